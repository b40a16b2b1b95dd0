"""Packed rows: whole files and pieces of files one after another, kept apart by segment ids.

Row number i is a pure function of the text and (window, seed, multiple), so no state needs saving: going back or
resuming packs again from the first row, which costs microseconds a sequence.
"""

import bisect
import itertools
import operator
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from flax_examples.data import END_OF_FILE, InputError

OPEN_ROWS = 16  # rows being filled at a time; 64 fill hardly better
NOTHING = -1  # the target where there is none


class Rows(NamedTuple):
    """A batch, each [B, T] int32. Positions are the layer's: they restart with every id."""

    tokens: np.ndarray  # 0 in padding
    targets: np.ndarray  # the byte that follows in the same file; NOTHING after its last byte and in padding
    segment_ids: np.ndarray  # 1, 2, ... along a row; 0 is padding, in gaps between sequences and at the end


class PackedRows:
    """Rows of `window` tokens packed from `text`, in which every file ends with END_OF_FILE (the file's last byte).

    Each epoch cuts files longer than the window into pieces of lengths of its own and visits all in an order of its
    own. A piece's last byte still predicts the next byte of its file, so an epoch predicts every byte but the files'
    first exactly once. Sequences start at multiples of `multiple`.
    """

    def __init__(self, text: np.ndarray, window: int, seed: int, multiple: int = 1):
        self.text, self.window, self.seed, self.multiple = text, window, seed, multiple
        last = np.flatnonzero(text == END_OF_FILE)
        if text.size and text[-1] != END_OF_FILE:
            last = np.append(last, text.size - 1)
        self._file_starts = np.concatenate([[0], last[:-1] + 1]).astype(np.int64)
        self._file_sizes = last + 1 - self._file_starts if last.size else np.zeros(1, np.int64)
        if self._file_sizes.max() < 2:
            raise InputError("--data: the training text has no file of 2 bytes or more, wanted one to predict from")
        self._next = np.full(text.size, NOTHING, np.int16)
        self._next[:-1] = text[1:]
        self._next[last] = NOTHING
        self._stream, self._at = self._rows(), 0

    def batch(self, step: int, size: int) -> Rows:
        """The rows of one step: [size, window]."""
        rows = Rows(*(np.full((size, self.window), empty, np.int32) for empty in (0, NOTHING, 0)))
        for i, row in enumerate(self._take(step * size, size)):
            at = 0
            for number, (start, stop) in enumerate(row, 1):
                here = slice(at, at + stop - start)
                rows.tokens[i, here] = self.text[start:stop]
                rows.targets[i, here] = self._next[start:stop]
                rows.segment_ids[i, here] = number
                at += self._slots(stop - start)
        return rows

    def seen(self, samples: int) -> np.ndarray:
        """Positions in the text of the distinct bytes predicted in the first `samples` rows: sorted int64."""
        mask = np.zeros(self.text.size, bool)
        for row in itertools.islice(self._rows(), samples):
            for start, stop in row:
                mask[start:stop] = True
        return np.flatnonzero(mask & (self._next != NOTHING)) + 1

    def summary(self, samples: int) -> dict:
        """Plain values about the first `samples` rows."""
        sequences = np.array([sequence for row in itertools.islice(self._rows(), samples) for sequence in row])
        tokens = int(np.sum(sequences[:, 1] - sequences[:, 0]))
        ends = int(np.sum(self._next[sequences[:, 1] - 1] == NOTHING))
        return {
            "rows": samples,
            "sequences": len(sequences),
            "tokens": tokens,  # of sequences
            "predicted_bytes": tokens - ends,
            "fill": round(tokens / (samples * self.window), 4),
        }

    def _slots(self, size: int) -> int:
        return -(-size // self.multiple) * self.multiple

    def _take(self, first: int, count: int) -> list[list[tuple[int, int]]]:
        if first < self._at:
            self._stream, self._at = self._rows(), 0
        skip, self._at = first - self._at, first + count
        return list(itertools.islice(self._stream, skip, skip + count))

    def _rows(self) -> Iterator[list[tuple[int, int]]]:
        """Every row there ever is: (start, stop) in the text of each of its sequences.

        Best fit: a sequence goes where the least room is left after it. Where it fits nowhere, the fullest row is done.
        """
        room = operator.itemgetter(0)
        rows: list[tuple[int, list]] = []  # (slots free, sequences), by slots free
        for epoch in itertools.count():
            for start, stop in self._sequences(epoch):
                at = bisect.bisect_left(rows, stop - start, key=room)
                if at == len(rows):
                    if len(rows) == OPEN_ROWS:
                        yield rows.pop(0)[1]
                    free, row = self.window, []
                else:
                    free, row = rows.pop(at)
                row.append((start, stop))
                free -= self._slots(stop - start)
                if free > 0:
                    bisect.insort(rows, (free, row), key=room)
                else:
                    yield row

    def _sequences(self, epoch: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of an epoch's sequences, each within one file, in the order they are visited."""
        rng = np.random.default_rng([self.seed, epoch])
        # Lengths are in units of `multiple`, so that gaps follow the ends of files alone.
        longest = self.window // self.multiple
        least = -(-longest // 16)
        starts = [self._file_starts]
        for file in np.flatnonzero(self._file_sizes > self.window):
            size = self._file_sizes[file]
            count = size // (least * self.multiple)
            # Short pieces often, and some of every length up to the window, whose late positions need training too.
            drawn = rng.integers(1, longest, count, endpoint=True) >> rng.integers(0, 4, count)
            cuts = np.cumsum(np.maximum(drawn, least)) * self.multiple
            starts.append(self._file_starts[file] + cuts[cuts < size])
        starts = np.sort(np.concatenate(starts))
        stops = np.append(starts[1:], self.text.size)
        some = (stops - starts > 1) | (self._next[starts] != NOTHING)  # a file's last byte alone predicts nothing
        order = rng.permutation(np.flatnonzero(some))
        return zip(starts[order].tolist(), stops[order].tolist(), strict=True)
