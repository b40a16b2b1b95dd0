"""Attention in pure jnp, block by block over queries and keys in both passes: never a T x S matrix.

Forward: an online softmax over key blocks for each query block (FlashAttention-2, arXiv:2307.08691, algorithm 1).
Backward: probabilities recomputed from q, k and lse, key block by key block (algorithm 2). Blocks that causality
hides altogether are not visited. Everything here works on one device's [B, T, H, .] arrays.

Of packed sequences none reaches another, whatever it holds: 0 x NaN is NaN, so what is not finite is taken out of the
values that are summed with weights of 0, and put back, as NaN, in the rows that see it.
"""

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import segments
from jax_mla.rope import wide
from jax_mla.sharding import vary_like

# The longest block, in tokens. Logits of one block are B x H x BLOCK x BLOCK float32.
BLOCK = 512


class _Side(NamedTuple):
    """Queries or keys: their count, blocks, and what masks them."""

    tokens: int
    blocks: int
    size: int  # tokens a block; blocks * size >= tokens
    ids: jax.Array | None  # [B, blocks * size], 0 at padding
    order: jax.Array | None  # [B, blocks * size]

    @classmethod
    def of(cls, x: jax.Array, ids: jax.Array | None, order: jax.Array | None) -> "_Side":
        tokens = x.shape[1]
        blocks = max(1, math.ceil(tokens / BLOCK))
        size = math.ceil(tokens / blocks)
        side = cls(tokens, blocks, size, None, None)
        return side._replace(ids=side.pad(ids, 1), order=side.pad(order, 1))

    def pad(self, x: jax.Array | None, axis: int) -> jax.Array | None:
        extra = self.blocks * self.size - self.tokens
        if x is None or not extra:
            return x
        return jnp.pad(x, [(0, extra if i == axis else 0) for i in range(x.ndim)])

    def block(self, x: jax.Array, index, axis: int = 2) -> jax.Array:
        return x if self.blocks == 1 else jax.lax.dynamic_slice_in_dim(x, index * self.size, self.size, axis)

    def heads_first(self, x: jax.Array) -> jax.Array:
        """[B, T, H, ...] -> [B, H, blocks * size, ...], padding tokens zeroed so that their NaN can reach nothing."""
        x = self.pad(x, 1)
        if self.ids is not None:
            x = _where((self.ids != 0).reshape(*self.ids.shape, *(1,) * (x.ndim - 2)), x, 0.0)
        return jnp.swapaxes(x, 1, 2)

    def tokens_first(self, x: jax.Array) -> jax.Array:
        """The inverse of `heads_first`, but for padding."""
        return jnp.swapaxes(x, 1, 2)[:, : self.tokens]


class _Mask(NamedTuple):
    queries: _Side
    keys: _Side
    offset: int | None  # causal by index: query i sees keys j <= i + offset
    last: jax.Array | None  # [blocks]: causal by `last_key`, the largest of each block of queries

    @classmethod
    def of(cls, static, q, k, q_ids, k_ids, last) -> "_Mask":
        q_order = k_order = offset = None
        if last is not None:
            q_order, k_order = last, jnp.arange(k.shape[1], dtype=last.dtype)[None]
        elif static.causal is not False:
            if static.own_order:
                q_order, k_order = segments.causal_order(static.causal, q_ids, k_ids)
            else:
                offset = k.shape[1] - q.shape[1] if static.causal == "bottom_right" else 0
        queries, keys = _Side.of(q, q_ids, q_order), _Side.of(k, k_ids, k_order)
        if last is not None:
            last = jnp.max(
                queries.order.reshape(-1 if queries.order.size else 0, queries.blocks, queries.size),
                axis=(0, 2),
                initial=-1,
            )
        return cls(queries, keys, offset, last)

    def visible(self, i, j) -> jax.Array | None:
        """Which keys of block j queries of block i see: bool broadcastable to [B, H, size, size], None for all."""
        queries, keys = self.queries, self.keys
        terms = []
        rows = i * queries.size + jax.lax.broadcasted_iota(jnp.int32, (queries.size, 1), 0)
        columns = j * keys.size + jax.lax.broadcasted_iota(jnp.int32, (1, keys.size), 1)
        if keys.blocks * keys.size > keys.tokens:
            terms.append(columns < keys.tokens)
        if self.offset is not None:
            terms.append(columns <= rows + self.offset)

        def pairs(side, x, axis):
            return jnp.expand_dims(side.block(x, i if side is queries else j, axis=1), (1, axis))

        if queries.ids is not None:
            q_ids, k_ids = pairs(queries, queries.ids, 3), pairs(keys, keys.ids, 2)
            terms.append((q_ids == k_ids) & (q_ids != 0))
        if queries.order is not None:
            terms.append(pairs(queries, queries.order, 3) >= pairs(keys, keys.order, 2))
        return functools.reduce(operator.and_, terms) if terms else None

    def touched(self, visible: jax.Array, bad: jax.Array, axis: int) -> jax.Array:
        """Which queries (axis 3, of a block's `visible`) see a bad key [B, H, S]; which keys (axis 2) a bad query."""
        equation = "bts,bhs->bht" if axis == 3 else "bts,bht->bhs"
        return jnp.einsum(equation, visible[:, 0].astype(jnp.float32), bad.astype(jnp.float32)) > 0

    def key_blocks(self, i):
        """How many key blocks queries of block i can see any of."""
        if self.offset is None and self.last is None:
            return self.keys.blocks
        last = (i + 1) * self.queries.size - 1 + self.offset if self.last is None else self.last[i]
        return jnp.clip(last // self.keys.size + 1, 0, self.keys.blocks)

    def first_query_block(self, j):
        """The first query block that can see any key of block j."""
        if self.last is not None:  # those before it see none either
            return jnp.argmax(jnp.append(self.last, self.keys.tokens) >= j * self.keys.size)
        if self.offset is None:
            return 0
        return jnp.clip((j * self.keys.size - self.offset) // self.queries.size, 0, self.queries.blocks)


def _loop(start, stop, body, carry, single: bool):
    """A fori_loop, or its one turn without a loop."""
    return body(0, carry) if single else jax.lax.fori_loop(start, stop, body, carry)


def _dot(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def _where(mask: jax.Array, x: jax.Array, other: float) -> jax.Array:
    """x where the mask holds, else a number. In x's dtype: a bare Python float is a float64 in x64 mode."""
    return jnp.where(mask, x, np.asarray(other, x.dtype))  # numpy's: jax_debug_nans looks at every array of JAX's


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [..., K] with what is not finite as 0, and where there was any [...]."""
    finite = jnp.isfinite(x)
    return _where(finite, x, 0.0), ~jnp.all(finite, axis=-1)


def _finite(x: jax.Array) -> jax.Array:
    """x with -inf, which says that nothing was seen, as 0: for exponents whose result is masked anyway."""
    return _where(x != -jnp.inf, x, 0.0)


def _logits(static, visible: jax.Array | None, q: jax.Array, k: jax.Array) -> jax.Array:
    """Scaled logits of one block in float32, -inf where masked."""
    logits = _dot("bhtd,bhsd->bhts", q, k) * static.scale
    return logits if visible is None else _where(visible, logits, -jnp.inf)


def forward(static, q, k, v, q_ids, k_ids, last=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o [B, T, H, V] in q's dtype, lse [B, T, H], largest logit of each row [B, T, H]."""
    mask = _Mask.of(static, q, k, q_ids, k_ids, last)
    queries, keys = mask.queries, mask.keys
    (batch, _, heads, _), width = q.shape, v.shape[3]
    if 0 in (*q.shape, k.shape[1], width):  # nothing to see: softmax over no keys
        nothing = jnp.full(q.shape[:3], -jnp.inf, wide(q).dtype)
        return jnp.zeros((*q.shape[:3], width), q.dtype), nothing, nothing
    dtype = q.dtype
    q, k, v = queries.heads_first(q), keys.heads_first(k), keys.heads_first(v)
    packed = q_ids is not None
    v, v_bad = _split(v) if packed else (v, None)

    def query_block(i):
        q_i = queries.block(q, i)

        def key_block(j, carry):
            total, weight, largest, *spoiled = carry
            visible = mask.visible(i, j)
            logits = _logits(static, visible, q_i, keys.block(k, j))
            new = jnp.maximum(largest, jnp.max(logits, axis=-1))
            base = _finite(new)
            p = jnp.exp(logits - base[..., None])
            decay = jnp.exp(largest - base)
            weight = weight * decay + jnp.sum(p, axis=-1)
            total = total * decay[..., None] + _dot("bhts,bhsv->bhtv", p.astype(dtype), keys.block(v, j))
            spoiled = [s | mask.touched(visible, keys.block(v_bad, j), 3) for s in spoiled]
            return total, weight, new, *spoiled

        rows = (batch, heads, queries.size)
        start = (
            jnp.zeros((*rows, width), wide(q).dtype),
            jnp.zeros(rows, wide(q).dtype),
            jnp.full(rows, -jnp.inf, wide(q).dtype),
        ) + (jnp.zeros(rows, bool),) * packed
        start = tuple(vary_like(x, q, k, v, q_ids, k_ids, last) for x in start)
        total, weight, largest, *spoiled = _loop(0, mask.key_blocks(i), key_block, start, keys.blocks == 1)
        seen = largest != -jnp.inf  # not `weight > 0`: a NaN is to come out as NaN
        divisor = _where(seen, weight, 1.0)
        o = _where(seen[..., None], total / divisor[..., None], 0.0).astype(dtype)
        for rows in spoiled:
            o = _where(~rows[..., None], o, jnp.nan)
        lse = _where(seen, largest + jnp.log(divisor), -jnp.inf)
        return o, lse, largest

    if queries.blocks == 1:
        results = query_block(0)
    else:
        stacked = jax.lax.map(query_block, jnp.arange(queries.blocks, dtype=jnp.int32))
        results = (_unstack(x) for x in stacked)
    o, lse, largest = map(queries.tokens_first, results)
    return o, lse, largest


def _unstack(x: jax.Array) -> jax.Array:
    """[blocks, B, H, size, ...] -> [B, H, blocks * size, ...]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def backward(static, q, k, v, q_ids, k_ids, o, lse, do, dlse, last=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv in q's dtype.

    With P = exp(logits - lse): dV = P^T dO; dS = scale P (dO V^T - rowsum(dO O) + dlse); dQ = dS K; dK = dS^T Q.
    """
    mask = _Mask.of(static, q, k, q_ids, k_ids, last)
    queries, keys = mask.queries, mask.keys
    if 0 in (*q.shape, k.shape[1], v.shape[3]):
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    refs = (q, k, v, q_ids, k_ids, do, dlse, last)
    dtype = q.dtype
    q, k, v = queries.heads_first(q), keys.heads_first(k), keys.heads_first(v)
    do, o, lse, dlse = (queries.heads_first(x) for x in (do, o, lse, dlse))
    # A row that saw nothing passes nothing on, whatever its cotangents hold.
    seen = lse != -jnp.inf
    do, dlse = _where(seen[..., None], do, 0.0), _where(seen, dlse, 0.0)
    delta = jnp.sum(wide(do) * wide(o), axis=-1) - dlse
    lse = _finite(lse)
    packed = q_ids is not None
    (q_sum, _), (k_sum, _), (do_sum, do_bad) = map(_split, (q, k, do)) if packed else ((q, None), (k, None), (do, None))

    def key_block(j, dq):
        k_j, v_j = keys.block(k, j), keys.block(v, j)

        def query_block(i, carry):
            dq, dk, dv, *spoiled = carry
            q_i, do_i, visible = queries.block(q, i), queries.block(do, i), mask.visible(i, j)
            p = jnp.exp(_logits(static, visible, q_i, k_j) - queries.block(lse, i)[..., None])
            dp = _dot("bhtv,bhsv->bhts", do_i, v_j)
            ds = p * (dp - queries.block(delta, i)[..., None]) * static.scale
            if packed:  # lse, dp and delta may be NaN where nothing is seen
                p, ds = _where(visible, p, 0.0), _where(visible, ds, 0.0)
                spoiled = [s | mask.touched(visible, queries.block(do_bad, i), 2) for s in spoiled]
            p, ds = p.astype(dtype), ds.astype(dtype)
            dv = dv + _dot("bhts,bhtv->bhsv", p, queries.block(do_sum, i))
            dk = dk + _dot("bhts,bhtd->bhsd", ds, queries.block(q_sum, i))
            dq_i = _dot("bhts,bhsd->bhtd", ds, keys.block(k_sum, j))
            if queries.blocks == 1:
                return dq + dq_i, dk, dv, *spoiled
            dq_i = queries.block(dq, i) + dq_i
            return jax.lax.dynamic_update_slice_in_dim(dq, dq_i, i * queries.size, 2), dk, dv, *spoiled

        start = tuple(jnp.zeros(x.shape, wide(q).dtype) for x in (k_j, v_j))
        start += (jnp.zeros(k_j.shape[:3], bool),) * packed
        start = tuple(vary_like(x, *refs) for x in start)
        first = mask.first_query_block(j)
        dq, dk, dv, *spoiled = _loop(first, queries.blocks, query_block, (dq, *start), queries.blocks == 1)
        for rows in spoiled:
            dv = _where(~rows[..., None], dv, jnp.nan)
        return dq, (dk.astype(dtype), dv.astype(dtype))

    dq = vary_like(jnp.zeros(q.shape, wide(q).dtype), *refs)
    if keys.blocks == 1:
        dq, (dk, dv) = key_block(0, dq)
    else:
        dq, stacked = jax.lax.scan(lambda dq, j: key_block(j, dq), dq, jnp.arange(keys.blocks, dtype=jnp.int32))
        dk, dv = map(_unstack, stacked)
    return queries.tokens_first(dq).astype(dtype), keys.tokens_first(dk), keys.tokens_first(dv)
