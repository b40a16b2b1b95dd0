"""rms_norm against the fp64 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from judge import assert_close, check, draw

from jax_mla import rms_norm


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 48), (96,), (1, 1)])
def test_values_and_gradients(shape, zero_centered):
    rng = np.random.default_rng(0)
    args = (draw(rng, *shape), draw(rng, shape[-1]))
    op = lambda x, scale: rms_norm(x, scale, 3e-2, zero_centered=zero_centered)  # noqa: E731
    model = lambda x, scale: reference.rms_norm(x, scale, 3e-2, zero_centered)  # noqa: E731
    check(op, model, args, rng)


@pytest.mark.parametrize(
    "dtype,scale_dtype", [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)
def test_mixed_dtypes(dtype, scale_dtype):
    rng = np.random.default_rng(1)
    x, scale = draw(rng, 64, 32, dtype=dtype), draw(rng, 32, dtype=scale_dtype)
    y, pullback = jax.vjp(lambda x, s: rms_norm(x, s, 1e-5), x, scale)
    assert y.dtype == x.dtype
    assert_close(y, reference.rms_norm(x, scale, 1e-5))
    dy = draw(rng, 64, 32, dtype=dtype)
    dx, dscale = pullback(dy)
    assert dx.dtype == x.dtype and dscale.dtype == scale.dtype
    normalised = reference.rms_norm(x, np.ones(32), 1e-5)
    # A float32 scale's gradient is summed in float32 from bfloat16 values: it is not rounded to bfloat16.
    assert_close(dscale, (reference.f64(dy) * normalised).sum(0))


def test_scale_gradient_is_summed_wide():
    """Case F12: a bfloat16 running sum of 4096 ones stops at 256."""
    x, scale = jnp.ones((4096, 2), jnp.bfloat16), jnp.ones(2, jnp.bfloat16)
    dscale = jax.grad(lambda s: jnp.sum(rms_norm(x, s, 0.0).astype(jnp.float32)))(scale)
    assert dscale.tolist() == [4096.0, 4096.0]


def test_saves_the_input_and_one_number_a_row():
    x, scale = jnp.ones((6, 5, 32)), jnp.ones(32)
    saved = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(lambda x, s: rms_norm(x, s, 1e-6), *a)[1], x, scale))
    assert sorted(a.shape for a in saved) == [(6, 5), (6, 5, 32), (32,)]


def test_tiny_rows_and_no_rows():
    assert rms_norm(jnp.zeros((0, 8)), jnp.ones(8), 1e-6).shape == (0, 8)
    assert np.all(np.asarray(rms_norm(jnp.zeros((3, 8)), jnp.ones(8), 1e-6)) == 0)


@pytest.mark.parametrize(
    "args,message",
    [
        ((jnp.ones((2, 8)), jnp.ones(7), 1e-6), r"scale: found float32\[7\], wanted an array \[K=8\]"),
        ((jnp.ones((2, 8), jnp.int32), jnp.ones(8), 1e-6), "x: found dtype int32"),
        ((jnp.ones((2, 8)), jnp.ones(8, jnp.int32), 1e-6), "scale: found dtype int32"),
        ((jnp.ones((2, 8)), jnp.ones(8), -1.0), "eps: found -1.0"),
        ((jnp.ones((2, 8)), jnp.ones(8), float("nan")), "eps: found nan"),
        ((jnp.ones((2, 8)), jnp.ones(8), jnp.ones(())), "eps: found"),
        ((jnp.ones(()), jnp.ones(8), 1e-6), "x: found"),
        ((None, jnp.ones(8), 1e-6), "x: found NoneType"),
    ],
)
def test_bad_input_is_named(args, message):
    with pytest.raises((ValueError, TypeError), match=message):
        rms_norm(*args)


def test_traced_eps_is_named():
    with pytest.raises(TypeError, match="eps: found a traced value"):
        jax.jit(lambda eps: rms_norm(jnp.ones((2, 8)), jnp.ones(8), eps))(1e-6)
    with pytest.raises(TypeError, match="zero_centered: found 'no'"):
        rms_norm(jnp.ones((2, 8)), jnp.ones(8), 1e-6, zero_centered="no")
