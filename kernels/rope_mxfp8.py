"""RoPE and MXFP8 in one read, in Triton: what follows the Q up-projection, and what stands before its backward GEMMs.

x [rows, HEADS, DIM] with rows a multiple of 32, a head's last dims rotary. A program has 32 tokens of some blocks of
one head, or of its rotary dims.
"""

import triton
import triton.language as tl

from .blocks import HOPPER, blocks
from .launch import Launch, cdiv, require
from .mxfp8 import (
    CODES,
    Values,
    encoded,
    largest,
    load,
    magnitude,
    pieces,
    rounds_up,
    scale_of,
    spread,
    store,
    store_encoded,
    width,
)
from .rope import check_rotary, load_neighbours, rotate, table_row


@triton.jit
def _rotated(x, cos, sin, base, table, HALF: tl.constexpr, READ_PAIRS: tl.constexpr, WRITE_PAIRS: tl.constexpr,
             INVERSE: tl.constexpr):  # fmt: skip
    """[32, 2 HALF] of tokens whose rotary dims start at base."""
    i = pieces(tl.arange(0, HALF), 4)  # float32 tables are what is widest
    c = tl.load(cos + table[:, None] * HALF + i[None, :]).to(tl.float32)
    s = tl.load(sin + table[:, None] * HALF + i[None, :]).to(tl.float32)
    if READ_PAIRS:
        x1, x2 = load_neighbours(x, (base // 2)[:, None] + i[None, :], None)
    else:
        x1 = tl.load(x + base[:, None] + i[None, :]).to(tl.float32)
        x2 = tl.load(x + base[:, None] + (HALF + i)[None, :]).to(tl.float32)
    left, right = rotate(x1, x2, c, s, INVERSE)
    both = tl.join(left, right)
    if not WRITE_PAIRS:
        both = tl.permute(both, (0, 2, 1))
    return tl.reshape(both, (32, 2 * HALF))


@triton.jit
def _store(values, base, row_base, column_base, column, group, row_codes, row_scales, column_codes, column_scales,
           DIMS: tl.constexpr, UP: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Codes and scales, both ways, of a tile of a head's dims `column`, blocks `group`; where not WHOLE, below DIMS."""
    mask = tl.broadcast_to((column < DIMS)[None, :], values.shape)
    row_mask = tl.broadcast_to((group < DIMS // 32)[None, :], (values.shape[0], values.shape[1] // 32))
    bits, offsets = magnitude(values), base[:, None] + column[None, :]
    scale = scale_of(largest(bits, 32), UP)
    store_encoded(row_codes + offsets, values, spread(scale, 32), mask, WHOLE)
    store(row_scales + row_base[:, None] + group[None, :], scale.to(tl.uint8), row_mask, WHOLE)
    scale = scale_of(tl.max(bits, axis=0), UP)
    store_encoded(column_codes + offsets, values, scale[None, :], mask, WHOLE)
    store(column_scales + column_base + column, scale.to(tl.uint8), column < DIMS, WHOLE)


@triton.jit
def _kept_part(x, base, row_base, column_base, part, row_codes, row_scales, column_codes, column_scales,
               KEPT: tl.constexpr, UP: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    WHOLE: tl.constexpr = KEPT % BC == 0
    column, group = part * BC + pieces(tl.arange(0, BC), 8), part * (BC // 32) + tl.arange(0, BC // 32)
    mask = tl.broadcast_to((column < KEPT)[None, :], (32, BC))
    values = load(x + base[:, None] + column[None, :], mask, WHOLE).to(tl.float32)
    _store(values, base, row_base, column_base, column, group, row_codes, row_scales, column_codes, column_scales,
           KEPT, UP, WHOLE)  # fmt: skip


@triton.jit
def rope_quantize_kernel(x, cos, sin, row_codes, row_scales, column_codes, column_scales, N1: tl.constexpr,
                         S0: tl.constexpr, S1: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, KEPT: tl.constexpr,
                         READ_PAIRS: tl.constexpr, WRITE_PAIRS: tl.constexpr, INVERSE: tl.constexpr, UP: tl.constexpr,
                         ROTARY: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    # Along the dims and heads first: neighbours in time read neighbours in memory.
    part = tl.program_id(0) % (PARTS + 1)
    head = (tl.program_id(0) // (PARTS + 1) % HEADS).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) // ((PARTS + 1) * HEADS)
    token = block * 32 + tl.arange(0, 32)
    base = (token * HEADS + head) * DIM  # of the head, in x and codes
    row_base = (token * HEADS + head) * (DIM // 32)  # in row-wise scales
    column_base = (block * HEADS + head) * DIM  # in column-wise scales
    if part < PARTS:  # of the dims that are not rotated, BC
        _kept_part(x, base, row_base, column_base, part, row_codes, row_scales, column_codes, column_scales, KEPT, UP,
                   BC)  # fmt: skip
    else:
        values = _rotated(x, cos, sin, base + KEPT, table_row(token, N1, S0, S1), ROTARY // 2, READ_PAIRS, WRITE_PAIRS,
                          INVERSE)  # fmt: skip
        _store(values, base, row_base, column_base, KEPT + pieces(tl.arange(0, ROTARY), 8 if WRITE_PAIRS else 4),
               KEPT // 32 + tl.arange(0, ROTARY // 32), row_codes, row_scales, column_codes, column_scales, DIM, UP,
               True)  # fmt: skip


def supports(dim: int, rotary: int) -> str | None:
    """Why these head dims have no such kernel, or None."""
    if (dim - rotary) % 32 or rotary % 32 or rotary & (rotary - 1):
        return f"head dim {dim - rotary} + {rotary}: wants multiples of 32, the rotary part a power of two"
    return None


def rope_quantize(rows: int, heads: int, dim: int, rotary: int, table: tuple[int, int, int], read: str, write: str,
                  inverse: bool, rounding: str = "up", values: Values = CODES,
                  arch: int = HOPPER) -> Launch:  # fmt: skip
    """x [rows, heads, dim], cos, sin -> row-wise codes and scales, column-wise codes and scales, of the rotation.
    values: as `mxfp8.quantize`."""
    check_rotary(rotary, dim, read, write)
    require(supports(dim, rotary) is None, "rotary", rotary, f"with dim {dim}, multiples of 32 and a power of two")
    require(rows % 32 == 0, "rows", rows, "a multiple of 32")
    kept = dim - rotary
    size, warps = blocks("rope_quantize", rows * heads * dim, arch)
    size = width(kept, size)
    parts = cdiv(kept, size)
    constants = (("N1", table[0]), ("S0", table[1]), ("S1", table[2]), ("HEADS", heads), ("DIM", dim), ("KEPT", kept))
    constants += (("READ_PAIRS", read == "pairs"), ("WRITE_PAIRS", write == "pairs"), ("INVERSE", inverse))
    constants += (("UP", rounds_up(rounding)), ("ROTARY", rotary), ("BC", size), ("PARTS", parts))
    row_codes, column_codes = encoded((rows, heads, dim), values)
    outputs = (row_codes, ((rows, heads, dim // 32), "uint8"), column_codes, ((rows // 32, heads, dim), "uint8"))
    return Launch(rope_quantize_kernel, (cdiv(rows, 32) * heads * (parts + 1),), outputs, constants, warps, 1)
