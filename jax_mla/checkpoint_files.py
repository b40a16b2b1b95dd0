"""Safetensors files and Hugging Face's folders of them: which file has a key, the tensors of some keys, writing.

The reading is the `safetensors` package's (extra `convert`), imported when first used. Nothing here knows MLA.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("BF16", "F16", "F32", "F64")  # what the package's numpy API reads, of what `from_hf` takes
_CODES = "F8_E4M3"


def find(path: str | os.PathLike) -> dict[str, Path]:
    """Every tensor's key and the file that has it, in the order of the file or index; of an index no shard is opened.

    path: a .safetensors file, or a folder with model.safetensors or, failing that, model.safetensors.index.json.
    Raises FileNotFoundError for what is not there, ValueError for what is no safetensors file or index, TypeError for
    what is no path, ImportError without the package.
    """
    path = _path(path)
    if not path.exists():
        raise FileNotFoundError(f"path: found nothing at {path}, wanted a .safetensors file or a folder with one")
    if path.is_dir():
        if not (path / _SINGLE).exists():
            return _indexed(path)
        path /= _SINGLE
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def read(files: Mapping[str, Path], keys: Iterable[str]) -> dict[str, np.ndarray]:
    """The tensors of these keys of `find`'s answer; only their files are opened, and only they are read.

    Raises FileNotFoundError or ValueError for an index that promises what is not there, TypeError for a dtype other
    than bfloat16, float16, float32, float64 and float8_e4m3fn.
    """
    by_file, arrays = {}, {}
    for key in keys:
        by_file.setdefault(files[key], []).append(key)
    for path, wanted in by_file.items():
        if not path.exists():
            raise FileNotFoundError(f"path: found no {path}, wanted the shard that {_INDEX} names for {wanted[0]}")
        with _open(path) as file:
            if missing := set(wanted) - set(file.keys()):
                raise ValueError(f"path: found {path} without {min(missing)}, wanted it there as {_INDEX} says")
            for key in wanted:
                dtype = file.get_slice(key).get_dtype()
                if dtype == _CODES:
                    arrays[key] = _codes(path, key)
                elif dtype in _DTYPES:
                    arrays[key] = file.get_tensor(key)
                else:
                    raise TypeError(
                        f"{key}: found dtype {dtype} in {path}, wanted one of {_CODES}, {', '.join(_DTYPES)}"
                    )
    return arrays


def write(path: str | os.PathLike, arrays: Mapping[str, np.ndarray]) -> None:
    """One file with these C-contiguous arrays. OSError where it cannot be written, ImportError without the package."""
    path, package = _path(path), _package()
    from safetensors.numpy import save_file

    try:
        # The format is what Hugging Face's loaders ask for; the bytes are the same for every framework.
        save_file(dict(arrays), path, metadata={"format": "pt"})
    except package.SafetensorError as reason:
        raise OSError(f"path: found {path}, wanted a file that can be written ({reason})") from reason


def _path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: found {path!r}, wanted a str or os.PathLike")
    return Path(path)


def _package():
    try:
        import safetensors
    except ImportError as reason:
        raise ImportError("safetensors: not installed, wanted for files: pip install 'jax_mla[convert]'") from reason
    return safetensors


def _open(path: Path):
    """The package's handle, its header checked."""
    package = _package()
    try:
        return package.safe_open(path, framework="numpy")
    except package.SafetensorError as reason:
        raise ValueError(f"path: found {path}, wanted a safetensors file ({reason})") from reason


def _indexed(folder: Path) -> dict[str, Path]:
    index = folder / _INDEX
    if not index.exists():
        raise FileNotFoundError(f"path: found the folder {folder}, wanted {_SINGLE} or {_INDEX} in it")
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {key: folder / shard for key, shard in shards.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as reason:
        raise ValueError(
            f"path: found {index}, wanted JSON with a weight_map of keys to files ({reason!r})"
        ) from reason


def _codes(path: Path, key: str) -> np.ndarray:
    """float8_e4m3fn, read here: the package looks a dtype up in numpy, which has none of 8 bits.

    The format: the header's length as 8 little-endian bytes, the header (which `_open` had checked), the tensors.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        tensor = json.loads(file.read(length))[key]
    start, end = tensor["data_offsets"]
    data = np.fromfile(path, np.uint8, end - start, offset=8 + length + start)
    return data.view(ml_dtypes.float8_e4m3fn).reshape(tensor["shape"])
