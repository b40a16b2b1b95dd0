"""apply_rope and apply_rope_kv against the fp64 reference: values, bits, gradients and refusals."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from judge import assert_close, assert_same, check, draw

from jax_mla import RopeConfig, YarnScaling, apply_rope, apply_rope_kv, rope_tables

LAYOUTS = ("pairs", "halves")
ROPE = RopeConfig(theta=500.0, scaling=YarnScaling(8, 32, mscale=0.7, mscale_all_dim=1.3))


def tables(shape, rotary, seed=0):
    positions = np.random.default_rng(seed).integers(0, 300, shape)
    return rope_tables(jnp.asarray(positions, jnp.int32), ROPE, rotary)


@pytest.mark.parametrize("read,write,inverse", list(itertools.product(LAYOUTS, LAYOUTS, (False, True))))
@pytest.mark.parametrize("head,rotary", [(192, 64), (128, 32), (112, 48), (64, 64), (6, 4)])
def test_every_layout_and_partial_rotation(head, rotary, read, write, inverse):
    rng = np.random.default_rng(head)
    x, (cos, sin) = draw(rng, 2, 5, 3, head), tables((2, 5), rotary)
    options = dict(rotary_dim=rotary, input_layout=read, output_layout=write, inverse=inverse)
    y = jax.jit(lambda x: apply_rope(x, cos, sin, **options))(x)
    assert_close(y, reference.apply_rope(x, cos, sin, **options))
    assert_same(y[..., : head - rotary], x[..., : head - rotary])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_round_once(dtype):
    """fp32 inside: the result is the exact one rounded, but for ties that fp32 arithmetic may move by one step."""
    rng = np.random.default_rng(1)
    x, (cos, sin) = draw(rng, 3, 7, 5, 24, dtype=dtype), tables((7,), 8)
    y = apply_rope(x, cos, sin, rotary_dim=8)
    exact = reference.apply_rope(x, cos, sin, 8)
    assert y.dtype == x.dtype
    assert (reference.f64(y) == reference.f64(jnp.asarray(exact, jnp.float32).astype(dtype))).mean() > 0.999
    assert_same(y[..., :16], x[..., :16])


@pytest.mark.parametrize("read,write", list(itertools.product(LAYOUTS, LAYOUTS)))
def test_inverse_undoes_and_is_the_adjoint(read, write):
    rng = np.random.default_rng(2)
    x, y = draw(rng, 2, 5, 3, 20), draw(rng, 2, 5, 3, 20)
    cos, sin = rope_tables(jnp.arange(100, 105), RopeConfig(), 8)  # no YaRN: cos^2 + sin^2 = 1
    options = dict(rotary_dim=8, input_layout=read, output_layout=write)
    there = apply_rope(x, cos, sin, **options)
    assert_close(apply_rope(there, cos, sin, **options, inverse=True), x, 1e-6)
    cos, sin = tables((2, 5), 8)  # YaRN scales the tables: the adjoint still is one
    forward = np.vdot(apply_rope(x, cos, sin, **options), y)
    assert np.isclose(forward, np.vdot(x, apply_rope(y, cos, sin, **options, inverse=True)), rtol=1e-5)


@pytest.mark.parametrize(
    "x_shape,table_shape",
    [
        ((7, 3, 16), (7,)),  # packed tokens, thd
        ((2, 7, 3, 16), (7,)),
        ((2, 7, 3, 16), (2, 7)),
        ((2, 7, 3, 16), (1, 7)),
        ((7, 2, 3, 16), (7, 1)),  # sequence-major
        ((2, 3, 7, 1, 16), (3, 7)),  # more leading dims
        ((3, 16), ()),  # one token
    ],
)
def test_tables_broadcast_against_the_tokens(x_shape, table_shape):
    rng = np.random.default_rng(3)
    x, (cos, sin) = draw(rng, *x_shape), tables(table_shape, 8)
    op = lambda x, cos, sin: apply_rope(x, cos, sin, rotary_dim=8)  # noqa: E731
    y = check(op, lambda x, cos, sin: reference.apply_rope(x, cos, sin, 8), (x, cos, sin), rng)
    wide = [jnp.concatenate([t, t + 9.0], -1) for t in (cos, sin)]  # width P: the first half is read
    assert_same(jax.jit(op)(x, *wide), jax.jit(op)(x, cos, sin))
    assert y.shape == x.shape


@pytest.mark.parametrize("read,write,inverse", list(itertools.product(LAYOUTS, LAYOUTS, (False, True))))
def test_gradients_of_x_and_of_the_tables(read, write, inverse):
    rng = np.random.default_rng(4)
    options = dict(rotary_dim=8, input_layout=read, output_layout=write, inverse=inverse)
    args = (draw(rng, 2, 5, 3, 12), *tables((2, 5), 8))
    check(
        lambda x, cos, sin: apply_rope(x, cos, sin, **options),
        lambda x, cos, sin: reference.apply_rope(x, cos, sin, **options),
        args,
        rng,
    )


def test_x_is_saved_only_when_a_table_is_differentiated():
    x, (cos, sin) = jnp.ones((2, 5, 3, 12)), tables((5,), 8)
    saved = lambda f, *args: {a.shape for a in jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], *args))}  # noqa: E731
    assert x.shape not in saved(lambda x: apply_rope(x, cos, sin, rotary_dim=8), x)
    assert x.shape in saved(lambda cos: apply_rope(x, cos, sin, rotary_dim=8), cos)


def test_position_zero_changes_nothing_and_the_input_survives():
    """Cases 3 and 49 of public reports: rotation in place corrupts what is used again."""
    rng = np.random.default_rng(5)
    x, c, d = (draw(rng, 2, 8, 4, 192, dtype=jnp.bfloat16) for _ in range(3))
    cos, sin = rope_tables(jnp.arange(8), RopeConfig(), 64)
    before = np.asarray(x).copy()
    y = apply_rope(x, cos, sin, rotary_dim=64, input_layout="halves")
    assert_same(y[:, 0], x[:, 0])
    assert_same(x, before)

    def loss(rope, x):
        return jnp.sum((rope(x) * c).astype(jnp.float32)) + jnp.sum((x * d).astype(jnp.float32))

    ours = lambda x: apply_rope(x, cos, sin, rotary_dim=64)  # noqa: E731
    value, gradient = jax.jit(jax.value_and_grad(lambda x: loss(ours, x)))(x)
    remat = jax.jit(jax.value_and_grad(jax.checkpoint(lambda x: loss(ours, x))))(x)
    assert_same((value, gradient), remat)
    assert_same(x, before)
    assert_close(gradient, reference.apply_rope(c, cos, sin, 64, inverse=True) + reference.f64(d))


def test_empty_and_tiny():
    cos, sin = tables((0,), 4)
    assert apply_rope(jnp.zeros((2, 0, 3, 6)), cos, sin, rotary_dim=4).shape == (2, 0, 3, 6)
    cos, sin = tables((1,), 4)
    assert apply_rope(jnp.zeros((0, 1, 1, 4)), cos, sin).shape == (0, 1, 1, 4)
    k, v = apply_rope_kv(jnp.zeros((0, 1, 2, 5)), jnp.zeros((0, 1, 4)), cos, sin, nope_dim=2)
    assert k.shape == (0, 1, 2, 6) and v.shape == (0, 1, 2, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("read,write", list(itertools.product(LAYOUTS, LAYOUTS)))
def test_keys_and_values(read, write, dtype):
    rng = np.random.default_rng(6)
    kv, k_pe = draw(rng, 2, 7, 5, 11, dtype=dtype), draw(rng, 2, 7, 8, dtype=dtype)
    cos, sin = tables((2, 7), 8)
    options = dict(nope_dim=6, input_layout=read)
    k, v = apply_rope_kv(kv, k_pe, cos, sin, **options, output_layout=write)
    rotated = reference.apply_rope(k_pe[:, :, None], cos, sin, input_layout=read, output_layout=write)
    assert_same((k[..., :6], v), (kv[..., :6], kv[..., 6:]))
    assert_close(k[..., 6:], np.repeat(rotated, 5, axis=2))


def test_shared_rotary_key_gets_the_sum_over_heads():
    """Case 10 of public reports, by finite differences with a different cotangent in every head."""
    rng = np.random.default_rng(7)
    cos, sin = tables((2, 7), 8)
    args = (draw(rng, 2, 7, 5, 11), draw(rng, 2, 7, 8), cos, sin)
    check(lambda *a: apply_rope_kv(*a, nope_dim=6), lambda *a: reference.apply_rope_kv(*a, nope_dim=6), args, rng)


def test_head_sum_is_wide():
    """Case F12: 4096 ones summed in bfloat16 stop at 256."""
    heads = 4096
    cos, sin = rope_tables(jnp.zeros((1,), jnp.int32), RopeConfig(), 2)
    k_pe = jnp.zeros((1, 1, 2), jnp.bfloat16)
    _, pullback = jax.vjp(
        lambda k_pe: apply_rope_kv(jnp.zeros((1, 1, heads, 2), jnp.bfloat16), k_pe, cos, sin, nope_dim=1)[0], k_pe
    )
    assert_same(pullback(jnp.ones((1, 1, heads, 3), jnp.bfloat16))[0], jnp.full((1, 1, 2), 4096, jnp.bfloat16))


X, COS = jnp.zeros((2, 7, 3, 16)), jnp.zeros((7, 4))
REFUSED = [
    (dict(rotary_dim=7), "rotary_dim: found 7"),
    (dict(rotary_dim=18), "rotary_dim: found 18"),
    (dict(rotary_dim=0), "rotary_dim: found 0"),
    (dict(rotary_dim=8.0), "rotary_dim: found 8.0"),
    (dict(input_layout="interleaved"), "input_layout: found 'interleaved', wanted one of 'pairs', 'halves'"),
    (dict(output_layout=None), "output_layout: found None"),
    (dict(inverse=1), "inverse: found 1"),
    (dict(x=jnp.zeros(16)), r"x: found float32\[16\], wanted an array \[..., H, D\]"),
    (dict(x=jnp.zeros((2, 7, 3, 16), jnp.int32)), "x: found dtype int32"),
    (dict(x=jnp.zeros((2, 7, 3, 16), jnp.float8_e4m3fn)), "x: found dtype float8_e4m3fn"),
    (dict(x=[[0.0]]), "x: found list"),
    (dict(cos=jnp.zeros((6, 4))), r"cos: found float32\[6, 4\], wanted 4 or 8 columns and leading dims"),
    (dict(sin=jnp.zeros((7, 5))), r"sin: found float32\[7, 5\]"),
    (dict(sin=jnp.zeros((1, 1, 7, 4))), r"sin: found float32\[1, 1, 7, 4\]"),
    (dict(cos=jnp.zeros((3, 7, 4))), r"cos: found float32\[3, 7, 4\]"),
    (dict(cos=jnp.zeros((7, 4), jnp.int32)), "cos: found dtype int32"),
    (dict(cos=None), "cos: found NoneType"),
    (dict(implementation="cuda"), "implementation: found 'cuda', wanted one of 'xla'"),
    (dict(implementation=3), "implementation: found 3"),
]


@pytest.mark.parametrize("change,message", REFUSED, ids=[m for _, m in REFUSED])
def test_bad_input_is_named_before_any_launch(change, message):
    given = dict(x=X, cos=COS, sin=COS, rotary_dim=8) | change
    x, cos, sin = (given.pop(name) for name in ("x", "cos", "sin"))
    with pytest.raises((ValueError, TypeError), match=message):
        apply_rope(x, cos, sin, **given)
    if hasattr(x, "shape") and hasattr(cos, "shape"):
        with pytest.raises((ValueError, TypeError), match=message):
            jax.eval_shape(lambda x, cos, sin: apply_rope(x, cos, sin, **given), x, cos, sin)


KV, K_PE, T8 = jnp.zeros((2, 7, 3, 11)), jnp.zeros((2, 7, 8)), jnp.zeros((7, 4))


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(k_pe=jnp.zeros((2, 6, 8))), r"k_pe: found float32\[2, 6, 8\], wanted an array \[B=2, S=7, P\]"),
        (dict(k_pe=jnp.zeros((2, 7, 1, 8))), "k_pe: found"),
        (dict(k_pe=K_PE.astype(jnp.bfloat16)), "k_pe: found dtype bfloat16, wanted kv's"),
        (dict(k_pe=jnp.zeros((2, 7, 7))), "k_pe: found"),
        (dict(kv=jnp.zeros((7, 3, 11))), "kv: found"),
        (dict(nope_dim=11), "nope_dim: found 11"),
        (dict(nope_dim=-1), "nope_dim: found -1"),
        (dict(nope_dim=2.0), "nope_dim: found 2.0"),
        (dict(sin=jnp.zeros((7, 3))), "sin: found"),
        (dict(input_layout="half"), "input_layout"),
        (dict(output_layout="half"), "output_layout"),
        (dict(implementation="triton"), "apply_rope_kv.*'triton': needs"),
    ],
)
def test_bad_keys_and_values_are_named(change, message):
    given = dict(kv=KV, k_pe=K_PE, cos=T8, sin=T8, nope_dim=6) | change
    kv, k_pe, cos, sin = (given.pop(name) for name in ("kv", "k_pe", "cos", "sin"))
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        apply_rope_kv(kv, k_pe, cos, sin, **given)
