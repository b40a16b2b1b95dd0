"""Safetensors files of one attention module, of folders and shards: the same bits in and out, and what errors say."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jax_mla import MLAConfig, convert

ROOT = Path(__file__).resolve().parent.parent
# Every dim different. V3 style: a q rank; V2-Lite style: none. Blocks of 128 of FP8 weights end short in both.
V3 = MLAConfig(300, 3, 130, 129, 64, 32, 40)
V3_BIASED = MLAConfig(20, 3, 10, 9, 5, 4, 7, attention_bias=True)
V2_LITE = MLAConfig(300, 3, None, 129, 64, 32, 40)
CONFIGS = {"V3": V3, "V3, bias": V3_BIASED, "V2-Lite": V2_LITE}
DTYPES = [ml_dtypes.bfloat16, np.float16, np.float32]
INDEX = "model.safetensors.index.json"


def hf_shapes(config):
    """Written out by hand: [out, in], heads flattened."""
    M, H, R, C = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    N, P, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    shapes = {
        "kv_a_layernorm.weight": (C,),
        "kv_a_proj_with_mqa.weight": (C + P, M),
        "kv_b_proj.weight": (H * (N + V), C),
        "o_proj.weight": (M, H * V),
    }
    if R is None:
        shapes["q_proj.weight"] = (H * (N + P), M)
    else:
        shapes |= {
            "q_a_layernorm.weight": (R,),
            "q_a_proj.weight": (R, M),
            "q_b_proj.weight": (H * (N + P), R),
        }
    if config.attention_bias:
        shapes |= {"q_a_proj.bias": (R,), "kv_a_proj_with_mqa.bias": (C + P,), "o_proj.bias": (M,)}
    return shapes


def module(config, dtype=ml_dtypes.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    return {key: rng.normal(size=shape).astype(dtype) for key, shape in hf_shapes(config).items()}


def fp8_module(config, seed=0):
    """As DeepSeek's checkpoints have it: E4M3 matrices and float32 factors of 128 x 128 blocks, bfloat16 norms."""
    rng, tensors = np.random.default_rng(seed), module(config, seed=seed)
    for key, shape in hf_shapes(config).items():
        if len(shape) == 2:
            bits = rng.integers(0, 256, shape, np.uint8)  # every code, both NaNs too
            tensors[key] = bits.view(ml_dtypes.float8_e4m3fn)
            blocks = [-(-size // 128) for size in shape]
            tensors[key + "_scale_inv"] = rng.uniform(1e-4, 2.0, blocks).astype(np.float32)
    return tensors


def prefixed(tensors, layer):
    return {f"model.layers.{layer}.self_attn.{key}": value for key, value in tensors.items()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert type(found[name]) is np.ndarray and found[name].flags.c_contiguous and found[name].flags.writeable
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert found[name].tobytes() == value.tobytes(), name


# --- One file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prefix", ["", "model.layers.3.self_attn."])
def test_a_file_gives_what_from_hf_gives(tmp_path, name, dtype, prefix):
    config, path = CONFIGS[name], tmp_path / "any name.safetensors"
    tensors = module(config, dtype)
    save_file({prefix + key: value for key, value in tensors.items()}, path)
    for given in (path, str(path)):
        assert_same(convert.load_safetensors(given, config, prefix), convert.from_hf(tensors, config))


@pytest.mark.parametrize("name", ["V3", "V2-Lite"])
def test_fp8_files(tmp_path, name):
    config, path = CONFIGS[name], tmp_path / "model.safetensors"
    tensors = fp8_module(config)
    save_file({"a": np.ones(3, np.float32), **prefixed(tensors, 0), "z": np.ones(5, np.float16)}, path)
    with safe_open(path, framework="numpy") as file:
        assert file.get_slice("model.layers.0.self_attn.o_proj.weight").get_dtype() == "F8_E4M3"
    params = convert.load_safetensors(path, config, "model.layers.0.self_attn.")
    assert_same(params, convert.from_hf(tensors, config))
    assert params["wo"].dtype == np.float32 and params["kv_norm"].dtype == ml_dtypes.bfloat16
    # Element by element, at both edges.
    codes, factors = tensors["kv_b_proj.weight"], tensors["kv_b_proj.weight_scale_inv"]
    for out, inner in ((0, 0), (127, 127), (128, 128), (311, 128), (311, 0)):
        wanted = np.float32(codes[out, inner]) * factors[out // 128, inner // 128]
        np.testing.assert_array_equal(params["wkv_b"][inner, out // 104, out % 104], wanted)


@pytest.mark.parametrize("dtype", [*DTYPES, np.float64])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prefix", ["", "model.layers.61.self_attn."])
def test_round_trip_is_bit_for_bit(tmp_path, name, dtype, prefix):
    config, path = CONFIGS[name], tmp_path / "layer.safetensors"
    tensors = module(config, dtype)
    tensors["kv_a_layernorm.weight"][:4] = [np.nan, -0.0, np.inf, np.finfo(np.float16).smallest_subnormal]
    params = convert.from_hf(tensors, config)
    convert.save_safetensors(params, config, path, prefix)
    assert_same(convert.load_safetensors(path, config, prefix), params)
    assert load_file(path).keys() == {prefix + key for key in tensors}
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        for key, value in tensors.items():
            assert file.get_tensor(prefix + key).tobytes() == value.tobytes(), key


def test_jax_arrays_and_mixed_dtypes_are_saved(tmp_path):
    tensors = module(V3_BIASED)
    tensors["kv_a_layernorm.weight"] = tensors["kv_a_layernorm.weight"].astype(np.float32)
    params = convert.from_hf(tensors, V3_BIASED)
    path = str(tmp_path / "layer.safetensors")
    convert.save_safetensors({name: jnp.asarray(value) for name, value in params.items()}, V3_BIASED, path)
    assert_same(convert.load_safetensors(path, V3_BIASED), params)


def test_neither_torch_nor_flax_is_needed(tmp_path):
    for tensors, name in ((module(V3), "bf16"), (fp8_module(V3), "fp8")):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    code = f"""
import sys
sys.modules["torch"] = sys.modules["flax"] = None  # importing them raises
from jax_mla import MLAConfig, convert
config = MLAConfig(300, 3, 130, 129, 64, 32, 40)
for name in ("bf16", "fp8"):
    params = convert.load_safetensors({str(tmp_path)!r} + f"/{{name}}.safetensors", config)
    convert.save_safetensors(params, config, {str(tmp_path)!r} + "/again.safetensors")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# --- Folders ------------------------------------------------------------------------------------------------------


def sharded(folder, *shards):
    """A checkpoint's folder of these shards and their index."""
    where = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / name)
        where |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def split(tensors):
    items = list(tensors.items())
    return dict(items[::2]), dict(items[1::2])


@pytest.mark.parametrize("make", [module, fp8_module], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", ["V3", "V2-Lite"])
def test_sharded_folders_are_opened_where_the_module_is(tmp_path, name, make):
    """Layer 1 lies in two shards. The shards without it may be absent, and its neighbours of any dtype."""
    config = CONFIGS[name]
    layers = [make(config, seed=seed) for seed in range(3)]
    first, second = split(prefixed(layers[1], 1))
    other = {"model.layers.1.mlp.experts": np.ones(7, np.int8), "model.layers.1.self_attn_norm.weight": np.ones(3)}
    derived = {"model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(16, np.int64)}
    sharded(tmp_path, prefixed(layers[0], 0), {**first, **other}, {**derived, **second}, prefixed(layers[2], 2))
    for layer, tensors in enumerate(layers):
        found = convert.load_safetensors(tmp_path, config, f"model.layers.{layer}.self_attn.")
        assert_same(found, convert.from_hf(tensors, config))
    for number in (1, 4):
        (tmp_path / f"model-{number:05}-of-00004.safetensors").unlink()
    found = convert.load_safetensors(str(tmp_path), config, prefix="model.layers.1.self_attn.")
    assert_same(found, convert.from_hf(layers[1], config))


def test_a_folder_with_one_file(tmp_path):
    """As Hugging Face's loaders do, model.safetensors goes before an index."""
    sharded(tmp_path, prefixed(module(V3, seed=1), 0))
    save_file(prefixed(module(V3, seed=2), 0), tmp_path / "model.safetensors")
    found = convert.load_safetensors(tmp_path, V3, "model.layers.0.self_attn.")
    assert_same(found, convert.from_hf(module(V3, seed=2), V3))


# --- Errors -------------------------------------------------------------------------------------------------------


def message(error, *arguments, call=convert.load_safetensors, **more):
    with pytest.raises(error) as raised:
        call(*arguments, **more)
    assert type(raised.value) is error
    return str(raised.value)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(prefixed(module(V3_BIASED), 0), path)
    return path


def test_prefixes_that_are_not_there(tmp_path):
    path = tmp_path / "x.safetensors"
    model = {}
    for layer in range(12):
        model |= prefixed(module(V3_BIASED), layer)
    save_file(model, path)
    some = ", ".join(f"'model.layers.{layer}.self_attn.'" for layer in range(3))
    for prefix in (
        "",
        "model.layers.12.self_attn.",
        "model.layers.1.self_attn",
        "model.layers.1",
        "layers.1.self_attn.",
    ):
        assert message(ValueError, path, V3_BIASED, prefix) == (
            f"prefix: found no attention module at {prefix!r} in {path}, wanted one of {some}, "
            "... 'model.layers.11.self_attn.' (12 in all)"
        )
    save_file({**prefixed(module(V3_BIASED), 10), **prefixed(module(V3_BIASED), 9)}, path)
    assert message(ValueError, path, V3_BIASED, "attn.").endswith(
        "wanted one of 'model.layers.9.self_attn.', 'model.layers.10.self_attn.'"
    )
    save_file(module(V3_BIASED), path)
    assert message(ValueError, path, V3_BIASED, "attn.").endswith("wanted one of ''")
    save_file({"lm_head.weight": np.ones(3)}, path)
    assert message(ValueError, path, V3_BIASED, "attn.").endswith(
        "wanted a checkpoint that has one (no key here ends in kv_a_proj_with_mqa.weight)"
    )


def test_missing_and_unexpected_tensors(path):
    prefix = "model.layers.0.self_attn."
    unbiased = MLAConfig(20, 3, 10, 9, 5, 4, 7)
    assert message(ValueError, path, unbiased, prefix) == (
        f"{path} at {prefix!r}: missing nothing; unexpected kv_a_proj_with_mqa.bias, o_proj.bias, q_a_proj.bias "
        "(for a config with q_lora_rank 10 and attention_bias False)"
    )
    tensors = prefixed(module(V3_BIASED), 0)
    del tensors[prefix + "o_proj.weight"]
    save_file(tensors, path)
    assert "missing o_proj.weight; unexpected nothing" in message(ValueError, path, V3_BIASED, prefix)


def test_wrong_shapes_and_dtypes(path):
    key = "model.layers.0.self_attn.o_proj.weight"
    for array, error, wanted in (
        (np.ones((21, 20), np.float32), ValueError, "o_proj.weight: found float32[21, 20], wanted shape [20, 21]"),
        (np.ones((20, 21), np.int8), TypeError, f"{key}: found dtype I8 in {path}, wanted one of F8_E4M3, BF16, F16, "),
        (np.ones((20, 21), ml_dtypes.float8_e5m2), TypeError, f"{key}: found dtype F8_E5M2 in {path}, wanted one of "),
        (
            np.ones((20, 21), ml_dtypes.float8_e4m3fn),
            ValueError,
            "o_proj.weight_scale_inv: missing, wanted float32 [1, 1] beside the float8_e4m3fn o_proj.weight",
        ),
    ):
        save_file({**prefixed(module(V3_BIASED), 0), key: array}, path)
        assert message(error, path, V3_BIASED, "model.layers.0.self_attn.").startswith(wanted)


def test_files_that_are_not_there(tmp_path):
    absent = tmp_path / "absent.safetensors"
    assert message(FileNotFoundError, absent, V3) == (
        f"path: found nothing at {absent}, wanted a .safetensors file or a folder with one"
    )
    assert message(FileNotFoundError, tmp_path, V3) == (
        f"path: found the folder {tmp_path}, wanted model.safetensors or {INDEX} in it"
    )
    first, second = split(prefixed(module(V3), 0))
    sharded(tmp_path, first, second)
    lost = tmp_path / "model-00002-of-00002.safetensors"
    lost.unlink()
    assert message(FileNotFoundError, tmp_path, V3, "model.layers.0.self_attn.") == (
        f"path: found no {lost}, wanted the shard that {INDEX} names for {next(iter(second))}"
    )
    save_file({"a": np.ones(3)}, lost)
    assert message(ValueError, tmp_path, V3, "model.layers.0.self_attn.") == (
        f"path: found {lost} without {min(second)}, wanted it there as {INDEX} says"
    )


@pytest.mark.parametrize("cut", [0, 5, 60, -1], ids=["empty", "5 bytes", "in the header", "one byte short"])
def test_files_that_are_cut_short(path, cut):
    path.write_bytes(path.read_bytes()[:cut])
    assert message(ValueError, path, V3_BIASED).startswith(f"path: found {path}, wanted a safetensors file (")


@pytest.mark.parametrize("data", [b"PK\3\4" * 50, b"{}" * 50, b"\x80\x02}q\x00" * 50], ids=["zip", "json", "pickle"])
def test_files_of_another_format(tmp_path, data):
    path, folder = tmp_path / "pytorch_model.bin", tmp_path / "folder"
    path.write_bytes(data)
    assert message(ValueError, path, V3).startswith(f"path: found {path}, wanted a safetensors file (")
    folder.mkdir()
    sharded(folder, prefixed(module(V3_BIASED), 0))
    shard = folder / "model-00001-of-00001.safetensors"
    shard.write_bytes(data)
    found = message(ValueError, folder, V3_BIASED, "model.layers.0.self_attn.")
    assert found.startswith(f"path: found {shard}, wanted a safetensors file (")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_indices_that_are_none(tmp_path, text):
    (tmp_path / INDEX).write_text(text, encoding="utf-8")
    wanted = f"path: found {tmp_path / INDEX}, wanted JSON with a weight_map of keys to files ("
    assert message(ValueError, tmp_path, V3).startswith(wanted)


def test_arguments_of_the_wrong_kind(path):
    assert message(TypeError, 3, V3) == "path: found 3, wanted a str or os.PathLike"
    assert message(TypeError, path, {}) == "config: found dict, wanted an MLAConfig (MLAConfig.from_hf makes one)"
    prefix = "prefix: found 3, wanted a str such as 'model.layers.3.self_attn.'"
    assert message(TypeError, path, V3, 3) == prefix
    params = convert.from_hf(module(V3_BIASED), V3_BIASED)
    save = convert.save_safetensors
    assert message(TypeError, params, V3_BIASED, path, 3, call=save) == prefix
    assert message(TypeError, params, V3_BIASED, None, call=save) == "path: found None, wanted a str or os.PathLike"
    assert message(TypeError, None, V3_BIASED, path, call=save) == "params: found NoneType, wanted a dict of arrays"
    del params["wo"]
    assert message(ValueError, params, V3_BIASED, path, call=save).startswith("params: missing wo; unexpected nothing")


def test_files_that_cannot_be_written(tmp_path):
    params = convert.from_hf(module(V3_BIASED), V3_BIASED)
    for path in (tmp_path, tmp_path / "absent" / "x.safetensors"):
        found = message(OSError, params, V3_BIASED, path, call=convert.save_safetensors)
        assert found.startswith(f"path: found {path}, wanted a file that can be written (")


def test_without_the_package(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    wanted = "safetensors: not installed, wanted for files: pip install 'jax_mla[convert]'"
    assert message(ImportError, path, V3_BIASED) == wanted
    params = convert.from_hf(module(V3_BIASED), V3_BIASED)
    assert message(ImportError, params, V3_BIASED, path, call=convert.save_safetensors) == wanted


# --- Hugging Face's own files -------------------------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank, bias", [(24, False), (24, True), (None, False)], ids=["q rank", "bias", "no q rank"])
def test_folders_that_transformers_saves(tmp_path, dtype, rank, bias):
    """One file and shards of save_pretrained; what we write of a layer, torch reads bit for bit."""
    import torch
    from safetensors.torch import load_file as load_torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    hf = DeepseekV3Config(
        vocab_size=50,
        hidden_size=44,
        intermediate_size=60,
        moe_intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=5,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=rank,
        kv_lora_rank=18,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=14,
        attention_bias=bias,
    )
    model = DeepseekV3ForCausalLM(hf).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases are constants when new
            parameter.normal_()
    state_dict = {}
    for key, value in model.state_dict().items():
        bits = value.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if dtype == "bfloat16" else value.numpy()
        state_dict[key] = bits
    for name, size in (("one", "1GB"), ("shards", "20KB")):
        folder = tmp_path / name
        model.save_pretrained(folder, max_shard_size=size)
        assert (folder / INDEX).exists() == (name == "shards")
        config = MLAConfig.from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        for layer in range(3):
            prefix = f"model.layers.{layer}.self_attn."
            own = {key.removeprefix(prefix): x for key, x in state_dict.items() if key.startswith(prefix)}
            params = convert.load_safetensors(folder, config, prefix)
            assert_same(params, convert.from_hf(own, config))
            convert.save_safetensors(params, config, tmp_path / "ours.safetensors", prefix)
            for key, tensor in load_torch(tmp_path / "ours.safetensors").items():
                assert torch.equal(tensor, model.state_dict()[key]), key
