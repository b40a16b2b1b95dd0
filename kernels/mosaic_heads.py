"""How a warpgroup finishes a head in registers, from the float32 accumulators of its up-projection: RoPE of adjacent
pairs, MXFP8 both ways. Written on `mosaic_threads.Threads`; that is `t` in every function here.

A lane is 4 r + l. Its thread has, of every 8 columns, the neighbours 2 l and 2 l + 1, in row r of every 8. Of a block
of 32 columns that makes 8 values a row, in one of two orders: in pairs, value i in column 8 (i // 2) + 2 l + i % 2, as
accumulators lie; or strided, in column 4 i + l, as the left and the right halves lie that were made of pairs.
"""

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 32
ROWS = 64  # of one wgmma
LATER = 3  # block of a head: from there on a block waits until the next has begun


def grouped(x: jax.Array) -> jax.Array:
    """x [T, K], T a multiple of 128, its rows in the order that gives each warp whole blocks: it has 16 rows of each
    wgmma, half a block, and the other half in the next wgmma."""
    return x.reshape(-1, 4, 2, 16, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)


def untiled(scales: jax.Array) -> jax.Array:
    """Scales by rows, as `Encoder` writes them, as [T, columns / 32]."""
    return scales.swapaxes(1, 2).reshape(-1, scales.shape[1])


def tiled(scales: jax.Array) -> jax.Array:
    """The inverse."""
    return scales.reshape(-1, BLOCK, scales.shape[1]).swapaxes(1, 2)


def table(cos: jax.Array, sin: jax.Array, pairs: bool) -> jax.Array:
    """cos, sin [T, P / 2] as [T, P]: for each l the cosines, then the sines, in the order of a thread's values."""
    half = cos.shape[-1]
    split = (half // 4, 4, 1) if pairs else (half // 8, 4, 2)
    own = [a.reshape(-1, *split).swapaxes(1, 2).reshape(-1, 4, half // 4) for a in (cos, sin)]
    return jnp.concatenate(own, axis=-1).reshape(-1, 2 * half)


def rotate(t, y: np.ndarray, tables, row, pairs: bool) -> tuple[list, list]:
    """The left and the right half of one row of a head's rotary columns y [P / 8, 2], float32: P / 4 values each,
    strided where they were pairs, else as they lay. tables: `table`'s; row: of it."""
    count = y.size // 2
    at = (t.long(row) * 4 + t.long(t.lane & 3)) * (8 * count)
    words = [w for i in range(0, 2 * count, 4) for w in t.load(tables, at + 4 * i, 4)]
    cos, sin = ([t.float(w) for w in part] for part in (words[:count], words[count:]))
    first, second = (y[:, 0], y[:, 1]) if pairs else (part.reshape(-1) for part in np.split(y, 2))
    left = [a * c - b * s for a, b, c, s in zip(first, second, cos, sin, strict=True)]
    right = [b * c + a * s for a, b, c, s in zip(first, second, cos, sin, strict=True)]
    return left, right


def halves(t, y: np.ndarray, tables, row) -> list[np.ndarray]:
    """`rotate` of pairs y [ROWS / 64, P / 8, 2, 2], rounded to bfloat16, both halves laid out as accumulators: words of
    two neighbours [ROWS / 64, P / 16, 2]. row: of the tables, y's first."""
    found = [np.empty((len(y), y.shape[1] // 2, 2), object) for _ in range(2)]
    quad, odd = t.lane & 28, (t.lane & 2) != 0
    sources = [quad | ((t.lane << 1) & 2), quad | ((t.lane << 1) & 2) | 1]
    for s, h in np.ndindex(len(y), 2):
        own = row + (t.warp * 16 + (t.lane >> 2) + (ROWS * s + 8 * h))
        both = [t.bfloat16(*pair) for pair in zip(*rotate(t, y[s, :, h], tables, own, True), strict=True)]
        for g in range(len(both) // 2):
            # Lanes 0 and 1 want what value 2 g is in the four lanes, lanes 2 and 3 what the next is.
            a, b = (t.select(odd, *(t.shuffle(both[2 * g + i], lane) for i in (1, 0))) for lane in sources)
            found[0][s, g, h], found[1][s, g, h] = t.permute(a, b, 0x5410), t.permute(a, b, 0x7632)
    return found


def scale_of(t, amax):
    """The E8M0 code of a block from the largest magnitude in it, and the bits of 2^(127 - code)."""
    bits = t.bits(amax)
    # 448 is 1.75 * 2^8: a mantissa above 0x600000, that of 1.75, carries into the exponent.
    scale = t.maximum(((bits + 0x1FFFFF) >> 23) - 8, t.constant(0))
    special = t.select(bits >= 0x7F800001, t.constant(255), t.constant(254))
    scale = t.select(bits >= 0x7F800000, special, scale)
    inverse = (t.constant(254) - scale) << 23
    # One bit more makes it subnormal 2^-127 of 254, and NaN of 255.
    return scale, t.select(scale >= 254, inverse | 0x00400000, inverse)


def _owned(t, values: list, bits: list[int]):
    """The largest of each of 2^n values over the lanes that differ in `bits` alone: of that value whose number these
    bits of the lane spell, the first the highest."""
    for bit in bits:
        upper, middle = (t.lane & bit) != 0, len(values) // 2
        low, high = values[:middle], values[middle:]
        sent = [t.float(t.shuffle_xor(t.bits(t.select(upper, a, b)), bit)) for a, b in zip(low, high, strict=True)]
        kept = [t.select(upper, b, a) for a, b in zip(low, high, strict=True)]
        values = [t.largest(pair) for pair in zip(kept, sent, strict=True)]
    return values[0]


class Encoder:
    """Writes one head as MXFP8, both ways: of a tile whose rows are `grouped` a thread has rows 32 warp + r + 0, 8, 16
    and 24, and a warp whole blocks.

    refs: codes and scales by rows, then by columns: codes [T, columns], scales by rows [T / 32, columns / 32, 32], so
    that a warp writes neighbours (`untiled` gives them their order), by columns [T / 32, columns]. row: the tile's
    first, of T; at: the head's first column.
    """

    def __init__(self, t, refs, tokens: int, columns: int, row, at):
        self.t, self.columns = t, columns
        self.row_codes, self.row_scales, self.column_codes, self.column_scales = refs
        self.quarter = t.lane & 3
        self.first, self.at = row + t.warp * BLOCK, t.long(at)
        self.inside = self.first < tokens
        self.own = self.first + (t.lane >> 2)
        self.codes_at = t.long(self.own) * columns + self.at + t.long(self.quarter * 8)
        self.block_at = t.long(self.first >> 5) * columns + self.at
        # Of the two bits of a lane's quarter, upper and lower, `_transposed` makes choices of halves of two words.
        self.upper, lower = (self.quarter & 2) != 0, (self.quarter & 1) != 0

        def chosen(*digits: int):
            a, b, c, d = map(t.constant, digits)
            return t.select(self.upper, t.select(lower, d, c), t.select(lower, b, a))

        self.kept, self.sent = chosen(0x5410, 0x7632, 0x1054, 0x3276), chosen(0x7632, 0x5410, 0x3276, 0x1054)
        self.words = chosen(0x5410, 0x1054, 0x5410, 0x1054), chosen(0x7632, 0x3276, 0x7632, 0x3276)
        self.waiting, self.blocks = None, 0

    def block(self, values: np.ndarray, column: int, strided: bool) -> None:
        """Columns `column` to `column` + 31 of the head: values [4, 8]. While this block's shuffles are on their way
        the codes of the one before are made; `finish` makes the last one's. (The first ones' at once: as long as little
        of the head is written there are no registers to keep them in.)"""
        t, scales_at = self.t, self.block_at + column
        scale, inverse = scale_of(t, _owned(t, [t.largest(row) for row in values], (2, 1)))
        owned = (t.lane >> 2) + self.quarter * 8
        t.store(self.row_scales, scales_at + t.long(owned), [scale], self.inside, bits=8)
        quad = t.lane & 28
        by_row = [t.float(t.shuffle(inverse, quad | i)) for i in range(4)]

        scale, inverse = scale_of(t, _owned(t, [t.largest(own) for own in values.T], (16, 8, 4)))
        i = t.lane >> 2
        owned = i * 4 + self.quarter if strided else (i >> 1) * 8 + self.quarter * 2 + (i & 1)
        t.store(self.column_scales, scales_at + t.long(owned), [scale], self.inside, bits=8)
        by_column = [t.float(t.shuffle(inverse, self.quarter | 4 * i)) for i in range(8)]

        self.finish()
        self.waiting = values, column, strided, by_row, by_column
        self.blocks += 1
        if self.blocks < LATER:
            self.finish()

    def finish(self) -> None:
        if self.waiting is not None:
            values, column, strided, by_row, by_column = self.waiting
            self._codes(self.row_codes, column, values, [[i] * 8 for i in by_row], strided)
            self._codes(self.column_codes, column, values, [by_column] * 4, strided)
            self.waiting = None

    def _codes(self, ref, column: int, values: np.ndarray, inverses: list, strided: bool) -> None:
        t = self.t
        for i, (row, own) in enumerate(zip(values, inverses, strict=True)):
            scaled = [value * inverse for value, inverse in zip(row, own, strict=True)]
            words = self._transposed(t.e4m3(*scaled[:4]), t.e4m3(*scaled[4:]))
            if strided:  # each lane's first column, of two that are 4 apart, in front of all second ones
                words = [t.permute(*words, order) for order in (0x6420, 0x7531)]
            t.store(ref, self.codes_at + (8 * i * self.columns + column), words, self.inside)

    def _transposed(self, low, high) -> list:
        """Two words: of the four 16-bit numbers in each of four neighbouring lanes those of this lane's quarter."""
        t = self.t
        kept = t.select(self.upper, high, low)
        other = t.shuffle_xor(t.select(self.upper, low, high), 2)
        own, sent = (t.permute(kept, other, digits) for digits in (self.kept, self.sent))
        other = t.shuffle_xor(sent, 1)
        return [t.permute(own, other, digits) for digits in self.words]

    def share(self, refs, width: int, column: int) -> None:
        """Columns from `column` on: `width` of them that are encoded already and the same for every head. refs: as this
        head's, their arrays padded to whole tiles."""
        t, chunks = self.t, width // 16
        for source, target in zip(refs[::2], (self.row_codes, self.column_codes), strict=True):
            for i in range(chunks):
                n = t.lane + 32 * i
                row, at = t.long(self.first + n // chunks), t.long(n % chunks * 16)
                words = t.load(source, row * width + at, 4)
                t.store(target, row * self.columns + self.at + column + at, words, self.inside)
        at = t.long(self.first >> 5) * width
        for source, target in zip(refs[1::2], (self.row_scales, self.column_scales), strict=True):
            for i in range(0, width, BLOCK):
                own = t.long(t.lane + i)
                word = t.load(source, at + own, 1, bits=8)
                t.store(target, self.block_at + column + own, word, self.inside, bits=8)


def _by_row(y: np.ndarray) -> np.ndarray:
    """Accumulators [2, columns / 8, 2, 2] as [4, columns / 4]."""
    return y.swapaxes(1, 2).reshape(4, -1)


def quantize_query(
    t, y: np.ndarray, tables, refs, tokens: int, heads: int, nope: int, row, head, pairs: bool, bias=None
) -> None:
    """RoPE, then MXFP8, of a tile's head y [2, (nope + P) / 8, 2, 2], its rows `grouped`. bias: float32 [H (N + P)], or
    None; added here, a block at a time, since all of it at once would cost registers."""
    width = 8 * y.shape[1]
    half, encoder = (width - nope) // 2, Encoder(t, refs, tokens, heads * width, row, head * width)
    values = _by_row(y)

    def columns(first: int, count: int) -> np.ndarray:
        part = values[:, first // 4 : (first + count) // 4]
        if bias is None:
            return part
        at = (t.long(head) * width + t.long(encoder.quarter * 2) + first) * 4
        added = [t.float(word) for g in range(count // 8) for word in t.load(bias, at + 32 * g, 2)]
        result = np.empty(part.shape, object)
        for i, j in np.ndindex(part.shape):
            result[i, j] = part[i, j] + added[j]
        return result

    for column in range(0, nope, BLOCK):
        encoder.block(columns(column, BLOCK), column, False)
    rotary = columns(nope, 2 * half)
    rows = [rotate(t, v.reshape(-1, 2), tables, encoder.own + 8 * i, pairs) for i, v in enumerate(rotary)]
    for side in range(2):
        for column in range(0, half, BLOCK):
            block = np.empty((4, BLOCK // 4), object)
            for i, row in enumerate(rows):
                block[i] = row[side][column // 4 : (column + BLOCK) // 4]
            encoder.block(block, nope + side * half + column, pairs)
    encoder.finish()


def quantize(
    t, y: np.ndarray, refs, tokens: int, heads: int, width: int, row, head, shared=None, rotary: int = 0
) -> None:
    """MXFP8 of a tile's head, `width` columns of which the last `rotary` are `shared`, its rows `grouped`."""
    encoder, values = Encoder(t, refs, tokens, heads * width, row, head * width), _by_row(y)
    for column in range(0, width - rotary, BLOCK):
        encoder.block(values[:, column // 4 : (column + BLOCK) // 4], column, False)
    encoder.finish()
    if rotary:
        encoder.share(shared, rotary, width - rotary)
