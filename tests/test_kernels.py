"""Every Triton kernel's launch specification on torch tensors against the fp64 references: bit for bit where the format
is exact. In Triton's interpreter on the CPU; on a GPU the same launches run as compiled kernels.
"""

import itertools

import numpy as np
import pytest
import reference

torch = pytest.importorskip("torch", reason="needs torch (extra `golden`): kernels run on torch tensors here")
from torch_launch import GPU, run, to_numpy, to_torch  # noqa: E402  (before triton: it chooses the interpreter)

triton = pytest.importorskip("triton", reason="needs triton (extra `test`)")
from jax_mla.kernels import mxfp8, norm, rope, rope_mxfp8  # noqa: E402

pytestmark = [pytest.mark.golden, *([pytest.mark.gpu] if GPU else [])]

DTYPES = ("float32", "bfloat16")
LAYOUTS = ("pairs", "halves")
TIES = 2e-3  # the share of codes that float32 arithmetic in another order may move by one step


def values(*shape, dtype="float32", seed=0, special=True):
    """Blocks of every size, and (rows, columns last) NaN, infinity, zeros, subnormals."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(3 * rng.normal(size=(*shape[:-1], 1)))
    if special:
        flat = x.reshape(-1, shape[-1])
        flat[0, 5], flat[33 % len(flat), 3], flat[40 % len(flat), -1] = np.nan, np.inf, -np.inf
        flat[-32:, :32], flat[-3, -8:] = 0.0, 1e-41
    return to_torch(x, dtype)


def judge_codes(found, x, axis, rounding="up", ties=0.0):
    """codes, scales against the oracle's for x."""
    wanted_codes, wanted_scales = reference.mxfp8(x, axis, rounding)
    codes, scales = map(to_numpy, found)
    if not ties:
        assert np.array_equal(scales.reshape(wanted_scales.shape), wanted_scales)
        assert np.array_equal(codes, wanted_codes)
        return
    assert (scales.reshape(wanted_scales.shape) != wanted_scales).mean() <= ties
    assert (codes != wanted_codes).mean() <= ties


@pytest.mark.parametrize("rounding", ["up", "ocp"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("usage", ["rowwise", "columnwise", "both"])
def test_quantize_and_dequantize(usage, dtype, rounding):
    """Bit for bit, with NaN, infinity, zero and subnormal blocks; 5 groups of columns: the last tile is ragged."""
    x = values(64, 160, dtype=dtype)
    found = run(mxfp8.quantize(64, 160, usage, rounding), x)
    for number, axis in enumerate({"rowwise": [1], "columnwise": [0], "both": [1, 0]}[usage]):
        pair = found[2 * number : 2 * number + 2]
        judge_codes(pair, to_numpy(x), axis, rounding)
        copy = "rowwise" if axis == 1 else "columnwise"
        scales, codes = to_numpy(pair[1]).astype(int), to_numpy(pair[0])
        nan = np.repeat(scales == 255, 32, axis) | (codes & 0x7F == 0x7F)
        exact = reference.decode(codes, scales, axis)
        for out in ("float32", "bfloat16"):
            (y,) = run(mxfp8.dequantize(64, 160, copy, out), *pair)
            wanted = to_numpy(to_torch(np.where(nan, 0, exact), out))
            assert np.array_equal(np.where(nan, 0, to_numpy(y)), wanted) and np.isnan(to_numpy(y)[nan]).all()


def test_values_in_place_of_codes():
    """What a GEMM reads at once has the bits of two launches, quantise and dequantise, beside a copy of codes."""
    x, scale = values(64, 160, dtype="bfloat16"), to_torch(np.linspace(0.5, 2, 160), "bfloat16")
    cos, sin = map(to_torch, np.random.default_rng(3).normal(size=(2, 64, 16)).astype(np.float32))
    (rstd,) = run(norm.rstd(64, 160, 1e-3), x)
    rope_settings = 64, 1, 160, 32, (64, 0, 1), "halves", "pairs", True
    launches = [
        (lambda **how: mxfp8.quantize(64, 160, "both", **how), (x,)),
        (lambda **how: norm.norm_quantize(64, 160, False, **how), (x, rstd, scale)),
        (lambda **how: rope_mxfp8.rope_quantize(*rope_settings, **how), (x.reshape(64, 1, 160), cos, sin)),
    ]
    for launch, args in launches:
        codes = [a.reshape(len(a), -1) for a in run(launch(), *args)]
        for dtypes in (("bfloat16", None), (None, "float32"), ("bfloat16", "bfloat16")):
            found = [a.reshape(len(a), -1) for a in run(launch(values=dtypes), *args)]
            for at, (copy, dtype) in enumerate(zip(("rowwise", "columnwise"), dtypes, strict=True)):
                wanted = codes[2 * at : 2 * at + 2]
                if dtype is not None:
                    wanted = run(mxfp8.dequantize(64, 160, copy, dtype), *wanted)
                for f, w in zip(found[2 * at :], wanted, strict=False):
                    assert np.array_equal(to_numpy(f), to_numpy(w), equal_nan=True), (dtypes, copy)


@pytest.mark.parametrize(
    "outer,tokens,inner,columns", [(2, 32, 3, 96), (1, 160, 2, 64), (1, 128, 1, 128), (3, 64, 1, 160)]
)
def test_quantize_tiles_the_scales_in_the_same_pass(outer, tokens, inner, columns):
    """The bytes of two launches, padding included."""
    rows, wide = outer * tokens, inner * columns
    x = values(rows, wide, dtype="bfloat16")
    for usage in ("rowwise", "columnwise", "both"):
        found = run(mxfp8.quantize(rows, wide, usage, tiled=(tokens, columns)), x)
        plain = run(mxfp8.quantize(rows, wide, usage), x)
        for number, copy in enumerate(["rowwise", "columnwise"] if usage == "both" else [usage]):
            sizes = (tokens, inner, columns // 32) if copy == "rowwise" else (tokens // 32, inner, columns)
            (tiles,) = run(mxfp8.swizzle(outer, *sizes, copy), plain[2 * number + 1])
            assert np.array_equal(to_numpy(found[2 * number]), to_numpy(plain[2 * number]))
            assert np.array_equal(to_numpy(found[2 * number + 1]), to_numpy(tiles))
    assert mxfp8.supports_tiled(tokens, columns) is None and "found 33 tokens" in mxfp8.supports_tiled(33, columns)


def test_quantize_rows_of_any_number():
    x = values(37, 96)
    judge_codes(run(mxfp8.quantize(37, 96, "rowwise"), x), to_numpy(x), 1)


@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("outer,tokens,inner,columns", [(2, 129, 1, 5), (2, 40, 3, 6), (1, 4, 1, 128), (3, 5, 2, 192)])
def test_swizzle(usage, outer, tokens, inner, columns):
    """Case 16 of public reports: every byte by its formula, padding 0; scales that are never 0."""
    shape = (outer, tokens, inner, columns)
    scales = np.resize(np.arange(1, 256), shape).astype(np.uint8)
    (tiles,) = run(mxfp8.swizzle(*shape, usage), to_torch(scales, "uint8"))
    matrices = np.moveaxis(scales, 2, 1).reshape(-1, tokens, columns)
    matrices = matrices if usage == "rowwise" else matrices.swapaxes(1, 2)
    rows, blocks = matrices.shape[1:]
    wanted = np.zeros(tuple(tiles.shape), np.uint8)
    for r, c in itertools.product(range(rows), range(blocks)):
        wide = -(-blocks // 4)
        wanted[:, (r // 128 * wide + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = matrices[:, r, c]
    assert np.array_equal(to_numpy(tiles), wanted)


def tables(n0, n1, half, broadcast, seed=1):
    """cos, sin [n0 * n1 or n1 or n0, half], the launch's table, and what each flat token reads."""
    rng = np.random.default_rng(seed)
    count, table = {"own": (n0 * n1, (n1, n1, 1)), "row": (n1, (n1, 0, 1)), "first": (n0, (n1, 1, 0))}[broadcast]
    cos, sin = rng.normal(size=(2, count, half)).astype(np.float32)
    tokens = np.arange(n0 * n1)
    rows = tokens // n1 * table[1] + tokens % n1 * table[2]
    return cos, sin, table, (cos[rows], sin[rows])


# Every pair of layouts, and dims that are odd in another way each.
ROPES = [(3, 96, 32, read, write) for read, write in itertools.product(LAYOUTS, LAYOUTS)]
ROPES += [(1, 128, 64, "pairs", "halves"), (5, 64, 48, "halves", "pairs"), (9, 0, 8, "pairs", "pairs")]
ROPES += [(6, 3, 2, "pairs", "halves")]


@pytest.mark.parametrize("heads,nope,rotary,read,write", ROPES)
def test_rope(heads, nope, rotary, read, write):
    """Case 30 of public reports: heads that no tile divides, head dims that are no power of two, every tile size the
    same bits; in place and copying; forward and inverse."""
    n0, n1 = 2, 3
    x = to_torch(np.random.default_rng(0).normal(size=(n0 * n1, heads, nope + rotary)), "bfloat16")
    for inverse, broadcast, blocks in ((False, "own", (1, 4, 64)), (True, "row", (64,)), (False, "first", (64,))):
        cos, sin, table, read_by_token = tables(n0, n1, rotary // 2, broadcast)
        wanted = reference.apply_rope(to_numpy(x), *read_by_token, rotary, read, write, inverse)
        first = None
        for copy, block in itertools.product((True, False), blocks):
            # `inverse` turns the roles of the layouts, as in the op: the kernel is told what to read and write.
            layouts = (write, read) if inverse else (read, write)
            launch = rope.rope(n0 * n1, heads, nope + rotary, rotary, table, *layouts, inverse, "bfloat16", copy, block)
            (y,) = run(launch, x, to_torch(cos), to_torch(sin))
            y = to_numpy(y)
            first = y if first is None else first
            assert np.array_equal(y, first)
            assert np.array_equal(y[..., :nope], to_numpy(x)[..., :nope])
            assert np.abs(y - wanted).max() <= 2.0**-8 * np.abs(wanted).max()


@pytest.mark.parametrize("heads,nope,rotary,read,write", ROPES)
def test_split(heads, nope, rotary, read, write):
    rng, tokens, value = np.random.default_rng(0), 3, nope + 5
    kv, k_pe = rng.normal(size=(tokens, heads, nope + value)), rng.normal(size=(tokens, rotary))
    kv, k_pe = to_torch(kv, "bfloat16"), to_torch(k_pe, "bfloat16")
    cos, sin, table, by_token = tables(1, tokens, rotary // 2, "own")
    arguments = (tokens, heads, nope, rotary, value, table, read, write, "bfloat16")
    shared = reference.apply_rope(to_numpy(k_pe)[:, None], *by_token, rotary, read, write)
    wanted = np.concatenate([to_numpy(kv)[..., :nope], np.repeat(shared, heads, 1)], -1)
    for block in (4, 32):
        k, v = map(to_numpy, run(rope.split(*arguments, block), kv, k_pe, to_torch(cos), to_torch(sin)))
        assert np.array_equal(v, to_numpy(kv)[..., nope:]) and np.array_equal(k[..., :nope], wanted[..., :nope])
        assert np.abs(k - wanted).max() <= 2.0**-8 * np.abs(wanted).max()
    dk, dv = (to_torch(rng.normal(size=s), "bfloat16") for s in (k.shape, v.shape))
    dkv, dk_pe = map(to_numpy, run(rope.split_backward(*arguments, 4), dk, dv, to_torch(cos), to_torch(sin)))
    assert np.array_equal(dkv, np.concatenate([to_numpy(dk)[..., :nope], to_numpy(dv)], -1))
    summed = to_numpy(dk).astype(float)[..., nope:].sum(1, keepdims=True)
    wanted = reference.apply_rope(summed, *by_token, rotary, read, write, inverse=True)[:, 0]
    assert np.abs(dk_pe - wanted).max() <= 1e-6 * np.abs(wanted).max()


QUANTIZED = [(1, 128, 64, read, write) for read, write in itertools.product(LAYOUTS, LAYOUTS)]
QUANTIZED += [(3, 96, 32, "pairs", "halves"), (2, 0, 64, "halves", "pairs"), (1, 160, 128, "halves", "halves")]


@pytest.mark.parametrize("heads,nope,rotary,read,write", QUANTIZED)
def test_rope_quantize(heads, nope, rotary, read, write):
    n0, n1 = 2, 32
    x = values(n0 * n1, heads * (nope + rotary), dtype="bfloat16").reshape(n0 * n1, heads, nope + rotary)
    for inverse, broadcast, rounding in ((False, "row", "up"), (True, "own", "ocp")):
        cos, sin, table, by_token = tables(n0, n1, rotary // 2, broadcast)
        layouts = (write, read) if inverse else (read, write)
        launch = rope_mxfp8.rope_quantize(n0 * n1, heads, nope + rotary, rotary, table, *layouts, inverse, rounding)
        found = run(launch, x, to_torch(cos), to_torch(sin))
        with np.errstate(invalid="ignore"):
            wanted = reference.apply_rope(to_numpy(x), *by_token, rotary, read, write, inverse)
        judge_codes(found[:2], wanted, -1, rounding, TIES)
        judge_codes(found[2:], wanted, 0, rounding, TIES)
    assert rope_mxfp8.supports(nope + rotary, rotary) is None
    assert "multiples of 32" in rope_mxfp8.supports(112, 48)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype, zero_centered):
    rng, rows, columns = np.random.default_rng(0), 32, 160
    x, dy = values(rows, columns, dtype=dtype, special=False), values(rows, columns, dtype=dtype, seed=1, special=False)
    scale = to_torch(rng.normal(size=columns), "float32")
    f = lambda a: to_numpy(a).astype(float)  # noqa: E731
    wanted = reference.rms_norm(f(x), f(scale), 1e-2, zero_centered)
    y, rstd = run(norm.norm(rows, columns, 1e-2, zero_centered, dtype), x, scale)
    assert np.abs(f(y) - wanted).max() <= (1e-6 if dtype == "float32" else 2.0**-8) * np.abs(wanted).max()
    assert np.abs(f(rstd) * np.sqrt((f(x) ** 2).mean(-1) + 1e-2) - 1).max() < 1e-6
    (rstd_too,) = run(norm.rstd(rows, columns, 1e-2), x)
    found = run(norm.norm_quantize(rows, columns, zero_centered), x, rstd_too, scale)
    judge_codes(found[:2], wanted, 1, ties=TIES)
    judge_codes(found[2:], wanted, 0, ties=TIES)
    by_row = run(norm.norm_quantize(rows - 3, columns, zero_centered, "rowwise"), x[:-3], rstd_too[:-3], scale)
    assert all(np.array_equal(to_numpy(a), to_numpy(b)[:-3]) for a, b in zip(by_row, found[:2], strict=True))
    assert np.allclose(f(rstd_too), f(rstd), rtol=1e-6)
    for programs in (7, 32):  # ragged: 32 rows by 7 programs
        dx, partial = run(norm.norm_backward(rows, columns, zero_centered, dtype, programs), x, rstd, scale, dy)
        h, factor = f(x) * f(rstd)[:, None], f(scale) + zero_centered
        g = f(dy) * factor
        wanted_dx = f(rstd)[:, None] * (g - h * (g * h).mean(-1, keepdims=True))
        assert np.abs(f(dx) - wanted_dx).max() <= (1e-6 if dtype == "float32" else 2.0**-8) * np.abs(wanted_dx).max()
        wanted_dscale = (f(dy) * h).sum(0)
        assert np.abs(f(partial).sum(0) - wanted_dscale).max() <= 1e-6 * np.abs(wanted_dscale).max()


def test_constants_are_checked_against_the_kernels_names():
    with pytest.raises(ValueError, match=r"constants: found \['ROW'\], wanted arguments of quantize_rows"):
        mxfp8.Launch(mxfp8.quantize_rows, (1,), (), (("ROW", 1),))
