"""Examples that train models with jax_mla."""
