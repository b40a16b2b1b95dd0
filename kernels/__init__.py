"""GPU kernels, installed as ``jax_mla.kernels``. Empty so far: every op runs through its pure-jnp implementation."""
