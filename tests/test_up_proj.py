"""q_up_proj_rope, kv_up_proj_rope and the dense contraction against the fp64 reference."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from judge import assert_close, check, draw

from jax_mla import RopeConfig, YarnScaling, kv_up_proj_rope, q_up_proj_rope, rope_tables
from jax_mla.linear import linear

ROPE = RopeConfig(theta=700.0, scaling=YarnScaling(8, 32, mscale=0.7, mscale_all_dim=1.3))
LAYOUTS = ("pairs", "halves")


def tables(shape, rotary):
    positions = np.random.default_rng(9).integers(0, 300, shape)
    return rope_tables(jnp.asarray(positions, jnp.int32), ROPE, rotary)


@pytest.mark.parametrize("normed,biased,layout", list(itertools.product((False, True), (False, True), LAYOUTS)))
def test_queries(normed, biased, layout):
    rng = np.random.default_rng(0)
    B, T, R, H, N, P = 2, 5, 10, 3, 6, 8
    args = [draw(rng, B, T, R), draw(rng, R, H, N + P) * R**-0.5, *tables((B, T), P)]
    names = [n for n, on in (("norm_scale", normed), ("bias", biased)) if on]
    args += [draw(rng, *dict(norm_scale=(R,), bias=(H, N + P))[n]) for n in names]
    options = dict(nope_dim=N, norm_eps=2e-2, input_layout=layout)

    def op(x, w, cos, sin, *rest):
        return q_up_proj_rope(x, w, cos, sin, **dict(zip(names, rest, strict=True)), **options)

    def model(x, w, cos, sin, *rest):
        return reference.q_up_proj_rope(x, w, cos, sin, **dict(zip(names, rest, strict=True)), **options)

    check(op, model, args, rng)


def test_queries_written_as_pairs():
    rng = np.random.default_rng(1)
    x, w, (cos, sin) = draw(rng, 2, 5, 10), draw(rng, 10, 3, 14), tables((5,), 8)
    check(
        lambda x, w: q_up_proj_rope(x, w, cos, sin, nope_dim=6, output_layout="pairs"),
        lambda x, w: reference.apply_rope(reference.up_projection(x, w), cos, sin, 8, "pairs", "pairs"),
        (x, w),
        rng,
    )


@pytest.mark.parametrize("normed,biased,layout", list(itertools.product((False, True), (False, True), LAYOUTS)))
def test_keys_and_values(normed, biased, layout):
    rng = np.random.default_rng(2)
    B, S, C, H, N, P, V = 2, 5, 10, 3, 6, 8, 7
    args = [draw(rng, B, S, C), draw(rng, C, H, N + V) * C**-0.5, draw(rng, B, S, P), *tables((S,), P)]
    names = [n for n, on in (("norm_scale", normed), ("bias", biased)) if on]
    args += [draw(rng, *dict(norm_scale=(C,), bias=(H, N + V))[n]) for n in names]
    options = dict(nope_dim=N, norm_eps=2e-2, input_layout=layout)

    def op(x, w, k_pe, cos, sin, *rest):
        return kv_up_proj_rope(x, w, k_pe, cos, sin, **dict(zip(names, rest, strict=True)), **options)

    def model(x, w, k_pe, cos, sin, *rest):
        return reference.kv_up_proj_rope(x, w, k_pe, cos, sin, **dict(zip(names, rest, strict=True)), **options)

    check(op, model, args, rng)


@pytest.mark.parametrize("dtype,w_dtype", [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_mixed_precision_gradients(dtype, w_dtype):
    """Results have x's dtype; a parameter's gradient has its own, and a float32 one was never rounded to bfloat16."""
    rng = np.random.default_rng(3)
    x, w, bias = (
        draw(rng, 2, 9, 32, dtype=dtype),
        draw(rng, 32, 3, 16, dtype=w_dtype) / 5,
        draw(rng, 3, 16, dtype=w_dtype),
    )
    scale, (cos, sin) = draw(rng, 32, dtype=w_dtype), tables((9,), 8)
    op = lambda x, w, s, b: q_up_proj_rope(x, w, cos, sin, nope_dim=8, norm_scale=s, bias=b)  # noqa: E731
    q, pullback = jax.vjp(op, x, w, scale, bias)
    wanted = reference.q_up_proj_rope(x, w, cos, sin, 8, scale, bias=bias)
    assert q.dtype == x.dtype
    assert_close(q, wanted, 2e-2 if dtype == "bfloat16" else 3e-6)
    dq = draw(rng, *q.shape, dtype=dtype)
    gradients = pullback(dq)
    assert [g.dtype for g in gradients] == [x.dtype, w.dtype, scale.dtype, bias.dtype]
    dw, dbias = gradients[1], gradients[3]
    # The operands a bfloat16 wgrad multiplies are the rounded latent and the rounded dz: exact in float64 from here.
    rounded = lambda a: reference.f64(jnp.asarray(a, jnp.float32).astype(dtype))  # noqa: E731
    latent = rounded(reference.rms_norm(x, scale, 1e-6))
    dz = rounded(reference.apply_rope(dq, cos, sin, 8, inverse=True))
    limit = 2e-2 if w_dtype == "bfloat16" else 2e-3  # rounding ties of latent and dz, not of the sum
    assert_close(dw, np.einsum("btr,bthd->rhd", latent, dz), limit)
    assert_close(dbias, dz.sum((0, 1)), limit)
    if w_dtype == "float32":
        assert (dw != dw.astype(jnp.bfloat16).astype(jnp.float32)).mean() > 0.9


def test_the_heads_are_not_saved():
    """Residuals: the latent, one number a row, parameters and tables. Neither q nor the normalised latent."""
    x, w, s = jnp.ones((2, 9, 32)), jnp.ones((32, 3, 16)), jnp.ones(32)
    cos, sin = tables((9,), 8)
    op = lambda x, w, s: q_up_proj_rope(x, w, cos, sin, nope_dim=8, norm_scale=s)  # noqa: E731
    saved = [a.shape for a in jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(op, *a)[1], x, w, s))]
    assert sorted(saved) == sorted([x.shape, (2, 9), w.shape, s.shape, (9, 4), (9, 4)]) or sorted(saved) == sorted(
        [x.shape, (2, 9), w.shape, s.shape, (1, 9, 4), (1, 9, 4)]
    )


@pytest.mark.parametrize("contract", [1, 2])
def test_linear(contract):
    rng = np.random.default_rng(4)
    x, w, bias = draw(rng, 2, 5, 3, 4), draw(rng, *(4, 6) if contract == 1 else (3, 4, 6)), draw(rng, 6)
    model = lambda x, w, b: np.tensordot(reference.f64(x), reference.f64(w), contract) + reference.f64(b)  # noqa: E731
    op = lambda x, w, b: linear(x, w, b, contract=contract)  # noqa: E731
    check(op, model, (x, w, bias), rng)
    with pytest.raises(ValueError, match="w: found"):
        linear(x, w[1:], contract=contract)
    with pytest.raises(ValueError, match="bias: found"):
        linear(x, w, bias[1:], contract=contract)


X, W, COS = jnp.zeros((2, 7, 12)), jnp.zeros((12, 3, 14)), jnp.zeros((7, 4))


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(w=jnp.zeros((11, 3, 14))), r"w: found float32\[11, 3, 14\], wanted an array \[R=12, H, D\]"),
        (dict(w=jnp.zeros((12, 42))), "w: found"),
        (dict(w=W.astype(jnp.int8)), "w: found dtype int8"),
        (dict(x=X.astype(jnp.int32)), "x: found dtype int32"),
        (dict(x=jnp.zeros(12)), "x: found"),
        (dict(nope_dim=14), "nope_dim: found 14"),
        (dict(nope_dim=7), "nope_dim: found 7"),
        (dict(nope_dim="6"), "nope_dim: found '6'"),
        (dict(cos=jnp.zeros((6, 4))), "cos: found"),
        (dict(sin=jnp.zeros((7, 3))), "sin: found"),
        (dict(norm_scale=jnp.zeros(11)), "norm_scale: found"),
        (dict(norm_eps=-1), "norm_eps: found -1"),
        (dict(bias=jnp.zeros((14, 3))), "bias: found"),
        (dict(bias=jnp.zeros((3, 14), jnp.int32)), "bias: found dtype int32"),
        (dict(input_layout="x"), "input_layout"),
        (dict(output_layout="x"), "output_layout"),
        (dict(implementation="mosaic"), "q_up_proj_rope: found no implementation.*'mosaic'"),
        (dict(implementation=("triton", "cudnn")), "'triton': .*; 'cudnn': "),
        (dict(implementation=[]), "implementation: found"),
    ],
)
def test_bad_queries_are_named(change, message):
    given = dict(x=X, w=W, cos=COS, sin=COS, nope_dim=6) | change
    x, w, cos, sin = (given.pop(name) for name in ("x", "w", "cos", "sin"))
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        q_up_proj_rope(x, w, cos, sin, **given)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(w=jnp.zeros((11, 3, 13))), "w: found"),
        (dict(x=jnp.zeros((7, 12))), "x: found"),
        (dict(k_pe=jnp.zeros((2, 6, 8))), "k_pe: found"),
        (dict(k_pe=jnp.zeros((2, 7, 8), jnp.bfloat16)), "k_pe: found dtype bfloat16, wanted x's"),
        (dict(k_pe=jnp.zeros((2, 7, 5))), "k_pe: found"),
        (dict(nope_dim=13), "nope_dim: found 13"),
        (dict(bias=jnp.zeros((3, 12))), "bias: found"),
        (dict(norm_scale=jnp.zeros((1, 12))), "norm_scale: found"),
        (dict(cos=jnp.zeros((2, 6, 4))), "cos: found"),
        (dict(input_layout="x"), "input_layout"),
        (dict(output_layout="x"), "output_layout"),
        (dict(implementation="cudnn"), "kv_up_proj_rope: found no implementation.*'cudnn'"),
    ],
)
def test_bad_keys_and_values_are_named(change, message):
    given = dict(x=X, w=jnp.zeros((12, 3, 13)), k_pe=jnp.zeros((2, 7, 8)), cos=COS, sin=COS, nope_dim=6) | change
    arrays = [given.pop(name) for name in ("x", "w", "k_pe", "cos", "sin")]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        kv_up_proj_rope(*arrays, **given)


def test_an_implementation_list_takes_the_first_that_can_run():
    rng = np.random.default_rng(5)
    x, w, (cos, sin) = draw(rng, 2, 5, 10), draw(rng, 10, 3, 14), tables((5,), 8)
    q = q_up_proj_rope(x, w, cos, sin, nope_dim=6, implementation=["cudnn", "xla"])
    assert_close(q, reference.q_up_proj_rope(x, w, cos, sin, 6))
