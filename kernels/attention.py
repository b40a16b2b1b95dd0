"""Attention in Triton, with the largest logit of every query: FlashAttention-2 (arXiv:2307.08691).

q [B, T, H, D], k [B, S, H, D], v [B, S, H, V]. A program has a block of queries of one head and goes through the keys.
D is multiplied in two parts, each a power of two: 192 as 128 and 64. Packed, it is told which, and masks only what not
all of the block sees: a loop without a mask, then one with, since every loop more costs registers in all of them.
attention_backward.py has the backward pass.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .blocks import HOPPER, SHORT, TABLES, Tile
from .launch import Launch, cdiv, power_of_two, require
from .mxfp8 import load

LOG2E = tl.constexpr(1.4426950408889634)


# What masks a loop over tokens, or a block of them.
FREE = tl.constexpr(0)  # nothing: they are there, and seen
BOUND = tl.constexpr(1)  # where they begin and end
BY_ID = tl.constexpr(2)  # their ids, too
BY_RUN = tl.constexpr(3)  # where, in place of ids, a token's sequence begins and ends: nothing is read in the loop


@triton.jit
def read(x, token, live, dim, dims: tl.constexpr, STRIDE: tl.constexpr, WHOLE: tl.constexpr):
    """x[token, dim] of a head, the two as columns and rows in either order; 0 for tokens that are not live, whatever is
    there: 0 times NaN is NaN. WHOLE: all are, and no dim is past the last."""
    return load(x + token.to(tl.int64) * STRIDE + dim, live & (dim < dims), WHOLE)


@triton.jit
def live_tokens(ids, token, least, most, MASK: tl.constexpr):
    """Which tokens, of those from `least` to `most`, are no padding, and their ids."""
    live, found = (token >= least) & (token < most), token
    if MASK == BY_ID:
        found = tl.load(ids + token, mask=live, other=0)
        live = found != 0
    return live, found


@triton.jit
def write(x, values, token, dim, tokens, dims, STRIDE: tl.constexpr):
    at = x + token.to(tl.int64) * STRIDE + dim
    tl.store(at, values.to(x.dtype.element_ty), mask=(token < tokens) & (dim < dims))


@triton.jit
def seen_keys(limit, key, live, q_id, k_id, OFFSET: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr):
    """Whether a query sees `key`, the two as a column and a row in either order, one of them `live`; limit: as
    `last_key`. By run: whether `key` lies from `q_id` on and before `limit`."""
    if MASK == BY_RUN:
        seen = (key >= q_id) & (key < limit)
    else:
        seen = live
        if CAUSAL:
            seen = seen & (key <= limit + OFFSET)
        if MASK == BY_ID:
            seen = seen & (q_id == k_id)
    return seen


@triton.jit
def run_of(runs, token, tokens: tl.constexpr):
    """Where the sequences of tokens begin, and end; padding's before it begins."""
    there = token < tokens
    return tl.load(runs + token, mask=there, other=tokens), tl.load(runs + tokens + token, mask=there, other=0)


@triton.jit
def last_key(last, row, T: tl.constexpr, ORDERED: tl.constexpr):
    """Which key, but for the offset, is the last that a query sees where attention is causal."""
    limit = row
    if ORDERED:
        limit = tl.load(last + row, mask=row < T, other=-1)
    return limit


@triton.jit
def place(TOKENS: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr):
    """A program's batch row and head, and its block of so many tokens; programs of a head follow one another."""
    BLOCKS: tl.constexpr = (TOKENS + SIZE - 1) // SIZE
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    return pair // H, pair % H, tl.program_id(0) % BLOCKS


@triton.jit
def span(bounds, batch, block, BLOCKS: tl.constexpr, OTHER: tl.constexpr):
    """What a packed block reads: from `low`, and of that from `first`, to `high`; without a mask from `begin` to `end`,
    which is nothing where it is not of one id."""
    at = bounds + (batch * BLOCKS + block) * 5
    first, begin, end, high, one = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4) != 0
    return first, first // OTHER * OTHER, tl.where(one, begin, high), tl.where(one, end, high), high


@triton.jit
def keys_of(bounds, batch, block, T: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr, OFFSET: tl.constexpr,
            BOUNDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """As `span`, of a block of queries."""
    if BOUNDED:
        first, low, begin, end, high = span(bounds, batch, block, (T + BM - 1) // BM, BN)
    else:
        first, low, begin, end, high = 0, 0, 0, S, S
        if CAUSAL:
            high = tl.maximum(tl.minimum(S, (block + 1) * BM + OFFSET), 0)
            end = tl.maximum(tl.minimum(S, block * BM + OFFSET + 1), 0)
        end = end // BN * BN
    return first, low, begin, end, high


@triton.jit
def _keys(total, largest, acc, q0, q1, k, v, ids, q_id, limit, low, high, begin, gap, least, most,
          SCALE: tl.constexpr, OFFSET: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, H: tl.constexpr,
          D: tl.constexpr, V: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BV: tl.constexpr,
          BN: tl.constexpr):  # fmt: skip
    """The online softmax over key blocks from `low` to `high`, which from `begin` on are `gap` further, of keys from
    `least` to `most`."""
    FACTOR: tl.constexpr = SCALE * LOG2E
    WHOLE: tl.constexpr = (MASK == FREE) & (D0 + D1 == D) & (BV == V)
    d0, d1, dv = tl.arange(0, D0), tl.arange(0, max(D1, 16)), tl.arange(0, BV)
    for at in range(low, high, BN):
        start = at
        if MASK != FREE:
            start = at + tl.where(at >= begin, gap, 0)
        key = start + tl.arange(0, BN)
        live, k_id = live_tokens(ids, key, least, most, MASK)
        logits = tl.dot(q0, read(k, key[None, :], live[None, :], d0[:, None], D, H * D, WHOLE))
        if D1:
            logits = tl.dot(q1, read(k, key[None, :], live[None, :], D0 + d1[:, None], D, H * D, WHOLE), logits)
        values = read(v, key[:, None], live[:, None], dv[None, :], V, H * V, WHOLE)
        if MASK != FREE:
            seen = seen_keys(
                limit[:, None], key[None, :], live[None, :], q_id[:, None], k_id[None, :], OFFSET, CAUSAL, MASK
            )
            logits = tl.where(seen, logits, float("-inf"))
        new = tl.maximum(largest, tl.max(logits, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new) * FACTOR
        p = tl.exp2(tl.fma(logits, tl.full(logits.shape, FACTOR, tl.float32), -base[:, None]))
        shrink = tl.exp2(tl.fma(largest, tl.full(largest.shape, FACTOR, tl.float32), -base))
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None])
        largest = new
    return total, largest, acc


@triton.jit
def forward_kernel(q, k, v, ids, bounds, o, lse, maxima, T: tl.constexpr, S: tl.constexpr, H: tl.constexpr,
             D: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, OFFSET: tl.constexpr,
             PACKED: tl.constexpr, RUNS: tl.constexpr, ORDERED: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
             BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    batch, head, block = place(T, BM, H)
    block = (T + BM - 1) // BM - 1 - block  # those with most keys to see go first
    row = block * BM + tl.arange(0, BM)
    d0, d1, dv = tl.arange(0, D0), tl.arange(0, max(D1, 16)), tl.arange(0, BV)
    q += batch * T * H * D + head * D
    k += batch * S * H * D + head * D
    v += batch * S * H * V + head * V
    MASK: tl.constexpr = BY_RUN if RUNS else BY_ID if PACKED else BOUND
    ids += batch * (S + 2 * T if ORDERED else 2 * T if RUNS else S)
    first, low, begin, end, high = keys_of(bounds, batch, block, T, S, CAUSAL, OFFSET, PACKED or ORDERED, BM, BN)
    if RUNS:
        live = row < T  # padding's queries see nothing, whatever they are
        q_id, limit = run_of(ids, row, T)
        if CAUSAL:
            limit = tl.minimum(limit, row + 1)
    else:
        live, q_id = live_tokens(ids + (S if ORDERED else 0), row, 0, T, MASK)
        limit = last_key(ids + S + T, row, T, ORDERED)
    q0 = read(q, row[:, None], live[:, None], d0[None, :], D, H * D, False)
    q1 = q0
    if D1:
        q1 = read(q, row[:, None], live[:, None], D0 + d1[None, :], D, H * D, False)
    total = tl.zeros((BM,), tl.float32)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    acc = tl.zeros((BM, BV), tl.float32)
    total, largest, acc = _keys(total, largest, acc, q0, q1, k, v, ids, q_id, limit, begin, end, 0, 0, first, high,
                                SCALE, OFFSET, CAUSAL, FREE, H, D, V, D0, D1, BV, BN)  # fmt: skip
    total, largest, acc = _keys(total, largest, acc, q0, q1, k, v, ids, q_id, limit, low, high - (end - begin), begin,
                                end - begin, first, high, SCALE, OFFSET, CAUSAL, MASK, H, D, V, D0, D1, BV,
                                BN)  # fmt: skip
    blind = (largest == float("-inf")) & (total == 0)
    at = (batch * T + row) * H + head
    logit = tl.where(total != total, float("nan"), largest * SCALE)  # the maximum passes over NaN, the sum does not
    tl.store(maxima + at, logit, mask=row < T)
    total = tl.where(blind, 1.0, total)
    tl.store(lse + at, logit + tl.log(total), mask=row < T)
    write(o + batch * T * H * V + head * V, acc / total[:, None], row[:, None], dv[None, :], T, V, H * V)


# --- Launches -----------------------------------------------------------------------------------------------------

# Of a head's D and V. Wider ones do not fit into registers; for narrower ones (tried: 32, 40, 48) compiled kernels gave
# wrong results on an H200 with triton 3.6, the interpreter right ones: why, is not known.
NARROWEST, WIDEST, MULTIPLE = 64, 256, 32


def supports(width: int, value: int) -> str | None:
    """Why there are no kernels for heads of these dims, or None."""
    if min(width, value) < NARROWEST or max(width, value) > WIDEST or width % MULTIPLE or value % MULTIPLE:
        return f"found heads of {width} and {value} dims, wants {NARROWEST} to {WIDEST}, multiples of {MULTIPLE}"
    return None


def parts(width: int) -> tuple[int, int]:
    """Two powers of two, none below 16, that hold a head of so many dims; 0 for a second that is not needed."""
    first = max(1 << (width.bit_length() - 1), 16)
    rest = width - first
    return first, (max(power_of_two(rest), 16) if rest > 0 else 0)


class Shape(NamedTuple):
    """What an attention is of. causal: query i sees keys j <= i + offset. scale > 0. packed: of T = S tokens
    with ids, int32 [B, T], of which 0 is padding, a query sees keys of its own id only. ordered: a query says which key
    is the last that it sees; the keys' ids, the queries' and these are one array, int32 [B, S + 2 T]. runs: packed, and
    the tokens of an id lie together, with no padding in between; ids are int32 [B, 2 T], of every token where those of
    its sequence begin, then one past their end: of padding T and 0. Either way every launch is told, int32
    [B, blocks, 5], what its blocks read: of the five, from the first to the fourth, and if the fifth is not 0 the block
    is of one id, and so is all that, from the second to the third seen by the whole block: these two are multiples of
    the tile's other size. (Else ids and bounds are not read, and any array will do.)"""

    batch: int
    queries: int
    keys: int
    heads: int
    width: int
    value: int
    scale: float
    causal: bool
    offset: int = 0
    packed: bool = False
    ordered: bool = False
    runs: bool = False

    def check(self) -> None:
        dims = self.width, self.value
        require(supports(*dims) is None, "width, value", dims, f"{NARROWEST} to {WIDEST}, multiples of {MULTIPLE}")
        require(self.scale > 0, "scale", self.scale, "one above 0")
        tokens = self.queries, self.keys
        same = self.ordered or not self.packed or tokens == (self.keys,) * 2
        require(same, "queries, keys", tokens, "as many, where packed")
        kinds = self.packed, self.ordered
        require(not self.runs or kinds == (True, False), "packed, ordered", kinds, "True and False, of runs")
        causal = self.causal, self.offset
        require(not self.ordered or causal == (True, 0), "causal, offset", causal, "True and 0, where ordered")

    def constants(self, tile: Tile) -> tuple[tuple[str, Any], ...]:
        self.check()
        d0, d1 = parts(self.width)
        return (("T", self.queries), ("S", self.keys), ("H", self.heads), ("D", self.width), ("V", self.value),
                ("SCALE", self.scale), ("CAUSAL", self.causal), ("OFFSET", self.offset), ("PACKED", self.packed),
                ("RUNS", self.runs), ("ORDERED", self.ordered), ("D0", d0), ("D1", d1),
                ("BV", max(power_of_two(self.value), 16)), ("BM", tile.queries), ("BN", tile.keys))  # fmt: skip


def tile_of(op: str, shape: Shape, arch: int | None) -> Tile:
    kind = ", packed" if shape.packed else ", short" if max(shape.queries, shape.keys) <= SHORT else ""
    table = TABLES.get(arch, TABLES[HOPPER])[f"attention {op}{kind}"]
    return next(tile for most, tile in table if sum(parts(shape.width)) + power_of_two(shape.value) <= most)


def forward(shape: Shape, dtype: str, arch: int | None = HOPPER) -> Launch:
    """q, k, v, ids, bounds of blocks of queries -> o [B, T, H, V], lse and the largest logit [B, T, H], float32."""
    tile = tile_of("forward", shape, arch)
    by_query = (shape.batch, shape.queries, shape.heads)
    outputs = (((*by_query, shape.value), dtype), *[(by_query, "float32")] * 2)
    grid = (cdiv(shape.queries, tile.queries) * shape.batch * shape.heads,)
    return Launch(forward_kernel, grid, outputs, shape.constants(tile), tile.warps, tile.stages)
