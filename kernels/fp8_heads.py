"""FP8 of heads in Triton: the cotangents of keys and values side by side, before the backward GEMMs.

One scale a tensor wants amax first. So there are two passes, and neither writes what is quantised: one reads for amax,
a number a head of every token, the other reads again for the codes, as they lie and transposed. Arrays are [rows,
HEADS, dims], rows being [entries, ROWS] with a scale an entry; of the codes [entries, HEADS dims, ROWS] is transposed.
Amax is float32's bits, int32: `fp8_bits.amax`.
"""

import triton
import triton.language as tl

from .blocks import HOPPER, blocks
from .fp8 import FORMATS, encode, supports, turned
from .launch import Launch, cdiv, power_of_two, require
from .mxfp8 import magnitude
from .rope import Table, check_rotary, load_pairs, rotate, store_pairs, table_row


@triton.jit
def _largest(x):
    """Over a row of dims, NaN aside."""
    bits = magnitude(x)
    return tl.max(tl.where(bits > 0x7F800000, 0, bits), axis=1)


@triton.jit
def split_amax_kernel(dk, dv, cos, sin, dk_pe, amax, N1: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr,
                      HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
                      READ_PAIRS: tl.constexpr, WRITE_PAIRS: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
                      BP: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """`rope.split_backward_kernel` with amax of [dk_nope | dv] in its place."""
    HALF: tl.constexpr = ROPE // 2
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BP)
    n, d = tl.arange(0, BN), tl.arange(0, BV)
    left, right = tl.zeros((BH, BP), tl.float32), tl.zeros((BH, BP), tl.float32)
    for start in range(0, HEADS, BH):
        head = start + tl.arange(0, BH)
        head_mask = (head < HEADS)[:, None]
        at = token * HEADS + head.to(tl.int64)
        x1, x2 = load_pairs(dk, at * (NOPE + ROPE) + NOPE, i, head_mask & (i < HALF)[None, :], HALF, WRITE_PAIRS,
                            NOPE % 2 == 0)  # fmt: skip
        left += x1
        right += x2
        nope = tl.load(dk + at[:, None] * (NOPE + ROPE) + n[None, :], mask=head_mask & (n < NOPE)[None, :], other=0)
        value = tl.load(dv + at[:, None] * VALUE + d[None, :], mask=head_mask & (d < VALUE)[None, :], other=0)
        found = tl.maximum(_largest(nope.to(tl.float32)), _largest(value.to(tl.float32)))
        tl.store(amax + at, found, mask=head < HEADS)
    row = table_row(token, N1, S0, S1) * HALF
    c = tl.load(cos + row + i, mask=i < HALF, other=0).to(tl.float32)
    s = tl.load(sin + row + i, mask=i < HALF, other=0).to(tl.float32)
    left, right = tl.sum(left, axis=0)[None, :], tl.sum(right, axis=0)[None, :]
    x1, x2 = rotate(left, right, c[None, :], s[None, :], True)
    one = tl.zeros((1,), tl.int64)
    store_pairs(dk_pe, one + token * ROPE, i, (i < HALF)[None, :], x1, x2, HALF, READ_PAIRS, True)


@triton.jit
def _place(ROWS: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, BR: tl.constexpr):
    """A program's entry, its rows in it and which of them are there, its head, and its part of that. Along parts and
    heads first: neighbours in time read neighbours in memory."""
    DOWN: tl.constexpr = (ROWS + BR - 1) // BR
    program = tl.program_id(0)
    part, head = program % PARTS, (program // PARTS % HEADS).to(tl.int64)
    entry = (program // (PARTS * HEADS * DOWN)).to(tl.int64)
    row = (program // (PARTS * HEADS) % DOWN * BR + tl.arange(0, BR)).to(tl.int64)
    return entry, row, row < ROWS, head, part


@triton.jit
def _store_both(codes, transposed, code, entry, row, live, head, dim, dim_live, ROWS: tl.constexpr, HEADS: tl.constexpr,
                DIM: tl.constexpr):  # fmt: skip
    """code [rows, dims] of a head of DIM."""
    mask = live[:, None] & dim_live[None, :]
    at = ((entry * ROWS + row) * HEADS + head) * DIM
    tl.store(codes + at[:, None] + dim[None, :], code, mask=mask)
    at = (entry * HEADS * DIM + head * DIM + dim) * ROWS
    tl.store(transposed + at[:, None] + row[None, :], turned(code), mask=tl.trans(mask))


@triton.jit
def _store_plain(x, base, scale, codes, transposed, entry, row, live, head, part, offset, WIDTH: tl.constexpr,
                 E5M2: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
                 BC: tl.constexpr):  # fmt: skip
    """Dims part BC .. of the WIDTH that start at base, as those of the head from `offset` on."""
    column = part * BC + tl.arange(0, BC)
    values = tl.load(x + base[:, None] + column[None, :], mask=live[:, None] & (column < WIDTH)[None, :], other=0)
    code = encode(values.to(tl.float32), scale, E5M2)
    _store_both(codes, transposed, code, entry, row, live, head, offset + column, column < WIDTH, ROWS, HEADS, DIM)


@triton.jit
def join_quantize_kernel(dk, dv, scale, codes, transposed, ROWS: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr,
                         ROPE: tl.constexpr, VALUE: tl.constexpr, E5M2: tl.constexpr, BR: tl.constexpr,
                         BC: tl.constexpr, NOPE_PARTS: tl.constexpr, VALUE_PARTS: tl.constexpr):  # fmt: skip
    """BR rows of BC dims of a head of [dk_nope | dv]."""
    entry, row, live, head, part = _place(ROWS, HEADS, NOPE_PARTS + VALUE_PARTS, BR)
    factor = tl.load(scale + entry)
    at = (entry * ROWS + row) * HEADS + head
    if part < NOPE_PARTS:
        _store_plain(dk, at * (NOPE + ROPE), factor, codes, transposed, entry, row, live, head, part, 0, NOPE, E5M2,
                     ROWS, HEADS, NOPE + VALUE, BC)  # fmt: skip
    else:
        _store_plain(dv, at * VALUE, factor, codes, transposed, entry, row, live, head, part - NOPE_PARTS, NOPE, VALUE,
                     E5M2, ROWS, HEADS, NOPE + VALUE, BC)  # fmt: skip


# --- Launches -----------------------------------------------------------------------------------------------------


def split_amax(rows: int, heads: int, nope: int, rotary: int, value: int, table: Table, read: str, write: str,
               arch: int = HOPPER) -> Launch:  # fmt: skip
    """dk, dv, cos, sin -> dk_pe float32 [rows, rotary], amax int32 [rows, heads] of [dk_nope | dv]. Layouts: the
    forward pass's."""
    check_rotary(rotary, nope + rotary, read, write)
    require(nope >= 0 and value > 0, "nope, value", (nope, value), "at least 0 and 1")
    size, warps = blocks("split_backward", rows * heads * (nope + value), arch)
    constants = (("N1", table[0]), ("S0", table[1]), ("S1", table[2]), ("HEADS", heads), ("NOPE", nope))
    constants += (("ROPE", rotary), ("VALUE", value), ("READ_PAIRS", read == "pairs"))
    constants += (("WRITE_PAIRS", write == "pairs"), ("BH", min(power_of_two(heads), size)))
    constants += (("BN", power_of_two(max(nope, 1))), ("BP", power_of_two(rotary // 2)), ("BV", power_of_two(value)))
    outputs = (((rows, rotary), "float32"), ((rows, heads), "int32"))
    return Launch(split_amax_kernel, (rows,), outputs, constants, warps, 2)


def join_quantize(entries: int, rows: int, heads: int, nope: int, rotary: int, value: int, dtype: str, format: str,
                  arch: int = HOPPER) -> Launch:  # fmt: skip
    """dk [entries, rows, heads, nope + rotary], dv, scale [entries] -> codes of [dk_nope | dv], uint8 [entries, rows,
    heads, nope + value], and [entries, heads (nope + value), rows]."""
    require(supports("both", dtype) is None, "dtype", dtype, "16 bits wide for transposed codes")
    require(format in FORMATS, "format", format, f"one of {FORMATS}")
    require(nope >= 0 and value > 0, "nope, value", (nope, value), "at least 0 and 1")
    size, warps = blocks("fp8 heads", entries * rows * heads * (nope + value), arch)
    down, across = min(size, power_of_two(rows)), min(128, power_of_two(max(nope, value)))
    parts = cdiv(nope, across), cdiv(value, across)
    constants = (("ROWS", rows), ("HEADS", heads), ("NOPE", nope), ("ROPE", rotary), ("VALUE", value))
    constants += (("E5M2", format == "e5m2"), ("BR", down), ("BC", across))
    constants += (("NOPE_PARTS", parts[0]), ("VALUE_PARTS", parts[1]))
    grid = (entries * cdiv(rows, down) * heads * sum(parts),)
    outputs = ((entries, rows, heads, nope + value), "uint8"), ((entries, heads * (nope + value), rows), "uint8")
    return Launch(join_quantize_kernel, grid, outputs, constants, warps, 1)
