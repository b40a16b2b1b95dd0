"""The arithmetic of FP8 with one scale a tensor, as Transformer Engine's Float8CurrentScaling defines it.

Source: compute_scale_from_amax and amax_kernel of Transformer Engine (common/recipe). amax is the largest magnitude of
what is no NaN; scale = largest code / amax in float32; 1 where amax is 0 or infinite, the largest float32 where the
quotient overflows; rounded down to a power of two on demand. code = cast(x * scale), saturating; value = code / scale.

On bits where subnormals would meet arithmetic: XLA flushes them to zero on some platforms.
"""

import jax
import jax.numpy as jnp

from jax_mla.mxfp8_bits import of_float32

CODES = {"e4m3": jnp.dtype(jnp.float8_e4m3fn), "e5m2": jnp.dtype(jnp.float8_e5m2)}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
_NAN = 0x7F  # of both: what the hardware casts NaN to
_INFINITY = 0x7F800000  # float32's bits
_MOST = float(jnp.finfo(jnp.float32).max)


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
    ratio = LARGEST[format] / jax.lax.bitcast_convert_type(amax, jnp.float32)
    scale = jnp.where((amax == 0) | (amax >= _INFINITY), 1.0, jnp.minimum(ratio, _MOST))
    if power_of_two:
        bits = jax.lax.bitcast_convert_type(scale, jnp.int32) & 0x7F800000
        scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return scale, _inverse(scale)


def _inverse(scale: jax.Array) -> jax.Array:
    """1 / scale, of scales above 2^126 the subnormal by its bits."""
    plain = jax.lax.bitcast_convert_type(1.0 / scale, jnp.int32)
    shifted = jax.lax.bitcast_convert_type(16.0 / scale, jnp.int32)
    mantissa, shift = shifted & 0x7FFFFF | 0x800000, 1 - ((shifted >> 23) - 4)
    shift = jnp.clip(shift, 1, 24)
    half = (1 << (shift - 1)) - 1 + ((mantissa >> shift) & 1)  # to nearest even
    subnormal = (mantissa + half) >> shift
    return jax.lax.bitcast_convert_type(jnp.where(scale > 2.0**126, subnormal, plain), jnp.float32)


def encode(x: jax.Array, scale: jax.Array, format: str) -> jax.Array:
    """x * scale as codes, to nearest even, saturating; of any NaN the positive one."""
    bits = of_float32(x)
    magnitude = bits & 0x7FFFFFFF
    product = jax.lax.bitcast_convert_type(magnitude, jnp.float32) * scale
    # A subnormal x is integer * 2^-149. (Where scale * 2^-125 is flushed, so would the code be.)
    small = (bits & 0x7FFFFF).astype(jnp.int32).astype(jnp.float32) * 2.0**-24 * (scale * 2.0**-125)
    product = jnp.minimum(jnp.where(magnitude < 0x800000, small, product), LARGEST[format])
    code = jax.lax.bitcast_convert_type(product.astype(CODES[format]), jnp.uint8) | (bits >> 31 << 7).astype(jnp.uint8)
    code = jnp.where(magnitude > _INFINITY, _NAN, code).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(code, CODES[format])
