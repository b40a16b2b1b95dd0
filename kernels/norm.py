"""RMSNorm in Triton: forward, forward with MXFP8 both ways of the float32 result, backward.

y = x rstd factor, rstd = 1 / sqrt(mean(x^2) + eps), factor = scale, or 1 + scale where it is zero-centred; float32.
"""

import triton
import triton.language as tl

from .blocks import HOPPER, blocks
from .launch import Launch, cdiv, power_of_two, require
from .mxfp8 import (
    CODES,
    Values,
    check_blocks,
    encoded,
    inside,
    load,
    rounds_up,
    store_columns,
    store_rows,
    tile,
    tiles,
    width,
)


@triton.jit
def _factor(scale, ZERO_CENTERED: tl.constexpr):
    factor = scale.to(tl.float32)
    if ZERO_CENTERED:
        factor += 1.0
    return factor


@triton.jit
def norm_kernel(x, scale, y, rstd, K: tl.constexpr, EPS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
                BK: tl.constexpr):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    values = tl.load(x + row * K + k, mask=k < K, other=0).to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=0) / K + EPS)
    factor = _factor(tl.load(scale + k, mask=k < K, other=0), ZERO_CENTERED)
    tl.store(y + row * K + k, (values * r * factor).to(y.dtype.element_ty), mask=k < K)
    tl.store(rstd + row, r)


@triton.jit
def rstd_kernel(x, rstd, K: tl.constexpr, EPS: tl.constexpr, BK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    values = tl.load(x + row * K + k, mask=k < K, other=0).to(tl.float32)
    tl.store(rstd + row, 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=0) / K + EPS))


@triton.jit
def _normalised(x, rstd, scale, ROWS: tl.constexpr, K: tl.constexpr, ZERO_CENTERED: tl.constexpr, BC: tl.constexpr,
                WHOLE: tl.constexpr):  # fmt: skip
    """A tile [32, BC] normalised, and where it is; the last rows first, which `rstd` has left in the cache."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    block, row, column, group, offsets = tile(program, ROWS, K, BC, x.dtype.element_ty.primitive_bitwidth)
    values = load(x + offsets, inside(row, column, ROWS, K), WHOLE).to(tl.float32)
    factor = _factor(load(scale + column, column < K, WHOLE), ZERO_CENTERED)
    y = values * load(rstd + row, row < ROWS, WHOLE)[:, None] * factor[None, :]
    return y, block, row, column, group, offsets


@triton.jit
def norm_quantize_kernel(x, rstd, scale, row_codes, row_scales, column_codes, column_scales, ROWS: tl.constexpr,
                         K: tl.constexpr, ZERO_CENTERED: tl.constexpr, UP: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """A tile [32, BC], normalised and quantised."""
    WHOLE: tl.constexpr = (ROWS % 32 == 0) & (K % BC == 0)
    y, block, row, column, group, offsets = _normalised(x, rstd, scale, ROWS, K, ZERO_CENTERED, BC, WHOLE)
    store_rows(y, row, column, group, offsets, row_codes, row_scales, ROWS, K, UP, WHOLE)
    store_columns(y, block, row, column, offsets, column_codes, column_scales, ROWS, K, UP, WHOLE)


@triton.jit
def norm_quantize_rows_kernel(x, rstd, scale, codes, scales, ROWS: tl.constexpr, K: tl.constexpr,
                              ZERO_CENTERED: tl.constexpr, UP: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """As norm_quantize_kernel, of any number of rows."""
    WHOLE: tl.constexpr = (ROWS % 32 == 0) & (K % BC == 0)
    y, block, row, column, group, offsets = _normalised(x, rstd, scale, ROWS, K, ZERO_CENTERED, BC, WHOLE)
    store_rows(y, row, column, group, offsets, codes, scales, ROWS, K, UP, WHOLE)


@triton.jit
def norm_backward_kernel(x, rstd, scale, dy, dx, dscale, ROWS: tl.constexpr, K: tl.constexpr,
                         ZERO_CENTERED: tl.constexpr, EACH: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """EACH rows, a partial sum of dscale. h = x rstd, g = dy factor: dx = rstd (g - h mean(g h)), dscale = dy h."""
    k = tl.arange(0, BK)
    factor = _factor(tl.load(scale + k, mask=k < K, other=0), ZERO_CENTERED)
    total = tl.zeros((BK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * EACH
    for i in range(EACH):
        row = first + i
        mask = (k < K) & (row + 0 * k < ROWS)
        r = tl.load(rstd + row, mask=row < ROWS, other=0)
        h = tl.load(x + row * K + k, mask=mask, other=0).to(tl.float32) * r
        cotangent = tl.load(dy + row * K + k, mask=mask, other=0).to(tl.float32)
        g = cotangent * factor
        g = tl.where(mask, g, 0.0)
        mean = tl.sum(g * h, axis=0) / K
        tl.store(dx + row * K + k, (r * (g - h * mean)).to(dx.dtype.element_ty), mask=mask)
        total += cotangent * h
    tl.store(dscale + tl.program_id(0).to(tl.int64) * K + k, total, mask=k < K)


# --- Launches -----------------------------------------------------------------------------------------------------


def _warps(columns: int) -> int:
    return 4 if columns <= 2048 else 8


def norm(rows: int, columns: int, eps: float, zero_centered: bool, dtype: str) -> Launch:
    """x [rows, columns], scale -> y like x, rstd float32 [rows]."""
    constants = (("K", columns), ("EPS", eps), ("ZERO_CENTERED", zero_centered), ("BK", power_of_two(columns)))
    return Launch(norm_kernel, (rows,), (((rows, columns), dtype), ((rows,), "float32")), constants, _warps(columns), 1)


def rstd(rows: int, columns: int, eps: float) -> Launch:
    """x [rows, columns] -> rstd float32 [rows]."""
    constants = (("K", columns), ("EPS", eps), ("BK", power_of_two(columns)))
    return Launch(rstd_kernel, (rows,), (((rows,), "float32"),), constants, _warps(columns), 1)


def norm_quantize(rows: int, columns: int, zero_centered: bool, usage: str = "both", rounding: str = "up",
                  values: Values = CODES, arch: int | None = HOPPER) -> Launch:  # fmt: skip
    """x [rows, columns], rstd, scale -> row-wise codes and scales, and for usage "both" column-wise ones. values: as
    `mxfp8.quantize`.

    A second launch after `rstd`'s: blocks of 32 rows leave a row to many programs.
    """
    require(usage in ("both", "rowwise"), "usage", usage, "'both' or 'rowwise'")
    check_blocks(rows, columns, usage)
    constants = (("ROWS", rows), ("K", columns), ("ZERO_CENTERED", zero_centered), ("UP", rounds_up(rounding)))
    (codes, by_column), by_row = encoded((rows, columns), values), ((rows, columns // 32), "uint8")
    kernel, outputs = norm_quantize_rows_kernel, (codes, by_row)
    if usage == "both":
        kernel, outputs = norm_quantize_kernel, (codes, by_row, by_column, ((rows // 32, columns), "uint8"))
    size, warps = blocks("norm_quantize", rows * columns, arch)
    size = width(columns, size)
    return Launch(kernel, tiles(rows, columns, size), outputs, (*constants, ("BC", size)), warps, 1)


def norm_backward(rows: int, columns: int, zero_centered: bool, dtype: str, programs: int = 1024) -> Launch:
    """x, rstd, scale, dy -> dx like x, partial sums of dscale, float32 [programs, columns].

    The number of programs is fixed, whatever the GPU: the order of the sum decides its last bits."""
    each = max(1, cdiv(rows, programs))
    grid = (max(1, cdiv(rows, each)),)
    constants = (("ROWS", rows), ("K", columns), ("ZERO_CENTERED", zero_centered), ("EACH", each))
    outputs = (((rows, columns), dtype), ((grid[0], columns), "float32"))
    return Launch(norm_backward_kernel, grid, outputs, (*constants, ("BK", power_of_two(columns))), _warps(columns), 2)
