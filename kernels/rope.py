"""RoPE in Triton: of queries, in place or copying, and of keys with the split of the KV up-projection's output.

Tokens are flat [n0, n1] and tables are read at i0 * S0 + i1 * S1, rows of P / 2: a stride of 0 shares a table. With x1,
x2 a pair, left = x1 cos - x2 sin, right = x2 cos + x1 sin, in float32, rounded once.
"""

import triton
import triton.language as tl

from .launch import Launch, cdiv, power_of_two


@triton.jit
def rotate(x1, x2, cos, sin, INVERSE: tl.constexpr):
    if INVERSE:
        sin = -sin
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def pair_offsets(i, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Where the two of pair i lie in the rotary dims."""
    if PAIRS:
        return 2 * i, 2 * i + 1
    return i, i + HALF


@triton.jit
def table_row(token, N1: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr):
    return token // N1 * S0 + token % N1 * S1


@triton.jit
def rope_kernel(x, cos, sin, y, N1: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, HEADS: tl.constexpr,
                DIM: tl.constexpr, KEPT: tl.constexpr, READ_PAIRS: tl.constexpr, WRITE_PAIRS: tl.constexpr,
                INVERSE: tl.constexpr, IN_PLACE: tl.constexpr, BH: tl.constexpr, BP: tl.constexpr,
                BK: tl.constexpr):  # fmt: skip
    """One token, BH heads. Either all of y, or IN_PLACE the rotary dims of x, and y is not touched."""
    HALF: tl.constexpr = (DIM - KEPT) // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    base = (token * HEADS + head.to(tl.int64)) * DIM
    i = tl.arange(0, BP)
    row = table_row(token, N1, S0, S1) * HALF
    c = tl.load(cos + row + i, mask=i < HALF, other=0).to(tl.float32)[None, :]
    s = tl.load(sin + row + i, mask=i < HALF, other=0).to(tl.float32)[None, :]
    mask = (head < HEADS)[:, None] & (i < HALF)[None, :]
    at1, at2 = pair_offsets(i, HALF, READ_PAIRS)
    x1 = tl.load(x + base[:, None] + (KEPT + at1)[None, :], mask=mask, other=0).to(tl.float32)
    x2 = tl.load(x + base[:, None] + (KEPT + at2)[None, :], mask=mask, other=0).to(tl.float32)
    left, right = rotate(x1, x2, c, s, INVERSE)
    if IN_PLACE:
        y = x
    else:
        k = tl.arange(0, BK)
        kept_mask = (head < HEADS)[:, None] & (k < KEPT)[None, :]
        kept = tl.load(x + base[:, None] + k[None, :], mask=kept_mask)
        tl.store(y + base[:, None] + k[None, :], kept, mask=kept_mask)
    at1, at2 = pair_offsets(i, HALF, WRITE_PAIRS)
    # All of a head's loads come before its stores: in place, a layout may move one pair onto another.
    tl.debug_barrier()
    tl.store(y + base[:, None] + (KEPT + at1)[None, :], left.to(y.dtype.element_ty), mask=mask)
    tl.store(y + base[:, None] + (KEPT + at2)[None, :], right.to(y.dtype.element_ty), mask=mask)


@triton.jit
def split_kernel(kv, k_pe, cos, sin, k, v, N1: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, HEADS: tl.constexpr,
                 NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, READ_PAIRS: tl.constexpr,
                 WRITE_PAIRS: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
                 BV: tl.constexpr):  # fmt: skip
    """One token, BH heads: k = [k_nope | RoPE(k_pe)], v."""
    HALF: tl.constexpr = ROPE // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    head_mask = (head < HEADS)[:, None]
    at = token * HEADS + head.to(tl.int64)
    i = tl.arange(0, BP)
    row = table_row(token, N1, S0, S1) * HALF
    c = tl.load(cos + row + i, mask=i < HALF, other=0).to(tl.float32)
    s = tl.load(sin + row + i, mask=i < HALF, other=0).to(tl.float32)
    at1, at2 = pair_offsets(i, HALF, READ_PAIRS)
    x1 = tl.load(k_pe + token * ROPE + at1, mask=i < HALF, other=0).to(tl.float32)
    x2 = tl.load(k_pe + token * ROPE + at2, mask=i < HALF, other=0).to(tl.float32)
    left, right = rotate(x1, x2, c, s, False)
    left, right = left.to(k.dtype.element_ty), right.to(k.dtype.element_ty)

    n = tl.arange(0, BN)
    nope = tl.load(kv + at[:, None] * (NOPE + VALUE) + n[None, :], mask=head_mask & (n < NOPE)[None, :])
    tl.store(k + at[:, None] * (NOPE + ROPE) + n[None, :], nope, mask=head_mask & (n < NOPE)[None, :])
    d = tl.arange(0, BV)
    value = tl.load(kv + at[:, None] * (NOPE + VALUE) + (NOPE + d)[None, :], mask=head_mask & (d < VALUE)[None, :])
    tl.store(v + at[:, None] * VALUE + d[None, :], value, mask=head_mask & (d < VALUE)[None, :])
    at1, at2 = pair_offsets(i, HALF, WRITE_PAIRS)
    rotary = k + at[:, None] * (NOPE + ROPE) + NOPE
    mask = head_mask & (i < HALF)[None, :]
    tl.store(rotary + at1[None, :], tl.broadcast_to(left[None, :], (BH, BP)), mask=mask)
    tl.store(rotary + at2[None, :], tl.broadcast_to(right[None, :], (BH, BP)), mask=mask)


@triton.jit
def split_backward_kernel(dk, dv, cos, sin, dkv, dk_pe, N1: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr,
                          HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
                          READ_PAIRS: tl.constexpr, WRITE_PAIRS: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
                          BP: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One token, all heads: dkv = [dk_nope | dv], and dk_pe from the float32 sum of dk's rotary dims over heads.

    READ_PAIRS and WRITE_PAIRS are the forward pass's: dk is read as that writes, dk_pe written as that reads.
    """
    HALF: tl.constexpr = ROPE // 2
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BP)
    n, d = tl.arange(0, BN), tl.arange(0, BV)
    at1, at2 = pair_offsets(i, HALF, WRITE_PAIRS)
    left, right = tl.zeros((BH, BP), tl.float32), tl.zeros((BH, BP), tl.float32)
    for start in range(0, HEADS, BH):
        head = start + tl.arange(0, BH)
        head_mask = (head < HEADS)[:, None]
        at = token * HEADS + head.to(tl.int64)
        mask = head_mask & (i < HALF)[None, :]
        rotary = dk + at[:, None] * (NOPE + ROPE) + NOPE
        left += tl.load(rotary + at1[None, :], mask=mask, other=0).to(tl.float32)
        right += tl.load(rotary + at2[None, :], mask=mask, other=0).to(tl.float32)
        nope = tl.load(dk + at[:, None] * (NOPE + ROPE) + n[None, :], mask=head_mask & (n < NOPE)[None, :])
        tl.store(dkv + at[:, None] * (NOPE + VALUE) + n[None, :], nope, mask=head_mask & (n < NOPE)[None, :])
        value = tl.load(dv + at[:, None] * VALUE + d[None, :], mask=head_mask & (d < VALUE)[None, :])
        tl.store(dkv + at[:, None] * (NOPE + VALUE) + (NOPE + d)[None, :], value, mask=head_mask & (d < VALUE)[None, :])
    row = table_row(token, N1, S0, S1) * HALF
    c = tl.load(cos + row + i, mask=i < HALF, other=0).to(tl.float32)
    s = tl.load(sin + row + i, mask=i < HALF, other=0).to(tl.float32)
    x1, x2 = rotate(tl.sum(left, axis=0), tl.sum(right, axis=0), c, s, True)
    at1, at2 = pair_offsets(i, HALF, READ_PAIRS)
    tl.store(dk_pe + token * ROPE + at1, x1, mask=i < HALF)
    tl.store(dk_pe + token * ROPE + at2, x2, mask=i < HALF)


# --- Launches -----------------------------------------------------------------------------------------------------

Table = tuple[int, int, int]  # n1, and the strides, in table rows, of i0 and i1

# By what was fastest on an H200 at DeepSeek-V3's heads; any value gives the same bits.
HEADS = 32


def _heads(heads: int, most: int) -> int:
    return min(power_of_two(heads), most)


def rope(tokens: int, heads: int, dim: int, rotary: int, table: Table, read: str, write: str, inverse: bool,
         dtype: str, copy: bool, block_heads: int = HEADS, num_warps: int = 4) -> Launch:  # fmt: skip
    """x [tokens, heads, dim], cos, sin -> y like x. Layouts "pairs" or "halves". Without `copy` only the rotary dims
    are written, into x's own buffer."""
    block = _heads(heads, block_heads)
    kept = dim - rotary
    constants = (("N1", table[0]), ("S0", table[1]), ("S1", table[2]), ("HEADS", heads), ("DIM", dim), ("KEPT", kept))
    constants += (("READ_PAIRS", read == "pairs"), ("WRITE_PAIRS", write == "pairs"), ("INVERSE", inverse))
    constants += (("IN_PLACE", not copy), ("BH", block), ("BP", power_of_two(rotary // 2)))
    constants += (("BK", power_of_two(max(kept, 1))),)
    aliases = () if copy else ((0, 0),)
    outputs = (((tokens, heads, dim), dtype),)
    return Launch(rope_kernel, (tokens, cdiv(heads, block)), outputs, constants, num_warps, 1, aliases)


def _split_constants(heads, nope, rotary, value, table, read, write, block) -> tuple:
    constants = (("N1", table[0]), ("S0", table[1]), ("S1", table[2]), ("HEADS", heads), ("NOPE", nope))
    constants += (("ROPE", rotary), ("VALUE", value), ("READ_PAIRS", read == "pairs"))
    constants += (("WRITE_PAIRS", write == "pairs"), ("BH", block), ("BN", power_of_two(max(nope, 1))))
    return (*constants, ("BP", power_of_two(rotary // 2)), ("BV", power_of_two(value)))


def split(tokens: int, heads: int, nope: int, rotary: int, value: int, table: Table, read: str, write: str,
          dtype: str, block_heads: int = HEADS, num_warps: int = 4) -> Launch:  # fmt: skip
    """kv [tokens, heads, nope + value], k_pe [tokens, rotary], cos, sin -> k, v."""
    block = _heads(heads, block_heads)
    outputs = (((tokens, heads, nope + rotary), dtype), ((tokens, heads, value), dtype))
    constants = _split_constants(heads, nope, rotary, value, table, read, write, block)
    return Launch(split_kernel, (tokens, cdiv(heads, block)), outputs, constants, num_warps, 1)


def split_backward(tokens: int, heads: int, nope: int, rotary: int, value: int, table: Table, read: str, write: str,
                   dtype: str, block_heads: int = HEADS, num_warps: int = 4) -> Launch:  # fmt: skip
    """dk, dv, cos, sin -> dkv [tokens, heads, nope + value], dk_pe float32 [tokens, rotary]. Layouts: the forward's."""
    block = _heads(heads, block_heads)
    outputs = (((tokens, heads, nope + value), dtype), ((tokens, rotary), "float32"))
    constants = _split_constants(heads, nope, rotary, value, table, read, write, block)
    return Launch(split_backward_kernel, (tokens,), outputs, constants, num_warps, 2)
