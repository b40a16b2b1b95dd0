"""The whole layer against the fp64 reference, forward and the gradient of every parameter, without torch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jax_mla import MLAConfig, RopeConfig, YarnScaling, init, mla

YARN = YarnScaling(40, 64, beta_fast=4, mscale=0.707, mscale_all_dim=1.2)
BASE = MLAConfig(
    hidden_size=20,
    num_heads=3,
    q_lora_rank=10,
    kv_lora_rank=9,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
    norm_eps=3e-3,
    attention_bias=True,
    rope=RopeConfig(theta=300.0, scaling=YARN),
)
PACKED = np.array([[1, 1, 1, 2, 2, 0, 0], [4, 4, 7, 7, 7, 7, 7]])
POSITIONS = np.array([[5, 6, 9, 10, 30, 31, 50], [0, 2, 3, 4, 8, 9, 11]])

CASES = {
    # Every leaf of a layer with every part: none may quietly get no gradient.
    "tiny, bias": (dataclasses.replace(MLAConfig(48, 2, 32, 32, 32, 32, 32), attention_bias=True), {}),
    "uneven dims, YaRN": (BASE, dict(positions=POSITIONS)),
    "halves": (dataclasses.replace(BASE, rope=RopeConfig(theta=300.0, interleave=False)), dict(positions=POSITIONS)),
    "no q rank": (dataclasses.replace(BASE, q_lora_rank=None, attention_bias=False), dict(positions=POSITIONS[0])),
    "no nope dims": (dataclasses.replace(BASE, qk_nope_head_dim=0), {}),
    "packed": (BASE, dict(segment_ids=PACKED)),
    "packed, own positions": (BASE, dict(segment_ids=PACKED, positions=POSITIONS)),
}


def random_params(config, seed):
    """Weights about as large as a trained layer's; norms away from 1, biases away from 0."""
    rng = np.random.default_rng(seed)
    result = {}
    for name, value in jax.eval_shape(lambda key: init(key, config), jax.random.key(0)).items():
        if name.endswith("norm"):
            result[name] = rng.uniform(0.5, 1.5, value.shape)
        else:
            fan_in = value.shape[0] if value.ndim < 3 or name != "wo" else value.shape[0] * value.shape[1]
            result[name] = rng.normal(size=value.shape) * (0.3 if name.endswith("bias") else fan_in**-0.5)
    return {name: value.astype(np.float32) for name, value in result.items()}


def expanded(options):
    """The reference takes positions [B,T]."""
    if np.ndim(options.get("positions")) == 1:
        return {**options, "positions": np.broadcast_to(options["positions"], (2, 7))}
    return options


def run_ours(config, options, params, x, c):
    """y, dparams, dx for the cotangent c."""

    @jax.jit
    def run(params, x):
        y, pullback = jax.vjp(lambda p, x: mla(p, x, config, **jax.tree.map(jnp.asarray, options)), params, x)
        return y, *pullback(jnp.asarray(c))

    return jax.tree.map(np.asarray, run(params, x))


@pytest.mark.parametrize("name", CASES)
def test_forward_and_every_gradient(name):
    config, options = CASES[name]
    params = random_params(config, seed=1)
    rng = np.random.default_rng(2)
    x, c = rng.normal(size=(2, 2, 7, config.hidden_size)).astype(np.float32)
    padding = options.get("segment_ids", np.ones((2, 7))) == 0
    x[padding] = np.nan  # reaches nothing

    y, dparams, dx = run_ours(config, options, params, x, c)
    wanted = reference.mla(params, x, config, **expanded(options))
    assert y.dtype == dx.dtype == np.float32
    np.testing.assert_allclose(y, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())
    assert (y[padding] == 0).all() and (dx[padding] == 0).all()

    names = [*params, "x"]
    args = [*params.values(), np.where(padding[..., None], 0, x)]
    gradients = [g.astype(np.float64) for g in (*(dparams[n] for n in params), dx)]

    def loss(*args):
        moved = dict(zip(params, args[:-1], strict=True))
        return (reference.mla(moved, args[-1], config, **expanded(options)) * c).sum()

    for _ in range(2):
        directions = reference.one_at_a_time(rng, args)
        numeric = reference.numeric_grad(loss, args, directions)
        for i, leaf in enumerate(names):
            assert gradients[i].shape == args[i].shape and np.isfinite(gradients[i]).all(), leaf
            assert np.abs(gradients[i]).max() > 1e-3, f"{leaf} gets no gradient"
            # A random direction's derivative is about as large as the gradient's norm.
            error = abs((gradients[i] * directions[i][i]).sum() - numeric[i])
            assert error < 1e-4 * np.linalg.norm(gradients[i]), leaf


def test_segments_are_separate_layers():
    """A packed row equals its sequences run one by one: the output, dx, and the sum of their parameter gradients."""
    params = random_params(BASE, seed=1)
    x, c = np.random.default_rng(4).normal(size=(2, 1, 7, BASE.hidden_size)).astype(np.float32)
    # The same tokens as one row with padding at both ends, and as a batch of two sequences.
    y, dparams, dx = run_ours(BASE, dict(segment_ids=np.array([[0, 5, 5, 5, 2, 2, 2]])), params, x, c)
    alone_y, alone_dparams, alone_dx = run_ours(BASE, {}, params, *(a[:, 1:].reshape(2, 3, -1) for a in (x, c)))
    np.testing.assert_allclose(y[:, 1:].reshape(2, 3, -1), alone_y, rtol=0, atol=3e-6)
    np.testing.assert_allclose(dx[:, 1:].reshape(2, 3, -1), alone_dx, rtol=0, atol=1e-5)
    for name, gradient in alone_dparams.items():
        np.testing.assert_allclose(dparams[name], gradient, rtol=0, atol=1e-5 * np.abs(gradient).max(), err_msg=name)
