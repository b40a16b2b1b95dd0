"""MXFP8 in torch, written from OCP Microscaling Formats (MX) v1.0 on torch's own fp8 types, bit for bit with ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_mla import dequantize, quantize_mxfp8

pytestmark = pytest.mark.golden


def inputs():
    """Blocks [n, 32], float32: an amax of every exponent, subnormals and specials."""
    rng = np.random.default_rng(0)
    exponents = np.arange(-149, 128)
    x = rng.uniform(-1, 1, (len(exponents), 32)) * np.ldexp(1.0, exponents)[:, None]
    x[:, 3] = np.ldexp(np.resize([1.0, 1.75, 1.7500001, 1.9999, 1.2], len(exponents)), exponents)
    special = rng.normal(size=(11, 32))
    special[0], special[1], special[2, 5], special[3, 31] = 0, -0.0, np.nan, np.nan
    special[4, 0], special[5, 7], special[6], special[7] = np.inf, -np.inf, 3e38, -3e38
    special[8, :2], special[9, :2], special[10] = (np.inf, np.nan), (500, -500), 1e-45
    return np.concatenate([x, special]).astype(np.float32)


def quantize_torch(torch, x, rounding):
    """Codes and scales, uint8, of torch blocks [n, 32], float64 inside."""
    amax = x.double().abs().amax(-1)
    exponent = torch.frexp(amax).exponent - 1 - 8
    if rounding == "up":
        exponent += (448.0 * 2.0 ** exponent.double() < amax).int()
    exponent = torch.where(amax == 0, -127, exponent.clamp(-127, 127))
    exponent = torch.where(amax.isinf(), 127, exponent)
    scaled = (x.double() * 2.0 ** (-exponent.double())[:, None]).clamp(-448, 448)
    codes = scaled.float().to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(amax.isnan()[:, None], 0x7F, codes)
    return codes, torch.where(amax.isnan(), 255, exponent + 127).to(torch.uint8)


@pytest.mark.parametrize("rounding", ["up", "ocp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_scales_and_values_are_torchs(dtype, rounding):
    import torch

    x = torch.from_numpy(inputs()).to(getattr(torch, dtype))
    assert torch.any(x[20] != 0), "torch flushes subnormals here"  # amax 2^-129
    codes, scales = quantize_torch(torch, x, rounding)
    # float8_e8m0fnu is torch's E8M0 (255 is NaN); float64 holds every product.
    values = codes.view(torch.float8_e4m3fn).double() * scales.view(torch.float8_e8m0fnu).double()[:, None]
    values = values.float().to(x.dtype)

    def run(x):
        t = quantize_mxfp8(x, rounding=rounding)
        return t.detach(), dequantize(t).astype(jnp.float32)

    integers = x.view(torch.int32 if dtype == "float32" else torch.int16)  # numpy has no bfloat16 to take from torch
    t, y = jax.jit(run)(jnp.asarray(integers.numpy().view(jnp.dtype(dtype))))
    assert np.array_equal(np.asarray(t.rowwise_scales)[:, 0], scales.numpy())
    assert np.array_equal(np.asarray(t.rowwise_codes).view(np.uint8), codes.numpy())
    assert np.array_equal(np.asarray(y), values.float().numpy(), equal_nan=True)
