"""How JAX launches GPU kernels, installed as ``jax_mla.ffi``. Empty so far: every op has a pure-jnp implementation."""
