"""Attention on FP8 tensors, its output as one, and the layer that keeps codes of both."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_mla
from jax_mla import FP8Recipe, FP8Tensor, MLAConfig, attention, dequantize, init, mla, quantize_fp8, quantize_mxfp8

B, T, H, D, V = 2, 12, 3, 24, 16
CODES = FP8Recipe(quantize_attention=True)
DOCS = Path(__file__).resolve().parent.parent / "docs"
WITHOUT_LOW_RANK = MLAConfig(40, 2, None, 20, 12, 8, 16, norm_eps=1e-3)


def draw(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def inputs(dtype=jnp.float32):
    return tuple(draw(B, T, H, d, seed=i, dtype=dtype) for i, d in enumerate((D, D, V)))


def test_both_passes_compute_with_the_values():
    """And gradients pass straight through, to arrays that were quantised."""
    qkv, do = inputs(), draw(B, T, H, V, seed=9)

    def through(*arrays):
        return attention(*(quantize_fp8(a, token_axis=-3) for a in arrays))

    tensors = [quantize_fp8(a, token_axis=-3) for a in qkv]
    o, pull = jax.vjp(attention, *map(dequantize, tensors))
    found, pull_found = jax.vjp(through, *qkv)
    np.testing.assert_allclose(found, o, atol=1e-6)
    for f, w in zip(pull_found(do), pull(do), strict=True):
        np.testing.assert_allclose(f, w, atol=2e-6)
    frozen = jax.vjp(lambda q: attention(q, tensors[1].detach(), tensors[2].detach()), tensors[0])[1](do)[0]
    np.testing.assert_allclose(frozen.proxy, pull(do)[0], atol=2e-6)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_output_as_a_tensor(power_of_two):
    """Its codes are those of quantising it afterwards; what its backward pass reads of it are their values."""
    qkv, do = inputs(), draw(B, T, H, V, seed=9)
    recipe = FP8Recipe(power_of_two=power_of_two)
    t, lse = attention(*qkv, out=recipe, return_lse=True)
    o, lse_wanted = attention(*qkv, return_lse=True)
    wanted = quantize_fp8(o, usage="both", token_axis=-3, power_of_two=power_of_two)
    assert isinstance(t, FP8Tensor) and t.usages == ("rowwise", "columnwise") and jnp.array_equal(lse, lse_wanted)
    for usage in t.usages:
        assert jnp.array_equal(t.codes(usage), wanted.codes(usage))
    assert jnp.array_equal(t.scale_inv, wanted.scale_inv)
    found = jax.vjp(lambda *a: dequantize(attention(*a, out=recipe)), *qkv)[1](do)
    # rowsum(do o) is of the rounded output, hence dq and dk; dv reads none of it.
    exact = jax.vjp(attention, *qkv)[1](do)
    rounded = o - dequantize(wanted)
    shift = jnp.sum(do * rounded, axis=-1)
    assert jnp.array_equal(found[2], exact[2])
    assert 0 < jnp.max(jnp.abs(found[0] - exact[0])) < 2 * jnp.max(jnp.abs(shift)) * jnp.max(jnp.abs(qkv[1])) * D**-0.5


def saved(recipe, remat, tokens=160):
    """Bytes a token that the backward pass keeps."""
    config = MLAConfig.deepseek_v3()
    params = jax.eval_shape(lambda: init(jax.random.key(0), config, jnp.bfloat16))
    x = jax.ShapeDtypeStruct((1, tokens, config.hidden_size), jnp.bfloat16)
    run = lambda p, x: mla(p, x, config, recipe=recipe, remat=remat, implementation="xla")  # noqa: E731
    leaves = jax.tree.leaves(jax.eval_shape(lambda p, x: jax.vjp(run, p, x)[1], params, x))
    return sum(a.size * a.dtype.itemsize for a in leaves if tokens in a.shape) / tokens


def test_what_is_kept():
    """At DeepSeek-V3's dims, the layer's input among them: under a recipe one copy of its codes."""
    policies = None, "qkv", "latents"
    plain = [saved(None, remat) for remat in policies]
    recipes = {
        "`FP8Recipe(quantize_attention=True)`": CODES,
        '`"fp8"`': "fp8",
        '`"fp8_block"`': "fp8_block",
        '`"mxfp8"`': "mxfp8",
    }
    rows = [["none (bfloat16)", *(f"{n:,.0f}" for n in plain)]]
    for name, recipe in recipes.items():
        shares = {remat: (saved(recipe, remat), of) for remat, of in zip(policies, plain, strict=True)}
        rows.append([name, *(f"{n:,.0f} ({100 * n / of:.0f} %)" for n, of in shares.values())])
        if recipe is CODES:
            assert max(n / of for n, of in shares.values()) < 0.56
    page = (DOCS / "fp8.md").read_text(encoding="utf-8")
    assert "\n".join(f"| {' | '.join(row)} |" for row in rows) in page
    said = (round(saved(recipe, None) / 1e3) for recipe in ("mxfp8", None))
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert "{} kB a token against bfloat16's {}".format(*said) in page


def step(config, recipe):
    def run(params, x, dy):
        y, pull = jax.vjp(lambda p, x: mla(p, x, config, recipe=recipe), params, x)
        return y, pull(dy)

    return jax.jit(run)


def gap(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(jnp.linalg.norm(f - w) / jnp.linalg.norm(w)) for f, w in pairs)


@functools.cache
def on_one_device(recipe):
    return step(WITHOUT_LOW_RANK, recipe)(*layer_inputs())


def layer_inputs():
    return init(jax.random.key(0), WITHOUT_LOW_RANK), draw(2, 8, 40, seed=1), draw(2, 8, 40, seed=2)


def test_the_layer_is_near_the_one_in_float32():
    found, exact = on_one_device(CODES), on_one_device(None)
    # Some ten roundings on the way to a gradient, a third of them to 2 bits: 6 % each.
    assert 0.02 < gap(found, exact) < 0.3


def test_heads_share_tokens_on_a_mesh():
    """Without a query low rank, where the layer's input is what is gathered: of codes the transposed ones too."""
    params, x, dy = layer_inputs()
    with jax.set_mesh(jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Explicit,))):
        heads = {"wq": 1, "wkv_b": 1, "wo": 0}
        specs = {n: P(*("tp" if i == heads.get(n) else None for i in range(p.ndim))) for n, p in params.items()}
        spread = {n: jax.device_put(p, specs[n]) for n, p in params.items()}
        tokens = [jax.device_put(a, P(None, "tp")) for a in (x, dy)]
        found = jax.device_get(step(WITHOUT_LOW_RANK, CODES)(spread, *tokens))
    assert gap(found, on_one_device(CODES)) < 1e-5


def test_bad_input_is_named():
    q, k, v = inputs()
    t = quantize_fp8(q, token_axis=-3)
    for args, options, message in (
        ((t, k, v), {}, "k: found float32.*wanted q, k and v all arrays or all tensors of one kind"),
        ((t, quantize_mxfp8(draw(B, 32, H, 32), token_axis=-3), t), {}, "k: found MXFP8Tensor.*of one kind"),
        ((quantize_fp8(q), k, v), {}, "k: found float32"),
        ((quantize_fp8(q),) * 3, {}, "q: found FP8Tensor.*wanted token_axis=-3"),
        ((quantize_fp8(q, token_axis=-3, usage="columnwise"),) * 3, {}, "q: found .* with a rowwise copy"),
        ((q, k, v), dict(out="mxfp8"), "out: found 'mxfp8', wanted None, 'fp8' or an FP8Recipe"),
        ((q[0], k[0], v[0]), dict(out="fp8", cu_seqlens=np.array([0, 5, 12])), "out: found .*wanted None for packed"),
        ((t, t, t), dict(cu_seqlens=np.array([0, 5, 12])), "cu_seqlens|q: found"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            attention(*args, **options)
    with pytest.raises(TypeError, match="quantize_attention: found 1, wanted a bool"):
        jax_mla.FP8Recipe(quantize_attention=1)
