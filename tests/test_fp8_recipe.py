"""The recipe "fp8" through the ops and the layer: what each GEMM multiplies, against the same products of values that
numpy rounded; how far that is from the layer without; what is kept, and what is refused."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from judge import assert_close, assert_same, draw, error
from test_fp8 import rounded

from jax_mla import (
    FP8Recipe,
    MLAConfig,
    apply_rope,
    attention,
    init,
    kv_up_proj_rope,
    mla,
    q_up_proj_rope,
    quantize_fp8,
    quantize_mxfp8,
    quantize_params,
    rms_norm,
    rope_tables,
)
from jax_mla.linear import linear

CONFIG = MLAConfig(20, 3, 12, 10, 6, 8, 5, norm_eps=1e-2, attention_bias=True)
B, T, R, H, N, PE, V = 2, 7, 12, 3, 6, 8, 5
COS, SIN = rope_tables(jnp.arange(11, 11 + T), CONFIG.rope, PE)
E4M3, PLAIN = FP8Recipe("e4m3", power_of_two=True), FP8Recipe()
RECIPES = {"fp8": PLAIN, "e4m3, powers of two": E4M3}
IDS = np.array([[1, 1, 1, 2, 2, 0, 0], [3, 3, 3, 3, 4, 4, 0]])


def inputs(*shapes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [draw(rng, *s, dtype=dtype) * jnp.exp(draw(rng, *s[:-1], 1)).astype(dtype) for s in shapes]


def pull(op, args, seed=1):
    """Outputs, every gradient for a random cotangent, and that cotangent."""
    rng = np.random.default_rng(seed)
    cotangents = jax.tree.map(lambda o: draw(rng, *o.shape, dtype=o.dtype), jax.eval_shape(op, *args))

    @jax.jit
    def run(args, cotangents):
        outputs, pullback = jax.vjp(op, *args)
        return outputs, pullback(cotangents)

    outputs, gradients = run(tuple(args), cotangents)
    return outputs, gradients, cotangents


def codes(recipe, x, gradient=False):
    """x as the recipe rounds it, float64."""
    return rounded(x, recipe.grad_format if gradient else "e4m3", recipe.power_of_two)


# --- What is multiplied -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,contract", [("fp8", 1), ("e4m3, powers of two", 2)])
def test_each_gemm_multiplies_the_rounded_tensors(name, contract):
    """linear in float64: y = x . w, dx = dy . w^T, dW = x^T . dy of three tensors, each rounded once."""
    recipe, f = RECIPES[name], reference.f64
    shapes = [(B, T, R), (R, H, V), (H, V)] if contract == 1 else [(B, T, H, V), (H, V, R), (R,)]
    x, w, bias = inputs(*shapes)
    equation = "btr,rhv->bthv" if contract == 1 else "bthv,hvr->btr"
    y, (dx, dw, db), dy = pull(lambda *a: linear(*a, contract=contract, recipe=recipe), (x, w, bias))
    rows, inner, out = *equation.split("->")[0].split(","), equation.split("->")[1]
    rounded_x, rounded_w, rounded_dy = codes(recipe, x), codes(recipe, w), codes(recipe, dy, gradient=True)
    assert_close(y, np.einsum(equation, rounded_x, rounded_w) + f(bias))
    assert_close(dx, np.einsum(f"{out},{inner}->{rows}", rounded_dy, rounded_w))
    assert_close(dw, np.einsum(f"{rows},{out}->{inner}", rounded_x, rounded_dy))
    assert_close(db, f(dy).sum((0, 1)))  # of the cotangent as it is
    assert error(y, np.einsum(equation, f(x), f(w)) + f(bias)) > 1e-3  # it did quantise


@pytest.mark.parametrize("layout", ["pairs", "halves"])
def test_queries(layout):
    x, w, bias = inputs((B, T, R), (R, H, N + PE), (H, N + PE))
    options = dict(nope_dim=N, input_layout=layout)
    op = lambda x, w, b: q_up_proj_rope(x, w, COS, SIN, bias=b, recipe="fp8", **options)  # noqa: E731
    q, (dx, dw, db), dq = pull(op, (x, w, bias))
    assert_close(q, reference.q_up_proj_rope(rounded(x), rounded(w), COS, SIN, bias=bias, **options))
    # Its inverse rotation as the library rounds it to float32: a tie the other way would be another code.
    dz = jax.jit(lambda dq: apply_rope(dq, COS, SIN, rotary_dim=PE, input_layout=layout, inverse=True))(dq)
    assert_close(dz, reference.apply_rope(dq, COS, SIN, PE, layout, inverse=True))
    assert_close(dx, np.einsum("bthd,rhd->btr", rounded(dz, "e5m2"), rounded(w)))
    assert_close(dw, np.einsum("btr,bthd->rhd", rounded(x), rounded(dz, "e5m2")))
    assert_close(db, reference.f64(dz).sum((0, 1)))


def test_keys_and_values():
    x, w, k_pe, bias = inputs((B, T, R), (R, H, N + V), (B, T, PE), (H, N + V))
    op = lambda x, w, p, b: kv_up_proj_rope(x, w, p, COS, SIN, nope_dim=N, bias=b, recipe=E4M3)  # noqa: E731
    (k, v), (dx, dw, dk_pe, db), (dk, dv) = pull(op, (x, w, k_pe, bias))
    x, w = codes(E4M3, x), codes(E4M3, w)
    assert_close((k, v), reference.kv_up_proj_rope(x, w, k_pe, COS, SIN, N, bias=bias))
    dkv = np.concatenate([reference.f64(dk)[..., :N], reference.f64(dv)], -1)
    assert_close(dx, np.einsum("bthd,rhd->btr", codes(E4M3, dkv, True), w))
    assert_close(dw, np.einsum("btr,bthd->rhd", x, codes(E4M3, dkv, True)))
    assert_close(db, dkv.sum((0, 1)))
    summed = reference.f64(dk)[..., N:].sum(2, keepdims=True)
    assert_close(dk_pe, reference.apply_rope(summed, COS, SIN, inverse=True)[:, :, 0])


def test_the_norm_is_rounded_to_the_inputs_dtype_and_differentiated():
    """q_up_proj_rope with a norm is rms_norm, quantize_fp8 and q_up_proj_rope, both passes."""
    x, w, scale = (a.astype(jnp.bfloat16) for a in inputs((B, T, R), (R, H, N + PE), (R,)))
    up = dict(nope_dim=N, recipe="fp8")
    whole = lambda x, w, s: q_up_proj_rope(x, w, COS, SIN, norm_scale=s, norm_eps=2e-2, **up)  # noqa: E731

    def parts(x, w, s):
        return q_up_proj_rope(quantize_fp8(rms_norm(x, s, 2e-2), usage="both"), w, COS, SIN, **up)

    found, wanted = (pull(op, (x, w, scale))[:2] for op in (whole, parts))
    assert_same(found[0], wanted[0])
    assert_same(found[1][1], wanted[1][1])
    assert_close(found[1], wanted[1])  # dx and dscale: dx is rounded to bfloat16 between the two
    assert found[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype,w_dtype", [("bfloat16", "float32"), ("float16", "bfloat16")])
def test_gradients_have_their_parameters_dtype(dtype, w_dtype):
    x, w, scale, bias = inputs((B, T, R), (R, H, N + PE), (R,), (H, N + PE))
    args = (x.astype(dtype), w.astype(w_dtype), scale.astype(w_dtype), bias.astype(w_dtype))
    op = lambda x, w, s, b: q_up_proj_rope(x, w, COS, SIN, nope_dim=N, norm_scale=s, bias=b, recipe="fp8")  # noqa: E731
    q, gradients, _ = pull(op, args)
    assert q.dtype == dtype and [g.dtype for g in gradients] == [a.dtype for a in args]
    if w_dtype == "float32":  # from the float32 accumulator
        assert np.mean(gradients[1] != gradients[1].astype(jnp.bfloat16).astype(jnp.float32)) > 0.9


# --- The layer ----------------------------------------------------------------------------------------------------


# Arrays of numpy: what is computed outside of jit costs a compilation a shape.
@functools.cache
def parameters(config=CONFIG, seed=3):
    rng, shapes = np.random.default_rng(seed), jax.eval_shape(lambda: init(jax.random.key(0), config))
    rows = {n: 1 if len(s.shape) == 1 else np.prod(s.shape[: 2 if n == "wo" else 1]) for n, s in shapes.items()}
    drawn = {n: rng.normal(size=s.shape) * rows[n] ** -0.5 for n, s in shapes.items()}
    drawn |= {n: 0.1 * v + n.endswith("norm") for n, v in drawn.items() if v.ndim == 1}
    return {n: np.float32(v) for n, v in drawn.items()}


def layer_inputs():
    rng = np.random.default_rng(5)
    return parameters(), *(rng.normal(size=(B, T, 20)).astype(np.float32) for _ in range(2))


def every(tree, function):
    """function of every leaf, in numpy."""
    return jax.tree.map(lambda leaf: function(np.asarray(leaf)), tree)


def step(recipe, seen=lambda params: params, **options):
    """y and the gradients of everything, of packed rows, for the cotangent c * s, in one program."""

    def run(p, x, c, s):
        y, pullback = jax.vjp(lambda p, x: mla(seen(p), x, CONFIG, recipe=recipe, segment_ids=IDS, **options), p, x)
        return y, pullback(c * s)

    jitted = jax.jit(run)
    return lambda p, x, c, s=1.0: jitted(p, x, c, np.float32(s))


@functools.cache
def compiled(recipe):
    return step(recipe)


def callback(options, gradient, x):
    """x as numpy rounds it."""

    def run(x, *options):
        recipe = FP8Recipe(*(("e5m2", "e4m3")[int(options[0])], bool(options[1])))
        return codes(recipe, np.asarray(x), gradient).astype(np.float32)

    return jax.pure_callback(run, jax.ShapeDtypeStruct(x.shape, jnp.float32), x, *options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(contract, options, x, w):
    return product_fwd(contract, options, x, w)[0]


def product_fwd(contract, options, x, w):
    x, w = callback(options, False, x), callback(options, False, w)
    return jnp.tensordot(x, w, contract), (x, w, options)


def product_bwd(contract, saved, dy):
    x, w, options = saved
    dy, outer, rows = callback(options, True, dy), w.ndim - contract, x.ndim - contract
    dx = jnp.tensordot(dy, w, (tuple(range(rows, rows + outer)), tuple(range(contract, w.ndim))))
    return (0.0, 0.0), dx, jnp.tensordot(x, dy, (tuple(range(rows)),) * 2)


product.defvjp(product_fwd, product_bwd)


def emulation(config, ids):
    """The layer of `product`s: what is between them is the library's. A function of options (gradients in E4M3, powers
    of two: numbers, so that one program has both), parameters, x and y's cotangent."""
    kept, positions = (ids != 0)[..., None], np.array([reference.local_index(row) for row in ids.tolist()])
    rank, nope, rotary = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
    rotate = functools.partial(apply_rope, rotary_dim=rotary)

    def layer(options, p, x):
        product_of, norm = functools.partial(product, 1, options), functools.partial(rms_norm, eps=config.norm_eps)
        cos, sin = rope_tables(positions, config.rope, rotary)
        x = jnp.where(kept, x, 0)
        q = product_of(norm(product_of(x, p["wq_a"]) + p["wq_a_bias"], p["q_norm"]), p["wq_b"])
        latent = product_of(x, p["wkv_a"]) + p["wkv_a_bias"]
        kv = product_of(norm(latent[..., :rank], p["kv_norm"]), p["wkv_b"])
        key = rotate(latent[:, :, None, rank:], cos, sin)
        k = jnp.concatenate([kv[..., :nope], jnp.broadcast_to(key, (*kv.shape[:3], rotary))], -1)
        o = attention(rotate(q, cos, sin), k, kv[..., nope:], scale=config.softmax_scale, segment_ids=ids)
        return jnp.where(kept, product(2, options, o, p["wo"]) + p["wo_bias"], 0)

    def run(options, p, x, c):
        y, pullback = jax.vjp(functools.partial(layer, options), p, x)
        return y, pullback(c)

    return jax.jit(run)


emulated = emulation(CONFIG, IDS)


def gap(found, wanted):
    found, wanted = reference.f64(found), reference.f64(wanted)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def named(result):
    y, (gradients, dx) = result
    return gradients | {"x": dx, "y": y}


@pytest.mark.parametrize("name", RECIPES)
def test_the_layer_is_the_emulated_one(name):
    """y and every gradient. A sum in another order may move a code by one step: then a few parts in a thousand of a
    tensor; one rounding more or less, or in the other format, is a few in a hundred."""
    recipe, args = RECIPES[name], layer_inputs()
    options = [(float(r.grad_format == "e4m3"), float(r.power_of_two)) for r in (recipe, *RECIPES.values()) if r]
    found, wanted = named(compiled(recipe)(*args)), named(emulated(options[0], *args))
    for parameter, value in wanted.items():
        assert gap(found[parameter], value) < 5e-3, parameter
    other = named(emulated(next(o for o in options if o != options[0]), *args))
    assert all(gap(found[n], value) > 2e-2 for n, value in other.items() if n != "wo_bias")


def test_nothing_in_padding_reaches_anything():
    """NaN there, in x and in y's cotangent, counts for nothing in a scale, a value or a gradient: the same bits."""
    params, x, c = layer_inputs()
    padding = (IDS == 0)[..., None]
    wanted = compiled(PLAIN)(params, x, c)
    for value in (np.nan, 1e6):
        assert_same(compiled(PLAIN)(params, *(np.where(padding, np.float32(value), a) for a in (x, c))), wanted)
    assert not np.any(np.where(padding, wanted[0], 0)) and not np.any(np.where(padding, wanted[1][1], 0))


def test_without_a_query_low_rank():
    config = dataclasses.replace(CONFIG, q_lora_rank=None)
    x = jax.ShapeDtypeStruct((B, T, 20), jnp.float32)
    run = lambda x: mla(parameters(config), x, config, recipe="fp8")  # noqa: E731
    assert jax.eval_shape(run, x).shape == x.shape


# On the way to a gradient: (operands rounded to E4M3, cotangents rounded to E5M2). Of y's: x and w of the
# down-projection, of the up-projection and of the output projection. Attention's backward pass reads q, k and v, with
# four roundings each.
ROUNDINGS = {
    "y": (6, 0),
    "wo": (5, 1),  # o, rounded; dy
    "wo_bias": (0, 0),
    "wkv_b": (1 + 2 + 1 + 12, 2),  # the latent, rounded; dy, wo, and what attention's gradient reads; dkv
    "wq_b": (1 + 2 + 1 + 12, 2),
    "wkv_a": (1 + 2 + 12 + 2, 3),
    "wq_a": (1 + 2 + 12 + 2, 3),
    "wq_a_bias": (2 + 12 + 2, 2),
    "wkv_a_bias": (2 + 12 + 2, 2),
    "q_norm": (2 + 12 + 2, 2),
    "kv_norm": (2 + 12 + 2, 2),
    "x": (2 + 12 + 3, 3),
}
# Of numbers spread over a binade: a step is 2^-3 (2^-2) of its lower end, an error uniform over half of it both ways.
RMS = {"e4m3": 2**-4 / 3**0.5 / 1.5, "e5m2": 2**-3 / 3**0.5 / 1.5}


@pytest.mark.parametrize("name", RECIPES)
def test_the_layer_is_as_far_from_float32s_as_the_format_says(name):
    """Rounding errors that are independent add in squares: no parameter's gradient is further off than twice that,
    none (but the last bias's, which nothing rounds) as near as one rounding of its own."""
    recipe, (params, x, c) = RECIPES[name], layer_inputs()
    found, wanted = (named(compiled(r)(params, x, c)) for r in (recipe, None))
    for parameter, value in wanted.items():
        operands, cotangents = ROUNDINGS[parameter]
        off = np.sqrt(operands * RMS["e4m3"] ** 2 + cotangents * RMS[recipe.grad_format] ** 2)
        distance = gap(found[parameter], value)
        assert distance < 2 * off or parameter == "wo_bias" and distance < 1e-6, (parameter, distance, off)
        assert distance > RMS["e4m3"] or parameter == "wo_bias", (parameter, distance)


def test_one_gradient_for_every_loss_scale():
    """A power of two moves scales and no code. Another factor rounds: codes near a tie may move by a step."""
    args = layer_inputs()
    _, plain = compiled(PLAIN)(*args)
    for factor in (2.0**-13, 2.0**13):
        assert_same(compiled(PLAIN)(*args, factor)[1], every(plain, lambda g, s=factor: g * np.float32(s)))
    for factor in (1e-4, 1e4):
        found = compiled(PLAIN)(*args, factor)[1]
        for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
            assert gap(f, reference.f64(w) * factor) < 1e-2


# --- Tensors in an array's place ----------------------------------------------------------------------------------


def tensors(x, w, **options):
    return quantize_fp8(x, usage="both", **options), quantize_fp8(w, usage="both", token_axis=-3, **options)


def test_quantised_before_or_inside_is_the_same():
    """Straight through: quantize_fp8, the op, and the gradient of what was quantised."""
    x, w = inputs((B, T, R), (R, H, V))
    run = functools.partial(linear, recipe="fp8")
    inside = pull(run, (x, w))[:2]
    assert_same(pull(lambda x, w: run(*tensors(x, w)), (x, w))[:2], inside)
    # As bytes, after a trip through a jit boundary, outside jit.
    t_x, t_w = jax.jit(tensors)(x, w)
    assert_close(run(t_x.bytes(), t_w.detach().bytes()), inside[0])
    # Without a recipe a tensor stands for its values.
    y, (dx, dw), dy = pull(lambda x, w: linear(*tensors(x, w)), (x, w))
    dy = reference.f64(dy)
    assert_close(y, np.einsum("btr,rhv->bthv", rounded(x), rounded(w)))
    assert_close(dx, np.einsum("bthv,rhv->btr", dy, rounded(w)))
    assert_close(dw, np.einsum("btr,bthv->rhv", rounded(x), dy))


def saved_by(op, *args):
    leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(op, *a)[1], *args))
    return sorted((a.dtype.name, a.shape) for a in leaves if a.size)


def test_residuals_are_the_codes_the_backward_pass_reads():
    """x transposed, w as it lies, a byte a number; of what is frozen no gradient, and nothing is kept for it."""
    x, w = inputs((B, T, R), (R, H, V))
    of_x, of_w = [("float32", ()), ("uint8", (R, B, T))], [("float32", ()), ("uint8", (R, H, V))]
    run = functools.partial(linear, recipe="fp8")
    assert saved_by(run, x, w) == sorted(of_x + of_w)
    t_x, t_w = (t.detach() for t in jax.jit(tensors)(x, w))
    assert saved_by(lambda x: run(x, t_w), x) == of_w and saved_by(lambda w: run(t_x, w), w) == of_x
    _, (dx, dw), (for_x, for_w) = pull(lambda x, w: (run(x, t_w), run(t_x, w)), (x, w))
    assert_close(dx, np.einsum("bthv,rhv->btr", rounded(for_x, "e5m2"), rounded(w)))
    assert_close(dw, np.einsum("btr,bthv->rhv", rounded(x), rounded(for_w, "e5m2")))


def test_parameters_quantised_before():
    """What stands for the values; of frozen ones nothing is kept for a gradient; for evaluation one copy is enough."""
    params, x, _ = layer_inputs()
    quantised = jax.jit(lambda p: quantize_params(p, CONFIG, recipe="fp8"))(params)
    for name in ("wo", "wkv_b"):
        values = quantised[name].codes("rowwise").astype(np.float32) * quantised[name].scale_inv
        assert_same(np.asarray(values), rounded(params[name]).astype(np.float32))
    frozen = {n: t.detach() if hasattr(t, "detach") else t for n, t in quantised.items()}
    run = functools.partial(mla, config=CONFIG, recipe="fp8")
    kept = saved_by(lambda x: run(frozen, x), x)
    assert not {("uint8", (width, B, T)) for width in (20, R, CONFIG.kv_lora_rank)}.intersection(kept)
    assert ("uint8", params["wo"].shape) in kept
    rows = {n: t.only("columnwise") if hasattr(t, "only") else t for n, t in frozen.items()}
    jax.eval_shape(lambda x: run(rows, x), x)
    with pytest.raises(ValueError, match="w: found .* wanted an FP8Tensor with a rowwise copy"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(run(rows, x))), x)


# --- Transformations ----------------------------------------------------------------------------------------------


def test_scan_over_layers_with_stacked_residuals():
    """Two layers, rematerialised, x donated: as one after the other."""
    x, w, c = inputs((B, T, R), (2, R, R), (B, T, R))

    def layer(x, w):
        return jnp.tanh(linear(x, w, recipe="fp8")), None

    def scanned(policy, x, w, c):
        body = jax.checkpoint(layer, policy=policy)
        y, pullback = jax.vjp(lambda x, w: jax.lax.scan(body, x, w)[0], x, w)
        return y, pullback(c)

    @jax.jit
    def one_by_one(x, w, c):
        y, pullback = jax.vjp(lambda x, w: layer(layer(x, w[0])[0], w[1])[0], x, w)
        return y, pullback(c)

    wanted = one_by_one(x, w, c)
    for policy in (jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.everything_saveable):
        run = jax.jit(functools.partial(scanned, policy), donate_argnums=0)
        assert_close(run(jnp.copy(x), w, c), wanted, 1e-4)


def test_vmap_has_a_scale_an_entry():
    """Of a GEMM, both passes, whatever the other entries hold; weights are shared, and of each entry too."""
    x, w = inputs((3, T, R), (3, R, V))
    x = x * jnp.asarray([1e-3, 1.0, 50.0])[:, None, None]
    dy = np.random.default_rng(7).normal(size=(3, T, V)).astype(np.float32) * np.float32([[[3]], [[1e-2]], [[1]]])

    def step(x, w, dy):
        y, pullback = jax.vjp(functools.partial(linear, recipe="fp8"), x, w)
        return y, *pullback(dy)

    both = jax.jit(lambda x, w, dy: (jax.vmap(step)(x, w, dy), jax.vmap(step, (0, None, 0))(x, w[0], dy)))
    for found, weights in zip(both(x, w, dy), (w, (w[0],) * 3), strict=True):
        for i in range(3):
            of_x, of_w, of_dy = rounded(x[i]), rounded(weights[i]), rounded(dy[i], "e5m2")
            assert_close([np.asarray(f[i]) for f in found], [of_x @ of_w, of_dy @ of_w.T, of_x.T @ of_dy])


def test_what_changes_no_bits():
    """Parameters that were quantised once, gradients through that; residuals computed again; x64 mode."""
    args = layer_inputs()
    wanted = compiled(PLAIN)(*args)
    once = functools.partial(quantize_params, config=CONFIG, recipe="fp8")
    with jax.enable_x64(True):
        assert_same(step(PLAIN, once, remat="latents")(*args), wanted)
        wide = jax.ShapeDtypeStruct((B, T, 20), jnp.float64)
        with pytest.raises(TypeError, match="found dtype float64, wanted bfloat16, float16 or float32"):
            jax.eval_shape(lambda x: mla(args[0], x, CONFIG, recipe="fp8"), wide)


def test_a_second_derivative_is_refused():
    x, w = inputs((B, T, R), (R, H, V))
    first = jax.grad(lambda x: jnp.sum(jnp.sin(linear(x, w, recipe="fp8"))))
    with pytest.raises(NotImplementedError, match="second derivative"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(first(x))), x)


def test_modules_take_the_recipe():
    """Traced to the layer's operations, nnx's to those of its initial values besides."""
    from jax_mla import linen, nnx

    params, x, _ = layer_inputs()

    def traced(layer):
        return collections.Counter(re.findall(r" = (\w+)", str(jax.make_jaxpr(layer)(params, x))))

    def of_nnx(params, x):
        module = nnx.MLA(CONFIG, recipe=E4M3, rngs=jax.random.key(0))
        for name, value in params.items():
            setattr(module, name, type(getattr(module, name))(value))
        return module(x)

    wanted, other = (traced(lambda p, x, r=r: mla(p, x, CONFIG, recipe=r)) for r in (E4M3, None))
    assert traced(lambda p, x: linen.MLA(CONFIG, recipe=E4M3).apply({"params": p}, x)) == wanted
    assert not wanted - traced(of_nnx) and wanted - other


# --- What is refused ----------------------------------------------------------------------------------------------

X, W, WIDE = np.ones((B, T, R), np.float32), np.ones((R, H, N + PE), np.float32), np.ones((32, H, 32), np.float32)
REFUSED = [  # what of the arguments, ValueError or TypeError, message
    (lambda: dict(recipe="fp9"), ValueError, "recipe: found 'fp9', wanted one of None, 'mxfp8', 'fp8'"),
    (lambda: dict(recipe=8), ValueError, "recipe: found 8, wanted one of"),
    (
        lambda: dict(x=np.ones((B, T, 32), np.float32), w=quantize_mxfp8(WIDE, token_axis=-3, usage="both")),
        TypeError,
        "w: found MXFP8Tensor.*, wanted an array or an FP8Tensor under this recipe",
    ),
    (
        lambda: dict(
            x=np.ones((B, T, 32), np.float32), w=quantize_fp8(WIDE, token_axis=-3, usage="both"), recipe="mxfp8"
        ),
        TypeError,
        "w: found FP8Tensor.*, wanted an array or an MXFP8Tensor under this recipe",
    ),
    (lambda: dict(w=quantize_fp8(W, usage="both")), ValueError, "w: found FP8Tensor.*wanted token_axis=-3"),
    (lambda: dict(x=quantize_fp8(X, token_axis=-3)), ValueError, "x: found FP8Tensor.*wanted token_axis=-2"),
    (lambda: dict(w=quantize_fp8(W, token_axis=-3)), ValueError, "w: found .*with a columnwise copy"),
    (lambda: dict(x=quantize_fp8(X, usage="columnwise")), ValueError, "x: found .*with a rowwise copy"),
    (lambda: dict(x=quantize_fp8(X), norm_scale=X[0, 0]), ValueError, "norm_scale: found .*wanted None beside"),
    (lambda: dict(x=X.astype(np.int8)), TypeError, "x: found dtype int8"),
]


@pytest.mark.parametrize("change,error_type,message", REFUSED)
def test_bad_input_is_named(change, error_type, message):
    def run():
        given = dict(x=jnp.asarray(X), w=jnp.asarray(W), cos=COS, sin=SIN, nope_dim=N, recipe="fp8") | change()
        return q_up_proj_rope(given.pop("x"), given.pop("w"), given.pop("cos"), given.pop("sin"), **given)

    with pytest.raises(error_type, match=message):
        jax.eval_shape(run)


def test_bad_recipes_and_parameters_are_named():
    with pytest.raises(ValueError, match="grad_format: found 'e3m4', wanted one of 'e4m3', 'e5m2'"):
        FP8Recipe("e3m4")
    with pytest.raises(TypeError, match="power_of_two: found 'yes', wanted a bool"):
        FP8Recipe(power_of_two="yes")
    assert FP8Recipe("e4m3") == FP8Recipe(grad_format="e4m3") and hash(FP8Recipe()) == hash(FP8Recipe("e5m2"))

    def layer(change=None, recipe="fp8", seen=lambda p: p):
        """Traced: of every parameter its shape is enough."""
        params, x = parameters(), jnp.ones((B, T, 20))

        def run():
            changed = {name: make(params[name]) for name, make in (change or {}).items()}
            return mla(seen(params | changed), x, CONFIG, recipe=recipe)

        jax.eval_shape(run)

    with pytest.raises(ValueError, match=r"params\['wq_b'\]: found .* wanted token_axis=-3"):
        layer({"wq_b": functools.partial(quantize_fp8, usage="both")})
    with pytest.raises(ValueError, match=r"params\['wo'\]: found .* with a columnwise copy"):
        layer({"wo": quantize_fp8})
    quantise = functools.partial(quantize_params, config=CONFIG, recipe="fp8")
    with pytest.raises(TypeError, match=r"params\['\w+'\]: found FP8Tensor.* MXFP8Tensor under this recipe"):
        layer(seen=quantise, recipe="mxfp8")
    with pytest.raises(TypeError, match=r"params\['\w+'\]: found FP8Tensor.* MXFP8Tensor under this recipe"):
        layer(seen=lambda p: quantize_params(quantise(p), CONFIG, recipe="mxfp8"))
    with pytest.raises(ValueError, match="recipe: found None, wanted one that quantises"):
        layer(seen=lambda p: quantize_params(p, CONFIG, recipe=None))


def test_what_the_backward_pass_misses_is_named_when_it_is_asked_for():
    def run(w):
        return jnp.sum(linear(quantize_fp8(jnp.asarray(X)), w, recipe="fp8"))

    w = jax.ShapeDtypeStruct(W.shape, jnp.float32)
    assert jax.eval_shape(run, w).shape == ()
    with pytest.raises(ValueError, match="x: found .* wanted an FP8Tensor with a columnwise copy"):
        jax.eval_shape(jax.grad(run), w)
