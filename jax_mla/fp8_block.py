"""To FP8 with a float32 scale for every block of 128: `quantize_fp8_block`, and back.

Source: DeepSeek-V3 (arXiv:2412.19437, section 3.3); the arithmetic is that of per_token_cast_to_fp8 and
per_block_cast_to_fp8 of DeepGEMM (deep_gemm/utils/math.py): scale = amax / 448, code = cast(x * (1 / scale)), both
quotients rounded once. What differs: no amax counts as at least 1e-4, which would lose small gradients.

On integers, and so the same bits on every platform: XLA divides by a constant by multiplying with its inverse, a GPU's
division is off by up to two units in the last place, and subnormals are flushed to zero here and there.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import checks, sharding
from jax_mla.coded import COPIES
from jax_mla.fp8_block_tensor import BLOCK, SHAPES, FP8BlockTensor, Layout, check_spread, layout
from jax_mla.mxfp8_bits import CODES, of_float32
from jax_mla.mxfp8_tensor import check_dtype, check_token_axis, make_proxy, once_differentiable

USAGES = (*COPIES, "both")
_LARGEST = 448.0
_INFINITY = 0x7F800000  # float32's bits; what is above, sign aside, is NaN
_ONE = 0x3F800000


def quantize_fp8_block(
    x: jax.Array,
    *,
    usage: str = "rowwise",
    token_axis: int = -2,
    block: str = "1x128",
    power_of_two: bool = False,
) -> FP8BlockTensor:
    """x as E4M3 codes with a float32 scale a block: scale = amax / 448, code = cast(x / scale), value = code * scale.

    x: bfloat16, float16 or float32 [..., T, ..., K]. block: "1x128", of activations, with usage "rowwise" (128
    neighbours along the dims after `token_axis`, flattened), "columnwise" (along `token_axis`) or "both"; "128x128", of
    weights, squares of the matrix [up to `token_axis`, after it], which serve every usage. A dim that 128 does not
    divide ends in a short block. token_axis: -2, or -3 for [..., T, H, D]. power_of_two: the scale rounded up to one,
    as DeepGEMM's ceil_to_ue8m0.

    As DeepGEMM (this file's docstring): x is multiplied with 1 / scale, to nearest even. A block of zeros has scale 1.
    No scale is below 2^-126, float32's least normal number. NaN counts for nothing in amax, and is code 0x7F; a block
    with an infinity has scale 1, and infinities become 448, as Transformer Engine's compute_scale_from_amax has it.

    Returns an `FP8BlockTensor` of x's shape and dtype. Backward: straight through, dx is the proxy's cotangent, never
    rounded to fp8; nothing is saved. By XLA alone, on every platform. Under an Explicit mesh scales are sharded as the
    codes; blocks are whole on every device.

    Raises TypeError for another dtype (float64 too); ValueError naming the argument, or axis, size and mesh axes where
    the share of a device is not a multiple of 128.
    """
    return _quantize(static_of("x", x, usage, token_axis, block, power_of_two), x)


@dataclasses.dataclass(frozen=True)
class Static:
    usage: str
    token_axis: int
    block: str
    power_of_two: bool
    dtype: np.dtype  # the tensor's logical dtype; what is quantised may be wider

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the layouts of the copies that are made."""
        if self.block == "128x128":
            return ("square",)
        return COPIES if self.usage == "both" else (self.usage,)


def static_of(argument: str, x: jax.Array, usage, token_axis, block, power_of_two) -> Static:
    checks.dims(argument, x, "... K")
    dtype = check_dtype(argument, x.dtype)
    checks.choice("usage", usage, USAGES)
    checks.choice("block", block, SHAPES)
    token_axis = check_token_axis(token_axis)
    if x.ndim < -token_axis:
        raise checks.found(argument, x, f"at least {-token_axis} dims (token_axis={token_axis})")
    static = Static(usage, token_axis, block, checks.static_bool("power_of_two", power_of_two), dtype)
    for kind in static.kinds:
        check_spread(argument, x, layout(x.ndim, token_axis, kind))
    return static


def _amax(bits: jax.Array, axis: int) -> jax.Array:
    """The largest of every 128 along an axis, of float32's magnitudes, which order as their bits do."""
    blocks = -(-bits.shape[axis] // BLOCK)
    pad = [(0, blocks * BLOCK - n if i == axis else 0) for i, n in enumerate(bits.shape)]
    bits = jnp.pad(bits, pad) if any(after for _, after in pad) else bits
    cut = bits.shape[:axis] + (blocks, BLOCK) + bits.shape[axis + 1 :]
    return jnp.max(bits.reshape(cut), axis=axis + 1)


def _scales(amax: jax.Array, power_of_two: bool) -> tuple[jax.Array, jax.Array]:
    """1 / scale and scale, float32, of amax in float32's bits, int32."""
    mantissa = amax & 0x7FFFFF | 0x800000  # a subnormal's is of no consequence
    # 448 is 7 * 2^6. Of mantissa / 7 the leading 24 bits, to nearest: 7 leaves no ties.
    shift = jnp.where(mantissa >= 7 << 21, 2, 3)
    shifted = mantissa << shift
    quotient = jax.lax.div(shifted + 3, jnp.full_like(shifted, 7))
    exponent = (amax >> 23) - 6 - shift
    quotient = jnp.where(exponent < 1, 0x800000, quotient)
    exponent = jnp.maximum(exponent, 1)
    if power_of_two:
        exponent += (quotient != 0x800000).astype(jnp.int32)
        quotient = jnp.full_like(quotient, 0x800000)
    # 2^47 / quotient, of 24 bits too: estimated from below, and corrected by what is then left of 2^47, which int32
    # holds modulo 2^32.
    estimate = (2.0**24 / (quotient.astype(jnp.float32) * 2.0**-23)).astype(jnp.int32) - 8
    inverse = estimate + jax.lax.div((quotient >> 1) - estimate * quotient, quotient)
    whole = quotient == 0x800000  # whose inverse, 2^24, has 25
    inverse = jnp.where(whole, 254, 253) - exponent << 23 | jnp.where(whole, 0, inverse & 0x7FFFFF)
    scale = exponent << 23 | quotient & 0x7FFFFF
    plain = (amax == 0) | (amax == _INFINITY)
    return tuple(jax.lax.bitcast_convert_type(jnp.where(plain, _ONE, a), jnp.float32) for a in (inverse, scale))


def _spread(scales: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """A scale for every value."""
    for axis in axes:
        scales = jax.lax.slice_in_dim(jnp.repeat(scales, BLOCK, axis=axis), 0, shape[axis], axis=axis)
    return scales


def _encode(bits: jax.Array, factor: jax.Array) -> jax.Array:
    """float32 bits times a normal factor, as codes: to nearest even, saturating; of any NaN the positive one."""
    by = jax.lax.bitcast_convert_type(factor, jnp.int32)
    exponent, mantissa = ((bits >> 23) & 0xFF).astype(jnp.int32), (bits & 0x7FFFFF).astype(jnp.int32)
    # x is integer * 2^(max(exponent, 1) - 150): no subnormal ever meets floating point.
    integer = jnp.where(exponent == 0, mantissa, mantissa | 0x800000).astype(jnp.float32)
    fraction = jax.lax.bitcast_convert_type(by & 0x7FFFFF | _ONE, jnp.float32)
    shift = jnp.clip(jnp.maximum(exponent, 1) - 150 + (by >> 23) - 127, -60, 60)  # beyond, all is 0 or saturates
    power = jax.lax.bitcast_convert_type(shift + 127 << 23, jnp.float32)
    magnitude = jnp.minimum(integer * fraction * power, _LARGEST)  # a bare cast gives NaN above 464
    code = jax.lax.bitcast_convert_type(magnitude.astype(CODES), jnp.uint8)
    code = jnp.where(exponent == 255, 0x7E, code) | (bits >> 31 << 7).astype(jnp.uint8)
    code = jnp.where((exponent == 255) & (mantissa != 0), 0x7F, code).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(code, CODES)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)  # outside jit: one program
def _cut(where: Layout, power_of_two: bool, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of one copy."""
    bits = of_float32(x).reshape(where.flat(x.shape))
    amax = (bits & 0x7FFFFFFF).astype(jnp.int32)
    amax = jnp.where(amax > _INFINITY, 0, amax)
    for axis in where.blocked:
        amax = _amax(amax, axis)
    # Else XLA computes them anew for each of the values.
    inverse, scales = jax.lax.optimization_barrier(_scales(amax, power_of_two))
    return _encode(bits, _spread(inverse, bits.shape, where.blocked)).reshape(x.shape), scales


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _values(where: Layout, dtype: np.dtype, codes: jax.Array, scales: jax.Array) -> jax.Array:
    values = codes.astype(jnp.float32).reshape(where.flat(codes.shape))
    return (values * _spread(scales, values.shape, where.blocked)).reshape(codes.shape).astype(dtype)


def raw_quantize(static: Static, x: jax.Array) -> FP8BlockTensor:
    """For the rules of ops that quantise what they compute: x may be wider than `static.dtype`."""
    found = {}
    for kind in static.kinds:
        where = layout(x.ndim, static.token_axis, kind)
        check_spread("quantize_fp8_block", x, where)  # a cotangent too
        codes, scales = where.names()
        forward = once_differentiable("quantize_fp8_block", functools.partial(_cut, where, static.power_of_two))
        found[kind] = sharding.local("quantize_fp8_block", f"{codes} -> {codes}, {scales}", forward, x)
    if "square" in found:
        found = {"rowwise": found["square"]}
    arrays = [array for usage in COPIES for array in found.get(usage, (None, None))]
    proxy = make_proxy(next(iter(found.values()))[0], static.dtype)
    return FP8BlockTensor(*arrays, static.dtype, static.token_axis, static.block, proxy)


def raw_dequantize(dtype: np.dtype, t: FP8BlockTensor) -> jax.Array:
    """The values of t's first copy in float32, rounded once to `dtype`."""
    where = t.layout(t.usages[0])
    codes, scales = where.names()
    forward = once_differentiable("dequantize", functools.partial(_values, where, np.dtype(dtype)))
    return sharding.local("dequantize", f"{codes}, {scales} -> {codes}", forward, *t.copy(t.usages[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantize(static: Static, x: jax.Array) -> FP8BlockTensor:
    return raw_quantize(static, x)


def _quantize_fwd(static: Static, x: jax.Array):
    return raw_quantize(static, x), None


def _quantize_bwd(static: Static, saved: None, dt: FP8BlockTensor):
    return (dt.proxy,)


_quantize.defvjp(_quantize_fwd, _quantize_bwd)
