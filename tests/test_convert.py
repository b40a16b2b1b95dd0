"""Hugging Face checkpoints in and out: row orders, exact round trips, errors that say what is wrong."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from jax.sharding import NamedSharding, PartitionSpec

from jax_mla import MLAConfig, convert, dequantize, kv_up_proj_rope, q_up_proj_rope, quantize_fp8_block

# Odd head count, every dim different, so that no transposed or swapped axis fits by chance.
CONFIG = MLAConfig(
    hidden_size=20, num_heads=3, q_lora_rank=10, kv_lora_rank=9, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=7
)
BIASED = MLAConfig(20, 3, 10, 9, 5, 4, 7, attention_bias=True)
DIRECT = MLAConfig(20, 3, None, 9, 5, 4, 7)
DIRECT_BIASED = MLAConfig(20, 3, None, 9, 5, 4, 7, attention_bias=True)
CONFIGS = {"q rank": CONFIG, "q rank, bias": BIASED, "no q rank": DIRECT, "no q rank, bias": DIRECT_BIASED}


def hf_shapes(config):
    """Written out by hand, from Hugging Face's modules: [out, in], heads flattened."""
    shapes = {
        "kv_a_proj_with_mqa.weight": (13, 20),
        "kv_a_layernorm.weight": (9,),
        "kv_b_proj.weight": (36, 9),
        "o_proj.weight": (20, 21),
    }
    if config.q_lora_rank is None:
        shapes["q_proj.weight"] = (27, 20)
    else:
        shapes.update({"q_a_proj.weight": (10, 20), "q_a_layernorm.weight": (10,), "q_b_proj.weight": (27, 10)})
    if config.attention_bias:
        shapes.update({"kv_a_proj_with_mqa.bias": (13,), "o_proj.bias": (20,)})
        if config.q_lora_rank is not None:
            shapes["q_a_proj.bias"] = (10,)
    return shapes


def our_shapes(config):
    shapes = {"wkv_a": (20, 13), "kv_norm": (9,), "wkv_b": (9, 3, 12), "wo": (3, 7, 20)}
    if config.q_lora_rank is None:
        shapes["wq"] = (20, 3, 9)
    else:
        shapes.update(wq_a=(20, 10), q_norm=(10,), wq_b=(10, 3, 9))
    if config.attention_bias:
        shapes.update(wkv_a_bias=(13,), wo_bias=(20,))
        if config.q_lora_rank is not None:
            shapes["wq_a_bias"] = (10,)
    return shapes


def state_dict(config, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {key: rng.normal(size=shape).astype(dtype) for key, shape in hf_shapes(config).items()}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_exact(name, dtype):
    config = CONFIGS[name]
    source = state_dict(config, dtype)
    source["kv_a_layernorm.weight"][:3] = [np.nan, -0.0, np.inf]
    before = {key: value.tobytes() for key, value in source.items()}
    params = convert.from_hf(source, config)
    assert {key: value.shape for key, value in params.items()} == our_shapes(config)
    back = convert.to_hf(params, config)
    assert back.keys() == source.keys()
    for key, value in source.items():
        assert back[key].dtype == value.dtype and back[key].shape == value.shape
        assert back[key].tobytes() == before[key] == value.tobytes(), key
    again = convert.from_hf(back, config)
    for name, value in params.items():
        assert again[name].dtype == value.dtype and again[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("name", CONFIGS)
def test_results_are_new_contiguous_arrays(name):
    config = CONFIGS[name]
    source = {key: np.asfortranarray(value) for key, value in state_dict(config).items()}
    for value in source.values():
        value.flags.writeable = False
    params = convert.from_hf(source, config)
    for results, inputs in ((params, source), (convert.to_hf(params, config), params)):
        for value in results.values():
            assert type(value) is np.ndarray and value.flags.c_contiguous and value.flags.writeable
            assert not any(np.shares_memory(value, x) for x in inputs.values())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_jax_arrays_are_taken(dtype):
    source = {key: jnp.asarray(value, dtype) for key, value in state_dict(BIASED).items()}
    params = convert.from_hf(source, BIASED)
    back = convert.to_hf({name: jnp.asarray(value) for name, value in params.items()}, BIASED)
    for key, value in source.items():
        assert type(back[key]) is np.ndarray and back[key].dtype == dtype
        assert back[key].tobytes() == np.asarray(value).tobytes()


def test_dtypes_may_differ_within_a_module():
    source = state_dict(CONFIG, ml_dtypes.bfloat16)
    source["q_a_layernorm.weight"] = source["q_a_layernorm.weight"].astype(np.float32)
    params = convert.from_hf(source, CONFIG)
    assert params["q_norm"].dtype == np.float32 and params["wq_a"].dtype == ml_dtypes.bfloat16


def numbered_state_dict(config):
    """Weights that carry their head in every number: multiplied with a latent of one 1, kv_b gives k_nope = h and
    v = 100 + h; q gives h, and 1000 + h in its rope dims."""
    source = {key: np.zeros(shape, np.float32) for key, shape in hf_shapes(config).items()}
    N, V, D = config.qk_nope_head_dim, config.v_head_dim, config.qk_head_dim
    kv, q = source["kv_b_proj.weight"], source["q_proj.weight" if config.q_lora_rank is None else "q_b_proj.weight"]
    for h in range(config.num_heads):
        kv[h * (N + V) : h * (N + V) + N, 0] = h
        kv[h * (N + V) + N : (h + 1) * (N + V), 0] = 100 + h
        q[h * D : h * D + N, 0] = h
        q[h * D + N : (h + 1) * D, 0] = 1000 + h
        source["o_proj.weight"][0, h * V : (h + 1) * V] = h
    return source


@pytest.mark.parametrize("config", [CONFIG, DIRECT], ids=["q rank", "no q rank"])
def test_row_order_within_heads(config):
    """Per head [nope | rope] for the queries, [k_nope | v] for keys and values; o_proj's columns are heads of V."""
    params = convert.from_hf(numbered_state_dict(config), config)
    N = config.qk_nope_head_dim
    latent = np.eye(1, config.kv_lora_rank)[None]
    kv = reference.up_projection(latent, params["wkv_b"])
    query = params["wq" if config.q_lora_rank is None else "wq_b"]
    q = reference.up_projection(np.eye(1, query.shape[0])[None], query)
    for h in range(config.num_heads):
        assert (kv[0, 0, h, :N] == h).all() and (kv[0, 0, h, N:] == 100 + h).all()
        assert (q[0, 0, h, :N] == h).all() and (q[0, 0, h, N:] == 1000 + h).all()
        assert (params["wo"][h, :, 0] == h).all()


@pytest.mark.parametrize("sharded", [False, True], ids=["one device", "heads over 3 devices"])
def test_row_order_through_the_ops(sharded):
    params = convert.from_hf(numbered_state_dict(CONFIG), CONFIG)
    N, P = CONFIG.qk_nope_head_dim, CONFIG.qk_rope_head_dim
    cos, sin = jnp.ones((1, P // 2)), jnp.zeros((1, P // 2))
    k_pe = jnp.arange(P, dtype=jnp.float32)[None, None]

    @jax.jit
    def run(wq_b, wkv_b):
        q = q_up_proj_rope(jnp.eye(1, 10)[None], wq_b, cos, sin, nope_dim=N)
        return q, *kv_up_proj_rope(jnp.eye(1, 9)[None], wkv_b, k_pe, cos, sin, nope_dim=N)

    if sharded:
        mesh = jax.make_mesh((3,), ("model",))
        with jax.set_mesh(mesh):
            by_head = NamedSharding(mesh, PartitionSpec(None, "model"))
            results = run(*(jax.device_put(params[name], by_head) for name in ("wq_b", "wkv_b")))
        assert all(len(result.sharding.device_set) == 3 for result in results)
    else:
        results = run(params["wq_b"], params["wkv_b"])
    q, k, v = map(np.asarray, results)
    for h in range(CONFIG.num_heads):
        assert (k[0, 0, h, :N] == h).all() and (v[0, 0, h] == 100 + h).all()
        assert (k[0, 0, h, N:] == [0, 2, 1, 3]).all()  # pairs in, halves out
        assert (q[0, 0, h, :N] == h).all() and (q[0, 0, h, N:] == 1000 + h).all()


# --- Errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted(hf_shapes(BIASED)))
def test_wrong_shapes_are_named(key):
    source, shape = state_dict(BIASED), hf_shapes(BIASED)[key]
    for bad in ((shape[0] + 1, *shape[1:]), shape[::-1] if len(shape) == 2 else (1, *shape), ()):
        with pytest.raises(ValueError) as raised:
            convert.from_hf({**source, key: np.zeros(bad, np.float32)}, BIASED)
        assert str(raised.value) == f"{key}: found float32{list(bad)}, wanted shape {list(shape)}"
    params = convert.from_hf(source, BIASED)
    for name, shape in our_shapes(BIASED).items():
        with pytest.raises(ValueError) as raised:
            convert.to_hf({**params, name: np.zeros((*shape[:-1], 99), np.float32)}, BIASED)
        assert str(raised.value) == f"{name}: found float32{[*shape[:-1], 99]}, wanted shape {list(shape)}"


def test_row_count_of_another_head_layout():
    """A kv_b_proj of 3 heads of 5 + 5, not 5 + 7."""
    source = {**state_dict(CONFIG), "kv_b_proj.weight": np.zeros((30, 9), np.float32)}
    with pytest.raises(ValueError, match=r"kv_b_proj.weight: found float32\[30, 9\], wanted shape \[36, 9\]"):
        convert.from_hf(source, CONFIG)


@pytest.mark.parametrize(
    "given, wanted, missing, unexpected",
    [
        (DIRECT, CONFIG, ["q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"], ["q_proj.weight"]),
        (CONFIG, DIRECT, ["q_proj.weight"], ["q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"]),
        (CONFIG, BIASED, ["q_a_proj.bias", "kv_a_proj_with_mqa.bias", "o_proj.bias"], []),
        (DIRECT_BIASED, DIRECT, [], ["kv_a_proj_with_mqa.bias", "o_proj.bias"]),
    ],
)
def test_missing_and_unexpected_keys_are_listed(given, wanted, missing, unexpected):
    with pytest.raises(ValueError) as raised:
        convert.from_hf(state_dict(given), wanted)
    message = str(raised.value)
    start, rest = message.split("; unexpected ")
    assert set(start.removeprefix("state_dict: missing ").split(", ")) == set(missing or ["nothing"])
    assert set(rest.split(" (")[0].split(", ")) == set(unexpected or ["nothing"])
    assert f"q_lora_rank {wanted.q_lora_rank} and attention_bias {wanted.attention_bias}" in message


def test_missing_and_unexpected_params_are_listed():
    params = convert.from_hf(state_dict(CONFIG), CONFIG)
    params["w"] = params.pop("wo")
    with pytest.raises(ValueError, match="params: missing wo; unexpected w "):
        convert.to_hf(params, CONFIG)


def fp8_state_dict(shapes, rng):
    """Codes and factors of DeepSeek's FP8 checkpoints, and the float32 weights they stand for, element by element."""
    source, wanted = {key: rng.normal(size=shape).astype(ml_dtypes.bfloat16) for key, shape in shapes.items()}, {}
    for key, shape in shapes.items():
        if len(shape) != 2:
            continue
        codes = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
        factors = rng.uniform(0.001, 2.0, [-(-n // 128) for n in shape]).astype(np.float32)
        weight = np.zeros(shape, np.float32)
        for i in range(shape[0]):
            for j in range(shape[1]):
                weight[i, j] = np.float32(codes[i, j]) * factors[i // 128, j // 128]
        source |= {key: codes, key + "_scale_inv": factors}
        wanted[key] = weight
    return source, wanted


def test_fp8_block_checkpoints():
    """Blocks of 128 x 128 with short ones at both edges; the other tensors stay what they were."""
    config = MLAConfig(300, 3, 130, 128, 64, 32, 40)
    shapes = {
        "q_a_proj.weight": (130, 300),
        "q_a_layernorm.weight": (130,),
        "q_b_proj.weight": (3 * 96, 130),
        "kv_a_proj_with_mqa.weight": (160, 300),
        "kv_a_layernorm.weight": (128,),
        "kv_b_proj.weight": (3 * 104, 128),
        "o_proj.weight": (300, 3 * 40),
    }
    source, wanted = fp8_state_dict(shapes, np.random.default_rng(0))
    params = convert.from_hf(source, config)
    restored = convert.to_hf(params, config)
    for key, weight in wanted.items():
        assert restored[key].dtype == np.float32 and np.array_equal(restored[key], weight)
    assert params["q_norm"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("name", CONFIGS)
def test_fp8_weights_may_stay_what_they_are(name):
    """keep_fp8: the same float32 numbers behind them as without it, and the checkpoint again, bit for bit."""
    config = CONFIGS[name]
    source, _ = fp8_state_dict(hf_shapes(config), np.random.default_rng(0))
    kept, plain = convert.from_hf(source, config, keep_fp8=True), convert.from_hf(source, config)
    for name, value in plain.items():
        found = kept[name] if value.ndim == 1 else dequantize(kept[name])
        assert found.dtype == value.dtype and np.array_equal(np.asarray(found), value), name
    back = convert.to_hf(kept, config)
    assert back.keys() == source.keys()
    for key, value in source.items():
        assert type(back[key]) is np.ndarray and back[key].flags.c_contiguous and back[key].dtype == value.dtype
        assert back[key].tobytes() == value.tobytes(), key
    narrow = source["o_proj.weight_scale_inv"].astype(ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match="o_proj.weight_scale_inv: found dtype bfloat16, wanted float32"):
        convert.from_hf({**source, "o_proj.weight_scale_inv": narrow}, config, keep_fp8=True)
    rows = quantize_fp8_block(jnp.ones(plain["wo"].shape))
    with pytest.raises(ValueError, match="wo: found FP8BlockTensor.* wanted 128x128 blocks and token_axis=-2"):
        convert.to_hf({**kept, "wo": rows}, config)


def test_fp8_without_its_factors_is_named():
    source, _ = fp8_state_dict(hf_shapes(CONFIG), np.random.default_rng(0))
    missing = {key: value for key, value in source.items() if key != "o_proj.weight_scale_inv"}
    with pytest.raises(ValueError, match=r"o_proj.weight_scale_inv: missing, wanted float32 \[1, 1\]"):
        convert.from_hf(missing, CONFIG)
    with pytest.raises(ValueError, match=r"o_proj.weight_scale_inv: found float32\[2, 1\], wanted shape \[1, 1\]"):
        convert.from_hf({**source, "o_proj.weight_scale_inv": np.ones((2, 1), np.float32)}, CONFIG)
    with pytest.raises(TypeError, match="o_proj.weight: found bfloat16.* wanted float8_e4m3fn codes"):
        convert.from_hf({**source, "o_proj.weight": state_dict(CONFIG, ml_dtypes.bfloat16)["o_proj.weight"]}, CONFIG)
    with pytest.raises(ValueError, match=r"o_proj.weight: found float8_e4m3fn\[21, 20\], wanted shape \[20, 21\]"):
        convert.from_hf({**source, "o_proj.weight": source["o_proj.weight"].T}, CONFIG)
    with pytest.raises(ValueError, match="unexpected q_a_layernorm.weight_scale_inv"):
        convert.from_hf({**source, "q_a_layernorm.weight_scale_inv": np.ones((1, 1), np.float32)}, CONFIG)


def test_prefixed_keys_say_to_strip_it():
    prefix = "model.layers.0.self_attn."
    prefixed = {prefix + key: value for key, value in state_dict(CONFIG).items()}
    with pytest.raises(ValueError, match=r"prefix 'model\.layers\.0\.self_attn\.', wanted .* strip it") as raised:
        convert.from_hf(prefixed, CONFIG)
    # The message's own remedy works.
    remedy = str(raised.value).split("as in ")[1]
    stripped = eval(remedy, {"prefix": prefix, "state_dict": prefixed})
    assert convert.from_hf(stripped, CONFIG).keys() == our_shapes(CONFIG).keys()
    model = {**prefixed, **{f"model.layers.1.self_attn.{key}": value for key, value in stripped.items()}}
    with pytest.raises(ValueError, match=r"prefix 'model\.layers\.0\.self_attn\.' and 1 more"):
        convert.from_hf({"model.embed_tokens.weight": np.zeros((2, 20)), **model}, CONFIG)


def test_derived_rotary_buffers_are_passed_over():
    source = {**state_dict(CONFIG), "rotary_emb.inv_freq": np.ones(2, np.float32)}
    assert convert.from_hf(source, CONFIG).keys() == our_shapes(CONFIG).keys()


@pytest.mark.parametrize(
    "value", [3, None, [[1.0]], "weights", np.zeros((20, 21), np.int32), np.zeros((20, 21), object)]
)
def test_values_that_are_not_floating_arrays(value):
    with pytest.raises(TypeError, match="o_proj.weight: found .*, wanted "):
        convert.from_hf({**state_dict(CONFIG), "o_proj.weight": value}, CONFIG)


def test_arguments_of_the_wrong_kind():
    with pytest.raises(TypeError, match="state_dict: found list, wanted a dict"):
        convert.from_hf([1], CONFIG)
    with pytest.raises(TypeError, match="params: found NoneType, wanted a dict"):
        convert.to_hf(None, CONFIG)
    with pytest.raises(TypeError, match="config: found dict, wanted an MLAConfig"):
        convert.from_hf(state_dict(CONFIG), {"hidden_size": 20})


@pytest.mark.golden
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors_get_the_way_out(dtype):
    import torch

    source = state_dict(CONFIG)
    tensor = torch.nn.Parameter(torch.tensor(source["o_proj.weight"]).to(getattr(torch, dtype)))
    with pytest.raises(TypeError, match=r"o_proj.weight: found a torch tensor, wanted a numpy array: .*\.numpy\(\)"):
        convert.from_hf({**source, "o_proj.weight": tensor}, CONFIG)
    if dtype == "bfloat16":  # the message's remedy
        array = tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        source["o_proj.weight"] = array
        params = convert.from_hf(source, CONFIG)
        assert params["wo"].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(params["wo"].astype(np.float32)[2, 6], tensor[:, 20].float().detach().numpy())
