"""The backward pass of attention in Triton: `attention.py` tells what of, and how.

One kernel has a block of queries and goes through the keys, for dq; another has a block of keys and goes through the
queries, for dk and dv. Both make the probabilities again, from q, k and lse: every sum then has one order, and nothing
float32 of q's size is in memory, for two products more than a kernel that makes all three.
"""

import triton
import triton.language as tl

from .attention import (
    BOUND,
    BY_ID,
    FREE,
    LOG2E,
    Shape,
    keys_of,
    last_key,
    live_tokens,
    place,
    read,
    seen_keys,
    span,
    tile_of,
    write,
)
from .blocks import HOPPER
from .launch import Launch, cdiv
from .mxfp8 import load


@triton.jit
def _row(x, row, live, H: tl.constexpr, WHOLE: tl.constexpr):
    """A number a query of a head."""
    return load(x + row.to(tl.int64) * H, live, WHOLE)


@triton.jit
def _queries_of(bounds, batch, block, T: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr, OFFSET: tl.constexpr,
                BOUNDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """As `span`, of a block of keys."""
    if BOUNDED:
        first, low, mixed, begin, end, high = span(bounds, batch, block, (S + BN - 1) // BN, BM)
    else:
        first, low, mixed, begin, end, high = 0, 0, 0, 0, T // BM * BM, T
        if CAUSAL:
            low = tl.minimum(tl.maximum(block * BN - OFFSET, 0), T) // BM * BM
            begin = tl.minimum(tl.maximum((block + 1) * BN - 1 - OFFSET, 0), T)
            begin = (begin + BM - 1) // BM * BM
            end = tl.maximum(begin, end)
    return first, low, mixed, begin, end, high


@triton.jit
def _dq_keys(dq0, dq1, q0, q1, do, lse, delta, k, v, ids, q_id, limit, low, high, least, most, SCALE: tl.constexpr,
             OFFSET: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
             V: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """dq over SCALE, of key blocks from `low` to `high`, of keys from `least` to `most`; lse is in powers of two."""
    WHOLE: tl.constexpr = (MASK == FREE) & (D0 + D1 == D) & (BV == V)
    d0, d1, dv = tl.arange(0, D0), tl.arange(0, max(D1, 16)), tl.arange(0, BV)
    for start in range(low, high, BN):
        key = start + tl.arange(0, BN)
        live, k_id = live_tokens(ids, key, least, most, MASK)
        k0 = read(k, key[:, None], live[:, None], d0[None, :], D, H * D, WHOLE)
        logits = tl.dot(q0, tl.trans(k0))
        k1 = k0
        if D1:
            k1 = read(k, key[:, None], live[:, None], D0 + d1[None, :], D, H * D, WHOLE)
            logits = tl.dot(q1, tl.trans(k1), logits)
        values = read(v, key[:, None], live[:, None], dv[None, :], V, H * V, WHOLE)
        p = tl.exp2(tl.fma(logits, tl.full(logits.shape, SCALE * LOG2E, tl.float32), -lse[:, None]))
        if MASK != FREE:
            seen = seen_keys(
                limit[:, None], key[None, :], live[None, :], q_id[:, None], k_id[None, :], OFFSET, CAUSAL, MASK
            )
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(do, tl.trans(values))
        ds = (p * (dp - delta[:, None])).to(k0.dtype)
        dq0 = tl.dot(ds, k0, dq0)
        if D1:
            dq1 = tl.dot(ds, k1, dq1)
    return dq0, dq1


@triton.jit
def dq_kernel(q, k, v, o, do, lse, dlse, ids, bounds, dq, delta, T: tl.constexpr, S: tl.constexpr,
              H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
              OFFSET: tl.constexpr, PACKED: tl.constexpr, ORDERED: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
              BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    batch, head, block = place(T, BM, H)
    block = (T + BM - 1) // BM - 1 - block
    row = block * BM + tl.arange(0, BM)
    d0, d1, dv = tl.arange(0, D0), tl.arange(0, max(D1, 16)), tl.arange(0, BV)
    q += batch * T * H * D + head * D
    dq += batch * T * H * D + head * D
    k += batch * S * H * D + head * D
    v += batch * S * H * V + head * V
    o += batch * T * H * V + head * V
    do += batch * T * H * V + head * V
    at = batch * T * H + head
    ids += batch * (S + 2 * T if ORDERED else S)
    live, q_id = live_tokens(ids + (S if ORDERED else 0), row, 0, T, BY_ID if PACKED else BOUND)
    q0 = read(q, row[:, None], live[:, None], d0[None, :], D, H * D, False)
    q1 = q0
    if D1:
        q1 = read(q, row[:, None], live[:, None], D0 + d1[None, :], D, H * D, False)
    cotangent = read(do, row[:, None], live[:, None], dv[None, :], V, H * V, False)
    outputs = read(o, row[:, None], live[:, None], dv[None, :], V, H * V, False)
    first, low, mixed, begin, end, high = keys_of(bounds, batch, block, T, S, CAUSAL, OFFSET, PACKED or ORDERED, BM, BN)
    limit = last_key(ids + S + T, row, T, ORDERED)
    lse_of = _row(lse + at, row, live, H, False)
    lse_of = tl.where(lse_of == float("-inf"), 0.0, lse_of * LOG2E)
    rest = tl.sum(outputs.to(tl.float32) * cotangent.to(tl.float32), axis=1) - _row(dlse + at, row, live, H, False)
    tl.store(delta + at + row.to(tl.int64) * H, rest, mask=row < T)
    dq0, dq1 = tl.zeros((BM, D0), tl.float32), tl.zeros((BM, max(D1, 16)), tl.float32)
    most = tl.maximum(mixed, high)
    if PACKED:
        dq0, dq1 = _dq_keys(dq0, dq1, q0, q1, cotangent, lse_of, rest, k, v, ids, q_id, limit, low, mixed, first, most,
                            SCALE, OFFSET, CAUSAL, BY_ID, H, D, V, D0, D1, BV, BN)  # fmt: skip
        dq0, dq1 = _dq_keys(dq0, dq1, q0, q1, cotangent, lse_of, rest, k, v, ids, q_id, limit, low, begin, first, most,
                            SCALE, OFFSET, CAUSAL, BOUND, H, D, V, D0, D1, BV, BN)  # fmt: skip
    dq0, dq1 = _dq_keys(dq0, dq1, q0, q1, cotangent, lse_of, rest, k, v, ids, q_id, limit, begin, end, first, most,
                        SCALE, OFFSET, CAUSAL, FREE, H, D, V, D0, D1, BV, BN)  # fmt: skip
    dq0, dq1 = _dq_keys(dq0, dq1, q0, q1, cotangent, lse_of, rest, k, v, ids, q_id, limit, end, high, first, most,
                        SCALE, OFFSET, CAUSAL, BOUND, H, D, V, D0, D1, BV, BN)  # fmt: skip
    write(dq, dq0 * SCALE, row[:, None], d0[None, :], T, D, H * D)
    if D1:
        write(dq, dq1 * SCALE, row[:, None], D0 + d1[None, :], T, D, H * D)


@triton.jit
def _dkv_queries(dk0, dk1, dv, k0, k1, values, q, do, lse, delta, ids, k_id, key, low, high, least, most,
                 SCALE: tl.constexpr, OFFSET: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, H: tl.constexpr,
                 D: tl.constexpr, V: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BV: tl.constexpr,
                 BM: tl.constexpr, T: tl.constexpr, ORDERED: tl.constexpr):  # fmt: skip
    """dk over SCALE, and dv, of query blocks from `low` to `high`, of queries from `least` to `most`."""
    WHOLE: tl.constexpr = (MASK == FREE) & (D0 + D1 == D) & (BV == V)
    d0, d1, d = tl.arange(0, D0), tl.arange(0, max(D1, 16)), tl.arange(0, BV)
    for start in range(low, high, BM):
        row = start + tl.arange(0, BM)
        live, q_id = live_tokens(ids, row, least, most, MASK)
        q0 = read(q, row[:, None], live[:, None], d0[None, :], D, H * D, WHOLE)
        logits = tl.dot(k0, tl.trans(q0))
        q1 = q0
        if D1:
            q1 = read(q, row[:, None], live[:, None], D0 + d1[None, :], D, H * D, WHOLE)
            logits = tl.dot(k1, tl.trans(q1), logits)
        cotangent = read(do, row[:, None], live[:, None], d[None, :], V, H * V, WHOLE)
        lse_of, rest = _row(lse, row, live, H, WHOLE), _row(delta, row, live, H, WHOLE)
        lse_of = tl.where(lse_of == float("-inf"), 0.0, lse_of * LOG2E)
        p = tl.exp2(tl.fma(logits, tl.full(logits.shape, SCALE * LOG2E, tl.float32), -lse_of[None, :]))
        if MASK != FREE:
            limit = last_key(ids + T, row, T, ORDERED)
            seen = seen_keys(
                limit[None, :], key[:, None], live[None, :], q_id[None, :], k_id[:, None], OFFSET, CAUSAL, MASK
            )
            p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(q0.dtype), cotangent, dv)
        dp = tl.dot(values, tl.trans(cotangent))
        ds = (p * (dp - rest[None, :])).to(q0.dtype)
        dk0 = tl.dot(ds, q0, dk0)
        if D1:
            dk1 = tl.dot(ds, q1, dk1)
    return dk0, dk1, dv


@triton.jit
def dkv_kernel(q, k, v, do, lse, delta, ids, bounds, dk, dv, T: tl.constexpr, S: tl.constexpr,
               H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
               OFFSET: tl.constexpr, PACKED: tl.constexpr, ORDERED: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
               BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    batch, head, block = place(S, BN, H)
    key = block * BN + tl.arange(0, BN)
    d0, d1, d = tl.arange(0, D0), tl.arange(0, max(D1, 16)), tl.arange(0, BV)
    q += batch * T * H * D + head * D
    k += batch * S * H * D + head * D
    dk += batch * S * H * D + head * D
    v += batch * S * H * V + head * V
    dv += batch * S * H * V + head * V
    do += batch * T * H * V + head * V
    lse += batch * T * H + head
    delta += batch * T * H + head
    ids += batch * (S + 2 * T if ORDERED else S)
    live, k_id = live_tokens(ids, key, 0, S, BY_ID if PACKED else BOUND)
    k0 = read(k, key[:, None], live[:, None], d0[None, :], D, H * D, False)
    k1 = k0
    if D1:
        k1 = read(k, key[:, None], live[:, None], D0 + d1[None, :], D, H * D, False)
    values = read(v, key[:, None], live[:, None], d[None, :], V, H * V, False)
    BOUNDED: tl.constexpr = PACKED or ORDERED
    first, low, mixed, begin, end, high = _queries_of(bounds, batch, block, T, S, CAUSAL, OFFSET, BOUNDED, BM, BN)
    ids += S if ORDERED else 0
    dk0, dk1 = tl.zeros((BN, D0), tl.float32), tl.zeros((BN, max(D1, 16)), tl.float32)
    total = tl.zeros((BN, BV), tl.float32)
    most = tl.maximum(mixed, high)
    if PACKED:
        dk0, dk1, total = _dkv_queries(dk0, dk1, total, k0, k1, values, q, do, lse, delta, ids, k_id, key, low, mixed,
                                       first, most, SCALE, OFFSET, CAUSAL, BY_ID, H, D, V, D0, D1, BV, BM, T,
                                       ORDERED)  # fmt: skip
    if PACKED or CAUSAL:
        dk0, dk1, total = _dkv_queries(dk0, dk1, total, k0, k1, values, q, do, lse, delta, ids, k_id, key, low, begin,
                                       first, most, SCALE, OFFSET, CAUSAL, BOUND, H, D, V, D0, D1, BV, BM, T,
                                       ORDERED)  # fmt: skip
    dk0, dk1, total = _dkv_queries(dk0, dk1, total, k0, k1, values, q, do, lse, delta, ids, k_id, key, begin, end,
                                   first, most, SCALE, OFFSET, CAUSAL, FREE, H, D, V, D0, D1, BV, BM, T,
                                   ORDERED)  # fmt: skip
    dk0, dk1, total = _dkv_queries(dk0, dk1, total, k0, k1, values, q, do, lse, delta, ids, k_id, key, end, high,
                                   first, most, SCALE, OFFSET, CAUSAL, BOUND, H, D, V, D0, D1, BV, BM, T,
                                   ORDERED)  # fmt: skip
    write(dk, dk0 * SCALE, key[:, None], d0[None, :], S, D, H * D)
    if D1:
        write(dk, dk1 * SCALE, key[:, None], D0 + d1[None, :], S, D, H * D)
    write(dv, total, key[:, None], d[None, :], S, V, H * V)


# --- Launches -----------------------------------------------------------------------------------------------------


def dq(shape: Shape, dtype: str, arch: int | None = HOPPER) -> Launch:
    """q, k, v, o, do, lse, dlse, ids, bounds of blocks of queries -> dq, and, for `dkv`, rowsum(do o) - dlse, float32
    [B, T, H]."""
    tile = tile_of("dq", shape, arch)
    by_query = (shape.batch, shape.queries, shape.heads)
    outputs = (((*by_query, shape.width), dtype), (by_query, "float32"))
    grid = (cdiv(shape.queries, tile.queries) * shape.batch * shape.heads,)
    return Launch(dq_kernel, grid, outputs, shape.constants(tile), tile.warps, tile.stages)


def dkv(shape: Shape, dtype: str, arch: int | None = HOPPER) -> Launch:
    """q, k, v, do, lse, what `dq` gives besides, ids, bounds of blocks of keys -> dk, dv."""
    tile = tile_of("dkv", shape, arch)
    outputs = tuple(((shape.batch, shape.keys, shape.heads, n), dtype) for n in (shape.width, shape.value))
    grid = (cdiv(shape.keys, tile.keys) * shape.batch * shape.heads,)
    return Launch(dkv_kernel, grid, outputs, shape.constants(tile), tile.warps, tile.stages)
