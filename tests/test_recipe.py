"""The recipe "mxfp8" through the ops: what each GEMM multiplies, against fp64; what is kept; what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from judge import assert_close, assert_same, draw, error
from reference import mxfp8_values as blocks

from jax_mla import (
    MLAConfig,
    MXFP8Tensor,
    attention,
    dequantize,
    init,
    kv_up_proj_rope,
    mla,
    q_up_proj_rope,
    quantize_mxfp8,
    quantize_params,
    rms_norm_quantize,
    rope_tables,
)
from jax_mla.linear import linear

CONFIG = dataclasses.replace(MLAConfig.tiny(), norm_eps=1e-3, attention_bias=True)
B, T, R, H, N, PE, V = 2, 64, 96, 3, 32, 32, 64
COS, SIN = rope_tables(jnp.arange(11, 11 + T), CONFIG.rope, PE)


def inputs(*shapes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [draw(rng, *s, dtype=dtype) * jnp.exp(draw(rng, *s[:-1], 1)).astype(dtype) for s in shapes]


def pull(op, args, seed=1):
    """Outputs (of tensors their values), and every gradient for a random cotangent, which is returned too."""
    values = lambda o: jax.tree.map(  # noqa: E731
        lambda t: dequantize(t) if isinstance(t, MXFP8Tensor) else t, o, is_leaf=lambda t: isinstance(t, MXFP8Tensor)
    )
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda *a: values(op(*a)), *args)
    cotangents = jax.tree.map(lambda o: draw(rng, *o.shape, dtype=o.dtype), shapes)

    @jax.jit
    def run(args, cotangents):
        outputs, pullback = jax.vjp(lambda *a: values(op(*a)), *args)
        return outputs, pullback(cotangents)

    outputs, gradients = run(tuple(args), cotangents)
    return outputs, gradients, cotangents


# --- What is multiplied -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contract", [1, 2])
def test_each_gemm_reads_the_copies_along_what_it_contracts(contract):
    """linear in fp64: y from x row-wise and w column-wise, dx from dy and w row-wise, dW from x and dy column-wise."""
    if contract == 1:
        x, w, bias = inputs((B, T, R), (R, H, 32), (H, 32))
        rows, out, axes = "btr", "rhd", (2, 0)
        y_out = "bthd"
    else:
        x, w, bias = inputs((B, T, H, 32), (H, 32, R), (R,))
        rows, out, axes = "bthd", "hdr", (3, 1)
        y_out = "btr"
    y, (dx, dw, db), dy = pull(lambda x, w, b: linear(x, w, b, contract=contract, recipe="mxfp8"), (x, w, bias))
    f = reference.f64
    assert_close(y, np.einsum(f"{rows},{out}->{y_out}", blocks(x, axes[0]), blocks(w, axes[1])) + f(bias))
    assert_close(dx, np.einsum(f"{y_out},{out}->{rows}", blocks(dy, -1), blocks(w, -1)))
    assert_close(dw, np.einsum(f"{rows},{y_out}->{out}", blocks(x, 1), blocks(dy, 1)))
    assert_close(db, f(dy).sum((0, 1)))
    assert error(y, np.einsum(f"{rows},{out}->{y_out}", f(x), f(w)) + f(bias)) > 1e-3  # it did quantise


@pytest.mark.parametrize("layout", ["pairs", "halves"])
def test_queries(layout):
    x, w, bias = inputs((B, T, R), (R, H, N + PE), (H, N + PE))
    options = dict(nope_dim=N, input_layout=layout)
    q, (dx, dw, db), dq = pull(
        lambda x, w, b: q_up_proj_rope(x, w, COS, SIN, bias=b, recipe="mxfp8", **options), (x, w, bias)
    )
    wanted = reference.q_up_proj_rope(blocks(x, 2), blocks(w, 0), COS, SIN, bias=bias, **options)
    assert_close(q, wanted)
    dz = reference.apply_rope(dq, COS, SIN, PE, layout, inverse=True)
    assert_close(dx, np.einsum("bthd,rhd->btr", blocks(dz, -1), blocks(w, -1)))
    assert_close(dw, np.einsum("btr,bthd->rhd", blocks(x, 1), blocks(dz, 1)))
    assert_close(db, dz.sum((0, 1)))
    # `out` alone: the GEMM of arrays, its rotated float32 result quantised both ways.
    t = jax.jit(lambda: q_up_proj_rope(x, w, COS, SIN, bias=bias, out="mxfp8", **options).detach())()
    plain = reference.q_up_proj_rope(x, w, COS, SIN, bias=bias, **options)
    for usage, axis in (("rowwise", -1), ("columnwise", 1)):
        codes, scales = t.copy(usage)
        wanted_codes, wanted_scales = reference.mxfp8(plain, axis)
        assert np.array_equal(scales, wanted_scales) and t.token_axis == -3
        assert (np.asarray(codes).view(np.uint8) != wanted_codes).mean() < 1e-3  # ties of the GEMM's rounding


def test_keys_and_values():
    x, w, k_pe, bias = inputs((B, T, R), (R, H, N + V), (B, T, PE), (H, N + V))
    op = lambda x, w, p, b: kv_up_proj_rope(x, w, p, COS, SIN, nope_dim=N, bias=b, recipe="mxfp8")  # noqa: E731
    (k, v), (dx, dw, dk_pe, db), (dk, dv) = pull(op, (x, w, k_pe, bias))
    wanted = reference.kv_up_proj_rope(blocks(x, 2), blocks(w, 0), k_pe, COS, SIN, N, bias=bias)
    assert_close((k, v), wanted)
    dkv = np.concatenate([reference.f64(dk)[..., :N], reference.f64(dv)], -1)
    assert_close(dx, np.einsum("bthd,rhd->btr", blocks(dkv, -1), blocks(w, -1)))
    assert_close(dw, np.einsum("btr,bthd->rhd", blocks(x, 1), blocks(dkv, 1)))
    assert_close(db, dkv.sum((0, 1)))
    summed = reference.f64(dk)[..., N:].sum(2, keepdims=True)
    assert_close(dk_pe, reference.apply_rope(summed, COS, SIN, inverse=True)[:, :, 0])
    quantized = jax.jit(lambda *a: jax.tree.map(lambda t: t.detach(), kv_up_proj_rope(*a[:3], COS, SIN, nope_dim=N,
        bias=a[3], out="mxfp8"), is_leaf=lambda t: isinstance(t, MXFP8Tensor)))(x, w, k_pe, bias)  # fmt: skip
    for t, plain in zip(quantized, reference.kv_up_proj_rope(x, w, k_pe, COS, SIN, N, bias=bias), strict=True):
        for usage, axis in (("rowwise", -1), ("columnwise", 1)):
            codes, scales = t.copy(usage)
            wanted_codes, wanted_scales = reference.mxfp8(plain, axis)
            assert np.array_equal(scales, wanted_scales)
            assert (np.asarray(codes).view(np.uint8) != wanted_codes).mean() < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_norm_goes_to_mxfp8_unrounded_and_is_differentiated(dtype):
    """q_up_proj_rope with a norm is rms_norm_quantize and then q_up_proj_rope, both passes, bit for bit."""
    x, w, scale = (a.astype(dtype) for a in inputs((B, T, R), (R, H, N + PE), (R,)))
    up = dict(nope_dim=N, recipe="mxfp8", out="mxfp8")
    whole = lambda x, w, s: q_up_proj_rope(x, w, COS, SIN, norm_scale=s, norm_eps=2e-2, **up)  # noqa: E731
    parts = lambda x, w, s: q_up_proj_rope(rms_norm_quantize(x, s, 2e-2, usage="both"), w, COS, SIN, **up)  # noqa: E731
    assert_same(pull(whole, (x, w, scale))[:2], pull(parts, (x, w, scale))[:2])
    x_64, w_64 = reference.rms_norm(x, scale, 2e-2), reference.f64(w)
    q = reference.apply_rope(np.einsum("btr,rhd->bthd", blocks(x_64, 2), blocks(w_64, 0)), COS, SIN, PE)
    assert_close(pull(whole, (x, w, scale))[0], blocks(q, -1), 5e-2 if dtype == "bfloat16" else 2e-2)


def test_what_mxfp8_holds_exactly_comes_out_as_without_it():
    """Small integers survive quantisation: both recipes agree to the last bit, both passes, bias and all."""
    rng = np.random.default_rng(5)
    integers = lambda *s: jnp.asarray(rng.integers(-4, 5, s), jnp.float32)  # noqa: E731
    x, w, bias, dy = integers(B, T, R), integers(R, H, 32), integers(H, 32), integers(B, T, H, 32)

    def run(recipe):
        y, pullback = jax.vjp(lambda *a: linear(*a, recipe=recipe), x, w, bias)
        return y, pullback(dy)

    assert_same(run("mxfp8"), run(None))


@pytest.mark.parametrize("dtype,w_dtype", [("bfloat16", "float32"), ("float16", "bfloat16"), ("bfloat16", "bfloat16")])
def test_gradients_have_their_parameters_dtype(dtype, w_dtype):
    x, w, scale, bias = inputs((B, T, R), (R, H, N + PE), (R,), (H, N + PE))
    args = (x.astype(dtype), w.astype(w_dtype), scale.astype(w_dtype), bias.astype(w_dtype))
    for out in (None, "mxfp8"):
        op = lambda x, w, s, b: q_up_proj_rope(  # noqa: E731
            x,
            w,
            COS,
            SIN,
            nope_dim=N,
            norm_scale=s,
            bias=b,
            recipe="mxfp8",
            out=out,  # noqa: B023
        )
        q, gradients, _ = pull(op, args)
        assert q.dtype == dtype and [g.dtype for g in gradients] == [a.dtype for a in args]
        if w_dtype == "float32":  # from the float32 accumulator
            assert np.mean(gradients[1] != gradients[1].astype(jnp.bfloat16).astype(jnp.float32)) > 0.9


def test_one_gradient_for_every_loss_scale():
    """About 1e-4 and 1e4: a power of two moves every block scale and no code."""
    params = init(jax.random.key(0), CONFIG)
    (x,) = inputs((B, T, 128))
    loss = lambda p, x, s: jnp.sum(jnp.sin(mla(p, x, CONFIG, recipe="mxfp8"))) * s  # noqa: E731
    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    plain = step(params, x, 1.0)
    for exponent in (-13, 13):
        assert_same(step(params, x, 2.0**exponent), jax.tree.map(lambda g, e=exponent: g * 2.0**e, plain))


# --- Tensors in an array's place ----------------------------------------------------------------------------------


def test_quantised_before_or_inside_is_the_same():
    x, w = inputs((B, T, R), (R, H, N + PE))
    up = dict(nope_dim=N, recipe="mxfp8")
    inside = pull(lambda x, w: q_up_proj_rope(x, w, COS, SIN, **up), (x, w))[:2]
    tensors = lambda x, w: (quantize_mxfp8(x, usage="both"), quantize_mxfp8(w, usage="both", token_axis=-3))  # noqa: E731
    assert_same(pull(lambda x, w: q_up_proj_rope(*tensors(x, w), COS, SIN, **up), (x, w))[:2], inside)
    # As bytes, and after a trip through a jit boundary.
    t_x, t_w = jax.jit(lambda x, w: jax.tree.map(lambda a: a, tensors(x, w)))(x, w)
    assert_close(q_up_proj_rope(t_x.bytes(), t_w.detach().bytes(), COS, SIN, **up), inside[0])
    # Without a recipe a tensor stands for its values.
    plain = dict(nope_dim=N)
    found = pull(lambda x, w: q_up_proj_rope(*tensors(x, w), COS, SIN, **plain), (x, w))[:2]
    wanted = pull(lambda x, w: q_up_proj_rope(*map(dequantize, tensors(x, w)), COS, SIN, **plain), (x, w))[:2]
    assert_same(found, wanted)


def test_a_tensor_without_proxy_gets_no_gradient_and_keeps_nothing():
    """Frozen weights: no wgrad, so x needs no column-wise copy (33 tokens), and dx is as ever."""
    x, w = inputs((B, 33, R), (R, H, 32))
    frozen = quantize_mxfp8(w, usage="both", token_axis=-3).detach()
    y, (dx,), dy = pull(lambda x: linear(x, frozen, recipe="mxfp8"), (x,))
    assert_close(dx, np.einsum("bthd,rhd->btr", blocks(dy, -1), blocks(w, -1)))
    saved = jax.eval_shape(lambda x: jax.vjp(lambda x: linear(x, frozen, recipe="mxfp8"), x)[1], x)
    assert all(a.size < x.size or a.shape == w.shape for a in jax.tree.leaves(saved))


def test_frozen_activations():
    x, w = inputs((B, T, R), (R, H, 40))  # dgrad, which is not wanted, could not have blocks of 40
    t = quantize_mxfp8(x, usage="both").detach()
    with pytest.raises(ValueError, match="w: found axis -1 of size 40"):
        jax.grad(lambda x: jnp.sum(linear(x, w, recipe="mxfp8")))(x)
    y, (dw,), dy = pull(lambda w: linear(t, w, recipe="mxfp8"), (w,))
    assert_close(dw, np.einsum("btr,bthd->rhd", blocks(x, 1), blocks(dy, 1)))


def test_quantize_params_once_for_many_uses():
    params = init(jax.random.key(0), CONFIG)
    (x,) = inputs((B, T, 128))
    step = lambda p, x: jnp.sum(jnp.sin(mla(p, x, CONFIG, recipe="mxfp8")))  # noqa: E731
    inside = jax.jit(jax.value_and_grad(step))(params, x)
    before = jax.jit(jax.value_and_grad(lambda p, x: step(quantize_params(p, CONFIG), x)))(params, x)
    assert_same(before, inside)
    with pytest.raises(ValueError, match=r"params\['wq_b'\]: found .* wanted token_axis=-3"):
        mla(params | {"wq_b": quantize_mxfp8(params["wq_b"])}, x, CONFIG)
    rows = quantize_params(params, CONFIG, usage="columnwise")
    assert_same(jax.jit(step)(rows, x), inside[0])  # the forward pass reads no more
    with pytest.raises(ValueError, match="w: found .* wanted an MXFP8Tensor with a rowwise copy"):
        jax.grad(step, argnums=1)(rows, x)


# --- What is kept -------------------------------------------------------------------------------------------------


def saved_by(op, *args):
    leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(op, *a)[1], *args))
    return sorted((a.dtype.name, a.shape) for a in leaves if a.size)


def test_residuals_are_the_codes_the_backward_pass_reads():
    x, w, scale = inputs((B, T, R), (R, H, N + PE), (R,), dtype=jnp.bfloat16)
    codes = [("uint8", (B, T, R)), ("uint8", (B, T // 32, R)), ("uint8", w.shape), ("uint8", (R, H, 2))]
    tables = [("float32", (1, T, PE // 2))] * 2
    op = lambda x, w: q_up_proj_rope(x, w, COS, SIN, nope_dim=N, recipe="mxfp8", out="mxfp8")  # noqa: E731
    assert saved_by(op, x, w) == sorted(codes + tables)
    op = lambda x, w, s: q_up_proj_rope(x, w, COS, SIN, nope_dim=N, norm_scale=s, recipe="mxfp8")  # noqa: E731
    norm = [("bfloat16", (B, T, R)), ("float32", (B, T)), ("bfloat16", (R,))]
    assert saved_by(op, x, w, scale) == sorted(codes + tables + norm)


def test_attention_keeps_codes():
    q, k, v = (quantize_mxfp8(a, usage="both", token_axis=-3) for a in inputs(*[(B, T, H, 64)] * 3))
    found = saved_by(lambda *t: attention(*t), q, k, v)
    codes = [("uint8", (B, T, H, 64))] * 3 + [("uint8", (B, T, H, 2))] * 2 + [("uint8", (B, 2, H, 64))]
    assert found == sorted(codes + [("float32", (B, T, H, 64)), ("float32", (B, T, H))])


# --- Attention ----------------------------------------------------------------------------------------------------


def tensors(*shapes, dtype=jnp.float32):
    quantize = jax.jit(functools.partial(quantize_mxfp8, usage="both", token_axis=-3))
    return [quantize(a) for a in inputs(*shapes, dtype=dtype)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_computes_with_the_values(dtype):
    """Row-wise q and k, column-wise v; the gradients land on the proxies, in the logical dtype."""
    q, k, v = (a.astype(dtype) for a in inputs((B, 32, H, 64), (B, T, H, 64), (B, T, H, 32)))
    usages = ("rowwise", "rowwise", "columnwise")
    options = dict(causal="bottom_right", return_lse=True)

    def quantized(*a):
        return attention(*(quantize_mxfp8(x, usage="both", token_axis=-3) for x in a), **options)

    def values(*a):
        return attention(
            *(dequantize(quantize_mxfp8(x, usage=u, token_axis=-3)) for x, u in zip(a, usages, strict=True)), **options
        )

    found = pull(quantized, (q, k, v))[:2]
    assert_same(found, pull(values, (q, k, v))[:2])
    wanted = reference.attention(blocks(q, -1), blocks(k, -1), blocks(v, 1), causal="bottom_right")
    assert_close(found[0], wanted[:2], 2e-2 if dtype == "bfloat16" else None)


def test_a_scale_is_a_factor():
    """Case 54 of public reports: every scale is applied, and as the power of two it is, bit for bit."""
    q, k, v = tensors((B, 32, H, 64), (B, T, H, 64), (B, T, H, 32))
    run = jax.jit(functools.partial(attention, causal=False))
    plain = run(q, k, v)
    doubled = dataclasses.replace(v, columnwise_scales=v.columnwise_scales + 1)
    assert_same(run(q, k, doubled), 2 * plain)
    twice = jax.jit(functools.partial(attention, causal=False, scale=2 * 64**-0.5))(q, k, v)
    for pair in ((dataclasses.replace(q, rowwise_scales=q.rowwise_scales + 1), k),
                 (q, dataclasses.replace(k, rowwise_scales=k.rowwise_scales + 1))):  # fmt: skip
        assert_same(run(*pair, v), twice)
    longer = tensors((B, 32, H, 64), (B, 96, H, 64), (B, 96, H, 32))
    assert error(run(*longer), plain) > 1e-2  # the keys' length counts


def test_grad_dtype():
    """float32 products in the backward pass of bfloat16 attention: closer to float32's gradients, in bfloat16 still."""
    q, k, v = (a.astype(jnp.bfloat16) for a in inputs((B, 32, H, 64), (B, 32, H, 64), (B, 32, H, 32)))
    plain = pull(attention, (q, k, v))[1]
    _, exact, _ = pull(attention, tuple(a.astype(jnp.float32) for a in (q, k, v)))
    gap = lambda found: np.mean([np.linalg.norm(reference.f64(f) - reference.f64(e)) for f, e in zip(found, exact)])  # noqa: E731, B905
    for dtype in ("float32", jnp.bfloat16, None):
        found = pull(lambda *a: attention(*a, grad_dtype=dtype), (q, k, v))[1]  # noqa: B023
        assert all(g.dtype == jnp.bfloat16 for g in found)
        if dtype == "float32":
            assert gap(found) < 0.99 * gap(plain)
        else:
            assert_same(found, plain)
    with pytest.raises(TypeError, match="grad_dtype: found dtype int32"):
        attention(q, k, v, grad_dtype=jnp.int32)


def test_no_block_mixes_sequences():
    """Case 28 of public reports: what one sequence holds changes no bit of another, in either pass."""
    shapes = [(1, 96, H, 64), (1, 96, H, 64), (1, 96, H, 32)]
    ids = np.repeat([[1, 2]], [32, 64], axis=1)
    plain = inputs(*shapes)

    def op(*a):
        return attention(*(quantize_mxfp8(x, usage="both", token_axis=-3) for x in a), segment_ids=ids)

    (cotangent,) = inputs((1, 96, H, 32), seed=1)
    for function in (op, lambda *a: attention(*a, segment_ids=ids)):

        @jax.jit
        def run(args, function=function):
            outputs, pullback = jax.vjp(function, *args)
            return outputs, pullback(cotangent)

        wanted = run(plain)
        for value in (1e4, np.nan):
            found = run([a.at[:, :32].set(value) for a in plain])
            assert_same(*(jax.tree.map(lambda a: a[:, 32:], r) for r in (found, wanted)))
            assert np.isfinite(found[0][:, :32]).all() == (value == 1e4)


def test_sequences_that_share_a_block_are_refused():
    """Case 28: boundaries known at trace time; a flattened batch of (2, 20) has no blocks at all."""
    q, k, v = tensors((1, 64, H, 64), (1, 64, H, 64), (1, 64, H, 32))
    ids = jnp.repeat(jnp.array([[1, 2]]), jnp.array([20, 44]), axis=1, total_repeat_length=64)
    with pytest.raises(
        ValueError, match="segment_ids: found a sequence that starts at token 20, wanted multiples of 32"
    ):
        attention(q, k, v, segment_ids=ids)
    with pytest.raises(ValueError, match="cu_seqlens: found a sequence that starts at token 20"):
        attention(*(jax.tree.map(lambda a: a[0], t) for t in (q, k, v)), cu_seqlens=np.array([0, 20, 64]))
    with pytest.raises(ValueError, match="kv_segment_ids: found a sequence that starts at token 20"):
        attention(q, k, v, segment_ids=jnp.ones((1, 64), jnp.int32), kv_segment_ids=ids)
    with pytest.raises(ValueError, match="segment_ids: found a sequence that starts at token 20"):
        mla(init(jax.random.key(0), CONFIG), jnp.ones((1, 64, 128)), CONFIG, segment_ids=ids, recipe="mxfp8")
    with pytest.raises(ValueError, match="x: found axis -2 of size 40, wanted a multiple of 32 for columnwise"):
        quantize_mxfp8(jnp.ones((40, 64)), usage="columnwise")
    # A tail, an empty sequence and a gap of padding share no block with a sequence's start.
    gap = jnp.repeat(jnp.array([[1, 0, 2, 0]]), jnp.array([20, 12, 25, 7]), axis=1, total_repeat_length=64)
    assert np.isfinite(jax.jit(functools.partial(attention, segment_ids=gap))(q, k, v)).all()
    bounds = np.array([0, 0, 32, 32, 57])
    one_row = [jax.tree.map(lambda a: a[0], t) for t in (q, k, v)]
    flat = jax.jit(functools.partial(attention, cu_seqlens=bounds))(*one_row)
    assert_same(flat[:57], jax.jit(functools.partial(attention, cu_seqlens=bounds[None]))(q, k, v)[0, :57])


# --- The layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_lora_rank", [64, None])
def test_the_layer_is_close_to_the_one_without(q_lora_rank):
    """Gradients point where float32's do: E4M3 has 3 bits, so each of some six roundings is off by 2^-5 or so."""
    config = dataclasses.replace(CONFIG, q_lora_rank=q_lora_rank)
    rng = np.random.default_rng(3)
    params = {n: p + 0.02 * draw(rng, *p.shape) for n, p in init(jax.random.key(0), config).items()}
    x = draw(rng, B, T, 128)
    ids = jnp.asarray(np.repeat([[1, 2, 0], [3, 3, 3]], [32, 20, 12], axis=1))
    run = lambda recipe: pull(lambda p, x: mla(p, x, config, segment_ids=ids, recipe=recipe), (params, x))  # noqa: E731
    (y, (dp, dx), _), (wanted, (dp_wanted, dx_wanted), _) = run("mxfp8"), run(None)
    assert 1e-3 < error(y, wanted) < 0.15 and not np.any(y[0, 52:]) and not np.any(dx[0, 52:])
    for name, found in (dp | {"x": dx}).items():
        f, w = (reference.f64(a).ravel() for a in (found, (dp_wanted | {"x": dx_wanted})[name]))
        assert f @ w / np.linalg.norm(f) / np.linalg.norm(w) > 0.95, name
        assert found.dtype == jnp.float32


def test_modules_take_the_recipe():
    from jax_mla import linen, nnx

    (x,) = inputs((B, T, 128))
    key = jax.random.key(0)
    wanted = jax.jit(lambda x: mla(init(key, CONFIG), x, CONFIG, recipe="mxfp8"))(x)
    module = linen.MLA(CONFIG, recipe="mxfp8")
    assert_same(jax.jit(lambda x: module.apply(module.init(key, x), x))(x), wanted)
    assert_same(jax.jit(lambda x: nnx.MLA(CONFIG, recipe="mxfp8", rngs=key)(x))(x), wanted)


# --- What is refused ----------------------------------------------------------------------------------------------

X, W, NOTHING = jnp.zeros((B, T, R)), jnp.zeros((R, H, N + PE)), dict(nope_dim=N)


@pytest.mark.parametrize(
    "change,error_type,message",
    [
        (dict(recipe="fp4"), ValueError, "recipe: found 'fp4', wanted one of None, 'mxfp8', 'fp8'"),
        (dict(out="bf16"), ValueError, "out: found 'bf16', wanted one of None, 'mxfp8'"),
        (dict(x=X[..., :80], w=W[:80], recipe="mxfp8"), ValueError, "x: found axis -1 of size 80"),
        (dict(x=X[:, :33], cos=COS[:33], sin=SIN[:33], out="mxfp8"), ValueError, "x: found axis -2 of size 33"),
        (dict(w=jnp.zeros((R, H, 48)), nope_dim=16, out="mxfp8"), ValueError, "out: found 'mxfp8' for D of 48"),
        (dict(w=quantize_mxfp8(W)), ValueError, "w: found MXFP8Tensor.*wanted token_axis=-3"),
        (dict(w=quantize_mxfp8(W, token_axis=-3), recipe="mxfp8"), ValueError, "w: found .*with a columnwise copy"),
        (dict(x=quantize_mxfp8(X, usage="columnwise"), recipe="mxfp8"), ValueError, "x: found .*with a rowwise copy"),
        (dict(x=quantize_mxfp8(X), norm_scale=jnp.ones(R)), ValueError, "norm_scale: found .*wanted None beside"),
    ],
)  # fmt: skip
def test_bad_input_is_named(change, error_type, message):
    given = dict(x=X, w=W, cos=COS, sin=SIN, nope_dim=N) | change
    x, w, cos, sin = (given.pop(name) for name in ("x", "w", "cos", "sin"))
    with pytest.raises(error_type, match=message):
        jax.eval_shape(lambda: q_up_proj_rope(x, w, cos, sin, **given))


def test_what_the_backward_pass_misses_is_named_when_it_is_asked_for():
    """Case 39 of public reports: a copy that is not there is never read as zeros, and evaluation needs one only."""
    t = quantize_mxfp8(X)
    assert linear(t, W, recipe="mxfp8").shape == (B, T, H, 64)
    with pytest.raises(ValueError, match="x: found .* wanted an MXFP8Tensor with a columnwise copy"):
        jax.grad(lambda w: jnp.sum(linear(t, w, recipe="mxfp8")))(W)
    with pytest.raises(ValueError, match="x: found axis -2 of size 33"):
        jax.grad(lambda w: jnp.sum(linear(X[:, :33], w, recipe="mxfp8")))(W)
    assert linear(X[:, :33], W, recipe="mxfp8").shape == (B, 33, H, 64)


def test_attention_refuses_mixtures():
    q, k, v = tensors((B, 32, H, 64), (B, 32, H, 64), (B, 32, H, 32))
    with pytest.raises(TypeError, match="v: found Array.*wanted q, k and v all arrays or all MXFP8Tensors|v: found"):
        attention(q, k, dequantize(v))
    with pytest.raises(ValueError, match="v: found .* wanted an MXFP8Tensor with a columnwise copy"):
        attention(q, k, v.only("rowwise"))
    flat = quantize_mxfp8(jnp.zeros((B, 32, 32, 64)), usage="both")
    with pytest.raises(ValueError, match="q: found .* wanted token_axis=-3"):
        attention(flat, flat, flat)
    with pytest.raises(TypeError, match="x64|float64|dtype float64"), jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((1, 32, 128), jnp.float64)
        jax.eval_shape(lambda x: mla(init(jax.random.key(0), CONFIG), x, CONFIG, recipe="mxfp8"), x)
