"""FP8 tensors with one scale each, bit for bit against a quantiser written from Transformer Engine's definition, in
numpy and in torch; the Triton kernels, gradients, transformations, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from judge import assert_same, draw

try:
    import torch_launch  # before triton: it chooses the interpreter
except ImportError:
    torch_launch = None
from jax_mla import FP8Tensor, dequantize, fp8, fp8_tensor, quantize_fp8

GPU = torch_launch is not None and torch_launch.GPU
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
FORMATS, DTYPES = tuple(TYPES), ("float32", "bfloat16", "float16")
VARIANTS = [(format, power_of_two) for format in FORMATS for power_of_two in (False, True)]
SHAPE = (3, 8, 17)
MOST = np.finfo(np.float32).max


def oracle(x, format="e4m3", power_of_two=False):
    """Codes, uint8; scale and its inverse, float32. In float64, in which a product of two float32 is exact, rounded
    where Transformer Engine's kernels round: the scale, the product and the code."""
    x = np.asarray(x).astype(np.float64)
    largest = float(ml_dtypes.finfo(TYPES[format]).max)
    amax = np.abs(np.where(np.isnan(x), 0, x)).max(initial=0)
    with np.errstate(over="ignore", divide="ignore"):
        scale = np.float32(1) if amax in (0, np.inf) else min(np.float32(largest) / np.float32(amax), MOST)
        if power_of_two:
            scale = np.float32(2.0 ** (np.frexp(scale)[1] - 1))
        product = (x * np.float64(scale)).astype(np.float32)
    codes = np.clip(product, -largest, largest).astype(TYPES[format]).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes), scale, np.float32(1) / scale


def rounded(x, format="e4m3", power_of_two=False):
    """The values, float64, of x as codes and scale."""
    codes, _, inverse = oracle(x, format, power_of_two)
    return codes.view(TYPES[format]).astype(np.float64) * np.float64(inverse)


def battery(dtype):
    """Tensors of one shape: amax all over the dtype's range; every rounding boundary; zeros, NaN, infinities,
    subnormals, alone and among others; what makes the scale overflow."""
    rng, dtype = np.random.default_rng(0), np.dtype(dtype)
    info, size = ml_dtypes.finfo(dtype), np.prod(SHAPE)
    plain = rng.normal(size=(24, size)) * np.exp(2 * rng.normal(size=(24, size)))
    lowest, highest = int(np.log2(float(info.smallest_subnormal))), int(np.log2(float(info.max)))
    for row, exponent in zip(plain, np.linspace(lowest, highest, 17).astype(int), strict=False):
        row[:] = rng.uniform(-1, 1, size) * 2.0**exponent
        row[exponent % size] = 2.0**exponent * (1, 1.75, -1.0625)[exponent % 3]
    special = plain[17:24].astype(dtype)
    special[0, ::5], special[0, 3] = np.nan, -np.nan
    special[1, 7], special[2, 11], special[3, :3] = np.inf, -np.inf, (np.nan, np.inf, -np.inf)
    special[4, ::3], special[4, 1::3] = info.max, -info.max
    special[5] = info.smallest_subnormal * rng.integers(-9, 10, size)
    special[6, ::4] = info.smallest_subnormal
    rows = [*plain[:17].astype(dtype), *special]
    rows += [np.full(size, value, dtype) for value in (0.0, -0.0, np.nan, info.smallest_subnormal)]
    for format in FORMATS:  # under a scale of 1
        grid = np.arange(128, dtype=np.uint8).view(TYPES[format]).astype(np.float64)
        grid = grid[np.isfinite(grid) & (grid <= float(info.max))]
        edges = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(dtype)
        edges = np.concatenate([np.nextafter(edges, dtype.type(0)), edges])
        edges[edges > grid[-1]] = 0
        for cut in np.split(np.resize(edges * rng.choice(np.array([-1, 1], dtype), len(edges)), 2 * size), 2):
            cut[5] = grid[-1]
            rows.append(cut)
    if dtype != np.float16:  # around the amax whose scale is float32's largest
        for top in (448 / float(MOST), 57344 / float(MOST)):
            for factor in (1 - 2**-6, 1.0, 1 + 2**-6):
                rows.append((rng.uniform(-1, 1, size) * top * factor).astype(dtype))
                rows[-1][0] = top * factor
    return [row.reshape(SHAPE) for row in rows]


def moved(codes, token_axis):
    """With the dims after `token_axis` in front."""
    split = codes.ndim + token_axis + 1
    return np.transpose(codes, (*range(split, codes.ndim), *range(split)))


def quantised(x):
    """(power_of_two, tensor): all variants; by turns along either axis, and one copy alone."""
    tensors = []
    for number, (format, power_of_two) in enumerate(VARIANTS):
        options = dict(token_axis=-2 - number % 2, format=format, power_of_two=power_of_two)
        usages = ("both", "columnwise", "rowwise")[: 1 + 2 * (number == 0)]
        tensors += [(power_of_two, quantize_fp8(x, usage=usage, **options).detach()) for usage in usages]
    return tensors


compiled = jax.jit(quantised)


@functools.cache
def found(dtype):
    """What the library makes of the battery: (x, tensors by variant and usage)."""
    return [(x, compiled(jnp.asarray(x))) for x in battery(dtype)]


def subnormal(x):
    """Whether float32 would have subnormals of it."""
    x = np.abs(np.asarray(x).astype(np.float64))
    return bool(np.any((x > 0) & (x < 2.0**-126)))


BITS = [*((dtype, False) for dtype in DTYPES), *((dtype, True) for dtype in DTYPES[:2])]


def judge(t, x, codes, inverse, what=""):
    """A tensor's copies against codes and scale."""
    assert t.shape == x.shape and t.dtype == x.dtype and t.scale_inv.dtype == jnp.float32
    found, wanted = (np.asarray(s, np.float32).view(np.uint32).item() for s in (t.scale_inv, inverse))
    assert found == wanted, f"{what}: inverse scale {found:#x}, wanted {wanted:#x}"
    for usage in t.usages:
        c = t.codes(usage)
        assert c.dtype == TYPES[t.format]
        wanted = codes if usage == "rowwise" else moved(codes, t.token_axis)
        wrong = np.flatnonzero(np.asarray(c).view(np.uint8) != wanted)
        assert c.shape == wanted.shape and not len(wrong), f"{what}: {len(wrong)} {usage} codes, first at {wrong[0]}"


@pytest.mark.parametrize("dtype,of_subnormals", BITS)
def test_every_bit_is_the_definitions(dtype, of_subnormals):
    """Under jit: codes as they lie and transposed, and the inverse scale."""
    usages = [("rowwise", "columnwise"), ("columnwise",), ("rowwise",), *[("rowwise", "columnwise")] * 3]
    for number, (x, tensors) in enumerate(found(dtype)):
        assert [t.usages for _, t in tensors] == usages
        for power_of_two, t in tensors if subnormal(x) == of_subnormals else ():
            codes, _, inverse = oracle(x, t.format, power_of_two)
            judge(t, x, codes, inverse, f"tensor {number}, {power_of_two}, {t}")


@pytest.mark.parametrize("dtype,of_subnormals", BITS[1:4:2])
def test_every_bit_eagerly(dtype, of_subnormals):
    some = [x for x in battery(dtype) if subnormal(x) == of_subnormals]
    for number, x in list(enumerate(some))[:: 1 + 2 * (not of_subnormals)]:
        format = FORMATS[number % 2]
        t = quantize_fp8(jnp.asarray(x), usage="both", token_axis=-3, format=format)
        judge(t, x, *oracle(x, format)[::2], f"tensor {number}, {format}")


@pytest.mark.golden
@pytest.mark.parametrize("dtype,of_subnormals", BITS)
def test_every_bit_is_torchs(dtype, of_subnormals):
    """The same in torch, on its own FP8 types and in its own float32."""
    import torch

    types = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    for number, (x, tensors) in enumerate(found(dtype)):
        integers = torch.from_numpy(x.view(f"i{x.dtype.itemsize}"))  # numpy has no bfloat16 to give torch
        values = integers.view(getattr(torch, dtype)).float()
        for power_of_two, t in tensors if subnormal(x) == of_subnormals else ():
            largest = torch.finfo(types[t.format]).max
            amax = values.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs().amax()
            scale = torch.tensor(largest, dtype=torch.float32) / amax
            scale = scale.clamp(max=torch.finfo(torch.float32).max) if 0 < amax < torch.inf else torch.ones_like(scale)
            if power_of_two:
                scale = torch.ldexp(torch.ones(()), torch.frexp(scale).exponent - 1)
            codes = (values * scale).clamp(-largest, largest).to(types[t.format]).view(torch.uint8)
            codes = torch.where(values.isnan(), torch.tensor(0x7F, dtype=torch.uint8), codes)
            judge(t, x, codes.numpy(), (1 / scale).numpy(), f"tensor {number}, {power_of_two}, {t}")


def test_the_comparison_catches_the_usual_faults():
    """Each of these is what a plausible implementation gives; each must fail the battery."""
    tensors = battery("float32")
    with np.errstate(all="ignore"):
        faults = {
            "NaN in amax": lambda x: oracle(np.where(np.isnan(x), np.inf, x)),
            "flushed subnormals": lambda x: oracle(np.where(np.abs(x) < 2.0**-126, 0 * x, x)),
            "infinities in amax": lambda x: oracle(np.where(np.isinf(x), 0, x)),
            "scale to its nearest power of two": lambda x: oracle(x, power_of_two=True),
            "another format": lambda x: oracle(x, "e5m2"),
            "truncated products": lambda x: oracle(np.nextafter(x, np.float32(0))),
        }
        for fault, wrong in faults.items():
            differ = 0
            for x in tensors:
                codes, _, inverse = oracle(x)
                other, _, other_inverse = wrong(x)
                differ += not (np.array_equal(codes, other) and inverse == other_inverse)
            assert differ, f"{fault} went unnoticed"


KNOWN = [  # values, format, power_of_two, codes, inverse scale
    ([1, 2, -4, 0.3, 0, -0.0, np.nan], "e4m3", False, "6e 76 fe 60 00 80 7f", 1 / 112),
    ([1, 2, -4, 0.3, 0, -0.0, -np.nan], "e5m2", False, "73 77 fb 6c 00 80 7f", 1 / 14336),
    ([1, 2, -4, 0.3], "e4m3", True, "68 70 f8 5a", 1 / 64),
    ([np.inf, -np.inf, 1, 500], "e4m3", False, "7e fe 38 7e", 1.0),
    ([np.inf, -np.inf, 1, 500], "e5m2", True, "7b fb 3c 60", 1.0),
    ([0, -0.0, np.nan, 0], "e4m3", False, "00 80 7f 00", 1.0),
    ([1e-40, -1e-40, 0, 0], "e4m3", False, "11 91 00 00", 2.0**-128),
    ([1e-40, -1e-40, 0, 0], "e4m3", True, "09 89 00 00", 2.0**-127),
    ([1e-37, -1e-37, 0, 0], "e4m3", True, "59 d9 00 00", 2.0**-127),
    ([3.4028235e38, -1, 0, 0], "e4m3", False, "7e 80 00 00", 7.5957e35),
]


@pytest.mark.parametrize("values,format,power_of_two,codes,inverse", KNOWN)
def test_known_answers(values, format, power_of_two, codes, inverse):
    """By hand: 448 / 4 is 112, 1 * 112 is 1.75 * 2^6, which is 0x6E."""
    t = quantize_fp8(jnp.asarray([values], jnp.float32), usage="both", format=format, power_of_two=power_of_two)
    assert np.asarray(t.rowwise_codes).view(np.uint8).tobytes() == bytes.fromhex(codes)
    assert np.asarray(t.columnwise_codes).view(np.uint8).tobytes() == bytes.fromhex(codes)
    assert t.columnwise_codes.shape == (len(values), 1)
    np.testing.assert_allclose(np.asarray(t.scale_inv, np.float64), inverse, rtol=1e-4 if inverse > 1 else 6e-8)


def test_dequantize_is_code_times_scale():
    x = draw(np.random.default_rng(1), 4, 3, 10)
    for format, power_of_two in VARIANTS[1:3]:
        t = quantize_fp8(x, usage="both", token_axis=-3, format=format, power_of_two=power_of_two)
        wanted = rounded(x, format, power_of_two).astype(np.float32)
        assert_same(dequantize(t), wanted)
        for copy in (t.only("rowwise"), t.only("columnwise").detach(), t.bytes()):
            assert_same(dequantize(copy), wanted)
        assert_same(dequantize(t, jnp.bfloat16), wanted.astype(jnp.bfloat16))
        step = 2**-4 if format == "e4m3" else 2**-3  # half of the last bit, of normal codes
        kept = np.abs(wanted) > np.abs(wanted).max() * 2**-12
        assert np.all((np.abs(wanted - x) <= step * np.abs(x) * (1 + 1e-6))[kept])
    assert dequantize(quantize_fp8(x.astype(jnp.float16))).dtype == jnp.float16
    subnormal = quantize_fp8(jnp.full((2, 2), 1e-40))
    assert subnormal.scale_inv > 0 or np.asarray(subnormal.scale_inv).view(np.uint32) == 1 << 21


# Gradients and transformations


def through(x, **options):
    return dequantize(quantize_fp8(x, **options))


@pytest.mark.parametrize("dtype,usage", list(zip(DTYPES, fp8.USAGES, strict=True)))
def test_gradients_are_straight_through_and_never_fp8(dtype, usage):
    """3.3, 1000 and 1e-4 arrive as they left, of what saturates and of NaN too; a carrier of FP8 would give others."""
    x = draw(np.random.default_rng(4), 5, 9, dtype=dtype).at[0, 0].set(jnp.inf).at[0, 1].set(jnp.nan)
    c = jnp.asarray(np.resize([3.3, 1000.0, 1e-4, -7.7], (5, 9)), dtype)

    def gradient(x, c):
        return jax.vjp(functools.partial(through, usage=usage, format="e5m2"), x)[1](c)[0]

    assert_same(jax.jit(gradient)(x, c), c)
    residuals = jax.eval_shape(lambda x: jax.vjp(lambda x: quantize_fp8(x, usage=usage), x)[1], x)
    assert not [a for a in jax.tree.leaves(residuals) if a.size]
    assert not np.any(jax.grad(lambda x: jnp.sum(dequantize(quantize_fp8(x).detach())))(x).astype(jnp.float32))


def test_vmap_has_a_scale_an_entry():
    """Values and gradients of every entry are its own, whatever the others hold."""
    x = draw(np.random.default_rng(5), 3, 4, 6) * jnp.asarray([1e-3, 1.0, 50.0])[:, None, None]
    c = draw(np.random.default_rng(6), 3, 4, 6)
    quantize = functools.partial(quantize_fp8, usage="both", format="e5m2")
    t = jax.jit(jax.vmap(quantize))(x)
    assert t.scale_inv.shape == (3,) and len(set(t.scale_inv.tolist())) == 3
    for i in range(3):
        judge(jax.tree.map(lambda a, i=i: a[i], t), x[i], *oracle(x[i], "e5m2")[::2])
    loss = lambda x, c: jnp.sum(dequantize(quantize(x)) * c)  # noqa: E731
    for run in (jax.vmap(jax.grad(loss)), jax.grad(lambda x, c: jnp.sum(jax.vmap(loss)(x, c)))):
        assert_same(jax.jit(run)(x, c), c)


def test_scan_remat_and_bytes():
    """Weights quantised once, scanned over as bytes, activations quantised and rematerialised inside."""
    rng = np.random.default_rng(9)
    w, x = draw(rng, 3, 8, 8), draw(rng, 4, 8)
    layer = lambda x, t: (jnp.tanh(through(x) @ dequantize(t)), None)  # noqa: E731

    def scanned(w, x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, jax.vmap(quantize_fp8)(w).bytes())[0] ** 2)

    def unrolled(w, x):
        for i in range(3):
            x, _ = layer(x, quantize_fp8(w[i]))
        return jnp.sum(x**2)

    found, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(w, x) for f in (scanned, unrolled))
    for f, g in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(f, g, rtol=2e-5, atol=1e-6)
        assert np.any(np.asarray(g) != 0)


def test_a_tensor_crosses_jit_and_export():
    x = draw(np.random.default_rng(10), 4, 3, 6, dtype="bfloat16")
    make = jax.jit(lambda x: quantize_fp8(x, usage="both", token_axis=-3, format="e5m2").detach())
    t, read = make(x), jax.jit(lambda t: dequantize(t))
    assert_same(read(t), dequantize(t))
    read(FP8Tensor(t.codes("rowwise"), t.codes("columnwise"), t.scale_inv, jnp.bfloat16, np.int64(-3), "e5m2"))
    assert read._cache_size() == 1
    with pytest.raises(AttributeError):
        t.dtype = "float32"
    assert repr(t) == "FP8Tensor(bfloat16[4, 3, 6], e5m2, rowwise and columnwise, token_axis=-3)"
    assert repr(jax.tree.map(lambda a: None, t)) and len(jax.tree.leaves(t)) == 3
    shapes = jax.eval_shape(functools.partial(quantize_fp8, usage="columnwise"), x)
    assert shapes.shape == (4, 3, 6) and shapes.columnwise_codes.shape == (6, 4, 3)
    for function, argument in ((make, x), (read, t)):
        restored = jax.export.deserialize(jax.export.export(function)(argument).serialize()).call(argument)
        assert_same(restored, function(argument))
    assert isinstance(jax.export.deserialize(jax.export.export(make)(x).serialize()).call(x), FP8Tensor)


def test_x64_gives_the_same_bits(x64):
    x = battery("float32")[18]
    judge(quantize_fp8(jnp.asarray(x), usage="both"), x, *oracle(x)[::2])
    with pytest.raises(TypeError, match="x: found dtype float64, wanted bfloat16, float16 or float32"):
        quantize_fp8(jnp.ones((2, 2), "float64"))


def test_x64_has_no_float64(x64):
    x = jnp.ones((2, 2), "float32")
    jaxpr = str(jax.make_jaxpr(jax.value_and_grad(lambda x: jnp.sum(through(x, usage="both"))))(x))
    assert "f64" not in jaxpr


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 5), (1, 1)])
def test_empty_and_tiny(shape):
    t = quantize_fp8(jnp.ones(shape), usage="both")
    assert dequantize(t).shape == shape and t.scale_inv == (1.0 if 0 in shape else np.float32(1) / np.float32(448))


def test_a_second_derivative_is_refused():
    first = jax.grad(lambda x: jnp.sum(jnp.sin(through(x))))
    with pytest.raises(NotImplementedError, match="quantize_fp8: found a second derivative|second derivative"):
        jax.grad(lambda x: jnp.sum(first(x)))(jnp.ones((2, 3)))


# The Triton kernels


@pytest.mark.skipif(torch_launch is None, reason="needs torch and triton (extras `golden`, `test`)")
@pytest.mark.parametrize("usage", [pytest.param(u, marks=[pytest.mark.gpu] if GPU else []) for u in fp8.USAGES])
def test_kernels_give_the_same_bits(usage):
    """Ragged sizes, several entries with a scale each, NaN, infinities and subnormals; what is outside of the arrays is
    neither read nor written. On a GPU the same launches run as compiled kernels."""
    from jax_mla.kernels import fp8 as kernels

    for entries, rows, columns, dtype, format in (
        (1, 7, 130, "bfloat16", "e4m3"),
        (3, 33, 5, "float16", "e5m2"),
        (2, 129, 3, "bfloat16", "e5m2"),
        (1, 128, 128, "bfloat16", "e4m3"),  # whole tiles
        (2, 1, 1, "float16", "e5m2"),
        *([(1, 7, 130, "float32", "e4m3")] if usage == "rowwise" else []),
    ):
        rng = np.random.default_rng(rows)
        x = rng.normal(size=(entries, rows, columns)) * np.exp(2 * rng.normal(size=(entries, 1, 1)))
        if rows > 1:
            x[0, 1, :3], x[-1, 2, 0], x[0, 3] = (np.nan, -np.nan, -0.0), np.inf if entries > 1 else 1, 1e-6
        if dtype == "float32":
            x[-1, -1], x[0, 4] = 1e-41, x[0, 4] * 1e-3
        given = torch_launch.to_torch(x, dtype)
        x = torch_launch.to_numpy(given.float())
        wanted = [oracle(entry, format) for entry in x]
        scale = torch_launch.to_torch([s for _, s, _ in wanted])
        codes = np.stack([c for c, _, _ in wanted])
        wanted = {"rowwise": [codes], "columnwise": [codes.swapaxes(1, 2)]}
        wanted["both"] = wanted["rowwise"] + wanted["columnwise"]
        results = torch_launch.run(kernels.quantize(entries, rows, columns, usage, dtype, format), given, scale)
        for f, w in zip(results, wanted[usage], strict=True):
            assert np.array_equal(torch_launch.to_numpy(f), w), (entries, rows, columns, dtype, format)
    assert "wants 16 bits" in kernels.supports("both", "float32") and kernels.supports("both", "float16") is None


# Refusals

X = np.ones((4, 6), np.float32)
T = FP8Tensor(np.ones((4, 6), TYPES["e4m3"]), None, np.float32(1), "float32", -2, "e4m3")
REFUSED = {
    "dtype": (lambda: quantize_fp8(jnp.ones((2, 2), jnp.int32)), "x: found dtype int32, wanted bfloat16"),
    "fp8": (lambda: quantize_fp8(T.rowwise_codes), "x: found dtype float8_e4m3fn"),
    "not an array": (lambda: quantize_fp8([1.0]), "x: found list"),
    "a tensor": (lambda: quantize_fp8(T), "x: found FP8Tensor"),
    "scalar": (lambda: quantize_fp8(jnp.ones(())), "x: found"),
    "usage": (lambda: quantize_fp8(X, usage="rows"), "usage: found 'rows', wanted one of 'rowwise'"),
    "format": (lambda: quantize_fp8(X, format="e3m4"), "format: found 'e3m4', wanted one of 'e4m3', 'e5m2'"),
    "power_of_two": (lambda: quantize_fp8(X, power_of_two=1), "power_of_two: found 1, wanted a bool"),
    "positive axis": (lambda: quantize_fp8(X, token_axis=0), "token_axis: found 0, wanted -2 or less"),
    "last axis": (lambda: quantize_fp8(X, token_axis=-1), "token_axis: found -1, wanted -2 or less"),
    "few dims": (lambda: quantize_fp8(X, token_axis=-3), "x: found .* wanted at least 3 dims"),
    "implementation": (lambda: quantize_fp8(X, implementation="cuda"), "implementation: found 'cuda'"),
    "no kernel": (lambda: quantize_fp8(X, implementation="mosaic"), "quantize_fp8: found no implementation"),
    "a traced axis": (lambda: jax.jit(lambda a: quantize_fp8(X, token_axis=a))(-2), "token_axis: found a traced value"),
    "missing": (lambda: T.codes("columnwise"), "no columnwise copy, wanted one quantised with usage='columnwise'"),
    "missing, only": (lambda: T.only("columnwise"), "no columnwise copy"),
    "checked": (lambda: fp8_tensor.check("w", T, "columnwise"), "w: found .* with a columnwise copy"),
    "no codes": (
        lambda: dequantize(FP8Tensor(None, None, jnp.ones(()), "float32", -2, "e4m3")),
        "t: found an FP8Tensor without codes",
    ),
    "codes": (
        lambda: dequantize(dataclasses.replace(T, rowwise_codes=X)),
        r"t.rowwise_codes: found float32\[4, 6\], wanted float8_e4m3fn \(or its bytes\) \[4, 6\]",
    ),
    "codes of another format": (
        lambda: dequantize(dataclasses.replace(T, format="e5m2")),
        r"t.rowwise_codes: found float8_e4m3fn\[4, 6\], wanted float8_e5m2",
    ),
    "transposed": (
        lambda: dequantize(dataclasses.replace(quantize_fp8(X, usage="both"), columnwise_codes=T.rowwise_codes)),
        r"t.columnwise_codes: found float8_e4m3fn\[4, 6\], wanted .* \[6, 4\]",
    ),
    "scale": (
        lambda: dequantize(dataclasses.replace(T, scale_inv=jnp.ones(1))),
        r"t.scale_inv: found float32\[1\], wanted float32\[\]",
    ),
    "proxy": (lambda: dequantize(dataclasses.replace(T, proxy=X[0])), r"t.proxy: found float32\[6\], wanted None or"),
    "logical dtype": (lambda: dataclasses.replace(T, dtype="float64"), "dtype: found dtype float64"),
    "made of a format": (lambda: dataclasses.replace(T, format="e3m4"), "format: found 'e3m4'"),
    "dequantised": (lambda: dequantize(T, jnp.float64), "dtype: found dtype float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_named(case):
    call, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        call()
