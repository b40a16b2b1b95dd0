"""Inside `shard_map`: over which mesh axes values differ between devices. What a kernel writes does so as what it
reads, which the primitive that launches it does not say."""

import jax


def varying(array: jax.Array) -> frozenset[str]:
    """The Manual axes over which the array differs between devices."""
    return jax.typeof(array).manual_axis_type.varying


def vary_like(x: jax.Array, *others: jax.Array | None) -> jax.Array:
    """x, typed as varying over the Manual axes that any of the others varies over."""
    wanted = frozenset().union(*(varying(o) for o in others if o is not None))
    missing = wanted - varying(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x
