"""`attention` by our Triton kernels, both passes: any two lengths, packed sequences as they lie, largest logits.

Packed, a block of queries or keys is told, from ids, what it has to read (`bounds`): a row of many sequences takes
about the time of its sequences, and no array of heads is sorted, padded or copied.
"""

import jax
import jax.numpy as jnp

from jax_mla import launches
from jax_mla.ffi import triton

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
OLDEST = 80  # compute capability
MOST = 2**31  # programs of a launch


def supports(static=None, *args) -> str | None:
    if static is None:
        return _unavailable()
    return _misfit(static, *args) or _unavailable() or _other_heads(*args)


def _unavailable() -> str | None:
    reason, capability = triton.unavailable(), triton.compute_capability()
    if reason is None and capability is not None and capability < OLDEST:
        return f"needs compute capability {OLDEST / 10} or later; found {capability / 10}"
    return reason


def _misfit(static, q, k, v, q_ids, k_ids) -> str | None:
    (batch, length, heads, _), keys = q.shape, k.shape[1]
    if q.dtype not in DTYPES:
        return f"found operands in {q.dtype}, wants bfloat16 or float16"
    if static.own_order:
        return "found kv_segment_ids: queries and keys of a segment that lie at different indices"
    if not static.scale > 0:
        return f"found scale={static.scale}, wants one above 0"
    if 0 in (*q.shape, *v.shape):
        return f"found an empty dim in q {list(q.shape)}, v {list(v.shape)}"
    if batch * max(length, keys) * heads >= MOST:
        return f"found {batch} rows of {max(length, keys)} tokens of {heads} heads, wants fewer than 2^31 in all"
    return None


def _other_heads(q, k, v, *ids) -> str | None:
    from jax_mla.kernels import attention as kernels

    return kernels.supports(q.shape[3], v.shape[3])


def _shape(static, q, k, v, ids):
    from jax_mla.kernels.attention import Shape

    (batch, length, heads, width), keys = q.shape, k.shape[1]
    offset = keys - length if static.causal == "bottom_right" else 0
    sizes = (batch, length, keys, heads, width, v.shape[3])
    return Shape(*sizes, static.scale, bool(static.causal), offset, ids is not None)


def _flat(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [..., T, H, D] as [B, T, H, D]."""
    return tuple(launches.flat(x, 3) for x in arrays)


def _of_ids(ids: jax.Array, alone: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of every token of rows of ids [B, T]: where the first of its id is, one past the last, and how many there are.
    alone: an id's tokens are known to be one after another."""
    axis, index = 1, jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    order = index
    if not alone:
        order = jnp.argsort(ids, axis=axis, stable=True).astype(jnp.int32)
        ids = jnp.take_along_axis(ids, order, axis=axis)
    differs = ids[:, 1:] != ids[:, :-1]
    edge = jnp.ones_like(ids[:, :1], bool)
    begins, ends = (jnp.concatenate(pair, axis=axis) for pair in ((edge, differs), (differs, edge)))
    begin = jax.lax.cummax(jnp.where(begins, index, 0), axis=axis)
    end = jax.lax.cummin(jnp.where(ends, index, ids.shape[1]), axis=axis, reverse=True)
    found = begin, end + 1, end + 1 - begin
    if alone:
        return found
    rows = jnp.arange(ids.shape[0])[:, None]
    found = jnp.take_along_axis(order, begin, axis), jnp.take_along_axis(order, end, axis) + 1, found[2]
    return tuple(jnp.zeros_like(f).at[rows, order].set(f) for f in found)


def bounds(ids: jax.Array, own: int, other: int, causal: bool, of_queries: bool, alone: bool = False) -> jax.Array:
    """What `kernels.attention.Shape` wants of packed rows of ids [B, T]: int32 [B, blocks, 5], of blocks of `own`
    queries, or keys, that read `other` keys, or queries, at a time."""
    length, live = ids.shape[1], ids != 0
    blocks = -(-length // own)

    def block(x, fill):
        return jnp.pad(x, ((0, 0), (0, blocks * own - length)), constant_values=fill).reshape(-1, blocks, own)

    def least(x, where):
        return jnp.min(block(jnp.where(where, x, length), length), axis=2)

    def most(x, where):
        return jnp.max(block(jnp.where(where, x, 0), 0), axis=2)

    first, last, count = _of_ids(ids, alone)
    start, stop = least(first, live), most(last, live)
    one = (most(first, live) == start) & (least(last, live) == stop) & jnp.all(block(live, True), axis=2)
    one = one & (most(count, live) == stop - start)
    first, begin, end, high = start, start, stop, stop
    if causal:
        at = own * jnp.arange(blocks, dtype=jnp.int32)
        if of_queries:
            high, end = jnp.minimum(high, at + own), jnp.minimum(end, at + 1)
        else:
            first, begin = jnp.maximum(first, at), jnp.maximum(begin, at + own - 1)
    first = jnp.minimum(first, high)
    begin = -(-begin // other) * other
    end = jnp.maximum(end // other * other, begin)
    return jnp.stack([first, begin, end, high, one], axis=2).astype(jnp.int32)


def _packing(static, shape, op: str, q, ids) -> tuple[jax.Array, jax.Array]:
    """The last two inputs of a launch."""
    from jax_mla.kernels.attention import tile_of

    if ids is None:
        return q, q
    tile = tile_of(op, shape, triton.compute_capability())
    own, other = (tile.keys, tile.queries) if op == "dkv" else (tile.queries, tile.keys)
    return ids, bounds(ids, own, other, shape.causal, op != "dkv", static.sequences is not None)


def forward(static, q, k, v, q_ids, k_ids) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o, lse, and every query's largest logit."""
    return _forward(static, q, k, v) if q_ids is None else _forward_packed(static, q, k, v, q_ids)


def backward(static, q, k, v, q_ids, k_ids, o, lse, do, dlse) -> tuple[jax.Array, jax.Array, jax.Array]:
    # What forward computed in may be another dtype than the products of this pass.
    arrays = (q, k, v, o.astype(q.dtype), lse, do, dlse)
    return _backward(static, *arrays) if q_ids is None else _backward_packed(static, *arrays, q_ids)


@launches.batched("data", "data", "data")
def _forward(static, q, k, v):
    return _launch_forward(static, q, k, v, None)


@launches.batched(*["data"] * 4)
def _forward_packed(static, q, k, v, ids):
    return _launch_forward(static, q, k, v, launches.flat(ids, 1))


@launches.batched(*["data"] * 7)
def _backward(static, *arrays):
    return _launch_backward(static, *arrays, None)


@launches.batched(*["data"] * 8)
def _backward_packed(static, *arrays):
    *arrays, ids = arrays
    return _launch_backward(static, *arrays, launches.flat(ids, 1))


def _launch_forward(static, q, k, v, ids):
    from jax_mla.kernels import attention as kernels

    lead, value, (q, k, v) = q.shape[:-1], v.shape[-1], _flat(q, k, v)
    shape = _shape(static, q, k, v, ids)
    launch = kernels.forward(shape, q.dtype.name, triton.compute_capability())
    o, lse, largest = triton.call(launch, q, k, v, *_packing(static, shape, "forward", q, ids))
    return o.reshape(*lead, value), lse.reshape(lead), largest.reshape(lead)


def _launch_backward(static, q, k, v, o, lse, do, dlse, ids):
    from jax_mla.kernels import attention_backward as kernels

    given = [x.shape for x in (q, k, v)]
    q, k, v, o, do = _flat(q, k, v, o, do)
    lse, dlse = launches.flat(lse, 2), launches.flat(dlse, 2)
    shape, dtype, arch = _shape(static, q, k, v, ids), q.dtype.name, triton.compute_capability()
    packing = _packing(static, shape, "dq", q, ids)
    dq, rest = triton.call(kernels.dq(shape, dtype, arch), q, k, v, o, do, lse, dlse, *packing)
    packing = _packing(static, shape, "dkv", q, ids)
    dk, dv = triton.call(kernels.dkv(shape, dtype, arch), q, k, v, do, lse, rest, *packing)
    return tuple(x.reshape(s) for x, s in zip((dq, dk, dv), given, strict=True))
