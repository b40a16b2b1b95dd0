"""GPU kernels, installed as ``jax_mla.kernels``."""
