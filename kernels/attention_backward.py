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
    BY_RUN,
    FREE,
    LOG2E,
    Shape,
    keys_of,
    last_key,
    live_tokens,
    place,
    read,
    run_of,
    seen_keys,
    span,
    tile_of,
    write,
)
from .blocks import HOPPER
from .launch import Launch, cdiv
from .mxfp8 import load


@triton.jit
def _queries_of(bounds, batch, block, T: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr, OFFSET: tl.constexpr,
                BOUNDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """As `span`, of a block of keys."""
    if BOUNDED:
        first, low, begin, end, high = span(bounds, batch, block, (S + BN - 1) // BN, BM)
    else:
        first, low, begin, end, high = 0, 0, 0, T // BM * BM, T
        if CAUSAL:
            low = tl.minimum(tl.maximum(block * BN - OFFSET, 0), T) // BM * BM
            begin = tl.minimum(tl.maximum((block + 1) * BN - 1 - OFFSET, 0), T)
            begin = (begin + BM - 1) // BM * BM
            end = tl.maximum(begin, end)
    return first, low, begin, end, high


@triton.jit
def _dq_keys(dq0, dq1, q0, q1, do, lse, delta, k, v, ids, q_id, limit, low, high, begin, gap, least, most,
             SCALE: tl.constexpr, OFFSET: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, H: tl.constexpr,
             D: tl.constexpr, V: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BV: tl.constexpr,
             BN: tl.constexpr):  # fmt: skip
    """dq over SCALE, of key blocks from `low` to `high`, which from `begin` on are `gap` further, of keys from `least`
    to `most`; lse is in powers of two."""
    WHOLE: tl.constexpr = (MASK == FREE) & (D0 + D1 == D) & (BV == V)
    d0, d1, dv = tl.arange(0, D0), tl.arange(0, max(D1, 16)), tl.arange(0, BV)
    for at in range(low, high, BN):
        start = at
        if MASK != FREE:
            start = at + tl.where(at >= begin, gap, 0)
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
def dq_kernel(q, k, v, o, do, lse, dlse, ids, bounds, dq, delta, powers, T: tl.constexpr, S: tl.constexpr,
              H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
              OFFSET: tl.constexpr, PACKED: tl.constexpr, RUNS: tl.constexpr, ORDERED: tl.constexpr, D0: tl.constexpr,
              D1: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
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
    MASK: tl.constexpr = BY_RUN if RUNS else BY_ID if PACKED else BOUND
    ids += batch * (S + 2 * T if ORDERED else 2 * T if RUNS else S)
    first, low, begin, end, high = keys_of(bounds, batch, block, T, S, CAUSAL, OFFSET, PACKED or ORDERED, BM, BN)
    if RUNS:  # no load waits for ids: what padding holds reaches its own rows alone, which are 0 in the end
        live = row < T
        q_id, limit = run_of(ids, row, T)
        sound = limit > q_id
        if CAUSAL:
            limit = tl.minimum(limit, row + 1)
    else:
        live, q_id = live_tokens(ids + (S if ORDERED else 0), row, 0, T, MASK)
        sound = live
        limit = last_key(ids + S + T, row, T, ORDERED)
    q0 = read(q, row[:, None], live[:, None], d0[None, :], D, H * D, False)
    q1 = q0
    if D1:
        q1 = read(q, row[:, None], live[:, None], D0 + d1[None, :], D, H * D, False)
    cotangent = read(do, row[:, None], live[:, None], dv[None, :], V, H * V, False)
    outputs = read(o, row[:, None], live[:, None], dv[None, :], V, H * V, False)
    of_row = at + row.to(tl.int64) * H
    lse_of = tl.load(lse + of_row, mask=live, other=0.0)
    lse_of = tl.where(lse_of == float("-inf"), 0.0, lse_of * LOG2E)
    rest = tl.sum(outputs.to(tl.float32) * cotangent.to(tl.float32), axis=1)
    rest -= tl.load(dlse + of_row, mask=live, other=0.0)
    at = (batch * H + head) * T
    tl.store(delta + at + row, rest, mask=row < T)
    tl.store(powers + at + row, lse_of, mask=row < T)
    dq0, dq1 = tl.zeros((BM, D0), tl.float32), tl.zeros((BM, max(D1, 16)), tl.float32)
    dq0, dq1 = _dq_keys(dq0, dq1, q0, q1, cotangent, lse_of, rest, k, v, ids, q_id, limit, begin, end, 0, 0, first,
                        high, SCALE, OFFSET, CAUSAL, FREE, H, D, V, D0, D1, BV, BN)  # fmt: skip
    dq0, dq1 = _dq_keys(dq0, dq1, q0, q1, cotangent, lse_of, rest, k, v, ids, q_id, limit, low, high - (end - begin),
                        begin, end - begin, first, high, SCALE, OFFSET, CAUSAL, MASK, H, D, V, D0, D1, BV,
                        BN)  # fmt: skip
    if RUNS:
        dq0, dq1 = tl.where(sound[:, None], dq0, 0.0), tl.where(sound[:, None], dq1, 0.0)
    write(dq, dq0 * SCALE, row[:, None], d0[None, :], T, D, H * D)
    if D1:
        write(dq, dq1 * SCALE, row[:, None], D0 + d1[None, :], T, D, H * D)


@triton.jit
def _dkv_queries(dk0, dk1, dv, k0, k1, values, q, do, powers, delta, ids, k_id, key, low, high, begin, gap, least, most,
                 SCALE: tl.constexpr, OFFSET: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, H: tl.constexpr,
                 D: tl.constexpr, V: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BV: tl.constexpr,
                 BM: tl.constexpr, T: tl.constexpr, ORDERED: tl.constexpr):  # fmt: skip
    """dk over SCALE, and dv, of query blocks from `low` to `high`, which from `begin` on are `gap` further, of queries
    from `least` to `most`. By run, k_id and key are what queries a key is seen by: from which on, and before which."""
    WHOLE: tl.constexpr = (MASK == FREE) & (D0 + D1 == D) & (BV == V)
    d0, d1, d = tl.arange(0, D0), tl.arange(0, max(D1, 16)), tl.arange(0, BV)
    for at in range(low, high, BM):
        start = at
        if MASK != FREE:
            start = at + tl.where(at >= begin, gap, 0)
        row = start + tl.arange(0, BM)
        live, q_id = live_tokens(ids, row, least, most, MASK)
        q0 = read(q, row[:, None], live[:, None], d0[None, :], D, H * D, WHOLE)
        logits = tl.dot(k0, tl.trans(q0))
        q1 = q0
        if D1:
            q1 = read(q, row[:, None], live[:, None], D0 + d1[None, :], D, H * D, WHOLE)
            logits = tl.dot(k1, tl.trans(q1), logits)
        cotangent = read(do, row[:, None], live[:, None], d[None, :], V, H * V, WHOLE)
        lse_of, rest = load(powers + row, live, WHOLE), load(delta + row, live, WHOLE)
        p = tl.exp2(tl.fma(logits, tl.full(logits.shape, SCALE * LOG2E, tl.float32), -lse_of[None, :]))
        if MASK != FREE:
            if MASK == BY_RUN:
                seen = seen_keys(key[:, None], row[None, :], live, k_id[:, None], q_id, OFFSET, CAUSAL, MASK)
            else:
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
def dkv_kernel(q, k, v, do, delta, powers, ids, bounds, dk, dv, T: tl.constexpr, S: tl.constexpr,
               H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
               OFFSET: tl.constexpr, PACKED: tl.constexpr, RUNS: tl.constexpr, ORDERED: tl.constexpr, D0: tl.constexpr,
               D1: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    batch, head, block = place(S, BN, H)
    key = block * BN + tl.arange(0, BN)
    d0, d1, d = tl.arange(0, D0), tl.arange(0, max(D1, 16)), tl.arange(0, BV)
    q += batch * T * H * D + head * D
    k += batch * S * H * D + head * D
    dk += batch * S * H * D + head * D
    v += batch * S * H * V + head * V
    dv += batch * S * H * V + head * V
    do += batch * T * H * V + head * V
    delta += (batch * H + head) * T
    powers += (batch * H + head) * T
    MASK: tl.constexpr = BY_RUN if RUNS else BY_ID if PACKED else BOUND
    ids += batch * (S + 2 * T if ORDERED else 2 * T if RUNS else S)
    BOUNDED: tl.constexpr = PACKED or ORDERED
    first, low, begin, end, high = _queries_of(bounds, batch, block, T, S, CAUSAL, OFFSET, BOUNDED, BM, BN)
    if RUNS:
        live = key < S
        k_id, until = run_of(ids, key, S)
        sound = until > k_id
        if CAUSAL:
            k_id = tl.maximum(k_id, key)
    else:
        live, k_id = live_tokens(ids, key, 0, S, MASK)
        until, sound = key, live
    k0 = read(k, key[:, None], live[:, None], d0[None, :], D, H * D, False)
    k1 = k0
    if D1:
        k1 = read(k, key[:, None], live[:, None], D0 + d1[None, :], D, H * D, False)
    values = read(v, key[:, None], live[:, None], d[None, :], V, H * V, False)
    ids += S if ORDERED else 0
    dk0, dk1 = tl.zeros((BN, D0), tl.float32), tl.zeros((BN, max(D1, 16)), tl.float32)
    total = tl.zeros((BN, BV), tl.float32)
    dk0, dk1, total = _dkv_queries(dk0, dk1, total, k0, k1, values, q, do, powers, delta, ids, k_id, until, begin, end,
                                   0, 0, first, high, SCALE, OFFSET, CAUSAL, FREE, H, D, V, D0, D1, BV, BM, T,
                                   ORDERED)  # fmt: skip
    dk0, dk1, total = _dkv_queries(dk0, dk1, total, k0, k1, values, q, do, powers, delta, ids, k_id, until, low,
                                   high - (end - begin), begin, end - begin, first, high, SCALE, OFFSET, CAUSAL,
                                   MASK, H, D, V, D0, D1, BV, BM, T, ORDERED)  # fmt: skip
    if RUNS:
        dk0, dk1 = tl.where(sound[:, None], dk0, 0.0), tl.where(sound[:, None], dk1, 0.0)
    write(dk, dk0 * SCALE, key[:, None], d0[None, :], S, D, H * D)
    if D1:
        write(dk, dk1 * SCALE, key[:, None], D0 + d1[None, :], S, D, H * D)
    write(dv, total, key[:, None], d[None, :], S, V, H * V)


# --- Launches -----------------------------------------------------------------------------------------------------


def dq(shape: Shape, dtype: str, arch: int | None = HOPPER) -> Launch:
    """q, k, v, o, do, lse, dlse, ids, bounds of blocks of queries -> dq, and, for `dkv`, which reads them by head,
    rowsum(do o) - dlse and lse in powers of two (0 of a query that sees no key), both float32 [B, H, T]."""
    tile = tile_of("dq", shape, arch)
    by_head = (shape.batch, shape.heads, shape.queries)
    outputs = (((shape.batch, shape.queries, shape.heads, shape.width), dtype), *[(by_head, "float32")] * 2)
    grid = (cdiv(shape.queries, tile.queries) * shape.batch * shape.heads,)
    return Launch(dq_kernel, grid, outputs, shape.constants(tile), tile.warps, tile.stages)


def dkv(shape: Shape, dtype: str, arch: int | None = HOPPER) -> Launch:
    """q, k, v, do, lse, what `dq` gives besides, ids, bounds of blocks of keys -> dk, dv."""
    tile = tile_of("dkv", shape, arch)
    outputs = tuple(((shape.batch, shape.keys, shape.heads, n), dtype) for n in (shape.width, shape.value))
    grid = (cdiv(shape.keys, tile.keys) * shape.batch * shape.heads,)
    return Launch(dkv_kernel, grid, outputs, shape.constants(tile), tile.warps, tile.stages)
