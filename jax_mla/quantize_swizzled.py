"""MXFP8 codes with their scales already in the 128x4 tiling of block-scaled GEMMs and attention: one pass over x."""

import dataclasses
import functools

import jax

from jax_mla import checks, dispatch, launches, mxfp8, sharding, swizzle
from jax_mla.mxfp8_tensor import once_differentiable


def quantize_swizzled(
    x: jax.Array,
    *,
    usage: str = "rowwise",
    token_axis: int = -2,
    rounding: str = "up",
    implementation: dispatch.Choice = None,
) -> tuple[jax.Array, ...]:
    """The codes of `quantize_mxfp8`, and in the scales' place what `swizzle_scales` makes of them: for kernels that
    read tiles. Both directions in one read of x, and no scales in memory before they are tiled.

    x, usage, token_axis, rounding: as `quantize_mxfp8`. With token_axis -3 the tiles are head-major.

    Returns codes float8_e4m3fn of x's shape and tiles uint8 [..., bytes] (see `swizzle_scales`); for "both" row-wise
    codes and tiles, then column-wise ones. Not differentiable: bits. Under an Explicit mesh leading dims, and with
    token_axis -3 the heads, may be sharded.

    Raises TypeError or ValueError naming the argument; NotImplementedError if no implementation fits.
    """
    static = mxfp8.static_of("x", x, usage, token_axis, rounding, implementation)
    if x.ndim < -token_axis:
        raise checks.found("x", x, f"at least {-token_axis} dims, the first of them tokens, for matrices of scales")
    chosen = dispatch.choose("quantize_swizzled", IMPLEMENTATIONS, static.implementation, static, x)
    dims, tiles = swizzle.rule(x.ndim, static.token_axis)
    rule = f"{dims} -> " + ", ".join([dims, tiles] * len(static.usages))
    forward = once_differentiable("quantize_swizzled", functools.partial(chosen.forward, static))
    return sharding.local("quantize_swizzled", rule, forward, x, opaque=chosen.opaque)


def _composed(name: str, static: mxfp8.Static, x: jax.Array) -> tuple[jax.Array, ...]:
    """Quantised, then tiled."""
    static = dataclasses.replace(static, implementation=name)
    arrays = mxfp8.IMPLEMENTATIONS[name].forward(static, x)
    result = ()
    for usage, codes, scales in zip(static.usages, arrays[0::2], arrays[1::2], strict=True):
        settings = swizzle.Static(usage, static.token_axis, name)
        result += (codes, swizzle.IMPLEMENTATIONS[name].forward(settings, scales))
    return result


@launches.batched("data")
def _triton(static: mxfp8.Static, x: jax.Array) -> tuple[jax.Array, ...]:
    from jax_mla.ffi import triton
    from jax_mla.kernels import mxfp8 as kernels

    tokens, dims = x.shape[static.token_axis], x.shape[-1]
    if x.size == 0 or kernels.supports_tiled(tokens, dims) is not None:
        return _composed("triton", static, x)
    flat = launches.matrix(x, static.token_axis)
    launch = kernels.quantize(
        *flat.shape, static.usage, static.rounding, (tokens, dims), arch=triton.compute_capability()
    )
    lead = swizzle.Static(static.usage, static.token_axis, "triton").matrices(x.shape)[:-2]
    arrays = triton.call(launch, flat)
    codes = [jax.lax.bitcast_convert_type(a, mxfp8.bits.CODES).reshape(x.shape) for a in arrays[0::2]]
    return tuple(a for pair in zip(codes, (t.reshape(*lead, -1) for t in arrays[1::2]), strict=True) for a in pair)


IMPLEMENTATIONS = {
    "triton": dispatch.Implementation(
        _triton, None, lambda static=None, *arrays: launches.supports(*arrays), opaque=True
    ),
    "xla": dispatch.Implementation(functools.partial(_composed, "xla"), None),
}
