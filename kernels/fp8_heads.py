"""FP8 of heads in Triton, before the backward GEMMs of the up-projections: of a rotation, and of two arrays joined.

One scale a tensor wants amax first. So there are two passes, and neither writes what is quantised: one reads for amax,
a number a head of every token, the other reads again for the codes, as they lie and transposed. Arrays are [rows,
HEADS, dims], rows being [entries, ROWS] with a scale an entry; transposed are words of four rows' codes, as `fp8.py`
tells: [entries, HEADS dims, ROWS / 4]. Amax is float32's bits, int32: `fp8_bits.amax`.
"""

import triton
import triton.language as tl

from .blocks import HOPPER, blocks
from .fp8 import FORMATS, encode, join_word, supports
from .launch import Launch, cdiv, power_of_two, require
from .mxfp8 import magnitude
from .rope import Table, check_rotary, load_pairs, rotate, store_pairs, table_row


@triton.jit
def _largest(x):
    """Over a row of dims, NaN aside."""
    bits = magnitude(x)
    return tl.max(tl.where(bits > 0x7F800000, 0, bits), axis=1)


@triton.jit
def rope_amax_kernel(x, cos, sin, amax, N1: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, HEADS: tl.constexpr,
                     DIM: tl.constexpr, KEPT: tl.constexpr, READ_PAIRS: tl.constexpr, INVERSE: tl.constexpr,
                     BH: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """One token, BH heads."""
    HALF: tl.constexpr = (DIM - KEPT) // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    base = (token * HEADS + head.to(tl.int64)) * DIM
    i, k = tl.arange(0, BP), tl.arange(0, BK)
    row = table_row(token, N1, S0, S1) * HALF
    c = tl.load(cos + row + i, mask=i < HALF, other=0).to(tl.float32)[None, :]
    s = tl.load(sin + row + i, mask=i < HALF, other=0).to(tl.float32)[None, :]
    mask = (head < HEADS)[:, None] & (i < HALF)[None, :]
    x1, x2 = load_pairs(x, base + KEPT, i, mask, HALF, READ_PAIRS, (DIM % 2 == 0) & (KEPT % 2 == 0))
    left, right = rotate(x1, x2, c, s, INVERSE)
    kept_mask = (head < HEADS)[:, None] & (k < KEPT)[None, :]
    kept = tl.load(x + base[:, None] + k[None, :], mask=kept_mask, other=0).to(tl.float32)
    found = tl.maximum(tl.maximum(_largest(left), _largest(right)), _largest(kept))
    tl.store(amax + token * HEADS + head, found, mask=head < HEADS)


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
    """A program's entry, its groups of four rows in it and which of them are there, its head, and its part of that.
    Along parts and heads first: neighbours in time read neighbours in memory."""
    DOWN: tl.constexpr = (ROWS // 4 + BR - 1) // BR
    program = tl.program_id(0)
    part, head = program % PARTS, (program // PARTS % HEADS).to(tl.int64)
    entry = (program // (PARTS * HEADS * DOWN)).to(tl.int64)
    group = (program // (PARTS * HEADS) % DOWN * BR + tl.arange(0, BR)).to(tl.int64)
    return entry, group, group < ROWS // 4, head, part


@triton.jit
def _store_words(words, word, entry, group, live, head, dim, dim_live, ROWS: tl.constexpr, HEADS: tl.constexpr,
                 DIM: tl.constexpr):  # fmt: skip
    """word [groups of rows, dims] of a head of DIM."""
    at = (entry * HEADS * DIM + head * DIM + dim) * (ROWS // 4)
    tl.store(words + at[:, None] + group[None, :], tl.trans(word), mask=dim_live[:, None] & live[None, :])


@triton.jit
def _store_plain(x, STRIDE: tl.constexpr, scale, codes, words, entry, group, live, head, part, offset,
                 WIDTH: tl.constexpr, E5M2: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
                 BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Dims part BC .. of the WIDTH of x's heads of STRIDE, as those of the head from `offset`."""
    column = part * BC + tl.arange(0, BC)
    mask = live[:, None] & (column < WIDTH)[None, :]
    word = tl.zeros((BR, BC), tl.int32)
    for i in tl.static_range(4):
        token = (entry * ROWS + 4 * group + i) * HEADS + head
        values = tl.load(x + (token * STRIDE)[:, None] + column[None, :], mask=mask, other=0)
        code = encode(values.to(tl.float32), scale, E5M2)
        tl.store(codes + (token * DIM + offset)[:, None] + column[None, :], code, mask=mask)
        word = join_word(word, code, i)
    _store_words(words, word, entry, group, live, head, offset + column, column < WIDTH, ROWS, HEADS, DIM)


@triton.jit
def rope_quantize_kernel(x, cos, sin, scale, codes, words, ROWS: tl.constexpr, N1: tl.constexpr, S0: tl.constexpr,
                         S1: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, KEPT: tl.constexpr,
                         READ_PAIRS: tl.constexpr, WRITE_PAIRS: tl.constexpr, INVERSE: tl.constexpr,
                         E5M2: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
                         PARTS: tl.constexpr):  # fmt: skip
    """4 BR rows of BC of a head's dims that are not rotated, or of those that are."""
    HALF: tl.constexpr = (DIM - KEPT) // 2
    entry, group, live, head, part = _place(ROWS, HEADS, PARTS + 1, BR)
    factor = tl.load(scale + entry)
    if part < PARTS:
        _store_plain(x, DIM, factor, codes, words, entry, group, live, head, part, 0, KEPT, E5M2, ROWS, HEADS, DIM,
                     BR, BC)  # fmt: skip
    else:
        i = tl.arange(0, BP)
        mask = live[:, None] & (i < HALF)[None, :]
        of_left, of_right = tl.zeros((BR, BP), tl.int32), tl.zeros((BR, BP), tl.int32)
        for r in tl.static_range(4):
            token = entry * ROWS + 4 * group + r
            at = (table_row(token, N1, S0, S1) * HALF)[:, None] + i[None, :]
            c = tl.load(cos + at, mask=mask, other=0).to(tl.float32)
            s = tl.load(sin + at, mask=mask, other=0).to(tl.float32)
            base = (token * HEADS + head) * DIM + KEPT
            x1, x2 = load_pairs(x, base, i, mask, HALF, READ_PAIRS, (DIM % 2 == 0) & (KEPT % 2 == 0))
            left, right = rotate(x1, x2, c, s, INVERSE)
            left, right = encode(left, factor, E5M2), encode(right, factor, E5M2)
            of_left, of_right = join_word(of_left, left, r), join_word(of_right, right, r)
            if WRITE_PAIRS:
                pair = tl.arange(0, 2 * BP)
                both = tl.reshape(tl.join(left, right), (BR, 2 * BP))
                tl.store(codes + base[:, None] + pair[None, :], both, mask=live[:, None] & (pair < 2 * HALF)[None, :])
            else:
                tl.store(codes + base[:, None] + i[None, :], left, mask=mask)
                tl.store(codes + base[:, None] + (HALF + i)[None, :], right, mask=mask)
        if WRITE_PAIRS:
            first, second = 2 * i, 2 * i + 1
        else:
            first, second = i, HALF + i
        _store_words(words, of_left, entry, group, live, head, KEPT + first, i < HALF, ROWS, HEADS, DIM)
        _store_words(words, of_right, entry, group, live, head, KEPT + second, i < HALF, ROWS, HEADS, DIM)


@triton.jit
def join_quantize_kernel(dk, dv, scale, codes, words, ROWS: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr,
                         ROPE: tl.constexpr, VALUE: tl.constexpr, E5M2: tl.constexpr, BR: tl.constexpr,
                         BC: tl.constexpr, NOPE_PARTS: tl.constexpr, VALUE_PARTS: tl.constexpr):  # fmt: skip
    """4 BR rows of BC dims of a head of [dk_nope | dv]."""
    entry, group, live, head, part = _place(ROWS, HEADS, NOPE_PARTS + VALUE_PARTS, BR)
    factor = tl.load(scale + entry)
    if part < NOPE_PARTS:
        _store_plain(dk, NOPE + ROPE, factor, codes, words, entry, group, live, head, part, 0, NOPE, E5M2, ROWS,
                     HEADS, NOPE + VALUE, BR, BC)  # fmt: skip
    else:
        _store_plain(dv, VALUE, factor, codes, words, entry, group, live, head, part - NOPE_PARTS, NOPE, VALUE, E5M2,
                     ROWS, HEADS, NOPE + VALUE, BR, BC)  # fmt: skip


# --- Launches -----------------------------------------------------------------------------------------------------


def rope_amax(rows: int, heads: int, dim: int, rotary: int, table: Table, read: str, inverse: bool,
              arch: int = HOPPER) -> Launch:  # fmt: skip
    """x [rows, heads, dim], cos, sin -> amax int32 [rows, heads] of the rotation in float32."""
    check_rotary(rotary, dim, read)
    size, warps = blocks("rope", rows * heads * dim, arch)
    block, kept = min(power_of_two(heads), size), dim - rotary
    constants = (("N1", table[0]), ("S0", table[1]), ("S1", table[2]), ("HEADS", heads), ("DIM", dim), ("KEPT", kept))
    constants += (("READ_PAIRS", read == "pairs"), ("INVERSE", inverse), ("BH", block))
    constants += (("BP", power_of_two(rotary // 2)), ("BK", power_of_two(max(kept, 1))))
    return Launch(rope_amax_kernel, (rows, cdiv(heads, block)), (((rows, heads), "int32"),), constants, warps, 1)


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


def _both(entries: int, rows: int, heads: int, dim: int) -> tuple:
    require(supports(rows) is None, "rows", rows, "a multiple of 4")
    return ((entries, rows, heads, dim), "uint8"), ((entries, heads * dim, rows // 4), "int32")


def _tile(entries: int, rows: int, heads: int, dim: int, widest: int, arch: int) -> tuple[int, int, int]:
    """Groups of rows and dims of a tile, and its warps."""
    size, warps = blocks("fp8 heads", entries * rows * heads * dim, arch)
    return min(size // 4, power_of_two(rows // 4)), min(128, power_of_two(max(widest, 1))), warps


def rope_quantize(entries: int, rows: int, heads: int, dim: int, rotary: int, table: Table, read: str, write: str,
                  inverse: bool, format: str, arch: int = HOPPER) -> Launch:  # fmt: skip
    """x [entries, rows, heads, dim], cos, sin, scale [entries] -> codes of the rotation, like x, and words [entries,
    heads dim, rows / 4]."""
    check_rotary(rotary, dim, read, write)
    require(format in FORMATS, "format", format, f"one of {FORMATS}")
    kept = dim - rotary
    down, across, warps = _tile(entries, rows, heads, dim, kept, arch)
    parts = cdiv(kept, across)
    constants = (("ROWS", rows), ("N1", table[0]), ("S0", table[1]), ("S1", table[2]), ("HEADS", heads), ("DIM", dim))
    constants += (("KEPT", kept), ("READ_PAIRS", read == "pairs"), ("WRITE_PAIRS", write == "pairs"))
    constants += (("INVERSE", inverse), ("E5M2", format == "e5m2"), ("BR", down), ("BP", power_of_two(rotary // 2)))
    constants += (("BC", across), ("PARTS", parts))
    grid = (entries * cdiv(rows // 4, down) * heads * (parts + 1),)
    return Launch(rope_quantize_kernel, grid, _both(entries, rows, heads, dim), constants, warps, 1)


def join_quantize(entries: int, rows: int, heads: int, nope: int, rotary: int, value: int, format: str,
                  arch: int = HOPPER) -> Launch:  # fmt: skip
    """dk [entries, rows, heads, nope + rotary], dv, scale [entries] -> as `rope_quantize`, of [dk_nope | dv]."""
    require(format in FORMATS, "format", format, f"one of {FORMATS}")
    require(nope >= 0 and value > 0, "nope, value", (nope, value), "at least 0 and 1")
    down, across, warps = _tile(entries, rows, heads, nope + value, max(nope, value), arch)
    parts = cdiv(nope, across), cdiv(value, across)
    constants = (("ROWS", rows), ("HEADS", heads), ("NOPE", nope), ("ROPE", rotary), ("VALUE", value))
    constants += (("E5M2", format == "e5m2"), ("BR", down), ("BC", across))
    constants += (("NOPE_PARTS", parts[0]), ("VALUE_PARTS", parts[1]))
    grid = (entries * cdiv(rows // 4, down) * heads * sum(parts),)
    return Launch(join_quantize_kernel, grid, _both(entries, rows, heads, nope + value), constants, warps, 1)
