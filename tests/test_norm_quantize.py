"""rms_norm_quantize: `rms_norm` in float32, straight to MXFP8, with RMSNorm's gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from judge import assert_close, assert_same, draw

from jax_mla import dequantize, quantize_mxfp8, rms_norm
from jax_mla.norm_quantize import rms_norm_quantize


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("usage,token_axis,shape", [("both", -2, (64, 96)), ("columnwise", -3, (1, 32, 2, 40))])
def test_bits_of_the_float32_norm(usage, token_axis, shape, zero_centered):
    """No rounding to bfloat16 in between: the bits of quantising the float32 norm, not of the bfloat16 one."""
    rng = np.random.default_rng(0)
    x, scale = draw(rng, *shape, dtype="bfloat16"), draw(rng, shape[-1])
    options = dict(usage=usage, token_axis=token_axis)
    norm = dict(eps=3e-2, zero_centered=zero_centered)
    found = jax.jit(lambda x, s: rms_norm_quantize(x, s, **norm, **options).detach())(x, scale)
    wide = jax.jit(lambda x, s: rms_norm(x, s, **norm))(x.astype(jnp.float32), scale)
    wanted = quantize_mxfp8(wide, **options)
    assert found.dtype == jnp.bfloat16 and found.usages == wanted.usages
    assert_same(jax.tree.leaves(found), jax.tree.leaves(wanted.detach()))
    rounded = quantize_mxfp8(wide.astype(jnp.bfloat16), **options).detach()
    usage = found.usages[0]
    assert not np.array_equal(np.asarray(rounded.copy(usage)[0]), np.asarray(found.copy(usage)[0]))


@pytest.mark.parametrize(
    "dtype,scale_dtype", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_gradients_are_the_norms(dtype, scale_dtype):
    rng = np.random.default_rng(1)
    x, scale = draw(rng, 32, 64, dtype=dtype), draw(rng, 64, dtype=scale_dtype)
    c = draw(rng, 32, 64, dtype=dtype) * 1000

    @jax.jit
    def run(x, scale, c):
        quantised = jax.vjp(lambda x, s: dequantize(rms_norm_quantize(x, s, 3e-2, usage="both")), x, scale)
        return quantised[1](c), jax.vjp(lambda x, s: rms_norm(x, s, 3e-2), x, scale)[1](c)

    found, wanted = run(x, scale, c)
    assert [g.dtype for g in found] == [x.dtype, scale.dtype]
    assert_close(found, wanted)
    saved = jax.eval_shape(lambda x, s: jax.vjp(lambda *a: rms_norm_quantize(*a, 1e-6), x, s)[1], x, scale)
    assert sorted(a.shape for a in jax.tree.leaves(saved)) == [(32,), (32, 64), (64,)]


@pytest.mark.parametrize("kind", ["Explicit", "Manual"])
def test_scale_gradient_is_summed_over_devices_once(kind):
    """Case 6: rows sharded, scale replicated."""
    rng = np.random.default_rng(2)
    x, scale, c = draw(rng, 4, 32, 32), draw(rng, 32), draw(rng, 4, 32, 32)
    loss = lambda x, s, c: jnp.sum(dequantize(rms_norm_quantize(x, s, 1e-6, usage="both")) * c)  # noqa: E731
    wanted = jax.grad(loss, (0, 1))(x, scale, c)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit if kind == "Explicit" else AxisType.Auto,))
    if kind == "Explicit":
        with jax.set_mesh(mesh):
            args = jax.device_put(x, P("data")), jax.device_put(scale, P()), jax.device_put(c, P("data"))
            assert_close(jax.jit(jax.grad(loss, (0, 1)))(*args), wanted)
        return
    for check in (True, False):
        body = lambda x, s, c: jax.lax.psum(loss(x, s, c), "data")  # noqa: E731
        specs = (P("data"), P(), P("data"))
        run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check)
        assert_close(jax.jit(jax.grad(run, (0, 1)))(x, scale, c), wanted)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: rms_norm_quantize(jnp.ones((2, 48)), jnp.ones(48), 1e-6), "x: found axis -1 of size 48"),
        (lambda: rms_norm_quantize(jnp.ones((2, 32)), jnp.ones(31), 1e-6), "scale: found"),
        (lambda: rms_norm_quantize(jnp.ones((2, 32)), jnp.ones(32), -1.0), "eps: found -1.0"),
        (lambda: rms_norm_quantize(jnp.ones((2, 32), jnp.int8), jnp.ones(32), 1e-6), "x: found dtype int8"),
        (lambda: rms_norm_quantize(jnp.ones((2, 32)), jnp.ones(32), 1e-6, usage="row"), "usage: found 'row'"),
        (
            lambda: rms_norm_quantize(jnp.ones((2, 32)), jnp.ones(32), 1e-6, implementation="triton"),
            "rms_norm_quantize: found no implementation",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        call()
