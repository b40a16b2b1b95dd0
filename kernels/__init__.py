"""GPU kernels, installed as ``jax_mla.kernels``. Empty so far: every op has a pure-jnp implementation."""
