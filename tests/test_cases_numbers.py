"""Public reports of wrong numbers: scales by inexact functions, casts, sums that stop, padding read, copies that are
stale, offsets that wrap. (The bits themselves: `test_mxfp8.py`.)"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from judge import assert_close, assert_same, draw

from jax_mla import (
    MLAConfig,
    MXFP8Tensor,
    RopeConfig,
    apply_rope,
    apply_rope_kv,
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
    swizzle_scales,
)
from jax_mla.linear import linear


def scales_of(amax, rounding):
    """The scale of a block with each amax, under jit."""
    x = jnp.zeros((len(amax), 32), amax.dtype).at[:, 7].set(-jnp.asarray(amax))
    return np.asarray(jax.jit(lambda x: quantize_mxfp8(x, rounding=rounding).rowwise_scales)(x))[:, 0].astype(int)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log2_is_inexact_on_powers_of_two(dtype):
    """Case F1 of public reports: floor and ceil of jnp.log2 are off by one for some exponents; no scale here is."""
    k, dtype = np.arange(-126, 128), jnp.dtype(dtype)
    power, most = np.ldexp(1.0, k).astype(dtype), np.ldexp(1.75, k).astype(dtype)  # 448 is 1.75 * 2^8
    wanted = np.clip(k - 8, -127, 127) + 127
    for rounding in ("up", "ocp"):
        assert np.array_equal(scales_of(power, rounding), wanted)
        assert np.array_equal(scales_of(most, rounding), wanted)
    above = np.nextafter(most, dtype.type(np.inf))
    assert np.array_equal(scales_of(above, "up"), np.clip(k - 7, -127, 127) + 127)
    assert np.array_equal(scales_of(np.nextafter(power, dtype.type(0))[1:], "ocp"), wanted[:-1])


def test_exp2_is_inexact_on_integers():
    """Case F2 of public reports: every scale multiplies by the power of two that it is, 2^-127 too."""
    codes = jnp.full((255, 32), 1.0, jnp.float8_e4m3fn)
    t = MXFP8Tensor(codes, jnp.arange(255, dtype=jnp.uint8)[:, None], None, None, "float32", -2)
    wanted = np.ldexp(np.ones(32), np.arange(255)[:, None] - 127).astype(np.float32)
    assert_same(jax.jit(dequantize)(t), wanted)


def test_subnormals_are_flushed_under_jit():
    """Case F3 of public reports: a block of 1e-40 is not a block of zeros, and 448 * 2^-127 is 2.633107e-36."""
    t = jax.jit(lambda x: quantize_mxfp8(x).detach())(jnp.full(32, 1e-40))
    assert t.rowwise_scales.tolist() == [0] and np.all(np.asarray(t.rowwise_codes).view(np.uint8) != 0)
    top = np.array([0x7E], np.uint8).view(ml_dtypes.float8_e4m3fn).repeat(32)
    t = MXFP8Tensor(jnp.asarray(top), jnp.zeros(1, jnp.uint8), None, None, "float32", -2)
    found = np.asarray(jax.jit(dequantize)(t))
    assert np.all(found == np.float32(448 * 2.0**-127)) and f"{found[0]:.6e}" == "2.633107e-36"


def test_a_cast_to_e8m0_rounds_scales_to_nearest():
    """Case F5 of public reports: 1.25, 1.4 and 1.5 go up (or, "ocp", down) alike; 0, 3e38 and 2^-130 are no NaN."""
    ratios = np.array([1.25, 1.4, 1.5], np.float32)
    assert scales_of(448 * ratios, "up").tolist() == [128] * 3
    assert scales_of(256 * ratios, "ocp").tolist() == [127] * 3
    x = jnp.zeros((3, 32)).at[:, 0].set(jnp.asarray([0.0, 3e38, 2.0**-130]))
    t = quantize_mxfp8(x)
    assert t.rowwise_scales[:, 0].tolist() == [0, 247, 0]
    np.testing.assert_allclose(np.asarray(dequantize(t), np.float64)[:, 0], [0.0, 3e38, 2.0**-130], rtol=2**-4)


def test_an_index_past_the_end_reads_the_last_row():
    """Case F6 of public reports: no table is looked up, and one that is too short for its tokens is an error."""
    rope, positions = RopeConfig(theta=300.0), jnp.asarray([0, 5, 163_839, 1_000_003])
    cos, sin = rope_tables(positions, rope, 8)
    frequencies = reference.inv_freq(rope, 8).astype(np.float32)
    angles = np.asarray(positions, np.float32)[:, None] * frequencies
    assert_close((cos, sin), (np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))))
    x = jnp.ones((2, 5, 3, 8))
    for call in (apply_rope, lambda *a: q_up_proj_rope(x[:, :, 0], jnp.ones((8, 3, 8)), *a[1:], nope_dim=0)):
        for run in (call, jax.jit(call)):
            with pytest.raises(ValueError, match=r"cos: found float32\[4, 4\], wanted .* leading dims"):
                run(x, cos, sin)


def test_a_uint8_carrier_drops_the_gradient():
    """Case F7 of public reports: codes as bytes, in scan too, pass on what fp8 could not hold."""
    x, c = draw(np.random.default_rng(0), 3, 32, 32), jnp.asarray(np.resize([3.3, 1000.0, 1e-4, -7.7], (32, 32)))

    def loss(x):
        t = quantize_mxfp8(x, usage="both").bytes()
        return jax.lax.scan(lambda total, t: (total + jnp.sum(dequantize(t) * c), None), 0.0, t)[0]

    assert_same(jax.jit(jax.grad(loss))(x), jnp.stack([c.astype(jnp.float32)] * 3))


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_a_bfloat16_running_sum_of_ones_stops_at_256(recipe):
    """Case F12 of public reports: dW and dbias over 4096 tokens, y over 4096 inputs."""
    x, w, b = (jnp.ones(s, jnp.bfloat16) for s in ((4096, 32), (32, 32), (32,)))
    dw, db = jax.jit(jax.grad(lambda w, b: jnp.sum(linear(x, w, b, recipe=recipe).astype(jnp.float32)), (0, 1)))(w, b)
    assert np.all(dw == 4096) and np.all(db == 4096)
    assert np.all(linear(x.T, jnp.ones((4096, 32), jnp.bfloat16), recipe=recipe) == 4096)


def tiled(buffer, r, c, columns):
    """What a kernel reads from the 128x4 tiling for scale (r, c)."""
    padded = -(-columns // 4) * 4
    return buffer[((r // 128) * (padded // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4]


def gemm(a, a_buffer, b, b_buffer, whole_tiles):
    """a b^T of codes [rows, 160] by 5 blocks of 32, scales read from the tiled buffers; or by all 8 blocks of 256 rows,
    the codes padded with zeros, as a kernel that masks its results only."""
    (m, k), n = a.shape, b.shape[0]
    rows, columns, blocks = (256, 256, 8) if whole_tiles else (m, n, k // 32)
    pad = lambda x, size: np.pad(x.astype(np.float64), [(0, size - len(x)), (0, blocks * 32 - k)])  # noqa: E731
    total, a, b = np.zeros((rows, columns)), pad(a, rows), pad(b, columns)
    for j in range(blocks):
        sides = []
        for codes, buffer in ((a, a_buffer), (b, b_buffer)):
            scale = tiled(np.asarray(buffer), np.arange(len(codes)), j, k // 32).astype(int)
            factor = np.where(scale == 255, np.nan, np.ldexp(1.0, scale - 127))
            sides.append(codes[:, j * 32 : j * 32 + 32] * factor[:, None])
        total += sides[0] @ sides[1].T
    return total[:m, :n]


def test_padding_of_the_scale_tiling_is_read_as_scales():
    """Case 16 of public reports: M = 129, N = K = 160. Our padding is zeros, so that even a kernel which reads it gets
    the product; poisoned with 0xFF it changes nothing for one that reads the scales there are."""
    rng = np.random.default_rng(0)
    a, b = (quantize_mxfp8(draw(rng, rows, 160)) for rows in (129, 160))
    clean = [np.asarray(swizzle_scales(t)) for t in (a, b)]
    padding = [np.asarray(swizzle_scales(jnp.ones_like(t.rowwise_scales))) == 0 for t in (a, b)]
    poisoned = [np.where(p, 255, s) for p, s in zip(padding, clean, strict=True)]
    assert padding[0].sum() == 1403 and not any(s[p].any() for s, p in zip(clean, padding, strict=True))
    codes = [np.asarray(t.rowwise_codes) for t in (a, b)]
    run = lambda buffers, **o: gemm(codes[0], buffers[0], codes[1], buffers[1], **o)  # noqa: E731
    wanted = reference.f64(dequantize(a)) @ reference.f64(dequantize(b)).T
    for buffers in (clean, poisoned):
        np.testing.assert_allclose(run(buffers, whole_tiles=False), wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(run(clean, whole_tiles=True), wanted, rtol=1e-12, atol=1e-12)
    assert np.isnan(run(poisoned, whole_tiles=True)).all()  # what the poison would do to a kernel that reads it


def test_padded_strides_of_a_batch_are_taken_for_unpadded_ones():
    """Case 16 of public reports: B = 2, M = 40; each batch entry is padded to 128 rows and 8 blocks."""
    scales = (np.arange(2 * 40 * 5) % 255 + 1).astype(np.uint8).reshape(2, 40, 5)
    buffer = np.asarray(swizzle_scales(jnp.asarray(scales))).ravel()
    r, c = np.indices((40, 5))
    for entry in range(2):
        assert np.array_equal(tiled(buffer[entry * 1024 :], r, c, 5), scales[entry])
    assert buffer.size == 2048 and (buffer == 0).sum() == 2048 - 400


def walk(jaxpr, visit):
    for eqn in jaxpr.eqns:
        visit(eqn)
        for parameter in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "jaxpr") or hasattr(p, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                walk(inner, visit)


TOKENS, HEADS, DIM = 87424, 128, 192  # 2,148,532,224 elements: more than int32 counts
BIG = {
    "apply_rope": (lambda x, c, s: apply_rope(x, c, s, rotary_dim=64), [(TOKENS, HEADS, DIM)]),
    "apply_rope_kv": (
        lambda kv, c, s: apply_rope_kv(kv, jnp.ones((1, TOKENS, 64), kv.dtype), c, s, nope_dim=64),
        [(1, TOKENS, HEADS, DIM)],
    ),
    "q_up_proj_rope": (
        lambda x, w, c, s: q_up_proj_rope(x, w, c, s, nope_dim=128, recipe="mxfp8", out="mxfp8").detach(),
        [(TOKENS, 32), (32, HEADS, DIM)],
    ),
    "kv_up_proj_rope": (
        lambda x, w, c, s: kv_up_proj_rope(x, w, jnp.ones((1, TOKENS, 64), x.dtype), c, s, nope_dim=64, recipe="mxfp8"),
        [(1, TOKENS, 32), (32, HEADS, DIM)],
    ),
    "attention": (lambda q, k, v, c, s: attention(q, k, v), [(1, TOKENS, HEADS, DIM)] * 3),
    "quantize_mxfp8": (
        lambda x, c, s: (
            t := quantize_mxfp8(x, usage="both", token_axis=-3).detach(),
            swizzle_scales(t),
            dequantize(t),
        ),
        [(TOKENS, HEADS, DIM)],
    ),
    "rms_norm_quantize": (
        lambda x, c, s: rms_norm_quantize(x, jnp.ones(DIM), 1e-3, token_axis=-3).detach(),
        [(TOKENS, HEADS, DIM)],
    ),
}


@pytest.mark.parametrize("name", BIG)
def test_offsets_wrap_at_31_bits(name):
    """Case 29 of public reports, as far as a CPU goes: at 2^31 elements every op traces, forward and backward, and no
    dim of any array in it, which is what integers index, is longer than int32 counts."""
    function, shapes = BIG[name]
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (*shapes, (TOKENS, 32), (TOKENS, 32))]
    assert max(np.prod(s) for s in shapes) > 2**31 or "up" in name
    outputs = jax.eval_shape(function, *args)
    assert all(min(o.shape, default=1) > 0 for o in jax.tree.leaves(outputs))
    count = 0

    def visit(eqn):
        nonlocal count
        for v in (*eqn.invars, *eqn.outvars):
            count += v.aval.size > 2**31
            assert max(v.aval.shape, default=0) < 2**31, eqn
            if jnp.issubdtype(v.aval.dtype, jnp.integer) and eqn.primitive.name == "iota":
                assert v.aval.size < 2**31, eqn

    def run(*args):
        if name in ("quantize_mxfp8", "rms_norm_quantize") or name == "q_up_proj_rope":
            return function(*args)
        return jax.vjp(function, *args)[1](jax.tree.map(lambda o: jnp.ones(o.shape, o.dtype), outputs))

    walk(jax.make_jaxpr(run)(*args).jaxpr, visit)
    assert count


CONFIG = MLAConfig(32, 3, None, 32, 32, 32, 32, norm_eps=1e-3)


def test_evaluation_before_training_leaves_a_stale_or_missing_copy():
    """Case 39 of public reports: gradients are the same after an evaluation, and new parameters are quantised anew."""
    from flax import nnx

    from jax_mla.nnx import MLA

    rng = np.random.default_rng(3)
    x, c = draw(rng, 2, 32, 32), draw(rng, 2, 32, 32)
    evaluate = nnx.jit(lambda module: module(x))
    train = nnx.jit(nnx.grad(lambda module: jnp.sum(module(x) * c)))
    used, fresh = (MLA(CONFIG, recipe="mxfp8", rngs=jax.random.key(0)) for _ in range(2))
    y = evaluate(used)
    assert_same(train(used), train(fresh))
    params = init(jax.random.key(0), CONFIG)
    new = params | {"wkv_b": 1.5 * params["wkv_b"]}
    for module in (used, fresh):
        module.wkv_b[...] = new["wkv_b"]
    y_new = evaluate(used)
    assert_same(y_new, evaluate(fresh))  # which was never evaluated with the old ones
    assert not np.array_equal(y_new, y)
    quantize = jax.jit(lambda p: quantize_params(p, CONFIG)["wkv_b"].bytes())
    old, quantised = map(quantize, (params, new))
    for usage in ("rowwise", "columnwise"):
        pairs = zip(old.copy(usage), quantised.copy(usage), strict=True)
        assert not all(np.array_equal(a, b) for a, b in pairs)
    with pytest.raises(ValueError, match="columnwise"):
        old.only("rowwise").copy("columnwise")


def test_no_query_low_rank_still_gets_a_norm_or_a_second_projection():
    """Case 51 of public reports: one query projection and no query norm; 0 is an error, but in Hugging Face's files."""
    params = init(jax.random.key(0), CONFIG)
    assert set(params) == {"wq", "wkv_a", "kv_norm", "wkv_b", "wo"}
    with pytest.raises(ValueError, match="q_lora_rank: found 0, wanted at least 1"):
        MLAConfig(32, 3, 0, 32, 32, 32, 32)
    x = 3.0 * draw(np.random.default_rng(4), 1, 32, 32)  # a query norm would undo the 3
    y = jax.jit(lambda x: mla(params, x, CONFIG))(x)
    assert_close(y, reference.mla(params, x, CONFIG), 1e-5)


def test_a_parity_harness_that_cannot_see_what_it_looks_for():
    """Case 53 of public reports, of our own comparison with Hugging Face: what would hide a permuted gradient, a wrong
    eps or factor, an offset or a padded head. (Sq != Skv: `test_attention.py`.)"""
    import types

    import test_parity_hf as harness

    assert jax.config.jax_default_matmul_precision == "highest"
    heads, yarn = harness.HF["num_attention_heads"], harness.YARN
    assert heads & (heads - 1) and harness.HF["rms_norm_eps"] not in (1e-6, 1e-5)
    assert len({harness.HF[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v")}) == 3
    assert yarn["mscale"] != yarn["mscale_all_dim"] != 0
    positions, x, cotangent = harness.inputs(types.SimpleNamespace(hidden_size=44), 0)
    assert len(set(positions[:, 0])) == len(positions) and positions.min() > 0 and np.ptp(np.diff(positions)) > 0
    for axis in range(3):  # no two tokens, rows or dims are treated alike
        first, second = (np.take(cotangent, i, axis) for i in (0, 1))
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.5
    assert np.unique(cotangent).size > 0.99 * cotangent.size and x.shape == cotangent.shape
