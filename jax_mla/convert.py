"""Checkpoint conversion: one Hugging Face attention module's state dict to this library's params, and back.

Hugging Face keeps a linear layer as [out, in] with heads flattened into `out` (`in` for o_proj); here a weight is
[in, out] with heads an axis of their own. That is a transpose and a reshape, no number changes: both directions are
exact in every dtype, and their results are new C-contiguous numpy arrays that share no memory with the input.

DeepSeek-V3's FP8 checkpoints store a matrix as E4M3 codes and one float32 factor for every block of 128 x 128 of them
(`weight_scale_inv`, the factor to multiply by; DeepSeek-V3, arXiv:2412.19437, section 3.3). They are read as the
float32 weights that they stand for, or on request (`keep_fp8`) kept as they are, which is what the recipe "fp8_block"
multiplies.

`load_safetensors` and `save_safetensors` are the two directions on files.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_mla import checkpoint_files, checks
from jax_mla import params as parameters
from jax_mla.config import MLAConfig
from jax_mla.fp8_block_tensor import BLOCK, FP8BlockTensor
from jax_mla.fp8_block_tensor import check as check_tensor

# Buffers, not weights: some checkpoints (Moonlight, Kimi K2) store these numbers, which the config determines.
_DERIVED_KEYS = ("rotary_emb.inv_freq",)

_SCALE = "_scale_inv"  # after a weight's key

# Parameter names in Hugging Face's order; `params.specs` says which of them a config has, and their shapes.
_KEYS = {
    "wq": "q_proj.weight",
    "wq_a": "q_a_proj.weight",
    "wq_a_bias": "q_a_proj.bias",
    "q_norm": "q_a_layernorm.weight",
    "wq_b": "q_b_proj.weight",
    "wkv_a": "kv_a_proj_with_mqa.weight",
    "wkv_a_bias": "kv_a_proj_with_mqa.bias",
    "kv_norm": "kv_a_layernorm.weight",
    "wkv_b": "kv_b_proj.weight",
    "wo": "o_proj.weight",
    "wo_bias": "o_proj.bias",
}


class _Tensor(NamedTuple):
    """One parameter under both names and in both shapes."""

    key: str
    hf_shape: tuple[int, ...]
    name: str
    shape: tuple[int, ...]
    token_axis: int  # of a matrix


def _tensors(config: MLAConfig) -> list[_Tensor]:
    """Every parameter of one attention module: the table both directions read."""
    specs, table = parameters.specs(config), []
    for name, key in _KEYS.items():
        if name not in specs:
            continue
        shape, inputs = specs[name].shape, specs[name].contracted
        hf_shape = (math.prod(shape[inputs:]), math.prod(shape[:inputs])) if inputs else shape
        table.append(_Tensor(key, hf_shape, name, shape, specs[name].token_axis))
    return table


def from_hf(
    state_dict: Mapping[str, Any], config: MLAConfig, *, keep_fp8: bool = False
) -> dict[str, np.ndarray | FP8BlockTensor]:
    """Params of `mla` from the state dict of one Hugging Face attention module (DeepSeek V2/V3-style).

    state_dict: unprefixed keys (`q_a_proj.weight`, ..., `o_proj.bias`) to numpy or jax arrays. A `rotary_emb.inv_freq`,
      which some checkpoints store, is passed over: the config determines it. A weight of float8_e4m3fn wants its
      `weight_scale_inv` beside it, float32 [ceil(out / 128), ceil(in / 128)].
    config: decides which keys there must be, and their shapes.
    keep_fp8: FP8 weights stay codes and factors.

    Returns one flat dict of new C-contiguous numpy arrays, each in its source's dtype (bfloat16 as ml_dtypes has it);
    FP8 weights as the float32 products of code and factor. With keep_fp8 as an `FP8BlockTensor` of the same bits, numpy
    too, of logical dtype float32 and without a proxy: a frozen weight, which `mla(recipe="fp8_block")` multiplies as it
    is, `mla(recipe=None)` as its values, and `dequantize` gives the products of.
    Raises ValueError for missing, unexpected and prefixed keys and for wrong shapes (naming the key, the found and the
    wanted), TypeError for values that are not arrays of bfloat16, float16, float32 or float64 (torch tensors too).
    """
    table = _check_arguments("state_dict", state_dict, config)
    keep_fp8 = checks.static_bool("keep_fp8", keep_fp8)
    keys = _weights(state_dict, table)
    _check_prefixes("state_dict", keys, [t.key for t in table])
    _check_keys("state_dict", keys, [t.key for t in table], config)
    params = {}
    for tensor in table:
        value, factors = state_dict[tensor.key], state_dict.get(tensor.key + _SCALE)
        if factors is not None or getattr(value, "dtype", None) == ml_dtypes.float8_e4m3fn:
            value, factors = _codes(tensor, value, factors)
            if keep_fp8:
                params[tensor.name] = _kept(tensor, value, factors)
                continue
            value = _dequantized(value, factors)
        array = _array(tensor.key, value, tensor.hf_shape)
        params[tensor.name] = np.array(array.T.reshape(tensor.shape), order="C")
    return params


def to_hf(params: Mapping[str, Any], config: MLAConfig) -> dict[str, np.ndarray]:
    """The state dict of one Hugging Face attention module from params of `mla`: the exact inverse of `from_hf`.

    Takes numpy or jax arrays; returns new C-contiguous numpy arrays of the same dtypes under unprefixed keys. A weight
    that is an `FP8BlockTensor` of 128 x 128 (of `keep_fp8`, or of `quantize_params(recipe="fp8_block")`) becomes its
    codes and, under `weight_scale_inv`, its factors, as DeepSeek's FP8 checkpoints have them. Raises as `from_hf` does,
    naming the parameter.
    """
    table = _check_arguments("params", params, config)
    _check_prefixes("params", params, [t.name for t in table])
    _check_keys("params", list(params), [t.name for t in table], config)
    state_dict = {}
    for tensor in table:
        value = params[tensor.name]
        if isinstance(value, FP8BlockTensor) and len(tensor.hf_shape) == 2:
            value, factors = _stored(tensor, value)
            state_dict[tensor.key + _SCALE] = np.array(factors.T, order="C")
        else:
            value = _array(tensor.name, value, tensor.shape)
        state_dict[tensor.key] = np.array(value.reshape(tensor.hf_shape[::-1]).T, order="C")
    return state_dict


def load_safetensors(
    path: str | os.PathLike, config: MLAConfig, prefix: str = "", *, keep_fp8: bool = False
) -> dict[str, np.ndarray | FP8BlockTensor]:
    """Params of `mla` from the safetensors files of a Hugging Face checkpoint: what `from_hf` returns, of one module.

    path: a .safetensors file, or a checkpoint's folder (model.safetensors, or model.safetensors.index.json and its
      shards). Only the module's tensors are read, and only shards that have some are opened.
    prefix: what stands before the module's keys, with its dot: "model.layers.3.self_attn.". keep_fp8: as `from_hf`.

    Raises as `from_hf` does; ValueError for a prefix with no attention module (naming those there are) and for files
    that are not safetensors, FileNotFoundError naming the file, TypeError naming a tensor of another dtype, ImportError
    without safetensors (`pip install 'jax_mla[convert]'`; torch is not needed).
    """
    table = _tensors(_check_config(config))
    wanted = [t.key for t in table]
    _check_prefix(prefix)
    keep_fp8 = checks.static_bool("keep_fp8", keep_fp8)
    files = checkpoint_files.find(path)
    tensors = {key.removeprefix(prefix): key for key in files if key.startswith(prefix)}
    if not tensors.keys() & set(wanted):
        raise ValueError(f"prefix: found no attention module at {prefix!r} in {path}, wanted {_prefixes(files)}")
    _check_keys(f"{path} at {prefix!r}", _weights(tensors, table), wanted, config)
    arrays = checkpoint_files.read(files, [key for name, key in tensors.items() if name not in _DERIVED_KEYS])
    return from_hf({key.removeprefix(prefix): array for key, array in arrays.items()}, config, keep_fp8=keep_fp8)


def save_safetensors(params: Mapping[str, Any], config: MLAConfig, path: str | os.PathLike, prefix: str = "") -> None:
    """Params of one `mla` as a safetensors file under Hugging Face's keys: `load_safetensors` gives the same bits back.

    params, config: as `to_hf` takes them. path: the file, overwritten. prefix: as in `load_safetensors`.
    Raises as `to_hf` does; OSError where the file cannot be written, ImportError without safetensors.
    """
    _check_prefix(prefix)
    checkpoint_files.write(path, {prefix + key: array for key, array in to_hf(params, config).items()})


def _codes(tensor: _Tensor, codes: Any, factors: Any) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 codes [out, in] and their blocks' factors, checked."""
    key = tensor.key + _SCALE
    if getattr(codes, "dtype", None) != ml_dtypes.float8_e4m3fn:
        raise TypeError(f"{tensor.key}: found {checks.show(codes)} beside a {key}, wanted float8_e4m3fn codes")
    blocks = tuple(math.ceil(size / BLOCK) for size in tensor.hf_shape)
    if factors is None:
        raise ValueError(f"{key}: missing, wanted float32 {list(blocks)} beside the float8_e4m3fn {tensor.key}")
    if tuple(codes.shape) != tensor.hf_shape:
        raise checks.found(tensor.key, codes, f"shape {list(tensor.hf_shape)}")
    if getattr(factors, "dtype", None) == np.float64:
        raise TypeError(f"{key}: found dtype float64, wanted float32")
    return np.asarray(codes), _array(key, factors, blocks)


def _dequantized(codes: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """The float32 weight [out, in]."""
    out, inner = codes.shape
    spread = factors.astype(np.float32).repeat(BLOCK, axis=0)[:out].repeat(BLOCK, axis=1)[:, :inner]
    return codes.astype(np.float32) * spread


def _kept(tensor: _Tensor, codes: np.ndarray, factors: np.ndarray) -> FP8BlockTensor:
    """The weight of codes [out, in] as they are."""
    if factors.dtype != np.float32:
        raise TypeError(f"{tensor.key + _SCALE}: found dtype {factors.dtype}, wanted float32 (or keep_fp8=False)")
    arrays = (np.array(a, order="C") for a in (codes.T.reshape(tensor.shape), factors.T))
    return FP8BlockTensor(*arrays, None, None, np.dtype(np.float32), tensor.token_axis, "128x128")


def _stored(tensor: _Tensor, t: FP8BlockTensor) -> tuple[np.ndarray, np.ndarray]:
    """Its codes and factors, in this library's order."""
    check_tensor(tensor.name, t)
    if t.shape != tensor.shape:
        raise checks.found(tensor.name, t, f"shape {list(tensor.shape)}")
    if not t.square or t.token_axis != tensor.token_axis:
        raise checks.found(tensor.name, t, f"128x128 blocks and token_axis={tensor.token_axis}")
    return tuple(map(np.asarray, t.copy("rowwise")))


def _check_arguments(argument: str, mapping: Any, config: Any) -> list[_Tensor]:
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{argument}: found {type(mapping).__name__}, wanted a dict of arrays")
    return _tensors(_check_config(config))


def _check_config(config: Any) -> MLAConfig:
    if not isinstance(config, MLAConfig):
        raise TypeError(f"config: found {type(config).__name__}, wanted an MLAConfig (MLAConfig.from_hf makes one)")
    return config


def _check_prefix(prefix: Any) -> None:
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: found {prefix!r}, wanted a str such as 'model.layers.3.self_attn.'")


def _prefixes(keys: Iterable[str]) -> str:
    """The prefixes of a checkpoint's attention modules, as an error lists them."""
    mark = _KEYS["wkv_a"]  # every module has it
    found = {key.removesuffix(mark) for key in keys if key.endswith(mark)}
    if not found:
        return f"a checkpoint that has one (no key here ends in {mark})"
    # Layer 10 after layer 9.
    found = sorted(found, key=lambda prefix: re.sub("[0-9]+", lambda number: number[0].zfill(9), prefix))
    rest = f", ... {found[-1]!r} ({len(found)} in all)" if len(found) > 3 else ""
    return f"one of {', '.join(map(repr, found[:3]))}{rest}"


def _weights(keys: Iterable[str], table: list[_Tensor]) -> list[str]:
    """The keys without buffers and without factors of FP8 weights."""
    factors = {t.key + _SCALE for t in table if len(t.hf_shape) == 2}
    return [key for key in keys if key not in factors and key not in _DERIVED_KEYS]


def _check_prefixes(argument: str, keys: Iterable[str], wanted: list[str]) -> None:
    prefixes = {}
    for key in keys:
        for name in wanted:
            if isinstance(key, str) and key.endswith("." + name):
                prefixes[key.removesuffix(name)] = None
    if prefixes:
        prefix = next(iter(prefixes))
        others = f" and {len(prefixes) - 1} more" if len(prefixes) > 1 else ""
        raise ValueError(
            f"{argument}: found keys with the prefix {prefix!r}{others}, wanted the keys of one attention module "
            f"without it: choose one and strip it, as in {{key.removeprefix(prefix): value for key, value in "
            f"{argument}.items() if key.startswith(prefix)}}"
        )


def _check_keys(argument: str, keys: Iterable[str], wanted: list[str], config: MLAConfig) -> None:
    missing = [name for name in wanted if name not in keys]
    unexpected = [str(key) for key in keys if key not in wanted]
    if missing or unexpected:
        raise ValueError(
            f"{argument}: missing {', '.join(missing) or 'nothing'}; unexpected {', '.join(unexpected) or 'nothing'} "
            f"(for a config with q_lora_rank {config.q_lora_rank} and attention_bias {config.attention_bias})"
        )


def _array(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    if type(value).__module__.partition(".")[0] == "torch":
        # Not converted on the quiet: that would need torch, and numpy has no name for torch's bfloat16.
        raise TypeError(
            f"{name}: found a torch tensor, wanted a numpy array: pass .detach().cpu().numpy() (of a bfloat16 tensor, "
            f".view(torch.int16).numpy().view(ml_dtypes.bfloat16))"
        )
    if not hasattr(value, "shape") or not hasattr(value, "dtype") or hasattr(value, "token_axis"):
        raise TypeError(f"{name}: found {type(value).__name__}, wanted an array of shape {list(shape)}")
    checks.floating(name, value)
    if tuple(value.shape) != shape:
        raise checks.found(name, value, f"shape {list(shape)}")
    return np.asarray(value)
