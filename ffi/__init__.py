"""How JAX launches GPU kernels, installed as ``jax_mla.ffi``. Empty so far: every op runs through its pure-jnp implementation."""
