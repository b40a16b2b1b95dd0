"""On an NVIDIA GPU: the Triton kernels as JAX launches them, against the pure-jnp ops on the same machine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from judge import assert_close, assert_same, draw
from test_fp8 import VARIANTS, judge, oracle
from test_fp8 import battery as fp8_battery
from test_fp8_recipe import RECIPES, RMS, ROUNDINGS, emulation, gap, parameters
from test_fp8_recipe import named as by_name
from test_mxfp8 import battery

from jax_mla import (
    MLAConfig,
    apply_rope,
    apply_rope_kv,
    dequantize,
    init,
    kv_up_proj_rope,
    mla,
    q_up_proj_rope,
    quantize_fp8,
    quantize_mxfp8,
    quantize_swizzled,
    rms_norm,
    rms_norm_quantize,
    rope_tables,
    swizzle_scales,
)
from jax_mla.dequantize import raw_dequantize

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(MLAConfig.tiny(), norm_eps=1e-3)
B, T, H, N, PE, V = 2, 96, 5, 128, 64, 128
COS, SIN = rope_tables(jnp.arange(3, 3 + T), CONFIG.rope, PE)


def both(op, *args, seed=0):
    """Outputs and gradients of op(implementation) for a random cotangent, in Triton and in jnp."""
    results = []
    for name in ("triton", "xla"):
        outputs, pullback = jax.vjp(jax.jit(lambda *a, name=name: op(name, *a)), *args)
        rng = np.random.default_rng(seed)
        results.append((outputs, pullback(jax.tree.map(lambda o: draw(rng, *o.shape, dtype=o.dtype), outputs))))  # noqa: B023
    return results


def inputs(*shapes, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    return [draw(rng, *s, dtype=dtype) for s in shapes]


def values(t):
    return dequantize(t.only("rowwise")), dequantize(t.only("columnwise"))


@pytest.mark.parametrize("rounding", ["up", "ocp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_bit_is_the_references(dtype, rounding):
    """Codes and scales of normal, subnormal, huge, zero, NaN and infinite blocks; values of every code and scale."""
    x = jnp.asarray(battery(dtype))
    for usage in ("rowwise", "columnwise", "both"):
        options = dict(usage=usage, rounding=rounding)
        found, wanted = (quantize_mxfp8(x, implementation=name, **options).bytes() for name in ("triton", "xla"))
        assert_same(found, wanted)
    for usage in ("rowwise", "columnwise"):
        for out in ("float32", "bfloat16", "float16"):
            found, wanted = (
                raw_dequantize(jnp.dtype(out), _every_code().only(usage), i).astype(jnp.float32)
                for i in ("triton", "xla")
            )
            nan = np.isnan(wanted)
            assert np.array_equal(np.isnan(found), nan)
            assert_same(jnp.where(nan, 0, found), jnp.where(nan, 0, wanted))


def _every_code():
    """Each of the 256 codes under each of the 256 scales."""
    t = quantize_mxfp8(jnp.ones((256, 8192)), usage="both")
    codes = jnp.tile(jnp.arange(256, dtype=jnp.uint8), (256, 32))
    scales = jnp.arange(256, dtype=jnp.uint8)
    rows = jnp.broadcast_to(scales[:, None], (256, 256))
    columns = jnp.broadcast_to(jnp.repeat(scales, 32)[None], (8, 8192))
    return dataclasses.replace(
        t.detach(), rowwise_codes=codes, columnwise_codes=codes, rowwise_scales=rows, columnwise_scales=columns
    )


@pytest.mark.parametrize("layouts", [("pairs", "halves"), ("halves", "pairs"), ("halves", "halves")])
def test_rope(layouts):
    read, write = layouts
    (x,) = inputs((B, T, H, N + PE))
    options = dict(rotary_dim=PE, input_layout=read, output_layout=write)
    op = lambda name, x: apply_rope(x, COS, SIN, implementation=name, **options)  # noqa: E731
    found, wanted = both(op, x)
    assert_close(found, wanted)
    assert_same(found[0][..., :N], x[..., :N])
    # In place, and the input read again afterwards, in a program, a scan and a rematerialised body.
    program = jax.jit(lambda x: (op("triton", x), x * 1))
    assert_same(program(x), (found[0], x))
    looped = jax.jit(lambda x: jax.lax.scan(lambda c, _: (op("triton", c) + x, None), x, length=2)[0])
    assert_close(looped(x), op("xla", op("xla", x) + x) + x)
    gradient = jax.jit(
        jax.grad(lambda x: jnp.sum(jax.checkpoint(op, static_argnums=0)("triton", x).astype(jnp.float32) ** 2))
    )
    assert_close(gradient(x), jax.grad(lambda x: jnp.sum(op("xla", x).astype(jnp.float32) ** 2))(x))
    donated = jax.jit(lambda x: op("triton", x), donate_argnums=0)
    assert_same(donated(x + 0), found[0])
    assert_same(jax.vmap(lambda x: op("triton", x))(jnp.stack([x, 2 * x])), jnp.stack([found[0], 2 * found[0]]))


@pytest.mark.parametrize("heads", [1, 3, 40, 96])
def test_hundred_repeats_are_the_same_bits(heads):
    """Case 31 of public reports: a race would show."""
    (x,) = inputs((512, heads, N + PE))
    cos, sin = rope_tables(jnp.arange(512), CONFIG.rope, PE)
    run = jax.jit(lambda x: apply_rope(x, cos, sin, rotary_dim=PE, output_layout="pairs", input_layout="halves",
                                       implementation="triton"))  # fmt: skip
    first = run(x)
    assert all(bool(jnp.array_equal(run(x), first)) for _ in range(100))


def test_split_and_norms():
    kv, k_pe = inputs((B, T, H, N + V), (B, T, PE))
    op = lambda name, kv, k_pe: apply_rope_kv(kv, k_pe, COS, SIN, nope_dim=N, implementation=name)  # noqa: E731
    assert_close(*both(op, kv, k_pe))
    x, scale = inputs((B, T, 1536))[0], draw(np.random.default_rng(1), 1536)
    assert_close(*both(lambda name, x, s: rms_norm(x, s, 1e-2, implementation=name), x, scale))
    found, wanted = both(
        lambda name, x, s: values(rms_norm_quantize(x, s, 1e-2, usage="both", implementation=name)), x, scale
    )
    assert_close(found[1], wanted[1])
    for f, w in zip(found[0], wanted[0], strict=True):
        assert np.mean(np.asarray(f != w)) < 1e-3
    scales = jnp.asarray(np.random.default_rng(0).integers(1, 255, (2, 129, 3, 5)), jnp.uint8)
    for usage in ("rowwise", "columnwise"):
        found, wanted = (
            swizzle_scales(scales, usage=usage, token_axis=-3, implementation=i) for i in ("triton", "xla")
        )
        assert_same(found, wanted)


def test_vmap():
    """Values and gradients of every entry of two batches, of which arguments may have one, both or none."""
    rope = lambda name, x, c, s: apply_rope(x, c, s, rotary_dim=PE, implementation=name)  # noqa: E731
    keys = lambda name, kv, k_pe, c, s: apply_rope_kv(kv, k_pe, c, s, nope_dim=N, implementation=name)  # noqa: E731
    norm = lambda name, x, s: rms_norm(x, s, 1e-2, implementation=name)  # noqa: E731
    codes = lambda name, x: values(quantize_mxfp8(x, usage="both", token_axis=-3, implementation=name))  # noqa: E731
    fused = lambda name, x, s: values(rms_norm_quantize(x, s, 1e-2, usage="both", implementation=name))  # noqa: E731
    tables = jnp.stack([COS, SIN, COS]), jnp.stack([SIN, COS, SIN])
    x, latent, kv, k_pe, scales = (draw(np.random.default_rng(0), *s, dtype=jnp.bfloat16) for s in (
        (2, 3, T, H, N + PE), (2, 3, T, 1536), (2, 3, 1, T, H, N + V), (2, 3, 1, T, PE), (3, 1536)))  # fmt: skip
    shared, both_of_x = (None, None), (0, 0)
    for op, args, axes in (
        (rope, (x, COS, SIN), (both_of_x, shared, shared)),
        (rope, (x[:, 0], *tables), ((0, None), (None, 0), (None, 0))),
        (keys, (kv, k_pe, *tables), (both_of_x, both_of_x, (None, 0), (None, 0))),
        (norm, (latent, scales[0]), (both_of_x, shared)),
        (norm, (latent, scales), (both_of_x, (None, 0))),
        (codes, (x,), (both_of_x,)),
        (fused, (latent, scales[0]), (both_of_x, shared)),
    ):
        results = []
        for name in ("triton", "xla"):

            def step(*a, op=op, name=name):
                outputs, pullback = jax.vjp(lambda *a: op(name, *a), *a)
                wave = lambda o: jnp.cos(jnp.arange(o.size, dtype=jnp.float32)).reshape(o.shape).astype(o.dtype)  # noqa: E731
                return outputs, pullback(jax.tree.map(wave, outputs))

            outer, inner = zip(*axes, strict=True)
            results.append(jax.jit(jax.vmap(jax.vmap(step, inner), outer))(*args))
        found, wanted = results
        assert_close(found[1], wanted[1])
        if op is fused:  # ties
            for f, w in zip(found[0], wanted[0], strict=True):
                assert np.mean(np.asarray(f != w)) < 1e-3
        else:
            assert_close(found[0], wanted[0])
    e8m0 = jnp.asarray(np.random.default_rng(0).integers(1, 255, (2, 2, 129, 3, 5)), jnp.uint8)
    found, wanted = (
        jax.vmap(lambda s, i=i: swizzle_scales(s, token_axis=-3, implementation=i))(e8m0)  # noqa: B023
        for i in ("triton", "xla")
    )
    assert_same(found, wanted)


@pytest.mark.parametrize("shape,token_axis", [((B, T, H, N + PE), -3), ((B, 256, 1536), -2), ((3, 40, 64), -2)])
def test_tiled_scales_in_the_same_pass(shape, token_axis):
    """40 tokens are no whole blocks: there row-wise, in two launches."""
    (x,) = inputs(shape)
    for usage in ("rowwise",) if shape[1] == 40 else ("rowwise", "columnwise", "both"):
        found, wanted = (
            quantize_swizzled(x, usage=usage, token_axis=token_axis, implementation=i) for i in ("triton", "xla")
        )
        assert_same(found, wanted)


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_up_projections_and_the_layer(recipe):
    rng = np.random.default_rng(0)
    up = dict(nope_dim=N, norm_eps=1e-3, recipe=recipe)
    x, w_q, w_kv = inputs((B, T, 512), (512, H, N + PE), (512, H, N + V))
    w_q, w_kv, scale, (k_pe,) = w_q / 22, w_kv / 22, 1 + 0.1 * draw(rng, 512), inputs((B, T, PE))
    ops = [
        (lambda name, *a: q_up_proj_rope(*a[:2], COS, SIN, norm_scale=a[2], implementation=name, **up), x, w_q, scale),
        (
            lambda name, *a: kv_up_proj_rope(*a[:3], COS, SIN, norm_scale=a[3], implementation=name, **up),
            *(x, w_kv, k_pe, scale),
        ),
        (
            lambda name, p, x: mla(p, x, CONFIG, recipe=recipe, implementation=(name, "xla")),
            init(jax.random.key(0), CONFIG),
            draw(rng, B, T, 128, dtype=jnp.bfloat16),
        ),
    ]
    for op, *args in ops:
        found, wanted = both(op, *args)
        for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            f, w = np.asarray(f, np.float64), np.asarray(w, np.float64)
            assert np.linalg.norm(f - w) < (1e-2 if recipe is None else 4e-2) * np.linalg.norm(w)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_fp8_bit_is_the_definitions(dtype, implementation):
    """Kernels and XLA alike, both formats: amax of every size, NaN, infinities, subnormals, saturated scales."""

    @jax.jit
    def run(x):
        options = dict(usage="both", implementation=implementation)
        return [quantize_fp8(x, format=f, power_of_two=p, **options).detach() for f, p in VARIANTS]

    for number, x in enumerate(fp8_battery(dtype)):
        for t, (format, power_of_two) in zip(run(jnp.asarray(x)), VARIANTS, strict=True):
            judge(t, x, *oracle(x, format, power_of_two)[::2], f"tensor {number}, {power_of_two}, {t}")


def test_fp8_of_odd_sizes():
    """The kernels' bits are XLA's: of copies alone and both, either token axis, entries of a vmap with a scale each;
    None takes what can run of the others."""
    for shape, token_axis in (((4, 33, 65), -2), ((2, 96, 5, 192), -3), ((1, 4, 1), -2), ((512, 7, 3), -3)):
        (x,) = inputs(shape, seed=2)
        for usage in ("rowwise", "columnwise", "both"):
            options = dict(usage=usage, token_axis=token_axis, format="e5m2" if usage == "both" else "e4m3")
            assert_same(*(quantize_fp8(x, implementation=i, **options).bytes() for i in ("triton", "xla")))
    x = inputs((3, 8, 40, 17))[0] * jnp.asarray([1e-3, 1, 30], jnp.bfloat16)[:, None, None, None]
    found, wanted = (
        jax.jit(jax.vmap(lambda x, i=i: quantize_fp8(x, usage="both", implementation=i).bytes()))(x)
        for i in ("triton", "xla")
    )
    assert_same(found, wanted)
    assert len(set(found.scale_inv.tolist())) == 3
    for rows in (1, 3, 7):
        (x,) = inputs((rows, 5))
        assert_same(*(quantize_fp8(x, usage="both", implementation=i).bytes() for i in (None, "xla")))


@pytest.mark.parametrize("name", RECIPES)
def test_the_layer_in_fp8(name):
    """Packed rows. In float32 against products in float32 of values that numpy rounded: FP8 GEMMs add up with fewer
    bits, which moves codes near a tie by a step, here and there. In bfloat16, which moves more, against the layer
    without, as far as the format says. 50 repeats are the same bits."""
    config, recipe = dataclasses.replace(CONFIG, attention_bias=True), RECIPES[name]
    rng, ids = np.random.default_rng(6), np.repeat([[1, 2, 0], [3, 4, 5]], [40, 32, 24], axis=1)
    params, x, c = parameters(config), *draw(rng, 2, B, T, config.hidden_size)

    @functools.partial(jax.jit, static_argnums=0)
    def run(recipe, p, x, c):
        y, pullback = jax.vjp(lambda p, x: mla(p, x, config, segment_ids=ids, recipe=recipe), p, x)
        return y, pullback(c)

    options = float(recipe.grad_format == "e4m3"), float(recipe.power_of_two)
    wanted = by_name(emulation(config, ids)(options, params, x, c))
    for parameter, value in by_name(run(recipe, params, x, c)).items():
        assert gap(value, wanted[parameter]) < 3e-2, parameter
    x, c = x.astype(jnp.bfloat16), c.astype(jnp.bfloat16)
    found, wanted = run(recipe, params, x, c), by_name(run(None, params, x, c))
    for parameter, value in by_name(found).items():
        operands, cotangents = ROUNDINGS[parameter]
        off = np.sqrt(operands * RMS["e4m3"] ** 2 + cotangents * RMS[recipe.grad_format] ** 2)
        assert gap(value, wanted[parameter]) < 2 * off + 1e-2, parameter
        assert value.dtype == ("bfloat16" if parameter in ("x", "y") else "float32")
    for _ in range(50):
        assert_same(run(recipe, params, x, c), found)


def test_more_elements_than_32_bits_count():
    """Case 29 of public reports: 87,424 x 128 x 192 is 2^31 and a little more."""
    tokens, heads = 87424, 128
    x = jnp.zeros((tokens, heads, N + PE), jnp.bfloat16).at[-1].set(inputs((heads, N + PE))[0])
    cos, sin = rope_tables(jnp.arange(tokens), CONFIG.rope, PE)
    run = jax.jit(lambda x, c, s: apply_rope(x, c, s, rotary_dim=PE, implementation="triton"), donate_argnums=0)
    last = run(x[-1:] + 0, cos[-1:], sin[-1:])
    y = run(x, cos, sin)
    assert_same(y[-1:], last)
    assert not bool(jnp.any(y[:2])) and not bool(jnp.any(y[-2]))


def test_torch_launches_the_same_bits():
    """The launch specification is shared: a grid or a stride cannot differ between frameworks."""
    torch = pytest.importorskip("torch")
    from jax_mla.ffi import triton
    from jax_mla.kernels import mxfp8, rope_mxfp8
    from torch_launch import run, to_numpy, to_torch

    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3, 192)).astype(np.float32)
    cos, sin = np.asarray(COS[:64]), np.asarray(SIN[:64])
    for launch, arrays in (
        (mxfp8.quantize(64, 576, "both"), [x.reshape(64, 576)]),
        (rope_mxfp8.rope_quantize(64, 3, 192, 64, (64, 0, 1), "pairs", "halves", False), [x, cos, sin]),
    ):
        found = jax.jit(lambda *a, launch=launch: triton.call(launch, *a))(*map(jnp.asarray, arrays))
        wanted = run(launch, *(to_torch(a) for a in arrays))
        for f, w in zip(found, wanted, strict=True):
            assert np.array_equal(np.asarray(f), to_numpy(w))
    assert torch.cuda.is_available()
