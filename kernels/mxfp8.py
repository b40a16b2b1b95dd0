"""MXFP8 in Triton: quantise one or both ways in one read, dequantise, tile scales.

Arrays are 2D here: x [rows, columns], with row-wise blocks of 32 neighbours in a row and column-wise ones of 32 rows. A
tensor [B, T, H, D] with token axis -3 is [B T, H D]: blocks along D are blocks in a row, blocks along T blocks of rows.
Tiles are [32 rows, groups, 32 columns], so that both kinds of block are reductions along an axis.

The arithmetic is jax_mla/mxfp8_bits.py's, bit for bit: exponents from bits, NaN blocks 255 / 0x7F, infinity 254.
"""

import triton
import triton.language as tl

from .launch import Launch, cdiv

BLOCK = 32


@triton.jit
def magnitude(x):
    """The bits of |x|, float32: they order as magnitudes do, NaN on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax, UP: tl.constexpr):
    """The E8M0 code of a block, int32, from the largest `magnitude` in it."""
    code = (amax >> 23) - 8  # 448 is 1.75 * 2^8
    if UP:
        code += ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    code = tl.minimum(tl.maximum(code, 0), 254)
    code = tl.where(amax == 0x7F800000, 254, code)
    return tl.where(amax > 0x7F800000, 255, code)


@triton.jit
def encode(x, scale):
    """The E4M3 code, uint8, of float32 x over 2^(scale - 127)."""
    # 2^(127 - scale); of 254, which is subnormal, by its bits; of 255 NaN, and the cast makes 0x7F of every NaN.
    inverse = tl.where(scale == 254, 0x00400000, (254 - scale) << 23)
    inverse = tl.where(scale == 255, 0x7FC00000, inverse).to(tl.float32, bitcast=True)
    return (x * inverse).to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # to nearest even, saturating


@triton.jit
def decode(code, scale):
    """float32 values of uint8 codes and scales."""
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    scale = scale.to(tl.int32)
    factor = tl.where(scale == 0, 0x00400000, scale << 23).to(tl.float32, bitcast=True)
    nan = (scale == 255) | ((code & 0x7F) == 0x7F)
    return tl.where(nan, float("nan"), value * factor)


@triton.jit
def tile(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BT: tl.constexpr, G: tl.constexpr):
    """A program's block of BT rows, its rows, its groups of columns, offsets [BT, G, 32] into [ROWS, COLUMNS], masks
    of the tile, its row-wise and its column-wise scales.

    Programs go along the columns first: neighbours in time read neighbours in memory."""
    ACROSS: tl.constexpr = (COLUMNS // 32 + G - 1) // G
    block = tl.program_id(0).to(tl.int64) // ACROSS
    row = block * BT + tl.arange(0, BT)
    group = tl.program_id(0).to(tl.int64) % ACROSS * G + tl.arange(0, G)
    offsets = row[:, None, None] * COLUMNS + (group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :])
    inside = group < COLUMNS // 32
    mask = tl.broadcast_to((row < ROWS)[:, None, None] & inside[None, :, None], (BT, G, 32))
    row_mask = (row < ROWS)[:, None] & inside[None, :]
    return block, row, group, offsets, mask, row_mask, tl.broadcast_to(inside[:, None], (G, 32))


# WHOLE, of these two: no tile sticks out of the array, and no mask is asked (masks cost more than the arithmetic).


@triton.jit
def load(pointers, mask, WHOLE: tl.constexpr):
    if WHOLE:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=mask, other=0)
    return values


@triton.jit
def store(pointers, values, mask, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def store_rows(x, row, group, offsets, mask, row_mask, codes, scales, COLUMNS: tl.constexpr, UP: tl.constexpr,
               WHOLE: tl.constexpr):  # fmt: skip
    """Row-wise codes and scales of a tile [BT, G, 32]."""
    scale = scale_of(tl.max(magnitude(x), axis=2), UP)
    store(codes + offsets, encode(x, scale[:, :, None]), mask, WHOLE)
    at = row[:, None] * (COLUMNS // 32) + group[None, :]
    store(scales + at, scale.to(tl.uint8), row_mask, WHOLE)


@triton.jit
def store_columns(x, block, group, offsets, mask, column_mask, codes, scales, COLUMNS: tl.constexpr, UP: tl.constexpr,
               WHOLE: tl.constexpr):  # fmt: skip
    """Column-wise codes and scales of a tile [32, G, 32] of whole blocks; `block` counts 32 rows."""
    scale = scale_of(tl.max(magnitude(x), axis=0), UP)
    store(codes + offsets, encode(x, scale[None, :, :]), mask, WHOLE)
    at = block * COLUMNS + group[:, None] * 32 + tl.arange(0, 32)[None, :]
    store(scales + at, scale.to(tl.uint8), column_mask, WHOLE)


@triton.jit
def quantize_rows(x, codes, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UP: tl.constexpr, BT: tl.constexpr,
                  G: tl.constexpr):  # fmt: skip
    WHOLE: tl.constexpr = (ROWS % BT == 0) & (COLUMNS // 32 % G == 0)
    block, row, group, offsets, mask, row_mask, column_mask = tile(ROWS, COLUMNS, BT, G)
    values = load(x + offsets, mask, WHOLE).to(tl.float32)
    store_rows(values, row, group, offsets, mask, row_mask, codes, scales, COLUMNS, UP, WHOLE)


@triton.jit
def quantize_columns(x, codes, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UP: tl.constexpr, G: tl.constexpr):
    WHOLE: tl.constexpr = (ROWS % 32 == 0) & (COLUMNS // 32 % G == 0)
    block, row, group, offsets, mask, row_mask, column_mask = tile(ROWS, COLUMNS, 32, G)
    values = load(x + offsets, mask, WHOLE).to(tl.float32)
    store_columns(values, block, group, offsets, mask, column_mask, codes, scales, COLUMNS, UP, WHOLE)


@triton.jit
def quantize_both(x, row_codes, row_scales, column_codes, column_scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                  UP: tl.constexpr, G: tl.constexpr):  # fmt: skip
    WHOLE: tl.constexpr = (ROWS % 32 == 0) & (COLUMNS // 32 % G == 0)
    block, row, group, offsets, mask, row_mask, column_mask = tile(ROWS, COLUMNS, 32, G)
    values = load(x + offsets, mask, WHOLE).to(tl.float32)
    store_rows(values, row, group, offsets, mask, row_mask, row_codes, row_scales, COLUMNS, UP, WHOLE)
    store_columns(values, block, group, offsets, mask, column_mask, column_codes, column_scales, COLUMNS, UP, WHOLE)


@triton.jit
def dequantize_kernel(codes, scales, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr,
                      BT: tl.constexpr, G: tl.constexpr):  # fmt: skip
    WHOLE: tl.constexpr = (ROWS % BT == 0) & (COLUMNS // 32 % G == 0)
    block, row, group, offsets, mask, row_mask, column_mask = tile(ROWS, COLUMNS, BT, G)
    if BY_ROW:
        at = row[:, None] * (COLUMNS // 32) + group[None, :]
        scale = load(scales + at, row_mask, WHOLE)[:, :, None]
    else:
        at = block * BT // 32 * COLUMNS + group[:, None] * 32 + tl.arange(0, 32)[None, :]
        scale = load(scales + at, column_mask, WHOLE)[None, :, :]
    value = decode(load(codes + offsets, mask, WHOLE), scale)
    store(y + offsets, value.to(y.dtype.element_ty), mask, WHOLE)


@triton.jit
def swizzle_kernel(scales, tiles, ROWS: tl.constexpr, BLOCKS: tl.constexpr, INNER: tl.constexpr,
                   OUTER_STRIDE: tl.constexpr, INNER_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
                   BLOCK_STRIDE: tl.constexpr):  # fmt: skip
    """One tile of 128 rows by 4 blocks of matrix (outer, inner): each of its 512 bytes a scale, or 0 for padding."""
    matrix = tl.program_id(0).to(tl.int64)
    row_tile, block_tile = tl.program_id(1), tl.program_id(2)
    byte = tl.arange(0, 512)
    row = row_tile * 128 + byte // 4 % 4 * 32 + byte // 16
    block = block_tile * 4 + byte % 4
    base = matrix // INNER * OUTER_STRIDE + matrix % INNER * INNER_STRIDE
    at = base + row.to(tl.int64) * ROW_STRIDE + block.to(tl.int64) * BLOCK_STRIDE
    value = tl.load(scales + at, mask=(row < ROWS) & (block < BLOCKS), other=0)
    tile = (matrix * tl.num_programs(1) + row_tile) * tl.num_programs(2) + block_tile
    tl.store(tiles + tile * 512 + byte, value)


# --- Launches -----------------------------------------------------------------------------------------------------

# One warp has a whole tile of 32 rows by 64 columns: no block is spread over two warps, so that both kinds of amax are
# shuffles, without shared memory or barriers between.
GROUPS, WARPS = 2, 1


def quantize(rows: int, columns: int, usage: str, rounding: str = "up") -> Launch:
    """x [rows, columns] -> codes and scales of each usage: uint8 [rows, columns] and [rows, columns / 32], and the same
    and [rows / 32, columns]."""
    by_row = (((rows, columns), "uint8"), ((rows, columns // BLOCK), "uint8"))
    by_column = (((rows, columns), "uint8"), ((rows // BLOCK, columns), "uint8"))
    kernel, outputs = {
        "rowwise": (quantize_rows, by_row),
        "columnwise": (quantize_columns, by_column),
        "both": (quantize_both, by_row + by_column),
    }[usage]
    constants = (("ROWS", rows), ("COLUMNS", columns), ("UP", rounding == "up"), ("G", GROUPS))
    if usage == "rowwise":
        constants += (("BT", 32),)
    return Launch(kernel, tiles(rows, columns, GROUPS), outputs, constants, WARPS, 1)


def tiles(rows: int, columns: int, groups: int) -> tuple[int]:
    """The grid of kernels that ask `tile` which one is theirs."""
    return (cdiv(rows, 32) * cdiv(columns, 32 * groups),)


def dequantize(rows: int, columns: int, usage: str, dtype: str) -> Launch:
    """codes, scales -> values [rows, columns]."""
    groups = 4  # 128 columns: 256 bytes a row of bfloat16
    constants = (("ROWS", rows), ("COLUMNS", columns), ("BY_ROW", usage == "rowwise"), ("BT", 32), ("G", groups))
    return Launch(dequantize_kernel, tiles(rows, columns, groups), (((rows, columns), dtype),), constants, 4, 1)


def swizzle(outer: int, tokens: int, inner: int, columns: int, usage: str) -> Launch:
    """Scales [outer, tokens, inner, columns] -> tiles [outer * inner, bytes]; tokens, columns: the scales' own."""
    strides = tokens * inner * columns, columns
    token, column = inner * columns, 1
    rows, blocks = (tokens, columns) if usage == "rowwise" else (columns, tokens)
    row_stride, block_stride = (token, column) if usage == "rowwise" else (column, token)
    grid = (outer * inner, cdiv(rows, 128), cdiv(blocks, 4))
    constants = (("ROWS", rows), ("BLOCKS", blocks), ("INNER", inner), ("OUTER_STRIDE", strides[0]))
    constants += (("INNER_STRIDE", strides[1]), ("ROW_STRIDE", row_stride), ("BLOCK_STRIDE", block_stride))
    return Launch(swizzle_kernel, grid, (((grid[0], grid[1] * grid[2] * 512), "uint8"),), constants)
