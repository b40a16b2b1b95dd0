"""RoPE and MXFP8 in one read, in Triton: what follows the Q up-projection, and what stands before its backward GEMMs.

x [rows, HEADS, DIM] with rows a multiple of 32, the last P dims of a head rotary. A program, one warp, has 32 tokens of
some blocks of one head, or of its rotary dims.
The rotated halves are tiles [32, groups, 16 or 32].
"""

import triton
import triton.language as tl

from .launch import Launch, cdiv
from .mxfp8 import encode, load, magnitude, scale_of, store
from .rope import load_neighbours, rotate, store_neighbours, table_row


@triton.jit
def _load_pairs(x, base, i, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """x1, x2 [32, groups, width] of tokens whose rotary dims start at base."""
    if PAIRS:
        x1, x2 = load_neighbours(x, (base // 2)[:, None, None] + i[None, :, :], None)
    else:
        x1 = tl.load(x + base[:, None, None] + i[None, :, :]).to(tl.float32)
        x2 = tl.load(x + base[:, None, None] + (HALF + i)[None, :, :]).to(tl.float32)
    return x1, x2


@triton.jit
def _store_pairs(y, base, i, left, right, HALF: tl.constexpr, PAIRS: tl.constexpr):
    if PAIRS:
        store_neighbours(y, (base // 2)[:, None, None] + i[None, :, :], left, right, None)
    else:
        tl.store(y + base[:, None, None] + i[None, :, :], left)
        tl.store(y + base[:, None, None] + (HALF + i)[None, :, :], right)


@triton.jit
def _rotary_part(x, cos, sin, row_codes, row_scales, column_codes, column_scales, base, row_base, column_base, table,
                 KEPT: tl.constexpr, READ_PAIRS: tl.constexpr, WRITE_PAIRS: tl.constexpr, INVERSE: tl.constexpr,
                 UP: tl.constexpr, ROTARY: tl.constexpr):  # fmt: skip
    HALF: tl.constexpr = ROTARY // 2
    # A row-wise block is 32 of one half, or where pairs are written (and where a half is but 16) 16 of each.
    MIXED: tl.constexpr = WRITE_PAIRS or HALF == 16
    WIDTH: tl.constexpr = 16 if MIXED else 32
    i = tl.arange(0, HALF // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    c = tl.load(cos + table[:, None, None] * HALF + i[None, :, :]).to(tl.float32)
    s = tl.load(sin + table[:, None, None] * HALF + i[None, :, :]).to(tl.float32)
    x1, x2 = _load_pairs(x, base + KEPT, i, HALF, READ_PAIRS)
    left, right = rotate(x1, x2, c, s, INVERSE)
    left_bits, right_bits = magnitude(left), magnitude(right)

    left_columns, right_columns = scale_of(tl.max(left_bits, axis=0), UP), scale_of(tl.max(right_bits, axis=0), UP)
    _store_pairs(column_codes, base + KEPT, i, encode(left, left_columns[None, :, :]),
                 encode(right, right_columns[None, :, :]), HALF, WRITE_PAIRS)  # fmt: skip
    if WRITE_PAIRS:
        at = (column_base + KEPT) // 2 + i
        store_neighbours(column_scales, at, left_columns.to(tl.uint8), right_columns.to(tl.uint8), None)
    else:
        tl.store(column_scales + column_base + KEPT + i, left_columns.to(tl.uint8))
        tl.store(column_scales + column_base + KEPT + HALF + i, right_columns.to(tl.uint8))

    left_amax, right_amax = tl.max(left_bits, axis=2), tl.max(right_bits, axis=2)  # [32, HALF / WIDTH]
    at = row_base[:, None] + (KEPT // 32 + tl.arange(0, HALF // WIDTH))[None, :]
    if MIXED:
        left_rows = scale_of(tl.maximum(left_amax, right_amax), UP)
        right_rows = left_rows
        tl.store(row_scales + at, left_rows.to(tl.uint8))
    else:
        left_rows, right_rows = scale_of(left_amax, UP), scale_of(right_amax, UP)
        tl.store(row_scales + at, left_rows.to(tl.uint8))
        tl.store(row_scales + at + HALF // 32, right_rows.to(tl.uint8))
    _store_pairs(row_codes, base + KEPT, i, encode(left, left_rows[:, :, None]),
                 encode(right, right_rows[:, :, None]), HALF, WRITE_PAIRS)  # fmt: skip


@triton.jit
def rope_quantize_kernel(x, cos, sin, row_codes, row_scales, column_codes, column_scales, N1: tl.constexpr,
                         S0: tl.constexpr, S1: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, KEPT: tl.constexpr,
                         READ_PAIRS: tl.constexpr, WRITE_PAIRS: tl.constexpr, INVERSE: tl.constexpr, UP: tl.constexpr,
                         ROTARY: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    # Along the dims and heads first: neighbours in time read neighbours in memory.
    part = tl.program_id(0) % (PARTS + 1)
    head = (tl.program_id(0) // (PARTS + 1) % HEADS).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) // ((PARTS + 1) * HEADS)
    token = block * 32 + tl.arange(0, 32)
    base = (token * HEADS + head) * DIM  # of the head, in x and codes
    row_base = (token * HEADS + head) * (DIM // 32)  # in row-wise scales
    column_base = (block * HEADS + head) * DIM  # in column-wise scales
    if part < PARTS:  # of the dims that are not rotated, G blocks of 32
        group = part * G + tl.arange(0, G)
        inside = group < KEPT // 32
        at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        WHOLE: tl.constexpr = KEPT // 32 % G == 0
        mask = tl.broadcast_to(inside[None, :, None], (32, G, 32))
        values = load(x + base[:, None, None] + at[None, :, :], mask, WHOLE).to(tl.float32)
        bits = magnitude(values)
        rows = scale_of(tl.max(bits, axis=2), UP)
        store(row_codes + base[:, None, None] + at[None, :, :], encode(values, rows[:, :, None]), mask, WHOLE)
        row_mask = tl.broadcast_to(inside[None, :], (32, G))
        store(row_scales + row_base[:, None] + group[None, :], rows.to(tl.uint8), row_mask, WHOLE)
        columns = scale_of(tl.max(bits, axis=0), UP)
        store(column_codes + base[:, None, None] + at[None, :, :], encode(values, columns[None, :, :]), mask, WHOLE)
        column_mask = tl.broadcast_to(inside[:, None], (G, 32))
        store(column_scales + column_base + at, columns.to(tl.uint8), column_mask, WHOLE)
    else:
        _rotary_part(x, cos, sin, row_codes, row_scales, column_codes, column_scales, base, row_base, column_base,
                     table_row(token, N1, S0, S1), KEPT, READ_PAIRS, WRITE_PAIRS, INVERSE, UP, ROTARY)  # fmt: skip


def supports(dim: int, rotary: int) -> str | None:
    """Why these head dims have no such kernel, or None."""
    if (dim - rotary) % 32 or rotary % 32 or rotary & (rotary - 1):
        return f"head dim {dim - rotary} + {rotary}: wants multiples of 32, the rotary part a power of two"
    return None


def rope_quantize(rows: int, heads: int, dim: int, rotary: int, table: tuple[int, int, int], read: str, write: str,
                  inverse: bool, rounding: str = "up", groups: int = 2, num_warps: int = 1) -> Launch:  # fmt: skip
    """x [rows, heads, dim], cos, sin -> row-wise codes and scales, column-wise codes and scales, of the rotation."""
    constants = (("N1", table[0]), ("S0", table[1]), ("S1", table[2]), ("HEADS", heads), ("DIM", dim))
    constants += (("KEPT", dim - rotary), ("READ_PAIRS", read == "pairs"), ("WRITE_PAIRS", write == "pairs"))
    constants += (("INVERSE", inverse), ("UP", rounding == "up"), ("ROTARY", rotary), ("G", groups))
    parts = cdiv(dim - rotary, 32 * groups)
    constants += (("PARTS", parts),)
    codes = ((rows, heads, dim), "uint8")
    outputs = (codes, ((rows, heads, dim // 32), "uint8"), codes, ((rows // 32, heads, dim), "uint8"))
    return Launch(rope_quantize_kernel, (cdiv(rows, 32) * heads * (parts + 1),), outputs, constants, num_warps, 1)
