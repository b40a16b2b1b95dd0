"""cos/sin tables: YaRN's numbers, accuracy at far positions, dtypes, errors. (The rotation has its own tests.)"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jax_mla import MLAConfig, RopeConfig, YarnScaling, apply_rope, rope_tables

V3 = RopeConfig(scaling=YarnScaling(40, 4096, mscale=1.0, mscale_all_dim=1.0))

ROPES = {
    "plain": RopeConfig(),
    "theta 50000": RopeConfig(theta=50000.0),
    "deepseek v3": V3,
    "mscale differs": RopeConfig(scaling=YarnScaling(40, 4096, mscale=0.707, mscale_all_dim=1.3)),
    "no all_dim": RopeConfig(scaling=YarnScaling(8, 2048, mscale=0.5)),
    "attention_factor": RopeConfig(scaling=YarnScaling(40, 4096, attention_factor=0.375)),
    "not truncated": RopeConfig(scaling=YarnScaling(40, 4096, truncate=False, mscale=1.0, mscale_all_dim=1.0)),
    "betas": RopeConfig(theta=1234.5, scaling=YarnScaling(3.5, 777, beta_fast=10.5, beta_slow=2.25)),
    "beta_fast is beta_slow": RopeConfig(scaling=YarnScaling(40, 4096, beta_fast=4, beta_slow=4, truncate=False)),
    "factor 1": RopeConfig(scaling=YarnScaling(1, 4096, mscale=0.3, mscale_all_dim=2.0)),
    "long original": RopeConfig(scaling=YarnScaling(40, 131072)),
    "short original": RopeConfig(scaling=YarnScaling(40, 6)),
}


def table(positions, rope, dim, **kwargs):
    return [np.asarray(t) for t in rope_tables(jnp.asarray(positions), rope, dim, **kwargs)]


def frequencies(rope, dim):
    """The inverse frequencies, read back from the angles of position 1 (all are at most 1 radian)."""
    cos, sin = table([1], rope, dim)
    return np.arctan2(sin[0].astype(np.float64), cos[0].astype(np.float64))


# --- Published numbers --------------------------------------------------------------------------------------------


def test_yarn_numbers_of_deepseek_v3():
    """dim 64, theta 1e4, factor 40, 4096 original tokens, beta 32 and 1: the ramp runs from 10 to 23."""
    assert reference.yarn_range(64, 1e4, 4096, 32, 1) == (10, 23)
    wanted = {0: 1, 10: 0.05623413, 15: 0.00833451, 16: 0.0055, 23: 3.3338036e-5, 24: 2.5e-5, 31: 3.3338036e-6}
    found = frequencies(V3, 64)
    for i, value in wanted.items():
        assert found[i] == pytest.approx(value, rel=2e-6), i
    # mscale == mscale_all_dim: the factor of the tables is exactly 1
    cos, sin = table([0], V3, 64)
    assert (cos == 1).all() and (sin == 0).all()


def test_yarn_range_is_clamped_to_dim_minus_1():
    """For 131,072 original tokens the ramp runs from 22 to 35, past the 32 frequencies that exist: not to 31."""
    assert reference.yarn_range(64, 1e4, 131072, 32, 1) == (22, 35)
    found, plain = frequencies(ROPES["long original"], 64), frequencies(RopeConfig(), 64)
    ramp = 9 / 13  # of frequency 31
    assert found[31] == pytest.approx(plain[31] * (1 - ramp + ramp / 40), rel=2e-6)
    np.testing.assert_allclose(found[:23], plain[:23], rtol=2e-6)


def test_yarn_range_of_no_width_is_a_step():
    """The ramp's ends meet: no division by zero, each frequency is either kept or divided."""
    assert reference.yarn_range(64, 1e4, 6, 32, 1) == (0, 0)
    found, plain = frequencies(ROPES["short original"], 64), frequencies(RopeConfig(), 64)
    np.testing.assert_allclose(found, plain / np.where(np.arange(32) > 0, 40, 1), rtol=2e-6)
    found = frequencies(ROPES["beta_fast is beta_slow"], 64)
    edge = 64 * math.log(4096 / (4 * 2 * math.pi)) / (2 * math.log(1e4))
    np.testing.assert_allclose(found, plain / np.where(np.arange(32) > edge, 40, 1), rtol=2e-6)


def test_partial_rotary_frequencies_are_of_the_rotary_dim():
    """Head 6, rotary_dim 4: inverse frequencies [1, 0.01] (of the head's 6 dims they would be [1, 0.0464])."""
    np.testing.assert_allclose(frequencies(RopeConfig(), 4), [1, 0.01], rtol=2e-6)
    x = np.random.default_rng(0).normal(size=(1, 3, 6)).astype(np.float32)
    cos, sin = rope_tables(jnp.array([1]), RopeConfig(), 4)
    y = np.asarray(apply_rope(x, cos, sin, rotary_dim=4))
    assert y[..., :2].tobytes() == x[..., :2].tobytes()
    np.testing.assert_allclose(y, reference.apply_rope(x, cos, sin, 4), rtol=0, atol=1e-6)
    assert not np.allclose(y[..., 2:], x[..., 2:], atol=1e-2)
    for bad in (3, 8, 0, -2):
        with pytest.raises(ValueError, match=f"rotary_dim: found {bad}, wanted"):
            apply_rope(x, cos, sin, rotary_dim=bad)


# --- Against the reference ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [2, 10, 64])
@pytest.mark.parametrize("name", ROPES)
def test_tables_are_the_reference(name, dim):
    rope = ROPES[name]
    positions = np.array([[0, 1, 2, 3, 50], [17, 18, 19, 401, 402]])  # offsets, gaps
    for found, wanted in zip(table(positions, rope, dim), reference.rope_tables(positions, rope, dim), strict=True):
        assert found.shape == (2, 5, dim // 2) and found.dtype == np.float32
        # fp32 angles: half an ulp of the position times the frequency, and of the frequency
        np.testing.assert_allclose(found, wanted, rtol=0, atol=402 * 2**-23 * reference.table_factor(rope))


@pytest.mark.parametrize("name", ["plain", "deepseek v3", "mscale differs"])
def test_far_positions(name):
    """At 100k and beyond: cos and sin of float32(position) * float32 frequency, to fp32 rounding; the exact angle is at
    most an ulp of that product away."""
    rope = ROPES[name]
    positions = np.array([4095, 65535, 99_999, 100_000, 163_839, 1_000_003])
    freq32 = reference.inv_freq(rope, 64).astype(np.float32)
    angles = positions.astype(np.float32)[:, None] * freq32
    assert angles.dtype == np.float32
    factor = reference.table_factor(rope)
    found = table(positions, rope, 64)
    for at, wanted in zip(found, (np.cos, np.sin), strict=True):
        np.testing.assert_allclose(at, wanted(angles.astype(np.float64)) * factor, rtol=0, atol=3e-7)
    exact = reference.rope_tables(positions, rope, 64)
    bound = (positions[:, None] * freq32.astype(np.float64) * 2**-23 + 3e-7) * factor
    for at, wanted in zip(found, exact, strict=True):
        assert (np.abs(at - wanted) <= bound).all()


def test_angles_are_the_tokens_own():
    """Nothing is looked up: a token's row depends on its position alone, however far and in whatever order."""
    rng = np.random.default_rng(1)
    positions = rng.integers(0, 200_000, (3, 7))
    cos, sin = table(positions, V3, 8)
    jitted = jax.jit(rope_tables, static_argnums=(1, 2))
    for b, t in np.ndindex(positions.shape):
        one = table(positions[b, t], V3, 8)
        assert one[0].shape == (4,)
        assert one[0].tobytes() == cos[b, t].tobytes() and one[1].tobytes() == sin[b, t].tobytes()
    np.testing.assert_allclose(jitted(positions, V3, 8), (cos, sin), rtol=0, atol=2e-7)
    mapped = jax.vmap(lambda p: rope_tables(p, V3, 8))(jnp.asarray(positions))
    np.testing.assert_allclose(mapped, (cos, sin), rtol=0, atol=2e-7)
    shapes = jax.eval_shape(lambda p: rope_tables(p, V3, 8), jax.ShapeDtypeStruct((0, 5), jnp.int32))
    assert [s.shape for s in shapes] == [(0, 5, 4)] * 2


def test_factor_multiplies_both_tables_and_position_0():
    scaling = YarnScaling(40, 4096, mscale=0.707, mscale_all_dim=1.3)
    neutral = RopeConfig(scaling=dataclasses.replace(scaling, attention_factor=1.0))
    factor = (0.0707 * math.log(40) + 1) / (0.13 * math.log(40) + 1)
    positions = np.arange(5, 40)
    rope = RopeConfig(scaling=scaling)
    for plain, scaled in zip(table(positions, neutral, 16), table(positions, rope, 16), strict=True):
        np.testing.assert_allclose(scaled, plain * factor, rtol=3e-7)
    cos, sin = table([0], rope, 16)
    assert (cos == np.float32(factor)).all() and (sin == 0).all()


# --- Dtypes and x64 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, "float32"])
def test_result_dtype_is_rounded_once(dtype):
    for found, wanted in zip(table(np.arange(99), V3, 64, dtype=dtype), table(np.arange(99), V3, 64), strict=True):
        assert found.dtype == jnp.dtype(dtype)
        assert found.tobytes() == wanted.astype(jnp.dtype(dtype)).tobytes()


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32])
def test_position_dtypes(dtype):
    positions = np.arange(3, 120)
    for found, wanted in zip(table(positions.astype(dtype), V3, 8), table(positions, V3, 8), strict=True):
        assert found.tobytes() == wanted.tobytes()


def test_x64_changes_nothing():
    positions = np.array([0, 5, 99_999, 163_839])
    wanted = table(positions.astype(np.int32), V3, 64)
    with jax.enable_x64(True):
        wide = jnp.asarray(positions)
        assert wide.dtype == jnp.int64
        found = rope_tables(wide, V3, 64)
        assert "f64" not in str(jax.make_jaxpr(lambda p: rope_tables(p, V3, 64))(wide))
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == jnp.float32 and np.asarray(a).tobytes() == b.tobytes()


# --- Errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, error, says",
    [
        (
            dict(positions=np.arange(3.0, dtype=np.float32)),
            TypeError,
            "positions: found dtype float32, wanted an integer",
        ),
        (dict(positions=np.array([True])), TypeError, "positions: found dtype bool, wanted an integer"),
        (dict(rotary_dim=5), ValueError, "rotary_dim: found 5, wanted an even number"),
        (dict(rotary_dim=0), ValueError, "rotary_dim: found 0, wanted at least 2"),
        (dict(rotary_dim=4.0), TypeError, "rotary_dim: found 4.0, wanted a Python int"),
        (dict(rope=MLAConfig.tiny()), TypeError, "rope: found MLAConfig.*, wanted a RopeConfig"),
        (dict(rope=None), TypeError, "rope: found None, wanted a RopeConfig"),
        (dict(dtype=jnp.int32), TypeError, "dtype: found int32, wanted a floating dtype"),
    ],
)
def test_errors(change, error, says):
    good = dict(positions=np.arange(3), rope=RopeConfig(), rotary_dim=4)
    rope_tables(**good)
    with pytest.raises(error, match=says):
        rope_tables(**{**good, **change})


def test_yarn_betas_in_the_wrong_order():
    with pytest.raises(ValueError, match="beta_fast: found 1.0, wanted at least beta_slow, which is 32.0"):
        YarnScaling(40, 4096, beta_fast=1, beta_slow=32)


# --- Transformers' own --------------------------------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize("name", ROPES)
def test_tables_are_transformers(name):
    import torch
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    rope = ROPES[name]
    parameters = dict(rope_type="default", rope_theta=rope.theta)
    if rope.scaling is not None:
        # Where this says nothing of attention_factor, theirs and ours (DeepSeek's) differ: state it.
        parameters.update(dataclasses.asdict(rope.scaling), rope_type="yarn")
        parameters["attention_factor"] = reference.table_factor(rope)
    config = DeepseekV3Config(qk_rope_head_dim=64, max_position_embeddings=163840, rope_parameters=parameters)
    golden = DeepseekV3RotaryEmbedding(config)
    np.testing.assert_allclose(frequencies(rope, 64), golden.inv_freq.numpy(), rtol=2e-6)
    positions = np.array([[0, 1, 2, 30], [7, 8, 9, 100]])
    wanted = golden(torch.zeros(1), torch.tensor(positions))
    for found, theirs in zip(table(positions, rope, 64), wanted, strict=True):
        np.testing.assert_allclose(found, theirs[..., :32].numpy(), rtol=0, atol=100 * 2**-22)
