"""FP8 with one scale a tensor, in Triton: one read writes the codes as the tensor lies, transposed, or both.

Hopper's FP8 GEMMs want both operands contiguous along what they contract, so a tensor that two GEMMs of a training step
contract along different axes is wanted both ways round. Arrays are [entries, rows, columns] here, each entry with its
own scale. The cast is the hardware's, to nearest even and saturating, of x * scale in float32.

Transposed codes are of 16-bit floats alone. There the compiler turns what was loaded, and casts it twice: right bit for
bit on an H200, at every size tried. Of float32 it turns codes, and triton 3.6 then gave wrong ones on the GPU (in the
interpreter right); so it did for a rotation in front of the cast, and for words of four codes in their place.
"""

import triton
import triton.language as tl

from .blocks import HOPPER, blocks
from .launch import Launch, cdiv, power_of_two, require
from .mxfp8 import load, store


@triton.jit
def encode(x, scale, E5M2: tl.constexpr):
    """The code, uint8, of float32 x * scale."""
    if E5M2:
        code = (x * scale).to(tl.float8e5)
    else:
        code = (x * scale).to(tl.float8e4nv)
    return code.to(tl.uint8, bitcast=True)


@triton.jit
def turned(code):
    """The transpose of codes, for stores. ptxas may fold bytes of casts that are put together elsewhere into the casts;
    not past an operation that changes nothing, which no compiler knows."""
    return tl.trans(code ^ (tl.num_programs(2) - 1).to(tl.uint8))


@triton.jit
def _tile(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """A program's entry, its rows and columns, and whether the array has them."""
    DOWN: tl.constexpr = (ROWS + BR - 1) // BR
    ACROSS: tl.constexpr = (COLUMNS + BC - 1) // BC
    program = tl.program_id(0)
    entry = (program // (DOWN * ACROSS)).to(tl.int64)
    row = program // ACROSS % DOWN * BR + tl.arange(0, BR)
    column = program % ACROSS * BC + tl.arange(0, BC)
    return entry, row.to(tl.int64), column.to(tl.int64), (row < ROWS)[:, None] & (column < COLUMNS)[None, :]


@triton.jit
def _store_transposed(codes, code, entry, row, column, mask, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                      WHOLE: tl.constexpr):  # fmt: skip
    at = entry * (ROWS * COLUMNS) + column[:, None] * ROWS + row[None, :]
    store(codes + at, turned(code), tl.trans(mask), WHOLE)


@triton.jit
def quantize_rows(x, scale, codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr, BR: tl.constexpr,
                  BC: tl.constexpr):  # fmt: skip
    WHOLE: tl.constexpr = (ROWS % BR == 0) & (COLUMNS % BC == 0)
    entry, row, column, mask = _tile(ROWS, COLUMNS, BR, BC)
    at = entry * (ROWS * COLUMNS) + row[:, None] * COLUMNS + column[None, :]
    values = load(x + at, mask, WHOLE).to(tl.float32)
    store(codes + at, encode(values, tl.load(scale + entry), E5M2), mask, WHOLE)


@triton.jit
def quantize_columns(x, scale, codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr, BR: tl.constexpr,
                     BC: tl.constexpr):  # fmt: skip
    WHOLE: tl.constexpr = (ROWS % BR == 0) & (COLUMNS % BC == 0)
    entry, row, column, mask = _tile(ROWS, COLUMNS, BR, BC)
    at = entry * (ROWS * COLUMNS) + row[:, None] * COLUMNS + column[None, :]
    code = encode(load(x + at, mask, WHOLE).to(tl.float32), tl.load(scale + entry), E5M2)
    _store_transposed(codes, code, entry, row, column, mask, ROWS, COLUMNS, WHOLE)


@triton.jit
def quantize_both(x, scale, codes, transposed, ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr,
                  BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    WHOLE: tl.constexpr = (ROWS % BR == 0) & (COLUMNS % BC == 0)
    entry, row, column, mask = _tile(ROWS, COLUMNS, BR, BC)
    at = entry * (ROWS * COLUMNS) + row[:, None] * COLUMNS + column[None, :]
    code = encode(load(x + at, mask, WHOLE).to(tl.float32), tl.load(scale + entry), E5M2)
    store(codes + at, code, mask, WHOLE)
    _store_transposed(transposed, code, entry, row, column, mask, ROWS, COLUMNS, WHOLE)


# --- Launches -----------------------------------------------------------------------------------------------------


USAGES = ("rowwise", "columnwise", "both")
FORMATS = ("e4m3", "e5m2")


def supports(usage: str, dtype: str) -> str | None:
    """Why there is no such kernel, or None."""
    return None if usage == "rowwise" or dtype != "float32" else "found float32, wants 16 bits for transposed codes"


def quantize(entries: int, rows: int, columns: int, usage: str, dtype: str, format: str = "e4m3",
             arch: int = HOPPER) -> Launch:  # fmt: skip
    """x [entries, rows, columns], scale float32 [entries] -> codes, uint8: like x, [entries, columns, rows], both."""
    require(usage in USAGES, "usage", usage, f"one of {USAGES}")
    require(format in FORMATS, "format", format, f"one of {FORMATS}")
    require(supports(usage, dtype) is None, "dtype", dtype, "16 bits wide for transposed codes")
    plain, transposed = ((entries, rows, columns), "uint8"), ((entries, columns, rows), "uint8")
    kernel, outputs = {
        "rowwise": (quantize_rows, (plain,)),
        "columnwise": (quantize_columns, (transposed,)),
        "both": (quantize_both, (plain, transposed)),
    }[usage]
    size, warps = blocks("fp8 quantize", entries * rows * columns, arch)
    down, across = min(size, power_of_two(rows)), min(size, power_of_two(columns))
    grid = (entries * cdiv(rows, down) * cdiv(columns, across),)
    constants = (("ROWS", rows), ("COLUMNS", columns), ("E5M2", format == "e5m2"), ("BR", down), ("BC", across))
    return Launch(kernel, grid, outputs, constants, warps, 1)
