"""MXFP8 tensors against an oracle written from the text of OCP Microscaling Formats (MX) v1.0, bit for bit; and their
gradients, transformations and shardings."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from judge import assert_same, draw
from reference import GRID, MIDDLES, nearest_even
from reference import mxfp8 as oracle

from jax_mla import MXFP8Tensor, dequantize, mxfp8, mxfp8_bits, mxfp8_tensor, quantize_mxfp8

DTYPES = ("float32", "bfloat16", "float16")
ROUNDINGS = ("up", "ocp")


def battery(dtype):
    """Blocks [n, 32], n a multiple of 32: every power of two as amax, 1.75 times it, and their neighbours; every E4M3
    rounding boundary and its neighbours; subnormal, huge, zero, NaN and infinite blocks; plain ones."""
    rng, dtype = np.random.default_rng(0), jnp.dtype(dtype)
    info = ml_dtypes.finfo(dtype)
    lowest, highest = {"float16": (-24, 15), "float32": (-149, 127), "bfloat16": (-133, 127)}[dtype.name]
    tops = np.ldexp([[1.0], [1.75]], np.arange(lowest, highest + 1)).astype(dtype)  # 1.75 of the lowest rounds
    tops = np.concatenate([np.nextafter(tops, dtype.type(0)), tops, np.nextafter(tops, dtype.type(np.inf))]).ravel()
    tops = tops[np.isfinite(tops.astype(np.float32))]
    rows = (rng.uniform(-1, 1, (len(tops), 32)) * tops.astype(np.float64)[:, None]).astype(dtype)
    rows[np.arange(len(tops)), rng.integers(0, 32, len(tops))] = tops * rng.choice(np.array([-1, 1], dtype), len(tops))
    # Boundaries of E4M3 in blocks whose scale is 2^-3.
    edges = np.concatenate([MIDDLES, GRID]).astype(dtype) / dtype.type(8)
    edges = np.concatenate([np.nextafter(edges, dtype.type(0)), edges, np.nextafter(edges, dtype.type(np.inf))])
    edges = np.resize(edges * rng.choice(np.array([-1, 1], dtype), len(edges)), (-(-len(edges) // 31), 31))
    edges = np.concatenate([edges, np.full((len(edges), 1), 56, dtype)], axis=1)
    special = rng.normal(size=(20, 32)).astype(dtype)
    special[0], special[1], special[2, ::2], special[3] = 0.0, -0.0, -0.0, info.max
    for row, (lane, value) in enumerate(
        [(4, np.nan), (5, np.nan), (31, -np.nan), (0, np.inf), (5, -np.inf), (31, np.inf)], start=4
    ):
        special[row, lane] = value
    special[10, :2], special[11], special[12] = (np.nan, np.inf), info.smallest_subnormal, -info.max
    special[13, 0], special[14] = info.max, info.smallest_normal
    special[15, 1:], special[16, :3] = 0.0, (500.0, -500.0, 465.0)
    special[17, 0], special[18, ::3], special[19] = np.inf, info.max, info.smallest_subnormal * rng.integers(0, 9, 32)
    plain = rng.normal(size=(64, 32)) * np.exp(rng.normal(size=(64, 32)) * 3)
    rows = np.concatenate([rows, edges, special, plain.astype(dtype)])
    return np.concatenate([rows, np.zeros((-len(rows) % 32, 32), dtype)])


def bits_of(codes):
    return np.asarray(codes).view(np.uint8)


def judge(pair, x, axis, rounding):
    """A copy's codes and scales against the oracle."""
    codes, scales = oracle(x, axis, rounding)
    assert pair[0].dtype == mxfp8_bits.CODES and pair[1].dtype == jnp.uint8
    wrong = np.flatnonzero((np.asarray(pair[1]) != scales).ravel())
    assert not len(wrong), f"{len(wrong)} scales, first at {wrong[0]}"
    wrong = np.flatnonzero((bits_of(pair[0]) != codes).ravel())
    assert not len(wrong), f"{len(wrong)} codes, first at {wrong[0]}"


def every_copy(x):
    """Row-wise copies of x, column-wise copies of its transpose: the same blocks."""
    columns = {r: quantize_mxfp8(x.T, usage="columnwise", rounding=r).copy("columnwise") for r in ROUNDINGS}
    return {r: quantize_mxfp8(x, rounding=r).copy("rowwise") for r in ROUNDINGS}, columns


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_is_the_specifications(dtype):
    """Cases F1 to F5, 15, 18: both roundings, both directions, under jit."""
    x = battery(dtype)
    rows, columns = jax.jit(every_copy)(jnp.asarray(x))
    for rounding in ROUNDINGS:
        judge(rows[rounding], x, -1, rounding)
        judge(columns[rounding], x.T, -2, rounding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_eagerly(dtype):
    x = battery(dtype)
    judge(quantize_mxfp8(jnp.asarray(x)).copy("rowwise"), x, -1, "up")
    judge(quantize_mxfp8(jnp.asarray(x), rounding="ocp").copy("rowwise"), x, -1, "ocp")


def test_the_oracles_rounding_is_ml_dtypes():
    v = np.random.default_rng(0).normal(size=4096) * 60
    v = np.concatenate([v, MIDDLES, -MIDDLES, GRID, MIDDLES * (1 - 2**-23), MIDDLES * (1 + 2**-22)])
    v = v.astype(np.float32)  # ml_dtypes casts float64 by way of float32, which rounds twice
    clipped = np.clip(v, -448, 448)
    assert np.array_equal(nearest_even(v), clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_the_comparison_catches_the_usual_faults():
    """Cases F1, F3, F4: each of these is what a plausible implementation gives; each must fail the battery."""
    x = battery("float32")
    codes, scales = oracle(x, -1, "up")
    good = jnp.asarray(codes).view(mxfp8_bits.CODES), jnp.asarray(scales)
    judge(good, x, -1, "up")
    flushed = np.where(np.abs(x) < 2.0**-126, 0, x)  # subnormals flushed, as XLA may
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(-1, keepdims=True)
        late = np.ceil(np.log2(amax / np.float32(448)) + 1e-6)  # a log2 that is a little off
        late = np.nan_to_num(np.clip(late, -127, 127), nan=128, posinf=127) + 127
        bare = np.ldexp(x.astype(np.float64), 127 - oracle(x, -1, "ocp")[1].astype(int)).astype(ml_dtypes.float8_e4m3fn)
    faults = {
        "the other rounding": (oracle(x, -1, "ocp"), "up"),
        "flushed subnormals": (oracle(flushed, -1, "up"), "up"),
        "inexact log2": ((codes, late.astype(np.uint8)), "up"),
        "a cast that does not saturate": ((bare.view(np.uint8), oracle(x, -1, "ocp")[1]), "ocp"),
        "one bit": ((codes ^ (np.arange(codes.size).reshape(codes.shape) == 777), scales), "up"),
    }
    for fault, ((c, s), rounding) in faults.items():
        with pytest.raises(AssertionError, match="first at"):
            judge((jnp.asarray(c.astype(np.uint8)).view(mxfp8_bits.CODES), jnp.asarray(s)), x, -1, rounding)
            pytest.fail(f"{fault} went unnoticed")


@pytest.mark.parametrize("shape,token_axis", [((2, 64, 3, 32), -3), ((64, 96), -2), ((3, 32, 64), -2)])
def test_both_usages_are_two_calls_in_the_tensors_own_order(shape, token_axis):
    """Case 39: neither copy is missing, stale or swapped."""
    x = draw(np.random.default_rng(1), *shape, dtype="bfloat16")
    calls = jax.jit(lambda x: [quantize_mxfp8(x, usage=u, token_axis=token_axis).detach() for u in mxfp8.USAGES])
    rows, columns, both = calls(x)
    assert_same(both.copy("rowwise"), rows.copy("rowwise"))
    assert_same(both.copy("columnwise"), columns.copy("columnwise"))
    judge(both.copy("rowwise"), np.asarray(x), -1, "up")
    judge(both.copy("columnwise"), np.asarray(x), token_axis, "up")
    assert both.shape == shape and both.ndim == len(shape) and both.dtype == x.dtype


def test_the_table_of_case_39():
    i, j = np.indices((64, 64)) // 32
    x = jnp.asarray(448 * 2.0 ** (3 * i - 5 * j), jnp.float32)
    t = quantize_mxfp8(x, usage="both")
    assert set(bits_of(t.rowwise_codes).ravel()) == set(bits_of(t.columnwise_codes).ravel()) == {0x7E}
    assert t.rowwise_scales.tolist() == [[127, 122]] * 32 + [[130, 125]] * 32
    assert t.columnwise_scales.tolist() == [[127] * 32 + [122] * 32, [130] * 32 + [125] * 32]
    with pytest.raises(ValueError, match="which has no columnwise copy, wanted one quantised with usage='columnwise'"):
        quantize_mxfp8(x).copy("columnwise")
    with pytest.raises(ValueError, match="no rowwise copy"):
        t.only("columnwise").only("rowwise")
    assert not np.array_equal(bits_of(quantize_mxfp8(x + 3).rowwise_codes), bits_of(t.rowwise_codes))


def test_saturation():
    """Case 15: 500 is beyond 448 under "ocp"; 465 and 1e4 under a scale of 1."""
    x = jnp.zeros(32).at[:3].set(jnp.array([500.0, -500.0, 1.0]))
    t = quantize_mxfp8(x, rounding="ocp")
    assert t.rowwise_scales.tolist() == [127] and bits_of(t.rowwise_codes)[:2].tolist() == [0x7E, 0xFE]
    assert dequantize(t)[:3].tolist() == [448.0, -448.0, 1.0]
    assert quantize_mxfp8(x).rowwise_scales.tolist() == [128]
    x = jnp.zeros(32).at[:5].set(jnp.array([465.0, -1e4, 464.0, jnp.inf, jnp.nan]))
    codes = mxfp8_bits.encode(mxfp8_bits.of_float32(x), jnp.array([127], jnp.uint8), -1)
    assert bits_of(codes)[:5].tolist() == [0x7E, 0xFE, 0x7E, 0x7E, 0x7F]


@pytest.mark.parametrize("usage", mxfp8.COPIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_and_infinity_stay_in_their_block(dtype, usage):
    """Case 18."""
    clean = np.ones((64, 64), jnp.dtype(dtype))
    run = jax.jit(lambda x: (quantize_mxfp8(x, usage=usage).detach(), dequantize(quantize_mxfp8(x, usage=usage))))
    wanted, _ = run(clean)
    for where, value in (((0, 5), np.nan), ((4, 2), np.nan), ((31, 31), np.nan), ((0, 5), np.inf), ((0, 5), -np.inf)):
        x = clean.copy()
        x[where] = value
        t, y = run(x)
        (codes, scales), (clean_codes, clean_scales) = t.copy(usage), wanted.copy(usage)
        block = (where[0], where[1] // 32) if usage == "rowwise" else (where[0] // 32, where[1])
        assert scales[block] == (255 if np.isnan(value) else 254)
        other = np.ones(scales.shape, bool)
        other[block] = False
        assert np.array_equal(np.asarray(scales)[other], np.asarray(clean_scales)[other])
        other = np.repeat(other, 32, axis=-1 if usage == "rowwise" else -2)
        assert np.array_equal(bits_of(codes)[other], bits_of(clean_codes)[other])
        y = np.asarray(y.astype(jnp.float32))
        assert np.array_equal(y[other], np.ones(other.sum(), np.float32))
        assert np.isnan(y[~other]).all() if np.isnan(value) else y[where] == value


def test_batch_rows_share_no_block():
    """Case 28: column-wise blocks of [B, T, K] are those of the flattened [B T, K], T being a multiple of 32."""
    x = draw(np.random.default_rng(2), 2, 32, 8)
    t, flat = (quantize_mxfp8(y, usage="columnwise") for y in (x, x.reshape(64, 8)))
    assert_same(t.columnwise_scales.reshape(2, 8), flat.columnwise_scales)
    bad = quantize_mxfp8(x.at[0, 3].set(jnp.nan), usage="columnwise")
    assert_same([a[1] for a in bad.copy("columnwise")], [a[1] for a in t.copy("columnwise")])


@pytest.mark.parametrize("how", ["jit", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_every_code_and_scale(dtype, how):
    """Case F3: 256 codes times 256 scales, subnormal results included, under jit too."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1)).view(ml_dtypes.float8_e4m3fn)
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], 8)
    t = MXFP8Tensor(jnp.asarray(codes), jnp.asarray(scales), None, None, dtype, -2)
    with np.errstate(over="ignore"):
        wanted = np.ldexp(codes.astype(np.float64), np.arange(256)[:, None] - 127).astype(np.float32)
        wanted[255] = np.nan
        wanted = wanted.astype(jnp.dtype(dtype))
    for tensor, axis in ((t, -1), (MXFP8Tensor(None, None, codes.T, scales.T, dtype, -2), -2)):
        found = np.asarray((jax.jit(dequantize) if how == "jit" else dequantize)(tensor))
        found = found if axis == -1 else found.T
        nan = np.isnan(wanted)
        assert found.dtype == wanted.dtype and np.array_equal(np.isnan(found), nan)
        unsigned = f"u{wanted.dtype.itemsize}"
        assert np.array_equal(found.view(unsigned)[~nan], wanted.view(unsigned)[~nan])


def test_dequantize_prefers_the_rowwise_copy_and_takes_a_dtype():
    x = draw(np.random.default_rng(3), 64, 64)
    t, other = quantize_mxfp8(x), quantize_mxfp8(2 * x, usage="columnwise")
    t = MXFP8Tensor(*t.copy("rowwise"), *other.copy("columnwise"), "float32", -2)
    assert_same(dequantize(t), dequantize(t.only("rowwise")))
    assert_same(dequantize(t.only("columnwise")), dequantize(other))
    assert not np.array_equal(dequantize(t), dequantize(other))
    assert dequantize(t, jnp.bfloat16).dtype == jnp.bfloat16
    assert_same(dequantize(t.bytes().detach()), dequantize(t))
    for implementation in ("xla", ["mosaic", "xla"]):
        assert_same(dequantize(t, implementation=implementation), dequantize(t))
    assert_same(jax.grad(lambda x: jnp.sum(dequantize(quantize_mxfp8(x), implementation="xla")))(x), jnp.ones_like(x))
    step = np.abs(np.asarray(x)).reshape(64, 2, 32).max(-1, keepdims=True) / 16
    assert np.all(np.abs(np.asarray(x - dequantize(t)).reshape(64, 2, 32)) <= step)


# Gradients


def through(x, **options):
    return dequantize(quantize_mxfp8(x, **options))


@pytest.mark.parametrize("dtype,usage", list(zip(DTYPES, mxfp8.USAGES, strict=True)))
def test_gradients_are_straight_through_and_never_fp8(dtype, usage):
    """Case F7: 3.3, 1000 and 1e-4 arrive as they left; an fp8 carrier would give 3.25, NaN and 0."""
    x = draw(np.random.default_rng(4), 32, 32, dtype=dtype)
    c = jnp.asarray(np.resize([3.3, 1000.0, 1e-4, -7.7], (32, 32)), dtype)
    gradient = lambda x: jax.vjp(functools.partial(through, usage=usage), x)[1](c)[0]  # noqa: E731
    assert_same(jax.jit(gradient)(x), c)
    fp8_carrier = jax.vjp(lambda x: x.astype(mxfp8_bits.CODES).astype(x.dtype), x)[1](c)[0]
    assert fp8_carrier[0, 0] == 3.25 and jnp.isnan(fp8_carrier[0, 1]) and fp8_carrier[0, 2] == 0


def test_a_gradient_arrives_in_the_logical_dtype_and_from_every_consumer():
    x = draw(np.random.default_rng(5), 32, 32, dtype="bfloat16")
    c = draw(np.random.default_rng(6), 32, 32)

    def loss(x):
        t = quantize_mxfp8(x, usage="both")
        rows, columns = dequantize(t, jnp.float32), dequantize(t.only("columnwise"))
        return jnp.sum(rows * c) + jnp.sum(columns) + jnp.sum(dequantize(t.detach()))

    assert_same(jax.jit(jax.grad(loss))(x), c.astype(jnp.bfloat16) + jnp.ones_like(x))


def test_a_detached_tensor_has_no_gradient():
    x = jnp.ones((32, 32))
    assert not np.any(jax.grad(lambda x: jnp.sum(dequantize(quantize_mxfp8(x).detach())))(x))
    t = quantize_mxfp8(x).detach()
    assert len(jax.tree.leaves(t)) == 2
    w = jax.grad(lambda w: jnp.sum(w * dequantize(t)))(x)
    assert_same(w, dequantize(t))


def optimized(function, *args):
    """Optimised HLO without what differs for nothing: metadata and the module's name."""
    text = jax.jit(function).lower(*args).compile().as_text()
    return re.sub(r", metadata=\{[^}]*\}|^HloModule.*$|\n\nFileNames(.|\n)*?(?=\n\n%|\n\nENTRY)", "", text, flags=re.M)


def test_xla_removes_the_proxy_and_backward_reads_nothing():
    x = jnp.ones((32, 96), jnp.bfloat16)
    detached = optimized(lambda x: dequantize(quantize_mxfp8(x).detach()), x)
    assert optimized(through, x) == detached and "f8e4m3fn" in detached
    assert "f8e4m3fn" not in optimized(jax.grad(lambda x: jnp.sum(through(x).astype(jnp.float32))), x)
    residuals = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(through, x)[1], x))
    assert sorted((r.shape, str(r.dtype)) for r in residuals) == [((32, 3), "uint8"), ((32, 96), "uint8")]


# Transformations


def test_vmap_grads_are_each_samples_own():
    """In both orders. A proxy of unbatched zeros would give every sample the sum over the batch."""
    rng = np.random.default_rng(7)
    x, c = draw(rng, 3, 32, 32), draw(rng, 3, 32, 32)
    loss = lambda x, c: jnp.sum(through(x, usage="both") * c)  # noqa: E731
    assert_same(jax.jit(jax.vmap(jax.grad(loss)))(x, c), c)
    assert_same(jax.jit(jax.grad(lambda x: jnp.sum(jax.vmap(loss)(x, c))))(x), c)
    assert_same(jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(x[0], c), c)
    whole = jax.vmap(functools.partial(quantize_mxfp8, usage="both"))(x)
    assert_same(whole, quantize_mxfp8(x, usage="both"))


def test_a_zero_proxy_would_fail_the_vmap_test(monkeypatch):
    monkeypatch.setattr(mxfp8, "make_proxy", lambda codes, dtype: jnp.zeros(codes.shape, dtype))
    x = draw(np.random.default_rng(8), 3, 32, 32)
    gradient = jax.grad(lambda y: jnp.sum(jax.vmap(through)(y) * x))(x)
    np.testing.assert_allclose(gradient[0], x.sum(0), rtol=1e-5, atol=1e-6)


def test_scan_and_remat():
    """Weights quantised once and scanned over as bytes, activations quantised and rematerialised inside."""
    rng = np.random.default_rng(9)
    w, x = draw(rng, 3, 32, 32), draw(rng, 4, 32)

    def layer(x, w):
        return jnp.tanh(through(x) @ dequantize(w)), None

    def scanned(w, x):
        t = quantize_mxfp8(w, token_axis=-2).bytes()
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, t)[0] ** 2)

    def unrolled(w, x):
        for i in range(3):
            x, _ = layer(x, quantize_mxfp8(w[i]))
        return jnp.sum(x**2)

    found, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(w, x) for f in (scanned, unrolled))
    for f, w_ in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(f, w_, rtol=2e-5, atol=1e-6)
        assert np.any(np.asarray(w_) != 0)


def test_a_tensor_crosses_jit_and_equal_tensors_compile_once():
    x = draw(np.random.default_rng(10), 32, 64, dtype="bfloat16")
    t = jax.jit(lambda x: quantize_mxfp8(x, usage="both").detach())(x)
    read = jax.jit(lambda t: dequantize(t))
    assert_same(read(t), dequantize(t))
    read(MXFP8Tensor(*t.copy("rowwise"), *t.copy("columnwise"), "bfloat16", -2))
    read(MXFP8Tensor(*t.copy("rowwise"), *t.copy("columnwise"), jnp.bfloat16, np.int64(-2)))
    assert read._cache_size() == 1
    with pytest.raises(AttributeError):
        t.dtype = "float32"
    assert repr(t) == "MXFP8Tensor(bfloat16[32, 64], rowwise and columnwise, token_axis=-2)"
    assert repr(jax.tree.map(lambda a: None, t))
    shapes = jax.eval_shape(functools.partial(quantize_mxfp8, usage="columnwise"), x)
    assert shapes.shape == (32, 64) and shapes.columnwise_scales.shape == (1, 64)


def test_x64_gives_the_same_bits(x64):
    """Case 46."""
    x = draw(np.random.default_rng(11), 32, 32, dtype="float32")
    t = quantize_mxfp8(x, usage="both")
    judge(t.copy("rowwise"), np.asarray(x), -1, "up")
    assert dequantize(t).dtype == jnp.float32
    jaxpr = str(jax.make_jaxpr(jax.value_and_grad(lambda x: jnp.sum(through(x, usage="both"))))(x))
    assert "f64" not in jaxpr
    with pytest.raises(TypeError, match="x: found dtype float64, wanted bfloat16, float16 or float32"):
        quantize_mxfp8(x.astype("float64"))


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 64), (3, 0), (32, 0)])
def test_empty(shape):
    t = quantize_mxfp8(jnp.zeros(shape), usage="rowwise" if shape == (3, 0) else "both")
    assert dequantize(t).shape == shape


def test_one_dim_has_rowwise_blocks():
    t = quantize_mxfp8(jnp.arange(64.0))
    assert t.rowwise_scales.shape == (2,) and dequantize(t).shape == (64,)


# Meshes


def mesh(kind, shape=(2, 4)):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(getattr(AxisType, kind),) * 2)


@pytest.mark.parametrize("kind", ["Explicit", "Auto", "Manual"])
def test_sharded_blocks_are_one_devices(kind):
    """Case 37: bits of one device, scales sharded as codes, no communication, gradients as sharded as x."""
    rng = np.random.default_rng(12)
    x, c = draw(rng, 64, 128, dtype="bfloat16"), draw(rng, 64, 128, dtype="bfloat16")
    wanted, spec = quantize_mxfp8(x, usage="both").detach(), P("data", "model")
    devices = mesh("Auto" if kind == "Manual" else kind)
    place = NamedSharding(devices, spec)
    with jax.set_mesh(devices):

        def run(x, c):
            t, y = quantize_mxfp8(x, usage="both").detach(), through(x)
            return t, y, jax.vjp(functools.partial(through, usage="both"), x)[1](c)[0]

        compiled = jax.jit(jax.shard_map(run, in_specs=(spec, spec), out_specs=spec) if kind == "Manual" else run)
        compiled = compiled.lower(jax.device_put(x, place), jax.device_put(c, place)).compile()
        t, y, dx = compiled(jax.device_put(x, place), jax.device_put(c, place))
    assert_same(t, wanted)
    assert_same(y, dequantize(wanted))
    assert_same(dx, c)
    for array in jax.tree.leaves((t, y, dx)):
        assert array.sharding.is_equivalent_to(place, 2), array.sharding
    assert not re.search(r"all-\w+|collective|reduce-scatter", compiled.as_text())


def test_replicated_weights_of_a_sharded_batch_sum_their_gradient_once():
    rng = np.random.default_rng(13)
    w, x = draw(rng, 32, 32), draw(rng, 8, 32)
    loss = lambda w, x: jnp.sum(jnp.sin(x @ dequantize(quantize_mxfp8(w))))  # noqa: E731
    wanted = jax.grad(loss)(w, x)
    with jax.set_mesh(mesh("Explicit")):
        found = jax.jit(jax.grad(loss))(jax.device_put(w, P()), jax.device_put(x, P("data")))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    for check in (True, False):
        body = lambda w, x: jax.lax.psum(loss(w, x), "data")  # noqa: E731
        run = jax.shard_map(body, mesh=mesh("Auto", (8, 1)), in_specs=(P(), P("data")), out_specs=P(), check_vma=check)
        found = jax.jit(jax.grad(run))(w, x)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_shard_that_is_not_whole_blocks_is_refused():
    """Case 27: (64, 64) over 4 devices leaves 16 rows a device."""
    with jax.set_mesh(mesh("Explicit")):
        x = jax.device_put(jnp.ones((64, 64)), P("model"))
        message = r"x: found axis -2 of size 64, 16 on each device of mesh axes \('model',\), wanted a multiple of 32"
        with pytest.raises(ValueError, match=message):
            quantize_mxfp8(x, usage="both")
        assert quantize_mxfp8(x).rowwise_scales.shape == (64, 2)


# Refusals

X = jnp.ones((32, 64))
REFUSED = {
    "columnwise 33": (
        lambda: quantize_mxfp8(jnp.ones((33, 64)), usage="columnwise"),
        "x: found axis -2 of size 33, wanted a multiple of 32 for columnwise blocks",
    ),
    "rowwise 48": (lambda: quantize_mxfp8(jnp.ones((32, 48))), "axis -1 of size 48, wanted a multiple of 32"),
    "flattened (2, 20)": (lambda: quantize_mxfp8(jnp.ones((2, 20, 64)), usage="both"), "axis -2 of size 20"),
    "dtype": (lambda: quantize_mxfp8(jnp.ones((32, 32), jnp.int32)), "x: found dtype int32, wanted bfloat16"),
    "fp8": (lambda: quantize_mxfp8(jnp.ones((32, 32), mxfp8_bits.CODES)), "x: found dtype float8_e4m3fn"),
    "scalar": (lambda: quantize_mxfp8(jnp.ones(())), "x: found"),
    "not an array": (lambda: quantize_mxfp8([1.0]), "x: found list"),
    "usage": (lambda: quantize_mxfp8(X, usage="rows"), "usage: found 'rows', wanted one of 'rowwise'"),
    "rounding": (lambda: quantize_mxfp8(X, rounding="down"), "rounding: found 'down', wanted one of 'up', 'ocp'"),
    "positive axis": (lambda: quantize_mxfp8(X, token_axis=0), "token_axis: found 0, wanted -2 or less"),
    "last axis": (lambda: quantize_mxfp8(X, token_axis=-1), "token_axis: found -1, wanted -2 or less"),
    "float axis": (lambda: quantize_mxfp8(X, token_axis=-2.0), "token_axis: found -2.0, wanted a Python int"),
    "few dims": (lambda: quantize_mxfp8(X, usage="both", token_axis=-3), "x: found .* wanted at least 3 dims"),
    "implementation": (lambda: quantize_mxfp8(X, implementation="cuda"), "implementation: found 'cuda'"),
    "no kernel": (lambda: quantize_mxfp8(X, implementation="mosaic"), "quantize_mxfp8: found no implementation"),
    "an array": (lambda: dequantize(X), r"t: found float32\[32, 64\], wanted an MXFP8Tensor"),
    "dequantised": (lambda: dequantize(quantize_mxfp8(X), implementation="cuda"), "implementation: found 'cuda'"),
    "dequantised, 3": (lambda: dequantize(quantize_mxfp8(X), implementation=3), "implementation: found 3"),
    "no kernel back": (lambda: dequantize(quantize_mxfp8(X), implementation="mosaic"), "dequantize: found no impl"),
    "float64": (lambda: dequantize(quantize_mxfp8(X), jnp.float64), "dtype: found dtype float64"),
    "empty": (
        lambda: dequantize(MXFP8Tensor(None, None, None, None, "float32", -2)),
        "t: found an MXFP8Tensor without",
    ),
    "scales": (
        lambda: dequantize(
            MXFP8Tensor(X.astype(mxfp8_bits.CODES), jnp.ones((32, 3), jnp.uint8), None, None, "float32", -2)
        ),
        r"t.rowwise_scales: found uint8\[32, 3\], wanted uint8\[32, 2\]",
    ),
    "codes": (
        lambda: dequantize(MXFP8Tensor(X, jnp.ones((32, 2), jnp.uint8), None, None, "float32", -2)),
        r"t.rowwise_codes: found float32\[32, 64\], wanted float8_e4m3fn",
    ),
    "proxy": (
        lambda: dequantize(dataclasses.replace(quantize_mxfp8(X), proxy=X[0])),
        r"t.proxy: found float32\[64\], wanted None or float32\[32, 64\]",
    ),
    "missing": (lambda: mxfp8_tensor.check("w", quantize_mxfp8(X), "columnwise"), "w: found .* with a columnwise copy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_named(case):
    call, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        call()


def test_a_traced_axis_is_named():
    with pytest.raises(TypeError, match="token_axis: found a traced value"):
        jax.jit(lambda axis: quantize_mxfp8(X, token_axis=axis))(-2)
