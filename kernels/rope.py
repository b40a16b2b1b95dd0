"""RoPE in Triton: of queries, in place or copying, and of keys with the split of the KV up-projection's output.

Tokens are flat [n0, n1] and tables are read at i0 * S0 + i1 * S1, rows of P / 2: a stride of 0 shares a table. With x1,
x2 a pair, left = x1 cos - x2 sin, right = x2 cos + x1 sin, in float32, rounded once.
"""

import triton
import triton.language as tl

from .blocks import HOPPER, blocks
from .launch import Launch, cdiv, power_of_two, require


@triton.jit
def rotate(x1, x2, cos, sin, INVERSE: tl.constexpr):
    if INVERSE:
        sin = -sin
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)


@triton.jit
def load_neighbours(x, at, mask):
    """Elements 2 at and 2 at + 1 as float32, loaded as one word: no shuffle takes them apart."""
    if x.dtype.element_ty.primitive_bitwidth == 32:
        word = _load(x.to(tl.pointer_type(tl.uint64)) + at, mask)
        first, second = word.to(tl.uint32), (word >> 32).to(tl.uint32)
    else:
        word = _load(x.to(tl.pointer_type(tl.uint32)) + at, mask)
        first, second = word.to(tl.uint16), (word >> 16).to(tl.uint16)
    first, second = first.to(x.dtype.element_ty, bitcast=True), second.to(x.dtype.element_ty, bitcast=True)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_neighbours(y, at, first, second, mask):
    """The inverse, of elements of y's dtype."""
    if y.dtype.element_ty.primitive_bitwidth == 32:
        word = first.to(tl.uint32, bitcast=True).to(tl.uint64) | second.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
        tl.store(y.to(tl.pointer_type(tl.uint64)) + at, word, mask=mask)
    else:
        word = first.to(tl.uint16, bitcast=True).to(tl.uint32) | second.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        tl.store(y.to(tl.pointer_type(tl.uint32)) + at, word, mask=mask)


@triton.jit
def load_pairs(x, base, i, mask, HALF: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr):
    """x1, x2 [rows, len(i)], float32, of rotary dims that start at base [rows]; mask [rows, len(i)]. EVEN: base is."""
    if PAIRS and EVEN:
        x1, x2 = load_neighbours(x, (base // 2)[:, None] + i[None, :], mask)
    elif PAIRS:
        x1 = tl.load(x + base[:, None] + (2 * i)[None, :], mask=mask, other=0).to(tl.float32)
        x2 = tl.load(x + base[:, None] + (2 * i + 1)[None, :], mask=mask, other=0).to(tl.float32)
    else:
        x1 = tl.load(x + base[:, None] + i[None, :], mask=mask, other=0).to(tl.float32)
        x2 = tl.load(x + base[:, None] + (HALF + i)[None, :], mask=mask, other=0).to(tl.float32)
    return x1, x2


@triton.jit
def store_pairs(y, base, i, mask, left, right, HALF: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr):
    left, right = left.to(y.dtype.element_ty), right.to(y.dtype.element_ty)
    if PAIRS and EVEN:
        store_neighbours(y, (base // 2)[:, None] + i[None, :], left, right, mask)
    elif PAIRS:
        tl.store(y + base[:, None] + (2 * i)[None, :], left, mask=mask)
        tl.store(y + base[:, None] + (2 * i + 1)[None, :], right, mask=mask)
    else:
        tl.store(y + base[:, None] + i[None, :], left, mask=mask)
        tl.store(y + base[:, None] + (HALF + i)[None, :], right, mask=mask)


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
    x1, x2 = load_pairs(x, base + KEPT, i, mask, HALF, READ_PAIRS, (DIM % 2 == 0) & (KEPT % 2 == 0))
    left, right = rotate(x1, x2, c, s, INVERSE)
    if IN_PLACE:
        y = x
    else:
        k = tl.arange(0, BK)
        kept_mask = (head < HEADS)[:, None] & (k < KEPT)[None, :]
        kept = tl.load(x + base[:, None] + k[None, :], mask=kept_mask)
        tl.store(y + base[:, None] + k[None, :], kept, mask=kept_mask)
    # All of a head's loads come before its stores: in place, a layout may move one pair onto another.
    tl.debug_barrier()
    store_pairs(y, base + KEPT, i, mask, left, right, HALF, WRITE_PAIRS, (DIM % 2 == 0) & (KEPT % 2 == 0))


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
    one = tl.zeros((1,), tl.int64)
    x1, x2 = load_pairs(k_pe, one + token * ROPE, i, (i < HALF)[None, :], HALF, READ_PAIRS, True)
    left, right = rotate(x1, x2, c[None, :], s[None, :], False)
    left, right = tl.broadcast_to(left, (BH, BP)), tl.broadcast_to(right, (BH, BP))

    n = tl.arange(0, BN)
    nope = tl.load(kv + at[:, None] * (NOPE + VALUE) + n[None, :], mask=head_mask & (n < NOPE)[None, :])
    tl.store(k + at[:, None] * (NOPE + ROPE) + n[None, :], nope, mask=head_mask & (n < NOPE)[None, :])
    d = tl.arange(0, BV)
    value = tl.load(kv + at[:, None] * (NOPE + VALUE) + (NOPE + d)[None, :], mask=head_mask & (d < VALUE)[None, :])
    tl.store(v + at[:, None] * VALUE + d[None, :], value, mask=head_mask & (d < VALUE)[None, :])
    store_pairs(k, at * (NOPE + ROPE) + NOPE, i, head_mask & (i < HALF)[None, :], left, right, HALF,
                WRITE_PAIRS, NOPE % 2 == 0)  # fmt: skip


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
    left, right = tl.zeros((BH, BP), tl.float32), tl.zeros((BH, BP), tl.float32)
    for start in range(0, HEADS, BH):
        head = start + tl.arange(0, BH)
        head_mask = (head < HEADS)[:, None]
        at = token * HEADS + head.to(tl.int64)
        mask = head_mask & (i < HALF)[None, :]
        x1, x2 = load_pairs(dk, at * (NOPE + ROPE) + NOPE, i, mask, HALF, WRITE_PAIRS, NOPE % 2 == 0)
        left += x1
        right += x2
        nope = tl.load(dk + at[:, None] * (NOPE + ROPE) + n[None, :], mask=head_mask & (n < NOPE)[None, :])
        tl.store(dkv + at[:, None] * (NOPE + VALUE) + n[None, :], nope, mask=head_mask & (n < NOPE)[None, :])
        value = tl.load(dv + at[:, None] * VALUE + d[None, :], mask=head_mask & (d < VALUE)[None, :])
        tl.store(dkv + at[:, None] * (NOPE + VALUE) + (NOPE + d)[None, :], value, mask=head_mask & (d < VALUE)[None, :])
    row = table_row(token, N1, S0, S1) * HALF
    c = tl.load(cos + row + i, mask=i < HALF, other=0).to(tl.float32)
    s = tl.load(sin + row + i, mask=i < HALF, other=0).to(tl.float32)
    left, right = tl.sum(left, axis=0)[None, :], tl.sum(right, axis=0)[None, :]
    x1, x2 = rotate(left, right, c[None, :], s[None, :], True)
    one = tl.zeros((1,), tl.int64)
    store_pairs(dk_pe, one + token * ROPE, i, (i < HALF)[None, :], x1, x2, HALF, READ_PAIRS, True)


# --- Launches -----------------------------------------------------------------------------------------------------

Table = tuple[int, int, int]  # n1, and the strides, in table rows, of i0 and i1


def check_rotary(rotary: int, dim: int, *layouts: str) -> None:
    require(rotary % 2 == 0 and 2 <= rotary <= dim, "rotary", rotary, f"an even number of at most {dim}")
    for layout in layouts:
        require(layout in ("pairs", "halves"), "layout", layout, "'pairs' or 'halves'")


def _blocks(op: str, tokens: int, heads: int, dim: int, arch: int, block_heads: int | None) -> tuple[int, int]:
    """Heads a program has at once, and its warps."""
    size, warps = blocks(op, tokens * heads * dim, arch)
    return min(power_of_two(heads), block_heads or size), warps


def rope(tokens: int, heads: int, dim: int, rotary: int, table: Table, read: str, write: str, inverse: bool,
         dtype: str, copy: bool, block_heads: int | None = None, arch: int = HOPPER) -> Launch:  # fmt: skip
    """x [tokens, heads, dim], cos, sin -> y like x. Layouts "pairs" or "halves". Without `copy` only the rotary dims
    are written, into x's own buffer."""
    check_rotary(rotary, dim, read, write)
    block, warps = _blocks("rope", tokens, heads, dim, arch, block_heads)
    kept = dim - rotary
    constants = (("N1", table[0]), ("S0", table[1]), ("S1", table[2]), ("HEADS", heads), ("DIM", dim), ("KEPT", kept))
    constants += (("READ_PAIRS", read == "pairs"), ("WRITE_PAIRS", write == "pairs"), ("INVERSE", inverse))
    constants += (("IN_PLACE", not copy), ("BH", block), ("BP", power_of_two(rotary // 2)))
    constants += (("BK", power_of_two(max(kept, 1))),)
    aliases = () if copy else ((0, 0),)
    outputs = (((tokens, heads, dim), dtype),)
    return Launch(rope_kernel, (tokens, cdiv(heads, block)), outputs, constants, warps, 1, aliases)


def _split_constants(heads, nope, rotary, value, table, read, write, block) -> tuple:
    check_rotary(rotary, nope + rotary, read, write)
    require(nope >= 0 and value > 0, "nope, value", (nope, value), "at least 0 and 1")
    constants = (("N1", table[0]), ("S0", table[1]), ("S1", table[2]), ("HEADS", heads), ("NOPE", nope))
    constants += (("ROPE", rotary), ("VALUE", value), ("READ_PAIRS", read == "pairs"))
    constants += (("WRITE_PAIRS", write == "pairs"), ("BH", block), ("BN", power_of_two(max(nope, 1))))
    return (*constants, ("BP", power_of_two(rotary // 2)), ("BV", power_of_two(value)))


def split(tokens: int, heads: int, nope: int, rotary: int, value: int, table: Table, read: str, write: str,
          dtype: str, block_heads: int | None = None, arch: int = HOPPER) -> Launch:  # fmt: skip
    """kv [tokens, heads, nope + value], k_pe [tokens, rotary], cos, sin -> k, v."""
    block, warps = _blocks("split", tokens, heads, nope + value, arch, block_heads)
    outputs = (((tokens, heads, nope + rotary), dtype), ((tokens, heads, value), dtype))
    constants = _split_constants(heads, nope, rotary, value, table, read, write, block)
    return Launch(split_kernel, (tokens, cdiv(heads, block)), outputs, constants, warps, 1)


def split_backward(tokens: int, heads: int, nope: int, rotary: int, value: int, table: Table, read: str, write: str,
                   dtype: str, block_heads: int | None = None, arch: int = HOPPER) -> Launch:  # fmt: skip
    """dk, dv, cos, sin -> dkv [tokens, heads, nope + value], dk_pe float32 [tokens, rotary]. Layouts: the forward's."""
    block, warps = _blocks("split_backward", tokens, heads, nope + value, arch, block_heads)
    outputs = (((tokens, heads, nope + value), dtype), ((tokens, rotary), "float32"))
    constants = _split_constants(heads, nope, rotary, value, table, read, write, block)
    return Launch(split_backward_kernel, (tokens,), outputs, constants, warps, 2)
