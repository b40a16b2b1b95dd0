"""MLAConfig, RopeConfig, YarnScaling: validation, equality, presets, and reading Hugging Face configs."""

import dataclasses
import json
import math

import numpy as np
import pytest
import reference

from jax_mla import MLAConfig, RopeConfig, YarnScaling

YARN = dict(factor=40, original_max_position_embeddings=4096)
LAYER = dict(
    hidden_size=64, num_heads=3, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
)


def g(factor, m):
    return 0.1 * m * math.log(factor) + 1


# class, one bad field, its value, the error, and what its message must say besides the field's name.
BAD = [
    (YarnScaling, "factor", 0.5, ValueError, ["0.5", "1.0"]),
    (YarnScaling, "factor", float("nan"), ValueError, ["nan", "finite"]),
    (YarnScaling, "factor", float("inf"), ValueError, ["inf", "finite"]),
    (YarnScaling, "factor", "40", TypeError, ["'40'", "float"]),
    (YarnScaling, "factor", True, TypeError, ["True", "float"]),
    (YarnScaling, "original_max_position_embeddings", 0, ValueError, ["0", "at least 1"]),
    (YarnScaling, "original_max_position_embeddings", 4096.0, TypeError, ["4096.0", "int"]),
    (YarnScaling, "original_max_position_embeddings", None, TypeError, ["None", "int"]),
    (YarnScaling, "beta_fast", 0, ValueError, ["0.0", "above 0"]),
    (YarnScaling, "beta_fast", 0.5, ValueError, ["0.5", "beta_slow", "1.0"]),
    (YarnScaling, "beta_slow", -1, ValueError, ["-1.0", "above 0"]),
    (YarnScaling, "beta_slow", None, TypeError, ["None", "float"]),
    (YarnScaling, "mscale", -0.1, ValueError, ["-0.1", "at least 0"]),
    (YarnScaling, "mscale", None, TypeError, ["None", "float"]),
    (YarnScaling, "mscale_all_dim", float("inf"), ValueError, ["inf", "finite"]),
    (YarnScaling, "attention_factor", 0.0, ValueError, ["0.0", "above 0"]),
    (YarnScaling, "attention_factor", "1", TypeError, ["'1'", "float"]),
    (YarnScaling, "truncate", 1, TypeError, ["1", "bool"]),
    (RopeConfig, "theta", 1.0, ValueError, ["1.0", "above 1"]),
    (RopeConfig, "theta", "1e4", TypeError, ["'1e4'", "float"]),
    (RopeConfig, "scaling", {"factor": 40}, TypeError, ["factor", "YarnScaling"]),
    (RopeConfig, "interleave", "pairs", TypeError, ["'pairs'", "bool"]),
    (MLAConfig, "hidden_size", 0, ValueError, ["0", "at least 1"]),
    (MLAConfig, "hidden_size", 64.0, TypeError, ["64.0", "int"]),
    (MLAConfig, "num_heads", -3, ValueError, ["-3", "at least 1"]),
    (MLAConfig, "num_heads", True, TypeError, ["True", "int"]),
    (MLAConfig, "q_lora_rank", 0, ValueError, ["0", "at least 1"]),
    (MLAConfig, "q_lora_rank", "24", TypeError, ["'24'", "int"]),
    (MLAConfig, "kv_lora_rank", None, TypeError, ["None", "int"]),
    (MLAConfig, "qk_nope_head_dim", -1, ValueError, ["-1", "at least 0"]),
    (MLAConfig, "qk_rope_head_dim", 5, ValueError, ["5", "even"]),
    (MLAConfig, "qk_rope_head_dim", 0, ValueError, ["0", "at least 1"]),
    (MLAConfig, "v_head_dim", 0, ValueError, ["0", "at least 1"]),
    (MLAConfig, "norm_eps", -1e-6, ValueError, ["-1e-06", "at least 0"]),
    (MLAConfig, "norm_eps", float("nan"), ValueError, ["nan", "finite"]),
    (MLAConfig, "attention_bias", 1, TypeError, ["1", "bool"]),
    (MLAConfig, "attention_bias", None, TypeError, ["None", "bool"]),
    (MLAConfig, "rope", None, TypeError, ["None", "RopeConfig"]),
    (MLAConfig, "rope", YarnScaling(**YARN), TypeError, ["YarnScaling", "RopeConfig"]),
]
GOOD = {YarnScaling: YARN, RopeConfig: {}, MLAConfig: LAYER}


@pytest.mark.parametrize("kind, field, value, error, says", BAD, ids=lambda x: getattr(x, "__name__", None))
def test_bad_fields_are_named(kind, field, value, error, says):
    kind(**GOOD[kind])
    with pytest.raises(error) as raised:
        kind(**{**GOOD[kind], field: value})
    message = str(raised.value)
    assert message.startswith(f"{field}: found ") and ", wanted " in message
    for word in says:
        assert word in message


def test_numpy_numbers_are_taken():
    config = MLAConfig(**{**LAYER, "num_heads": np.int64(3), "norm_eps": np.float32(0.5)})
    assert config == MLAConfig(**LAYER, norm_eps=0.5) and type(config.num_heads) is int


def test_traced_fields_are_refused():
    import jax

    with pytest.raises(TypeError, match="num_heads: found a traced value"):
        jax.eval_shape(lambda h: MLAConfig(**{**LAYER, "num_heads": h}).num_heads, 3)
    with pytest.raises(TypeError, match="theta: found a traced value"):
        jax.eval_shape(lambda t: RopeConfig(theta=t).theta, 1e4)


def test_equal_configs_are_one_jit_entry():
    import jax

    def make(one, ten_thousand, forty):
        yarn = YarnScaling(factor=forty, original_max_position_embeddings=4096, mscale=one, beta_slow=one)
        return MLAConfig(**LAYER, rope=RopeConfig(theta=ten_thousand, scaling=yarn))

    a, b = make(1, 10000, 40), make(1.0, 1e4, np.float64(40))
    assert a == b and hash(a) == hash(b) and a is not b
    for field in dataclasses.fields(a.rope.scaling):
        assert type(getattr(a.rope.scaling, field.name)) is type(getattr(b.rope.scaling, field.name))
    calls = []
    jitted = jax.jit(lambda config, x: calls.append(config) or x * config.num_heads, static_argnums=0)
    jitted(a, 1.0)
    jitted(b, 2.0)
    assert len(calls) == 1 and jitted._cache_size() == 1


@pytest.mark.parametrize(
    "change", [dict(hidden_size=65), dict(q_lora_rank=None), dict(norm_eps=1e-5), dict(rope=RopeConfig(theta=5e4))]
)
def test_different_configs_differ(change):
    assert MLAConfig(**LAYER) != MLAConfig(**{**LAYER, **change})


def test_configs_are_frozen():
    for config, field in ((MLAConfig(**LAYER), "num_heads"), (RopeConfig(), "theta"), (YarnScaling(**YARN), "factor")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field, 2)


def test_presets_are_the_published_models():
    v3, lite, tiny = MLAConfig.deepseek_v3(), MLAConfig.deepseek_v2_lite(), MLAConfig.tiny()
    assert dataclasses.astuple(v3)[:9] == (7168, 128, 1536, 512, 128, 64, 128, 1e-6, False)
    assert dataclasses.astuple(lite)[:9] == (2048, 16, None, 512, 128, 64, 128, 1e-6, False)
    assert dataclasses.astuple(v3.rope) == (1e4, (40.0, 4096, 32.0, 1.0, 1.0, 1.0, None, True), True)
    assert dataclasses.astuple(lite.rope) == (1e4, (40.0, 4096, 32.0, 1.0, 0.707, 0.707, None, True), True)
    assert v3.qk_head_dim == lite.qk_head_dim == 192
    # 192^-0.5 times g(1)^2 = 1.3688879^2 and g(0.707)^2 = 1.2608038^2
    assert v3.softmax_scale == pytest.approx(0.135234, rel=1e-5)
    assert lite.softmax_scale == pytest.approx(0.114721, rel=1e-5)
    assert all(d % 32 == 0 for d in dataclasses.astuple(tiny)[2:7]) and tiny.q_lora_rank is not None


@pytest.mark.parametrize("factor", [1, 1.5, 40])
@pytest.mark.parametrize("mscale, all_dim", [(1.0, 0.0), (0.707, 1.0), (0.0, 0.5), (1.0, 1.0)])
def test_yarn_factors(factor, mscale, all_dim):
    yarn = YarnScaling(factor, 4096, mscale=mscale, mscale_all_dim=all_dim)
    config = MLAConfig(**LAYER, rope=RopeConfig(scaling=yarn))
    assert yarn.table_factor == pytest.approx(reference.table_factor(config.rope), rel=1e-15)
    assert config.softmax_scale == pytest.approx(reference.softmax_scale(config), rel=1e-15)
    if factor == 1 or all_dim == 0:
        assert config.softmax_scale == 12**-0.5
    overridden = dataclasses.replace(yarn, attention_factor=0.25)
    assert overridden.table_factor == 0.25 and overridden.softmax_factor == yarn.softmax_factor


# --- Hugging Face configs -----------------------------------------------------------------------------------------

HF = dict(
    hidden_size=64,
    num_attention_heads=3,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
)
# max_position_embeddings is the context after scaling; only a config without `factor` needs it.
HF_YARN = dict(factor=40, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=1.0, beta_fast=24)


def hf(**changes):
    return MLAConfig.from_hf({**HF, **changes})


def test_from_hf_dict_file_and_folder(tmp_path):
    want = MLAConfig(**LAYER)
    (tmp_path / "config.json").write_text(json.dumps(HF), encoding="utf-8")
    for source in (HF, tmp_path, str(tmp_path), tmp_path / "config.json", str(tmp_path / "config.json")):
        assert MLAConfig.from_hf(source) == want
    everything = {**HF, "model_type": "deepseek_v3", "vocab_size": 7, "num_key_value_heads": 3}
    assert MLAConfig.from_hf(everything) == want


def test_from_hf_files_that_cannot_be_read(tmp_path):
    with pytest.raises(OSError):
        MLAConfig.from_hf(tmp_path / "nowhere.json")
    with pytest.raises(OSError):
        MLAConfig.from_hf(tmp_path)  # a folder without a config.json
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config: found .*broken\.json.*not JSON"):
        MLAConfig.from_hf(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config: found .*list\.json.*, which holds a list, wanted a JSON object"):
        MLAConfig.from_hf(tmp_path / "list.json")
    with pytest.raises(TypeError, match="config: found int, wanted"):
        MLAConfig.from_hf(3)


@pytest.mark.parametrize("field", sorted(set(HF) - {"q_lora_rank"}))
@pytest.mark.parametrize("null", [True, False])
def test_from_hf_missing_fields_are_named(field, null):
    config = {**HF, field: None} if null else {name: value for name, value in HF.items() if name != field}
    with pytest.raises(ValueError, match=f"'{field}'"):
        MLAConfig.from_hf(config)


def test_from_hf_query_rank():
    assert hf(q_lora_rank=0).q_lora_rank is None and hf(q_lora_rank=None).q_lora_rank is None
    without = {name: value for name, value in HF.items() if name != "q_lora_rank"}
    assert MLAConfig.from_hf(without).q_lora_rank is None
    assert hf(q_lora_rank=24).q_lora_rank == 24


def test_from_hf_small_fields():
    assert hf(rms_norm_eps=1e-3).norm_eps == 1e-6  # Hugging Face's latent norms ignore it
    assert hf(attention_bias=True).attention_bias is True and hf(attention_bias=None).attention_bias is False
    assert hf().rope == RopeConfig(theta=10000.0, scaling=None, interleave=True)
    assert hf(rope_interleave=False).rope.interleave is False
    assert hf(rope_theta=50000).rope.theta == 50000.0
    assert hf(rope_theta=None).rope.theta == 10000.0
    assert hf(num_key_value_heads=3) == hf(num_key_value_heads=None) == hf()
    with pytest.raises(ValueError, match="num_key_value_heads: found 1, wanted num_attention_heads, which is 3"):
        hf(num_key_value_heads=1)


@pytest.mark.parametrize(
    "spelling",
    [
        dict(rope_theta=2e4, rope_scaling=dict(type="yarn", **HF_YARN)),
        dict(rope_theta=2e4, rope_scaling=dict(rope_type="yarn", **HF_YARN)),
        dict(rope_parameters=dict(rope_type="yarn", rope_theta=2e4, **HF_YARN)),
        dict(rope_theta=2e4, rope_parameters=dict(type="yarn", **HF_YARN)),
        dict(rope_theta=3e4, rope_scaling=None, rope_parameters=dict(rope_type="yarn", rope_theta=2e4, **HF_YARN)),
    ],
)
def test_from_hf_scaling_spellings(spelling):
    yarn = YarnScaling(40, 4096, beta_fast=24, mscale=0.707, mscale_all_dim=1.0)
    assert hf(**spelling).rope == RopeConfig(theta=2e4, scaling=yarn)


@pytest.mark.parametrize("none", [None, {}, dict(type="default"), dict(rope_type="default", rope_theta=1e4)])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_from_hf_no_scaling(name, none):
    assert hf(**{name: none}) == hf()


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "longrope", "deepseek"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_from_hf_other_scalings_are_refused(name, kind):
    with pytest.raises(ValueError, match=f"{name} type: found '{kind}', wanted 'default' or 'yarn'"):
        hf(**{name: dict(rope_type=kind, **HF_YARN)})


def test_from_hf_bad_scalings():
    with pytest.raises(ValueError, match=r"rope_scaling: found \['yarn'\], wanted a dict"):
        hf(rope_scaling=["yarn"])
    with pytest.raises(ValueError, match="original_max_position_embeddings"):
        hf(rope_scaling=dict(type="yarn", factor=40))
    with pytest.raises(ValueError, match="no factor"):
        hf(rope_scaling=dict(type="yarn", original_max_position_embeddings=4096))
    with pytest.raises(ValueError, match="factor: found 0.5"):
        hf(rope_scaling=dict(type="yarn", factor=0.5, original_max_position_embeddings=4096))
    with pytest.raises(ValueError, match="beta_fast: found 0.5"):
        hf(rope_scaling=dict(type="yarn", beta_fast=0.5, factor=4, original_max_position_embeddings=4096))
    with pytest.raises(TypeError, match="factor: found '40'"):
        hf(rope_scaling=dict(type="yarn", factor="40", original_max_position_embeddings=4096))


def test_from_hf_optional_yarn_fields():
    scaling = dict(type="yarn", original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
    assert hf(rope_scaling=scaling, max_position_embeddings=163840).rope.scaling.factor == 40.0
    yarn = hf(rope_scaling=dict(scaling, factor=8, beta_fast=None, beta_slow=None, truncate=False)).rope.scaling
    assert yarn == YarnScaling(8, 4096, mscale_all_dim=1.0, truncate=False)
    moved = dict(scaling, factor=8, original_max_position_embeddings=None)
    assert hf(rope_scaling=moved, original_max_position_embeddings=512).rope.scaling == YarnScaling(
        8, 512, mscale_all_dim=1.0
    )


# The fields as a file has them, then the factor of cos and sin and the softmax factor, worked out for factor 40.
# Hugging Face takes g(mscale)/g(mscale_all_dim) only where both are given and not 0, else g(1); DeepSeek's own code
# takes the ratio always, with defaults 1 and 0.
ATTENTION_FACTORS = [
    ({}, g(40, 1), 1.0),
    (dict(mscale=0.707), g(40, 1), 1.0),
    (dict(mscale_all_dim=0.707), g(40, 1), g(40, 0.707) ** 2),
    (dict(mscale=0.707, mscale_all_dim=0.0), g(40, 1), 1.0),
    (dict(mscale=0.0, mscale_all_dim=0.707), g(40, 1), g(40, 0.707) ** 2),
    (dict(mscale=None, mscale_all_dim=1.0), g(40, 1), g(40, 1) ** 2),
    (dict(mscale=1.0, mscale_all_dim=1.0), 1.0, g(40, 1) ** 2),
    (dict(mscale=1.0, mscale_all_dim=0.707), g(40, 1) / g(40, 0.707), g(40, 0.707) ** 2),
    (dict(mscale=0.5, mscale_all_dim=2.0), g(40, 0.5) / g(40, 2), g(40, 2) ** 2),
    (dict(mscale=1.0, mscale_all_dim=1.0, attention_factor=0.75), 0.75, g(40, 1) ** 2),
    (dict(attention_factor=0.75), 0.75, 1.0),
]


@pytest.mark.parametrize("fields, table, softmax", ATTENTION_FACTORS)
def test_from_hf_attention_factor(fields, table, softmax):
    yarn = hf(rope_scaling=dict(type="yarn", **YARN, **fields)).rope.scaling
    assert yarn.table_factor == pytest.approx(table, rel=1e-15)
    assert yarn.softmax_factor == pytest.approx(softmax, rel=1e-15)


@pytest.mark.golden
@pytest.mark.parametrize("fields, table, softmax", ATTENTION_FACTORS)
@pytest.mark.parametrize("factor", [40, 1])
def test_from_hf_attention_factor_is_transformers(fields, table, softmax, factor):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as golden

    scaling = dict(rope_type="yarn", factor=factor, original_max_position_embeddings=4096, **fields)
    theirs = DeepseekV3Config(**HF, num_key_value_heads=3, max_position_embeddings=163840, rope_scaling=dict(scaling))
    ours = hf(rope_scaling=scaling)
    rotary = golden.DeepseekV3RotaryEmbedding(theirs)
    assert ours.rope.scaling.table_factor == pytest.approx(rotary.attention_scaling, rel=1e-15)
    attention = golden.DeepseekV3Attention(theirs, 0)
    assert ours.softmax_scale == pytest.approx(attention.scaling, rel=1e-15)
    saved = theirs.to_dict()  # what a checkpoint saved by this version of transformers has in its config.json
    assert MLAConfig.from_hf(saved) == ours


SCALED = dict(type="yarn", factor=4, original_max_position_embeddings=512)


def test_from_hf_takes_what_transformers_takes():
    """Where a config says a thing twice, or with null, transformers' reading is ours."""
    both = hf(rope_scaling=SCALED, rope_parameters=dict(rope_type="default", rope_theta=700.0)).rope
    assert both.scaling.factor == 4 and both.theta == 700.0
    above = hf(rope_scaling=SCALED, original_max_position_embeddings=1024)
    assert above.rope.scaling.original_max_position_embeddings == 1024
    assert hf(rope_interleave=None).rope.interleave is False
    assert hf(attention_bias=None).attention_bias is False


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(rope_scaling=dict(SCALED, partial_rotary_factor=0.5)), "rope_scaling partial_rotary_factor: found 0.5"),
        (dict(attention_bias="false"), "attention_bias: found 'false'"),
        (dict(rope_interleave="false"), "rope_interleave: found 'false'"),
        (dict(rope_scaling=dict(SCALED, truncate="no")), "truncate: found 'no'"),
        (
            dict(rope_scaling=dict(type="yarn", original_max_position_embeddings="512"), max_position_embeddings=2048),
            "original_max_position_embeddings: found '512'",
        ),
    ],
)
def test_from_hf_names_what_it_cannot_take(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        hf(**change)
