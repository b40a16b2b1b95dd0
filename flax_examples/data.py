"""Text as bytes: which files are taken, which are held out, and which windows a step trains on.

Everything here is a pure function of its arguments, so a resumed run sees the very bytes an uninterrupted one would.
"""

import dataclasses
import hashlib
import os
import pathlib
import stat
import sysconfig
from collections.abc import Sequence

import numpy as np

HELDOUT_FRACTION = 0.05  # of the files, by hash
HELDOUT_LEAST = 0.01  # of the bytes: a few files may hash to none below the fraction, or to tiny ones
# Text holds no NUL byte (a file with one is refused as binary), so NUL is free to mark where a file ends.
END_OF_FILE = 0


class InputError(Exception):
    """The user asked for something that cannot be done; the message is one line for them to act on."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and held-out text, each file followed by one NUL byte. Sizes in the summary count those NULs."""

    train: np.ndarray  # [bytes] uint8
    heldout: np.ndarray  # [bytes] uint8
    summary: dict  # plain values for the run's JSON; "fingerprint" identifies names and contents of all files


def load_corpus(paths: Sequence[str] = (), globs: Sequence[str] = ()) -> Corpus:
    """Reads `paths` (folders and files) whole; without any, the running Python's standard-library sources.

    From a folder every non-hidden file is taken, or those that match one of `globs`. Held-out files are chosen by a
    hash of their relative path: about one in twenty, more where those are too small to score much, and never all.
    """
    if paths:
        places, files = paths, _find(paths, globs or ("*",), skip=())
    else:
        places = [sysconfig.get_paths()["stdlib"]]
        files = _find(places, globs or ("*.py",), skip=("site-packages", "dist-packages"))
    everything = {name: _read(path) for name, path in files}
    texts = {name: text for name, text in everything.items() if text}
    if len(texts) < 2:
        raise InputError(
            f"--data: found {len(texts)} non-empty file{'s' * (len(texts) != 1)} in {' '.join(map(str, places))}"
            f"{' matching ' + ' '.join(globs) if globs else ''}, wanted at least 2: one to train on, one to hold out"
        )
    heldout_names = _hold_out({name: len(text) for name, text in texts.items()})
    digest = hashlib.sha256()
    for name, text in everything.items():
        digest.update(f"{name}\0{len(text)}\0".encode(errors="surrogateescape") + text)
    train = _join(text for name, text in texts.items() if name not in heldout_names)
    heldout = _join(text for name, text in texts.items() if name in heldout_names)
    summary = {
        "paths": [str(pathlib.Path(path).absolute()) for path in paths],
        "globs": list(globs),
        "fingerprint": digest.hexdigest()[:16],
        "train_files": len(texts) - len(heldout_names),
        "train_bytes": train.size,
        "heldout_files": len(heldout_names),
        "heldout_bytes": heldout.size,
        "empty_files": len(everything) - len(texts),
    }
    return Corpus(train, heldout, summary)


def _hold_out(sizes: dict[str, int]) -> set[str]:
    """Which of the files (at least 2; name: bytes) are held out."""
    order = sorted(sizes, key=_position)
    held, held_bytes, total = set(), 0, sum(sizes.values())
    for name in order[:-1]:
        if _position(name) >= HELDOUT_FRACTION and held_bytes >= HELDOUT_LEAST * total:
            break
        held.add(name)
        held_bytes += sizes[name]
    return held


def _find(paths: Sequence[str], globs: Sequence[str], skip: Sequence[str]) -> list[tuple[str, pathlib.Path]]:
    """(relative name, path) of every file asked for, in order of name; a file reached twice is listed once."""
    found: dict[pathlib.Path, str] = {}
    for root in map(pathlib.Path, paths):
        if not root.exists():
            raise InputError(f"--data: found nothing at {root}, wanted a folder or a file")
        if not root.is_dir():
            found.setdefault(root.absolute(), root.name)
            continue
        for folder, folders, names in os.walk(root, onerror=_unreadable):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
            for name in names:
                path = pathlib.Path(folder, name)
                relative = path.relative_to(root)
                if not name.startswith(".") and any(relative.match(pattern) for pattern in globs):
                    found.setdefault(path.absolute(), relative.as_posix())
    # The same relative name under two folders would make one entry of two files: number the later ones.
    files: dict[str, pathlib.Path] = {}
    for path, name in found.items():
        unique, number = name, 2
        while unique in files:
            unique, number = f"{name}#{number}", number + 1
        files[unique] = path
    return sorted(files.items())


def _unreadable(error: OSError):
    raise InputError(f"--data: cannot read {error.filename}: {error.strerror}; narrow the files with --glob")


def _read(path: pathlib.Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise InputError(f"--data: {path} is not a regular file; narrow the files with --glob, as --glob '*.txt'")
        text = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"--data: cannot read {path}: {error.strerror}; narrow the files with --glob, as --glob '*.txt'"
        ) from error
    if END_OF_FILE in text:
        raise InputError(
            f"--data: {path} is binary (NUL at byte {text.index(END_OF_FILE)}), wanted text;"
            " narrow the files with --glob, as --glob '*.txt'"
        )
    return text


def _position(name: str) -> float:
    """A number in [0, 1) that depends on nothing but the relative path."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:6], "big") / 2**48


def _join(texts) -> np.ndarray:
    return np.frombuffer(b"".join(part for text in texts for part in (text, bytes([END_OF_FILE]))), np.uint8)


class Windows:
    """Training windows: each epoch cuts the text into non-overlapping windows and visits them in an order of its own.

    Sample number i is a pure function of (seed, i), so no state needs saving, and until the first epoch ends every
    byte is seen at most once.
    """

    def __init__(self, text: np.ndarray, window: int, seed: int):
        check_length(text, window, "training text")
        self.text, self.window, self.seed = text, window, seed
        # Each window predicts its `window` bytes but the very first byte of the text, which nothing precedes.
        self.per_epoch = (text.size - 1) // window
        self._epoch, self._starts = -1, np.empty(0, np.int64)

    def starts(self, first: int, count: int) -> np.ndarray:
        """Where samples first..first+count-1 begin in the text: [count] int64."""
        index = np.arange(first, first + count)
        out = np.empty(count, np.int64)
        for epoch in np.unique(index // self.per_epoch):
            if epoch != self._epoch:
                rng = np.random.default_rng([self.seed, epoch])
                # Later epochs cut elsewhere: what was a window's start, with no context, is then inside one.
                offset = rng.integers(0, self.text.size - self.per_epoch * self.window) if epoch else 0
                self._epoch, self._starts = epoch, offset + self.window * rng.permutation(self.per_epoch)
            here = index // self.per_epoch == epoch
            out[here] = self._starts[index[here] % self.per_epoch]
        return out

    def batch(self, step: int, size: int) -> np.ndarray:
        """The tokens of one step: [size, window + 1] int32; inputs are [:, :-1], targets [:, 1:]."""
        return gather(self.text, self.starts(step * size, size), self.window)

    def seen(self, samples: int) -> np.ndarray:
        """Positions in the text of the distinct bytes predicted in the first `samples` samples: sorted int64."""
        mask = np.zeros(self.text.size, bool)
        for first in range(0, min(samples, 2 * self.per_epoch), self.per_epoch):
            starts = self.starts(first, min(self.per_epoch, samples - first))
            mask[(starts[:, None] + np.arange(1, self.window + 1)).ravel()] = True
        return np.flatnonzero(mask)


def gather(text: np.ndarray, starts: np.ndarray, window: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(window + 1)].astype(np.int32)


def heldout_starts(text: np.ndarray, window: int, max_bytes: int) -> np.ndarray:
    """Evenly spread, non-overlapping windows that hold at most `max_bytes` predicted bytes (at least one window)."""
    check_length(text, window, "held-out text")
    available = (text.size - 1) // window
    count = min(available, max(1, max_bytes // window))
    return window * (np.arange(count) * available // count)


def check_length(text: np.ndarray, window: int, name: str):
    if text.size < window + 1:
        raise InputError(f"--data: the {name} has {text.size} bytes, wanted at least window + 1 = {window + 1}")
