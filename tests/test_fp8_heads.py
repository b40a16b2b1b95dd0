"""kernels/fp8_heads.py in Triton's interpreter, or on a GPU, against numpy."""

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (extra `golden`): kernels run on torch tensors here")
from torch_launch import GPU, run, to_numpy, to_torch  # noqa: E402  (before triton: it chooses the interpreter)

triton = pytest.importorskip("triton", reason="needs triton (extra `test`)")
from jax_mla.kernels import fp8_heads  # noqa: E402

pytestmark = [pytest.mark.golden, *([pytest.mark.gpu] if GPU else [])]

FORMATS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def cast(x, scale, format):
    """x [entries, ...] by its entry's scale; NaN is 0x7F."""
    dtype, most = FORMATS[format]
    product = x * scale.reshape(-1, *[1] * (x.ndim - 1)).astype(np.float32)
    codes = np.clip(product, -most, most).astype(dtype).view(np.uint8)
    return np.where(np.isnan(x), 0x7F, codes)


def largest(x):
    return np.nanmax(np.abs(x), axis=-1).astype(np.float32).view(np.int32)


def draw(*shape, dtype, seed):
    x = np.random.default_rng(seed).normal(size=shape)
    x.reshape(-1)[3 * shape[-1] + 1] = np.nan
    x = to_torch(x, dtype)
    return x, to_numpy(x).astype(np.float32)


def turned(x, cos, sin, kept, read, write, inverse):
    """x [entries, rows, heads, dim], cos, sin [rows, 1, half]; float32, each product rounded."""
    rest = x[..., kept:]
    half = rest.shape[-1] // 2
    x1, x2 = (rest[..., 0::2], rest[..., 1::2]) if read == "pairs" else (rest[..., :half], rest[..., half:])
    s = -sin if inverse else sin
    left, right = x1 * cos - x2 * s, x2 * cos + x1 * s
    both = np.stack([left, right], axis=-1 if write == "pairs" else -2).reshape(rest.shape)
    return np.concatenate([x[..., :kept], both], axis=-1)


@pytest.mark.parametrize(
    "entries,rows,heads,nope,rotary,value,format,dtype",
    [
        (1, 40, 3, 32, 16, 24, "e5m2", "bfloat16"),
        (2, 33, 2, 24, 8, 40, "e4m3", "float16"),
        (1, 9, 2, 136, 4, 8, "e4m3", "bfloat16"),
        (1, 7, 1, 0, 4, 8, "e5m2", "bfloat16"),
    ],
)
def test_keys_and_values_side_by_side(entries, rows, heads, nope, rotary, value, format, dtype):
    dk, dk_values = draw(entries, rows, heads, nope + rotary, dtype=dtype, seed=3)
    dv, dv_values = draw(entries, rows, heads, value, dtype=dtype, seed=4)
    wanted = np.concatenate([dk_values[..., :nope], dv_values], axis=-1)
    angles = np.random.default_rng(5).normal(size=(rows, rotary // 2)).astype(np.float32)
    tables, table = [to_torch(t) for t in (np.cos(angles), np.sin(angles))], (rows, 0, 1)
    sizes = entries * rows, heads, nope, rotary, value
    flat = [a.reshape(entries * rows, heads, -1) for a in (dk, dv)]
    dk_pe, amax = run(fp8_heads.split_amax(*sizes, table, "pairs", "halves"), *flat, *tables)
    assert np.array_equal(to_numpy(amax), largest(wanted).reshape(-1, heads))
    turned_sum = turned(
        dk_values[..., nope:].sum(axis=2, keepdims=True), np.cos(angles)[:, None], np.sin(angles)[:, None], 0,
        "halves", "pairs", True,
    )  # fmt: skip
    np.testing.assert_allclose(to_numpy(dk_pe), turned_sum.reshape(entries * rows, rotary), rtol=1e-5, atol=1e-5)
    scale = np.float32(FORMATS[format][1]) / np.nanmax(np.abs(wanted), axis=(1, 2, 3))
    launch = fp8_heads.join_quantize(entries, rows, heads, nope, rotary, value, dtype, format)
    codes, transposed = run(launch, dk, dv, to_torch(scale))
    assert np.array_equal(to_numpy(codes), cast(wanted, scale, format))
    columns = cast(wanted, scale, format).reshape(entries, rows, -1).swapaxes(1, 2)
    assert np.array_equal(to_numpy(transposed), columns)
