"""`attention` by our Triton kernels, both passes: any two lengths, packed sequences as they lie, largest logits.

Packed, a block of queries or keys is told, from ids, what it has to read (`bounds`): a row of many sequences takes
about the time of its sequences, and no array of heads is sorted, padded or copied. So it is where every query has its
own last key (`bounds_by_last_key`).
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


def _shape(static, packed: bool, q, k, v):
    from jax_mla.kernels.attention import Shape

    (batch, length, heads, width), keys = q.shape, k.shape[1]
    offset = keys - length if static.causal == "bottom_right" else 0
    sizes = (batch, length, keys, heads, width, v.shape[3])
    known = packed and _known_runs(static)
    return Shape(*sizes, static.scale, bool(static.causal), offset, packed, static.ordered, known)


def _flat(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [..., T, H, D] as [B, T, H, D]."""
    return tuple(launches.flat(x, 3) for x in arrays)


def _known_runs(static) -> bool:
    """Whether an id's tokens are known to be one after another, with no padding in between."""
    return static.sequences is not None and not static.ordered


def _runs_of(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of every token of rows of ids [B, T]: where its run of that id begins, and one past its end."""
    axis, index = 1, jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    differs = ids[:, 1:] != ids[:, :-1]
    edge = jnp.ones_like(ids[:, :1], bool)
    begins, ends = (jnp.concatenate(pair, axis=axis) for pair in ((edge, differs), (differs, edge)))
    begin = jax.lax.cummax(jnp.where(begins, index, 0), axis=axis)
    end = jax.lax.cummin(jnp.where(ends, index, ids.shape[1]), axis=axis, reverse=True)
    return begin, end + 1


def runs(ids: jax.Array) -> jax.Array:
    """What `kernels.attention.Shape` wants of packed rows of ids [B, T] whose tokens lie together: int32 [B, 2 T]."""
    begin, end = _runs_of(ids)
    return jnp.concatenate([jnp.where(ids != 0, begin, ids.shape[1]), jnp.where(ids != 0, end, 0)], axis=1)


def _of_ids(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of every token of rows of ids [B, T]: where the first of its id is, one past the last, and how many there are."""
    axis = 1
    order = jnp.argsort(ids, axis=axis, stable=True).astype(jnp.int32)
    begin, end = _runs_of(jnp.take_along_axis(ids, order, axis=axis))
    rows = jnp.arange(ids.shape[0])[:, None]
    last = jnp.take_along_axis(order, end - 1, axis)
    found = jnp.take_along_axis(order, begin, axis), last + 1, end - begin
    return tuple(jnp.zeros_like(f).at[rows, order].set(f) for f in found)


def bounds(ids: jax.Array, own: int, other: int, causal: bool, of_queries: bool) -> jax.Array:
    """What `kernels.attention.Shape` wants of packed rows of ids [B, T]: int32 [B, blocks, 5], of blocks of `own`
    queries, or keys, that read `other` keys, or queries, at a time."""
    return _bounds(ids != 0, *_of_ids(ids), own, other, causal, of_queries)


def bounds_of_runs(rows: jax.Array, own: int, other: int, causal: bool, of_queries: bool) -> jax.Array:
    """As `bounds`, of what `runs` gives."""
    begin, end = jnp.split(rows, 2, axis=1)
    return _bounds(end > 0, begin, end, end - begin, own, other, causal, of_queries)


def _bounds(live, first, last, count, own: int, other: int, causal: bool, of_queries: bool) -> jax.Array:
    length = live.shape[1]
    start, stop, one = _reach(live, length, own, first, last, count)
    first, begin, end, high = start, start, stop, stop
    if causal:
        at = own * jnp.arange(-(-length // own), dtype=jnp.int32)
        if of_queries:
            high, end = jnp.minimum(high, at + own), jnp.minimum(end, at + 1)
        else:
            first, begin = jnp.maximum(first, at), jnp.maximum(begin, at + own - 1)
    return _table(other, first, begin, end, high, one)


def bounds_by_last_key(
    q_ids: jax.Array | None, k_ids: jax.Array | None, last: jax.Array, keys: int, own: int, other: int, of_queries: bool
) -> jax.Array:
    """As `bounds`, of queries each of which says the last of so many keys that it sees, last [B, T]. Tightest where
    those do not fall from one query to the next."""
    length = last.shape[1]
    last = jnp.clip(last, -1, keys - 1)
    mine, others = (length, keys) if of_queries else (keys, length)
    blocks = -(-mine // own)
    if q_ids is None:
        first = begin = jnp.zeros((last.shape[0], blocks), jnp.int32)
        end = high = jnp.full_like(first, others)
        one, live = jnp.ones_like(first), jnp.ones_like(last, bool)
    else:
        ids, among = (q_ids, k_ids) if of_queries else (k_ids, q_ids)
        first, high, one = _reach(ids != 0, others, own, *_among(ids, among))
        begin, end, live = first, high, q_ids != 0
    if of_queries:
        high = jnp.minimum(high, jnp.max(_blocks(jnp.where(live, last, -1), own, -1), axis=2) + 1)
        end = jnp.minimum(end, jnp.min(_blocks(jnp.where(live, last, keys), own, keys), axis=2) + 1)
    else:
        at = own * jnp.arange(blocks, dtype=jnp.int32)
        ahead, behind = jax.lax.cummax(last, axis=1), jnp.flip(jax.lax.cummax(last, axis=1, reverse=True), axis=1)
        first = jnp.maximum(first, _below(ahead, at))  # the first query that sees any of the block's keys
        high = jnp.minimum(high, length - _below(behind, at))  # one past the last
        whole = jnp.minimum(at + own - 1, keys - 1)
        begin = jnp.maximum(begin, _below(jax.lax.cummin(last, axis=1, reverse=True), whole))  # all from there see all
    return _table(other, first, jnp.minimum(begin, high), jnp.minimum(end, high), high, one)


def _blocks(x: jax.Array, size: int, fill) -> jax.Array:
    """x [B, T] as [B, blocks, size]."""
    length = x.shape[1]
    blocks = -(-length // size)
    return jnp.pad(x, ((0, 0), (0, blocks * size - length)), constant_values=fill).reshape(-1, blocks, size)


def _reach(live: jax.Array, others: int, own: int, first, last, count) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of blocks of tokens that are `live`, or padding: where, among so many others, what their ids are given to begins,
    and ends; whether a block has one id, and all in between has it too. first, last, count: as `_of_ids`, of every
    token."""

    def least(x):
        return jnp.min(_blocks(jnp.where(live, x, others), own, others), axis=2)

    def most(x):
        return jnp.max(_blocks(jnp.where(live, x, 0), own, 0), axis=2)

    start, stop = least(first), most(last)
    one = (most(first) == start) & (least(last) == stop) & jnp.all(_blocks(live, own, True), axis=2)
    return start, stop, one & (most(count) == stop - start)


def _below(rising: jax.Array, values: jax.Array) -> jax.Array:
    """How many of each row [T], which never falls, are below each of the values [n]: int32 [B, n]."""
    return jax.vmap(lambda row: jnp.searchsorted(row, values).astype(jnp.int32))(rising)


def _among(ids: jax.Array, others: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `_of_ids`, of every token of one row where its id is in another."""
    length = others.shape[1]
    order = jnp.argsort(others, axis=1, stable=True).astype(jnp.int32)
    rising = jnp.take_along_axis(others, order, axis=1)
    left, right = (
        jax.vmap(lambda row, own, side=side: jnp.searchsorted(row, own, side=side).astype(jnp.int32))(rising, ids)
        for side in ("left", "right")
    )
    first = jnp.take_along_axis(order, jnp.minimum(left, length - 1), axis=1)
    last = jnp.take_along_axis(order, jnp.maximum(right - 1, 0), axis=1) + 1
    found = right > left
    return jnp.where(found, first, length), jnp.where(found, last, 0), right - left


def _table(other: int, first, begin, end, high, one) -> jax.Array:
    first = jnp.minimum(first, high)
    begin = -(-begin // other) * other
    end = jnp.maximum(end // other * other, begin)
    return jnp.stack([first, begin, end, high, one], axis=2).astype(jnp.int32)


def _packing(static, shape, op: str, q, rows) -> tuple[jax.Array, jax.Array]:
    """The last two inputs of a launch."""
    from jax_mla.kernels.attention import tile_of

    if rows is None:
        return q, q
    tile = tile_of(op, shape, triton.compute_capability())
    own, other = (tile.keys, tile.queries) if op == "dkv" else (tile.queries, tile.keys)
    if not static.ordered:
        return rows, (bounds_of_runs if shape.runs else bounds)(rows, own, other, shape.causal, op != "dkv")
    k_ids, q_ids, last = jnp.split(rows, (shape.keys, shape.keys + shape.queries), axis=1)
    q_ids, k_ids = (q_ids, k_ids) if shape.packed else (None, None)
    return rows, bounds_by_last_key(q_ids, k_ids, last, shape.keys, own, other, op != "dkv")


def _rows(static, q, k, q_ids, k_ids, last) -> tuple[jax.Array, ...]:
    """What is packed, as the kernels read it: (), or one array."""
    if not static.ordered:
        return () if q_ids is None else (runs(q_ids) if _known_runs(static) else q_ids,)
    if q_ids is None:
        k_ids, q_ids = jnp.zeros(k.shape[:2], jnp.int32), jnp.zeros(q.shape[:2], jnp.int32)
    return (jnp.concatenate([a.astype(jnp.int32) for a in (k_ids, q_ids, last)], axis=1),)


def forward(static, q, k, v, q_ids, k_ids, last=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o, lse, and every query's largest logit."""
    rows = _rows(static, q, k, q_ids, k_ids, last)
    return (_forward_packed if rows else _forward)(static, q_ids is not None, q, k, v, *rows)


def backward(static, q, k, v, q_ids, k_ids, o, lse, do, dlse, last=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    # What forward computed in may be another dtype than the products of this pass.
    rows = _rows(static, q, k, q_ids, k_ids, last)
    arrays = (q, k, v, o.astype(q.dtype), lse, do, dlse, *rows)
    return (_backward_packed if rows else _backward)(static, q_ids is not None, *arrays)


@launches.batched("data", "data", "data")
def _forward(static, packed, q, k, v):
    return _launch_forward(static, packed, q, k, v, None)


@launches.batched(*["data"] * 4)
def _forward_packed(static, packed, q, k, v, rows):
    return _launch_forward(static, packed, q, k, v, launches.flat(rows, 1))


@launches.batched(*["data"] * 7)
def _backward(static, packed, *arrays):
    return _launch_backward(static, packed, *arrays, None)


@launches.batched(*["data"] * 8)
def _backward_packed(static, packed, *arrays):
    *arrays, rows = arrays
    return _launch_backward(static, packed, *arrays, launches.flat(rows, 1))


def _launch_forward(static, packed, q, k, v, rows):
    from jax_mla.kernels import attention as kernels

    lead, value, (q, k, v) = q.shape[:-1], v.shape[-1], _flat(q, k, v)
    shape = _shape(static, packed, q, k, v)
    launch = kernels.forward(shape, q.dtype.name, triton.compute_capability())
    o, lse, largest = triton.call(launch, q, k, v, *_packing(static, shape, "forward", q, rows))
    return o.reshape(*lead, value), lse.reshape(lead), largest.reshape(lead)


def _launch_backward(static, packed, q, k, v, o, lse, do, dlse, rows):
    from jax_mla.kernels import attention_backward as kernels

    given = [x.shape for x in (q, k, v)]
    q, k, v, o, do = _flat(q, k, v, o, do)
    lse, dlse = launches.flat(lse, 2), launches.flat(dlse, 2)
    shape, dtype, arch = _shape(static, packed, q, k, v), q.dtype.name, triton.compute_capability()
    packing = _packing(static, shape, "dq", q, rows)
    dq, *of_queries = triton.call(kernels.dq(shape, dtype, arch), q, k, v, o, do, lse, dlse, *packing)
    packing = _packing(static, shape, "dkv", q, rows)
    dk, dv = triton.call(kernels.dkv(shape, dtype, arch), q, k, v, do, *of_queries, *packing)
    return tuple(x.reshape(s) for x, s in zip((dq, dk, dv), given, strict=True))
