"""MXFP8 in Triton: quantise one or both ways in one read, dequantise, tile scales.

Arrays are 2D here: x [rows, columns], with row-wise blocks of 32 neighbours in a row and column-wise ones of 32 rows. A
tensor [B, T, H, D] with token axis -3 is [B T, H D]: blocks along D are blocks in a row, blocks along T blocks of rows.
Tiles are [32 rows, columns]: 2D, so that a warp's accesses run along rows whatever order Triton gives equal axes.

The arithmetic is jax_mla/mxfp8_bits.py's, bit for bit: exponents from bits, NaN blocks 255 / 0x7F, infinity 254.
"""

import triton
import triton.language as tl

from .blocks import HOPPER, blocks
from .launch import Launch, cdiv, power_of_two, require

BLOCK = 32


@triton.jit
def magnitude(x):
    """The bits of |x|, float32: they order as magnitudes do, NaN on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax, UP: tl.constexpr):
    """The E8M0 code of a block, int32, from the largest `magnitude` in it."""
    # 448 is 1.75 * 2^8: a mantissa above 0x600000, that of 1.75, carries into the exponent.
    code = tl.maximum(((amax + (0x1FFFFF if UP else 0)) >> 23) - 8, 0)
    return tl.where(amax >= 0x7F800000, tl.where(amax > 0x7F800000, 255, 254), code)


@triton.jit
def _cast(x, scale):
    """float32 x over 2^(scale - 127) as E4M3, to nearest even, saturating."""
    # 2^(127 - scale) by its exponent. One bit more makes it subnormal 2^-127 of 254, and NaN of 255.
    inverse = (254 - scale) << 23
    inverse = tl.where(scale >= 254, inverse | 0x00400000, inverse).to(tl.float32, bitcast=True)
    return (x * inverse).to(tl.float8e4nv)


@triton.jit
def _factor(scale):
    """2^(scale - 127), float32; infinity of 255."""
    return tl.where(scale == 0, 0x00400000, scale << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(x, scale):
    """The E4M3 code, uint8, of float32 x over 2^(scale - 127)."""
    return _cast(x, scale).to(tl.uint8, bitcast=True)


@triton.jit
def decode(code, scale):
    """float32 values of uint8 codes and scales."""
    value, scale = code.to(tl.float8e4nv, bitcast=True).to(tl.float32), scale.to(tl.int32)
    nan = (scale == 255) | ((code & 0x7F) == 0x7F)
    return tl.where(nan, float("nan"), value * _factor(scale))


@triton.jit
def rounded(x, scale):
    """`decode` of `encode`, without codes as bytes between: a GPU's results of that were wrong (triton 3.6: NaN from
    another row). A block with NaN has NaN for its inverse scale, so all of it is NaN."""
    return _cast(x, scale).to(tl.float32) * _factor(scale)


@triton.jit
def largest(bits, W: tl.constexpr):
    """[rows, columns] -> [rows, columns / W]: the largest of every W neighbours in a row."""
    return tl.max(tl.reshape(bits, (bits.shape[0], bits.shape[1] // W, W)), axis=2)


@triton.jit
def spread(values, W: tl.constexpr):
    """The inverse: every value W times."""
    wide = tl.broadcast_to(values[:, :, None], (values.shape[0], values.shape[1], W))
    return tl.reshape(wide, (values.shape[0], values.shape[1] * W))


@triton.jit
def pieces(i, W: tl.constexpr):
    """i itself, so spelled that Triton gives a thread W neighbours at most. Accesses are as wide as the widest of those
    that meet in a tile: 16 bytes of codes would be 32 of bfloat16, and neighbours in a warp would leave gaps of 16."""
    return i // W * W + i % W


@triton.jit
def tile(program, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BC: tl.constexpr, BITS: tl.constexpr):
    """A program's block of 32 rows, its rows, columns and groups of 32 columns, and offsets [32, BC] into the array,
    for loads of BITS each.

    Programs go along the columns first: neighbours in time read neighbours in memory."""
    ACROSS: tl.constexpr = (COLUMNS + BC - 1) // BC
    block = program.to(tl.int64) // ACROSS
    row = block * 32 + tl.arange(0, 32)
    part = program % ACROSS
    column, group = part * BC + pieces(tl.arange(0, BC), 128 // BITS), part * (BC // 32) + tl.arange(0, BC // 32)
    return block, row, column, group, row[:, None] * COLUMNS + column[None, :]


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
def store_encoded(pointers, x, scale, mask, WHOLE: tl.constexpr):
    """float32 x as codes of those scales, or into an array that is none of bytes as the values of the codes."""
    kind: tl.constexpr = pointers.dtype.scalar.element_ty
    if kind == tl.uint8:
        store(pointers, encode(x, scale), mask, WHOLE)
    else:
        store(pointers, rounded(x, scale).to(kind), mask, WHOLE)


@triton.jit
def inside(row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return (row < ROWS)[:, None] & (column < COLUMNS)[None, :]


@triton.jit
def store_tiled(scales, scale, matrix, r, c, mask, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Scales (r, c) of matrices [ROWS, BLOCKS] in tiles of 128 by 4, and the zeros that pad the last tiles."""
    DOWN: tl.constexpr = (ROWS + 127) // 128
    ACROSS: tl.constexpr = (BLOCKS + 3) // 4
    for i in tl.static_range(4 * DOWN - ROWS // 32 + 1):
        for j in tl.static_range(4 * ACROSS - BLOCKS + 1):
            at_r, at_c, value, wanted = r + 32 * i, c + j, scale, mask
            if i > 0:  # the last 32 rows fill what is below them, the last block what is right of it
                wanted = wanted & (r >= ROWS - 32) & (at_r < 128 * DOWN)
            if j > 0:
                wanted = wanted & (c == BLOCKS - 1)
            if i + j > 0:
                value = tl.zeros_like(scale)
            at = (matrix * (DOWN * ACROSS) + at_r // 128 * ACROSS + at_c // 4) * 512
            at += at_r % 32 * 16 + at_r % 128 // 32 * 4 + at_c % 4
            tl.store(scales + at, value, mask=wanted)


@triton.jit
def store_rows(x, row, column, group, offsets, codes, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
               UP: tl.constexpr, WHOLE: tl.constexpr, T: tl.constexpr = 0, D: tl.constexpr = 0):  # fmt: skip
    """Row-wise codes and scales of a tile; the scales tiled where T is not 0, as matrices [T, D / 32]."""
    scale = scale_of(largest(magnitude(x), 32), UP)
    store_encoded(codes + offsets, x, spread(scale, 32), inside(row, column, ROWS, COLUMNS), WHOLE)
    mask = inside(row, group, ROWS, COLUMNS // 32)
    if T:
        matrix = (row // T * (COLUMNS // D))[:, None] + (group // (D // 32))[None, :]
        r, c = (row % T)[:, None] + 0 * group[None, :], (group % (D // 32))[None, :] + 0 * row[:, None]
        store_tiled(scales, scale.to(tl.uint8), matrix, r, c, mask, T, D // 32)
    else:
        at = row[:, None] * (COLUMNS // 32) + group[None, :]
        store(scales + at, scale.to(tl.uint8), mask, WHOLE)


@triton.jit
def store_columns(x, block, row, column, offsets, codes, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                  UP: tl.constexpr, WHOLE: tl.constexpr, T: tl.constexpr = 0, D: tl.constexpr = 0):  # fmt: skip
    """Column-wise codes and scales of a tile of 32 rows, the `block`-th; tiled scales as matrices [D, T / 32]."""
    scale = scale_of(tl.max(magnitude(x), axis=0), UP)
    store_encoded(codes + offsets, x, scale[None, :], inside(row, column, ROWS, COLUMNS), WHOLE)
    if T:
        matrix = block // (T // 32) * (COLUMNS // D) + column // D
        c = block % (T // 32) + 0 * column
        store_tiled(scales, scale.to(tl.uint8), matrix, column % D, c, column < COLUMNS, D, T // 32)
    else:
        store(scales + block * COLUMNS + column, scale.to(tl.uint8), column < COLUMNS, WHOLE)


@triton.jit
def read_tile(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BC: tl.constexpr, WHOLE: tl.constexpr):
    """A program's tile as float32, and where it is."""
    bits: tl.constexpr = x.dtype.element_ty.primitive_bitwidth
    block, row, column, group, offsets = tile(tl.program_id(0), ROWS, COLUMNS, BC, bits)
    values = load(x + offsets, inside(row, column, ROWS, COLUMNS), WHOLE).to(tl.float32)
    return values, block, row, column, group, offsets


@triton.jit
def quantize_rows(x, codes, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UP: tl.constexpr, T: tl.constexpr,
                  D: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    WHOLE: tl.constexpr = (ROWS % 32 == 0) & (COLUMNS % BC == 0)
    values, block, row, column, group, offsets = read_tile(x, ROWS, COLUMNS, BC, WHOLE)
    store_rows(values, row, column, group, offsets, codes, scales, ROWS, COLUMNS, UP, WHOLE, T, D)


@triton.jit
def quantize_columns(x, codes, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UP: tl.constexpr, T: tl.constexpr,
                     D: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    WHOLE: tl.constexpr = (ROWS % 32 == 0) & (COLUMNS % BC == 0)
    values, block, row, column, group, offsets = read_tile(x, ROWS, COLUMNS, BC, WHOLE)
    store_columns(values, block, row, column, offsets, codes, scales, ROWS, COLUMNS, UP, WHOLE, T, D)


@triton.jit
def quantize_both(x, row_codes, row_scales, column_codes, column_scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                  UP: tl.constexpr, T: tl.constexpr, D: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    WHOLE: tl.constexpr = (ROWS % 32 == 0) & (COLUMNS % BC == 0)
    values, block, row, column, group, offsets = read_tile(x, ROWS, COLUMNS, BC, WHOLE)
    store_rows(values, row, column, group, offsets, row_codes, row_scales, ROWS, COLUMNS, UP, WHOLE, T, D)
    store_columns(values, block, row, column, offsets, column_codes, column_scales, ROWS, COLUMNS, UP, WHOLE, T, D)


@triton.jit
def dequantize_kernel(codes, scales, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr,
                      BC: tl.constexpr):  # fmt: skip
    WHOLE: tl.constexpr = (ROWS % 32 == 0) & (COLUMNS % BC == 0)
    block, row, column, group, offsets = tile(
        tl.program_id(0), ROWS, COLUMNS, BC, y.dtype.element_ty.primitive_bitwidth
    )
    mask = inside(row, column, ROWS, COLUMNS)
    if BY_ROW:
        at = row[:, None] * (COLUMNS // 32) + group[None, :]
        scale = spread(load(scales + at, inside(row, group, ROWS, COLUMNS // 32), WHOLE), 32)
    else:
        scale = load(scales + block * COLUMNS + column, column < COLUMNS, WHOLE)[None, :]
    store(y + offsets, decode(load(codes + offsets, mask, WHOLE), scale).to(y.dtype.element_ty), mask, WHOLE)


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


USAGES = ("rowwise", "columnwise", "both")
Values = tuple[str | None, str | None]  # the dtype of the row-wise and the column-wise values; None for codes
CODES: Values = (None, None)


def encoded(shape: tuple[int, ...], values: Values) -> tuple:
    """The outputs for row-wise and for column-wise codes, or the values of codes."""
    return tuple((shape, dtype or "uint8") for dtype in values)


def check_blocks(rows: int, columns: int, usage: str) -> None:
    require(usage in USAGES, "usage", usage, f"one of {USAGES}")
    require(usage == "columnwise" or columns % BLOCK == 0, "columns", columns, f"a multiple of {BLOCK}")
    require(usage == "rowwise" or rows % BLOCK == 0, "rows", rows, f"a multiple of {BLOCK}")


def rounds_up(rounding: str) -> bool:
    require(rounding in ("up", "ocp"), "rounding", rounding, "'up' or 'ocp'")
    return rounding == "up"


def width(columns: int, most: int) -> int:
    return min(most, max(power_of_two(columns), BLOCK))


def tiles(rows: int, columns: int, width: int) -> tuple[int]:
    """The grid of kernels that ask `tile` which one is theirs."""
    return (cdiv(rows, BLOCK) * cdiv(columns, width),)


def supports_tiled(tokens: int, columns: int) -> str | None:
    """Why `quantize` cannot tile the scales of matrices [tokens, columns], or None."""
    if tokens % BLOCK or columns < BLOCK:
        return f"found {tokens} tokens by {columns} columns, wants a multiple of {BLOCK} and at least {BLOCK}"
    return None


def quantize(rows: int, columns: int, usage: str, rounding: str = "up", tiled: tuple[int, int] | None = None,
             values: Values = CODES, arch: int = HOPPER) -> Launch:  # fmt: skip
    """x [rows, columns] -> codes and scales of each usage: uint8 [rows, columns] and [rows, columns / 32], and the same
    and [rows / 32, columns].

    tiled: (tokens, columns) of the matrices that x is made of, [outer, tokens, inner, columns]: the scales are then
    what `swizzle` makes of them, [outer * inner, bytes]. values: for a GEMM that is to read a copy at once, its values
    in place of its codes (the scales stay)."""
    check_blocks(rows, columns, usage)
    if tiled:
        fits, divides = supports_tiled(*tiled) is None, rows % tiled[0] == columns % tiled[1] == 0
        require(fits, "tiled", tiled, f"tokens in whole blocks of {BLOCK}, columns of at least one")
        require(divides, "tiled", tiled, f"what divides {rows} rows, {columns} columns")
    row_codes, column_codes = encoded((rows, columns), values)
    by_row, by_column = ((rows, columns // BLOCK), "uint8"), ((rows // BLOCK, columns), "uint8")
    tokens, dims = tiled or (0, 0)
    if tiled:
        matrices = rows // tokens * (columns // dims)
        by_row = ((matrices, cdiv(tokens, 128) * cdiv(dims // BLOCK, 4) * 512), "uint8")
        by_column = ((matrices, cdiv(dims, 128) * cdiv(tokens // BLOCK, 4) * 512), "uint8")
    kernel, outputs = {
        "rowwise": (quantize_rows, (row_codes, by_row)),
        "columnwise": (quantize_columns, (column_codes, by_column)),
        "both": (quantize_both, (row_codes, by_row, column_codes, by_column)),
    }[usage]
    size, warps = blocks(f"quantize {usage if values == CODES else 'values'}", rows * columns, arch)
    size = width(columns, size)
    constants = (("ROWS", rows), ("COLUMNS", columns), ("UP", rounds_up(rounding)), ("T", tokens), ("D", dims))
    return Launch(kernel, tiles(rows, columns, size), outputs, (*constants, ("BC", size)), warps, 1)


def dequantize(rows: int, columns: int, usage: str, dtype: str, arch: int = HOPPER) -> Launch:
    """codes, scales -> values [rows, columns]."""
    require(usage in USAGES[:2], "usage", usage, f"one of {USAGES[:2]}")
    check_blocks(rows, columns, usage)
    size, warps = blocks("dequantize", rows * columns, arch)
    size = width(columns, size)
    constants = (("ROWS", rows), ("COLUMNS", columns), ("BY_ROW", usage == "rowwise"), ("BC", size))
    outputs = (((rows, columns), dtype),)
    return Launch(dequantize_kernel, tiles(rows, columns, size), outputs, constants, warps, 1)


def swizzle(outer: int, tokens: int, inner: int, columns: int, usage: str) -> Launch:
    """Scales [outer, tokens, inner, columns] -> tiles [outer * inner, bytes]; tokens, columns: the scales' own."""
    require(usage in USAGES[:2], "usage", usage, f"one of {USAGES[:2]}")
    strides = tokens * inner * columns, columns
    token, column = inner * columns, 1
    rows, wide = (tokens, columns) if usage == "rowwise" else (columns, tokens)
    row_stride, block_stride = (token, column) if usage == "rowwise" else (column, token)
    grid = (outer * inner, cdiv(rows, 128), cdiv(wide, 4))
    constants = (("ROWS", rows), ("BLOCKS", wide), ("INNER", inner), ("OUTER_STRIDE", strides[0]))
    constants += (("INNER_STRIDE", strides[1]), ("ROW_STRIDE", row_stride), ("BLOCK_STRIDE", block_stride))
    return Launch(swizzle_kernel, grid, (((grid[0], grid[1] * grid[2] * 512), "uint8"),), constants)
