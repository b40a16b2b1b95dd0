"""The threads of kernels/mosaic_threads.py on NumPy: a value is an array of 128, one a thread of a warpgroup."""

import ml_dtypes
import numpy as np

F8 = ml_dtypes.float8_e4m3fn


class Threads:
    def __init__(self):
        thread = np.arange(128, dtype=np.int32)
        self.lane, self.warp = thread % 32, thread // 32
        self.stored = {}  # bytes written so far, by id of their array: none is written twice

    def constant(self, number):
        return np.full(128, number, np.int32)

    select = staticmethod(np.where)
    maximum = staticmethod(np.maximum)

    def long(self, value):
        return value.astype(np.int64)

    def bits(self, value):
        assert value.dtype == np.float32
        return value.view(np.int32)

    def float(self, bits):
        assert bits.dtype == np.int32
        return bits.view(np.float32)

    def largest(self, values):
        assert all(v.dtype == np.float32 for v in values)
        return np.max(np.abs(np.stack(values)), axis=0)

    def shuffle_xor(self, value, mask):
        return value[np.arange(128) ^ mask]

    def shuffle(self, value, lane):
        assert value.dtype == np.int32 and ((0 <= lane) & (lane < 32)).all()
        return value[32 * self.warp + lane]

    def permute(self, low, high, digits):
        assert low.dtype == high.dtype == np.int32
        both = np.stack([low, high], axis=1).view(np.uint8)  # [128, 8]
        digits = np.broadcast_to(np.asarray(digits, np.int32), 128)
        chosen = np.stack([(digits >> 4 * i) & 7 for i in range(4)], axis=1)
        return np.take_along_axis(both, chosen, axis=1).copy().view(np.int32)[:, 0]

    def e4m3(self, *values):
        codes = [np.where(np.isnan(v), np.uint8(0x7F), np.clip(v, -448, 448).astype(F8).view(np.uint8)) for v in values]
        return np.stack(codes, axis=1).view(np.int32)[:, 0]

    def bfloat16(self, low, high):
        return np.stack([v.astype(ml_dtypes.bfloat16) for v in (low, high)], axis=1).view(np.int32)[:, 0]

    def load(self, ref, at, count, *, bits=32):
        assert at.dtype == np.int64 and (at % (count * bits // 8) == 0).all()
        memory = ref.reshape(-1).view(np.uint8)
        raw = memory[at[:, None] + np.arange(count * bits // 8)]
        return list(raw.view(f"u{bits // 8}").astype(np.uint32).view(np.int32).T)

    def store(self, ref, at, words, mask, *, bits=32):
        size = bits // 8
        assert at.dtype == np.int64 and (at % (len(words) * size) == 0).all(), "misaligned"
        memory = ref.reshape(-1).view(np.uint8)
        written = self.stored.setdefault(id(ref), np.zeros(memory.size, bool))
        for i, word in enumerate(words):
            assert word.dtype == np.int32
            index = (at + i * size)[mask][:, None] + np.arange(size)
            assert not written[index].any(), "written twice"
            written[index] = True
            memory[index] = word[mask].copy().view(np.uint8).reshape(-1, 4)[:, :size]


def accumulators(tile: np.ndarray) -> np.ndarray:
    """float32 [rows, columns] as every thread has it: [rows / 64, columns / 8, 2, 2] of arrays of 128."""
    rows, columns = tile.shape
    split = tile.reshape(rows // 64, 4, 2, 8, columns // 8, 4, 2)  # slab, warp, half, r, group, quarter, neighbour
    own = split.transpose(0, 4, 2, 6, 1, 3, 5).reshape(rows // 64, columns // 8, 2, 2, 128)
    values = np.empty(own.shape[:-1], object)
    for at in np.ndindex(values.shape):
        values[at] = own[at]
    return values
