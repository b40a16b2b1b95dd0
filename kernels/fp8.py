"""FP8 with one scale a tensor, in Triton: one read writes the codes as the tensor lies, transposed, or both.

Hopper's FP8 GEMMs want both operands contiguous along what they contract, so a tensor that two GEMMs of a training step
contract along different axes is wanted both ways round. Arrays are [entries, rows, columns] here, each entry with its
own scale. The cast is the hardware's, to nearest even and saturating, of x * scale in float32.

What is transposed are words of the codes of four rows, not codes: where a layout of bytes is to be turned, compiled
kernels were wrong (triton 3.6, on a GPU alone, for float32 and for what was rotated; words and 16-bit floats were
right). So rows come in fours.
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
def join_word(word, code, i: tl.constexpr):
    """The i-th byte of int32 words that have none there. Not before an operation that changes nothing, which no
    compiler knows: ptxas may fold the bytes of casts into the casts, and took wrong registers for it."""
    return word | ((code.to(tl.int32) ^ (tl.num_programs(2) - 1)) << (8 * i))


@triton.jit
def _tile(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """A program's entry, its groups of four rows, its columns, and whether the array has them."""
    DOWN: tl.constexpr = (ROWS // 4 + BR - 1) // BR
    ACROSS: tl.constexpr = (COLUMNS + BC - 1) // BC
    program = tl.program_id(0)
    entry = (program // (DOWN * ACROSS)).to(tl.int64)
    group = (program // ACROSS % DOWN * BR + tl.arange(0, BR)).to(tl.int64)
    column = (program % ACROSS * BC + tl.arange(0, BC)).to(tl.int64)
    return entry, group, column, (group < ROWS // 4)[:, None] & (column < COLUMNS)[None, :]


@triton.jit
def quantize_kernel(x, scale, codes, words, ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr,
                    PLAIN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """4 BR rows by BC columns: words, and with PLAIN codes."""
    WHOLE: tl.constexpr = (ROWS % (4 * BR) == 0) & (COLUMNS % BC == 0)
    entry, group, column, mask = _tile(ROWS, COLUMNS, BR, BC)
    factor = tl.load(scale + entry)
    word = tl.zeros((BR, BC), tl.int32)
    for i in tl.static_range(4):
        at = entry * (ROWS * COLUMNS) + (4 * group + i)[:, None] * COLUMNS + column[None, :]
        code = encode(load(x + at, mask, WHOLE).to(tl.float32), factor, E5M2)
        if PLAIN:
            store(codes + at, code, mask, WHOLE)
        word = join_word(word, code, i)
    at = entry * (ROWS // 4 * COLUMNS) + column[:, None] * (ROWS // 4) + group[None, :]
    store(words + at, tl.trans(word), tl.trans(mask), WHOLE)


@triton.jit
def quantize_rows(x, scale, codes, SIZE: tl.constexpr, E5M2: tl.constexpr, BS: tl.constexpr):
    """BS of an entry's numbers, as they lie."""
    entry, part = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * BS + tl.arange(0, BS)
    at = entry * SIZE + part
    values = load(x + at, part < SIZE, SIZE % BS == 0).to(tl.float32)
    store(codes + at, encode(values, tl.load(scale + entry), E5M2), part < SIZE, SIZE % BS == 0)


# --- Launches -----------------------------------------------------------------------------------------------------


USAGES = ("rowwise", "columnwise", "both")
FORMATS = ("e4m3", "e5m2")


def supports(rows: int) -> str | None:
    """Why so many rows cannot be transposed, or None."""
    return f"found {rows} rows, wants a multiple of 4" if rows % 4 else None


def quantize(entries: int, rows: int, columns: int, usage: str, format: str = "e4m3", arch: int = HOPPER) -> Launch:
    """x [entries, rows, columns], scale float32 [entries] -> codes, uint8 like x; words, int32 [entries, columns,
    rows / 4], which are the bytes of codes [entries, columns, rows]; or both."""
    require(usage in USAGES, "usage", usage, f"one of {USAGES}")
    require(format in FORMATS, "format", format, f"one of {FORMATS}")
    size, warps = blocks("fp8 quantize", entries * rows * columns, arch)
    plain = ((entries, rows, columns), "uint8")
    if usage == "rowwise":
        most = size * size // 4
        constants = (("SIZE", rows * columns), ("E5M2", format == "e5m2"), ("BS", most))
        return Launch(quantize_rows, (cdiv(rows * columns, most), entries), (plain,), constants, warps, 1)
    require(supports(rows) is None, "rows", rows, "a multiple of 4")
    down, across = min(size // 4, power_of_two(rows // 4)), min(size, power_of_two(columns))
    grid = (entries * cdiv(rows // 4, down) * cdiv(columns, across),)
    constants = (("ROWS", rows), ("COLUMNS", columns), ("E5M2", format == "e5m2"), ("PLAIN", usage == "both"))
    constants += (("BR", down), ("BC", across))
    # Without plain codes their pointer is not touched.
    outputs = (plain if usage == "both" else ((1,), "uint8"), ((entries, columns, rows // 4), "int32"))
    return Launch(quantize_kernel, grid, outputs, constants, warps, 1)
