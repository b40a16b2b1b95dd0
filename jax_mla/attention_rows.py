"""`attention` of packed rows that are filled by sequences of one length: as a batch of so many shorter rows, for which
there are faster kernels than for packed ones."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import launches

LEAST = 128  # tokens of a sequence, below which a running program is not asked whether all are of one length


def alike(cu_seqlens: jax.Array, length: int) -> bool | None:
    """Whether all sequences of rows of `length` tokens are of one length, and fill them; None where that is not known
    while a program is traced, and may be."""
    count = cu_seqlens.shape[-1] - 1
    if not count or length % count or length // count < 2:
        return False
    if isinstance(cu_seqlens, jax.core.Tracer):
        return None if length // count >= LEAST else False
    return bool(np.all(np.asarray(cu_seqlens) == np.arange(count + 1) * (length // count)))


def cut(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """[B, T, ...] as [B * count, T / count, ...]."""
    return shape[0] * count, shape[1] // count, *shape[2:]


def as_batch(function: Callable, count: int) -> Callable:
    """A pass of `attention` over packed rows, of arrays q, k, v, ids of queries and of keys, and others by token, by
    one over rows, which have no ids."""

    def run(q, k, v, q_ids, k_ids, *others):
        lead = q.shape[:2]
        q, k, v, *others = (x.reshape(cut(x.shape, count)) for x in (q, k, v, *others))
        return tuple(x.reshape(*lead, *x.shape[2:]) for x in function(q, k, v, None, None, *others))

    return run


def where_alike(batch: Callable, packed: Callable, count: int, arrays: int) -> Callable:
    """The pass by `batch`, made by `as_batch`, if ids turn out to be those of `count` sequences of one length in every
    row, and else by `packed`. (A vmap has one answer for all that it maps over: it would run both otherwise.)"""

    def run(*arrays):
        lead = arrays[3].shape[:-1]  # of ids [..., T]; all of the others have it too
        arrays = [x.reshape(-1, *x.shape[len(lead) :]) for x in arrays]
        ids = arrays[3]
        each = ids.shape[1] // count
        same = jnp.all(ids == 1 + jnp.arange(ids.shape[1], dtype=ids.dtype) // each)
        results = jax.lax.cond(same, batch, packed, *arrays)
        return tuple(x.reshape(*lead, *x.shape[1:]) for x in results)

    return launches.batched(*["data"] * arrays)(run)
