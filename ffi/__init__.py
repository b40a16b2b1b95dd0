"""How JAX launches GPU kernels, installed as ``jax_mla.ffi``."""
