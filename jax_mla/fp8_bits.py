"""The arithmetic of FP8 with one scale a tensor, as Transformer Engine's Float8CurrentScaling defines it.

Source: compute_scale_from_amax and amax_kernel of Transformer Engine (common/recipe). amax is the largest magnitude of
what is no NaN; scale = largest code / amax in float32; 1 where amax is 0 or infinite, the largest float32 where the
quotient overflows; rounded down to a power of two on demand. code = cast(x * scale), saturating; value = code / scale.

On integers, and so the same bits on every platform: XLA flushes subnormals to zero on some, and divides approximately.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla.mxfp8_bits import of_float32

CODES = {"e4m3": jnp.dtype(jnp.float8_e4m3fn), "e5m2": jnp.dtype(jnp.float8_e5m2)}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
_LAST = {"e4m3": 0x7E, "e5m2": 0x7B}  # its code
_NAN = 0x7F  # of both: what the hardware casts NaN to
# float32's bits
_INFINITY, _MOST, _ONE = 0x7F800000, 0x7F7FFFFF, 0x3F800000


def amax(x: jax.Array) -> jax.Array:
    """The largest magnitude of x that is no NaN, as float32's bits, int32 []: they order as magnitudes do."""
    if x.dtype == jnp.bfloat16:  # 16 bits are enough until the end
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16) & 0x7FFF
        bits = jnp.where(bits > _INFINITY >> 16, 0, bits).astype(jnp.int32)
        return jnp.max(bits, initial=0) << 16
    bits = (of_float32(x) & 0x7FFFFFFF).astype(jnp.int32)
    return jnp.max(jnp.where(bits > _INFINITY, 0, bits), initial=0)


def scales(amax: jax.Array, format: str, power_of_two: bool) -> tuple[jax.Array, jax.Array]:
    """scale and its inverse, float32 like amax, which is float32's bits."""
    most = jnp.full_like(amax, _bits(LARGEST[format]))
    scale = jnp.where((amax == 0) | (amax >= _INFINITY), _ONE, jnp.minimum(_quotient(most, amax), _MOST))
    if power_of_two:
        scale &= 0x7F800000
    inverse = _quotient(jnp.full_like(amax, _ONE), scale)
    return tuple(jax.lax.bitcast_convert_type(bits, jnp.float32) for bits in (scale, inverse))


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b to nearest, of positive float32 as bits: on a GPU XLA's own is off by up to two units in the last place.

    b's subnormals count as the least normal number at most; results below that are subnormal, and the bits of one above
    float32's range are infinity's or above."""
    top, bottom = (bits & 0x7FFFFF | 0x800000 for bits in (a, b))
    shift = 24 - (top >= bottom).astype(jnp.int32)  # the quotient of (top << shift) / bottom has 24 bits
    one, other = (jax.lax.bitcast_convert_type(m - 0x800000 | _ONE, jnp.float32) for m in (top, bottom))
    # Estimated, and corrected by what is left, which int32 holds modulo 2^32.
    power = jax.lax.bitcast_convert_type(shift + 127 << 23, jnp.float32)
    estimate = (one / other * power).astype(jnp.int32)
    left = (top << shift) - estimate * bottom
    whole, rest = estimate + jnp.floor_divide(left, bottom), jnp.remainder(left, bottom)
    exponent = (a >> 23) - jnp.maximum(b >> 23, 1) + 150 - shift
    lost = jnp.clip(1 - exponent, 0, 24)  # of a subnormal's bits
    # What is cut off, and half the last place that stays. (A normal quotient of such numbers is never a tie.)
    cut = jnp.where(lost > 0, whole & ((1 << lost) - 1), (2 * rest > bottom).astype(jnp.int32))
    half = jnp.where(lost > 0, 1 << jnp.maximum(lost - 1, 0), 1)
    kept = whole >> lost
    up = jnp.where(lost > 0, (cut > half) | ((cut == half) & ((rest > 0) | (kept & 1 == 1))), cut == half)
    return (jnp.clip(exponent, 1, 255) - 1 << 23) + kept + up.astype(jnp.int32)  # the leading bit is an exponent's


def encode(x: jax.Array, scale: jax.Array, format: str) -> jax.Array:
    """x * scale as codes, to nearest even, saturating; of any NaN the positive one. scale: normal float32."""
    bits, by = of_float32(x), jax.lax.bitcast_convert_type(scale, jnp.int32)
    exponent, mantissa = ((bits >> 23) & 0xFF).astype(jnp.int32), (bits & 0x7FFFFF).astype(jnp.int32)
    # x is integer * 2^(max(exponent, 1) - 150): no subnormal ever meets floating point.
    integer = jnp.where(exponent == 0, mantissa, mantissa | 0x800000).astype(jnp.float32)
    fraction = jax.lax.bitcast_convert_type(by & 0x7FFFFF | _ONE, jnp.float32)
    shift = jnp.clip(jnp.maximum(exponent, 1) - 150 + (by >> 23) - 127, -60, 60)  # beyond, all is 0 or saturates
    power = jax.lax.bitcast_convert_type(shift + 127 << 23, jnp.float32)
    magnitude = jnp.minimum(integer * fraction * power, jnp.float32(LARGEST[format]))
    code = jax.lax.bitcast_convert_type(magnitude.astype(CODES[format]), jnp.uint8)
    code = jnp.where(exponent == 255, _LAST[format], code) | (bits >> 31 << 7).astype(jnp.uint8)
    code = jnp.where((exponent == 255) & (mantissa != 0), _NAN, code).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(code, CODES[format])
