"""The arithmetic of MXFP8, on bits: block scales, E4M3 codes, and values back from both.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5 and 6.3. Integers throughout: `log2` and `exp2` are
not exact on powers of two, a cast to fp8 overflows to NaN, and XLA flushes subnormals to zero on some platforms.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 32  # values a scale
CODES = jnp.dtype(jnp.float8_e4m3fn)
_LARGEST = 448.0  # of E4M3: code 0x7E; 0x7F is NaN
_INFINITY = 0x7F800000  # float32's bits; what is above, sign aside, is NaN
_NAN = 0x7FC00000


def of_float32(x: jax.Array) -> jax.Array:
    """The bits of x in float32, uint32, subnormals included."""
    if x.dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def _exponent(bits: jax.Array) -> jax.Array:
    return ((bits >> 23) & 0xFF).astype(jnp.int32)


def block_scales(bits: jax.Array, axis: int, rounding: str) -> jax.Array:
    """uint8, `axis` 32 times shorter: the scale of every block, from float32 bits."""
    axis %= bits.ndim
    blocks = bits.shape[:axis] + (bits.shape[axis] // BLOCK, BLOCK) + bits.shape[axis + 1 :]
    amax = jnp.max((bits & 0x7FFFFFFF).reshape(blocks), axis=axis + 1)  # bits order as magnitudes do, NaN on top
    code = _exponent(amax) - 8  # 448 is 1.75 * 2^8. A subnormal amax has exponent 0, far below the clamp.
    if rounding == "up":
        code += ((amax & 0x7FFFFF) > 0x600000).astype(code.dtype)  # beyond 1.75
    code = jnp.where(amax < _INFINITY, jnp.clip(code, 0, 254), jnp.where(amax == _INFINITY, 254, 255))
    return code.astype(jnp.uint8)


def encode(bits: jax.Array, scales: jax.Array, axis: int) -> jax.Array:
    """float8_e4m3fn: float32 bits over 2^(scale - 127), to nearest even, saturating at 448."""
    scales = jnp.repeat(scales, BLOCK, axis=axis).astype(jnp.int32)
    exponent, mantissa = _exponent(bits), (bits & 0x7FFFFF).astype(jnp.int32)
    # x is integer * 2^(max(exponent, 1) - 150): no subnormal ever meets floating point.
    integer = jnp.where(exponent == 0, mantissa, mantissa + 0x800000)
    shift = jnp.maximum(exponent, 1) - 23 - scales
    # integer < 2^24: beyond 60 all is 0 or saturates.
    power = jax.lax.bitcast_convert_type((jnp.clip(shift, -60, 60) + 127) << 23, jnp.float32)
    magnitude = jnp.minimum(integer.astype(jnp.float32) * power, _LARGEST)  # a bare cast gives NaN above 464
    code = jax.lax.bitcast_convert_type(magnitude.astype(CODES), jnp.uint8)
    code = jnp.where(exponent == 255, 0x7E, code) | (bits >> 31 << 7).astype(jnp.uint8)
    nan = (scales == 255) | ((exponent == 255) & (mantissa != 0))
    return jax.lax.bitcast_convert_type(jnp.where(nan, 0x7F, code).astype(jnp.uint8), CODES)


@functools.partial(jax.jit, static_argnames=("axis", "dtype"), inline=True)  # outside jit: one program
def decode(codes: jax.Array, scales: jax.Array, axis: int, dtype: np.dtype) -> jax.Array:
    """codes * 2^(scale - 127) in `dtype`, written as bits, so that subnormals are neither flushed nor rounded twice."""
    bits = jax.lax.bitcast_convert_type(codes.astype(jnp.float32), jnp.uint32)
    scales = jnp.repeat(scales, BLOCK, axis=axis).astype(jnp.int32)
    magnitude, mantissa = bits & 0x7FFFFFFF, bits & 0x7FFFFF
    exponent = _exponent(bits) + scales - 127
    normal = jnp.maximum(exponent, 0).astype(jnp.uint32) << 23 | mantissa
    # Exact: an E4M3 code has 3 mantissa bits, of float32's 23, and the shift is at most 10.
    subnormal = (mantissa | 0x800000) >> jnp.clip(1 - exponent, 0, 31).astype(jnp.uint32)
    value = jnp.where(exponent > 0, normal, subnormal)
    value = jnp.where(exponent > 254, _INFINITY, value)
    value = jnp.where(magnitude == 0, 0, value) | (bits >> 31 << 31)
    value = jnp.where((magnitude > _INFINITY) | (scales == 255), _NAN, value).astype(jnp.uint32)
    if dtype == jnp.bfloat16:
        value = (value + 0x7FFF + ((value >> 16) & 1)) >> 16  # to nearest even; NaN and infinity stay what they are
        return jax.lax.bitcast_convert_type(value.astype(jnp.uint16), dtype)
    return jax.lax.bitcast_convert_type(value, jnp.float32).astype(dtype)
