"""To MXFP8: `quantize_mxfp8`, gradients straight through the rounding.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5 and 6.3; the arithmetic is in `mxfp8_bits.py`, the
tensor and how gradients pass through one in `mxfp8_tensor.py`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np

from jax_mla import checks, dispatch, launches, sharding
from jax_mla import mxfp8_bits as bits
from jax_mla.mxfp8_tensor import (
    COPIES,
    MXFP8Tensor,
    blocked_axis,
    check_dtype,
    check_token_axis,
    make_proxy,
    once_differentiable,
)

USAGES = (*COPIES, "both")
ROUNDINGS = ("up", "ocp")


def quantize_mxfp8(
    x: jax.Array,
    *,
    usage: str = "rowwise",
    token_axis: int = -2,
    rounding: str = "up",
    implementation: dispatch.Choice = None,
) -> MXFP8Tensor:
    """x as MXFP8 codes and scales, in blocks of 32: code = E4M3(x / 2^e), scale = e + 127, e from the block's amax.

    x: bfloat16, float16 or float32 [..., T, ..., K]. usage: "rowwise" (blocks along K), "columnwise" (along
    `token_axis`) or "both", which gives the bits of two calls. token_axis: -2, or -3 for [..., T, H, D].
    rounding: "up", e = ceil(log2(amax / 448)), so that nothing saturates (Transformer Engine, cuDNN); "ocp", e =
    floor(log2(amax)) - 8 (OCP MX v1.0, section 6.3). e is clamped to -127 .. 127. Codes round to nearest even and
    saturate to +-448. All-zero block: scale 0, codes +-0. NaN in a block: scale 255 and every code 0x7F. Infinity:
    scale 254, its code +-448.

    Returns an `MXFP8Tensor` of x's shape and dtype. Backward: straight through, dx is the proxy's cotangent, never
    rounded to fp8; nothing is saved. Under an Explicit mesh scales are sharded as the codes.

    Raises TypeError for another dtype (float64 too); ValueError naming axis and size where a blocked dim, on each
    device, is not a multiple of 32; NotImplementedError if no implementation fits.
    """
    return _quantize(static_of("x", x, usage, token_axis, rounding, implementation), x)


@dataclasses.dataclass(frozen=True)
class Static:
    usage: str
    token_axis: int
    rounding: str
    dtype: np.dtype  # the tensor's logical dtype; what is quantised may be wider
    implementation: dispatch.Choice
    reads: tuple[str, ...] = ()  # the copies that are wanted as values, for a GEMM that reads them at once
    products: np.dtype | None = None  # the dtype of those

    @property
    def usages(self) -> tuple[str, ...]:
        return COPIES if self.usage == "both" else (self.usage,)

    def axis(self, usage: str) -> int:
        return -1 if usage == "rowwise" else self.token_axis

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Of codes and scales of each usage."""
        result = []
        for usage in self.usages:
            scales = list(shape)
            scales[self.axis(usage)] //= bits.BLOCK
            result += [shape, tuple(scales)]
        return result

    @property
    def values(self) -> tuple[str | None, str | None]:
        """For launches: the dtype of the copies that are read."""
        return tuple(str(self.products) if usage in self.reads else None for usage in COPIES)

    def unflatten(self, arrays, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
        """What a launch gives, flat and as bytes, as codes and scales of each usage of a tensor of that shape; values
        in place of codes of what is read. (There nobody wants the scales; but a mesh may spread the tensor only where
        it may spread them: by whole blocks.)"""
        arrays = [a.reshape(s) for a, s in zip(arrays, self.shapes(shape), strict=True)]
        result = ()
        for usage, codes, scales in zip(self.usages, arrays[::2], arrays[1::2], strict=True):
            result += (codes if usage in self.reads else jax.lax.bitcast_convert_type(codes, bits.CODES), scales)
        return result

    def tensor(self, *arrays: jax.Array) -> "MXFP8Tensor | Rounded":
        """What `unflatten` gives as a tensor with its proxy; with copies that are read beside one without."""
        found = dict(zip(self.usages, zip(arrays[::2], arrays[1::2], strict=True), strict=True))
        kept = {usage: pair for usage, pair in found.items() if usage not in self.reads}
        pairs = [array for usage in COPIES for array in kept.get(usage, (None, None))]
        if not self.reads:
            return MXFP8Tensor(*pairs, self.dtype, self.token_axis, make_proxy(arrays[0], self.dtype))
        values = (found[usage][0] if usage in self.reads else None for usage in COPIES)
        return Rounded(*values, MXFP8Tensor(*pairs, self.dtype, self.token_axis) if kept else None)


class Rounded(NamedTuple):
    """What was quantised for GEMMs at hand: the values of the copies that these read, and the others as a tensor."""

    rowwise: jax.Array | None
    columnwise: jax.Array | None
    tensor: MXFP8Tensor | None

    def detach(self) -> "Rounded":
        return self


def static_of(argument: str, x: jax.Array, usage, token_axis, rounding, implementation: dispatch.Choice) -> Static:
    """The settings, checked, for quantising what has x's shape to x's dtype."""
    checks.dims(argument, x, "... K")
    dtype = check_dtype(argument, x.dtype)
    checks.choice("usage", usage, USAGES)
    checks.choice("rounding", rounding, ROUNDINGS)
    static = Static(usage, check_token_axis(token_axis), rounding, dtype, dispatch.check(implementation))
    for usage in static.usages:
        blocked_axis(argument, x, usage, static.token_axis)
    return static


@functools.partial(jax.jit, static_argnums=0, inline=True)  # outside jit: one program, not sixty
def _xla_quantize(static: Static, x: jax.Array) -> tuple[jax.Array, ...]:
    """Codes and scales of each usage."""
    values, arrays = bits.of_float32(x), ()
    for usage in static.usages:
        axis = static.axis(usage)
        scales = bits.block_scales(values, axis, static.rounding)
        codes = bits.encode(values, scales, axis)
        arrays += (bits.decode(codes, scales, axis, static.products) if usage in static.reads else codes, scales)
    return arrays


def _straight_through(static: Static, gradient: jax.Array) -> jax.Array:
    return gradient


@launches.batched("data")
def _triton_quantize(static: Static, x: jax.Array) -> tuple[jax.Array, ...]:
    from jax_mla.ffi import triton
    from jax_mla.kernels import mxfp8 as kernels

    if x.size == 0:
        return _xla_quantize(static, x)
    flat = launches.matrix(x, static.token_axis if "columnwise" in static.usages else -2)
    settings = dict(values=static.values, arch=triton.compute_capability())
    launch = kernels.quantize(*flat.shape, static.usage, static.rounding, **settings)
    return static.unflatten(triton.call(launch, flat), x.shape)


def _triton_supports(static: Static | None = None, *arrays: jax.Array) -> str | None:
    return launches.supports(*arrays)


IMPLEMENTATIONS = {
    "triton": dispatch.Implementation(_triton_quantize, _straight_through, _triton_supports, opaque=True),
    "xla": dispatch.Implementation(forward=_xla_quantize, backward=_straight_through),
}


def raw_quantize(static: Static, x: jax.Array) -> MXFP8Tensor | Rounded:
    """For the forward rules of ops that quantise what they compute: x may be wider than `static.dtype`."""
    chosen = dispatch.choose("quantize_mxfp8", IMPLEMENTATIONS, static.implementation, static, x)
    dims = " ".join(f"t{i}" for i in range(x.ndim))
    rule = f"{dims} -> " + ", ".join([dims] * 2 * len(static.usages))  # whole blocks a device: see `blocked_axis`
    forward = once_differentiable("quantize_mxfp8", functools.partial(chosen.forward, static))
    return static.tensor(*sharding.local("quantize_mxfp8", rule, forward, x, opaque=chosen.opaque))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantize(static: Static, x: jax.Array) -> MXFP8Tensor:
    return raw_quantize(static, x)


def _quantize_fwd(static: Static, x: jax.Array):
    return raw_quantize(static, x), None


def _quantize_bwd(static: Static, saved: None, dt: MXFP8Tensor):
    return (_straight_through(static, dt.proxy),)


_quantize.defvjp(_quantize_fwd, _quantize_bwd)
