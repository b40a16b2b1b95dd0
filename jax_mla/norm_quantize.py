"""RMSNorm whose float32 result goes straight to MXFP8, with no rounding to the activation's dtype in between."""

import dataclasses
import functools
from typing import NamedTuple

import jax

from jax_mla import checks, dispatch, launches, mxfp8, norm, sharding
from jax_mla.mxfp8_tensor import MXFP8Tensor, once_differentiable
from jax_mla.rope import wide


def rms_norm_quantize(
    x: jax.Array,
    scale: jax.Array,
    eps: float,
    *,
    usage: str = "rowwise",
    token_axis: int = -2,
    rounding: str = "up",
    zero_centered: bool = False,
    implementation: dispatch.Choice = None,
) -> MXFP8Tensor:
    """MXFP8(x / sqrt(mean(x^2) + eps) * scale): `rms_norm` in float32, then `quantize_mxfp8` of that.

    x: bfloat16, float16 or float32 [..., T, ..., K]. scale, eps, zero_centered: as `rms_norm`. usage, token_axis,
    rounding: as `quantize_mxfp8`.

    Returns an `MXFP8Tensor` of x's shape and dtype. Backward: straight through the quantisation in x's dtype, then
    RMSNorm's; scale's gradient is summed in float32 and has scale's dtype. Saved: x, scale and rstd, float32 [...].

    Raises ValueError or TypeError naming the argument; NotImplementedError if no implementation fits.
    """
    sizes = checks.dims("x", x, "... K")
    checks.dims("scale", scale, "K", K=sizes["K"])
    checks.floating("scale", scale)
    implementation = dispatch.check(implementation)
    quantize = mxfp8.static_of("x", x, usage, token_axis, rounding, "xla")
    eps = checks.static_float("eps", eps, 0.0)
    normalize = norm.NormStatic(eps, checks.static_bool("zero_centered", zero_centered), "xla")
    return _norm_quantize(Static(normalize, quantize, implementation), x, scale)


@dataclasses.dataclass(frozen=True)
class Static:
    norm: norm.NormStatic
    quantize: mxfp8.Static
    implementation: dispatch.Choice


class Residuals(NamedTuple):
    x: jax.Array
    rstd: jax.Array
    scale: jax.Array


def _xla_forward(static: Static, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
    """codes and scales of each usage, rstd [...]."""
    xla = dataclasses.replace(static.norm, implementation="xla")
    y, rstd = norm.IMPLEMENTATIONS["xla"].forward(xla, wide(x), scale)  # float32 in, float32 out: no rounding
    return *mxfp8.IMPLEMENTATIONS["xla"].forward(static.quantize, y), rstd


@launches.batched("data", "weight")
def _triton_forward(static: Static, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
    from jax_mla.ffi import triton
    from jax_mla.kernels import norm as kernels

    if x.size == 0:
        return _xla_forward(static, x, scale)
    flat = launches.flat(x, 1)
    (rstd,) = triton.call(kernels.rstd(*flat.shape, static.norm.eps), flat)
    settings = static.norm.zero_centered, static.quantize.usage, static.quantize.rounding, static.quantize.values
    launch = kernels.norm_quantize(*flat.shape, *settings, arch=triton.compute_capability())
    arrays = triton.call(launch, flat, rstd, scale.reshape(-1))
    return *static.quantize.unflatten(arrays, x.shape), rstd.reshape(x.shape[:-1])


def _triton_supports(static: Static | None = None, *arrays: jax.Array) -> str | None:
    if static is not None and (static.quantize.usage == "columnwise" or static.quantize.token_axis != -2):
        return "wants usage='both' or 'rowwise', and token_axis=-2"
    return launches.supports(*arrays) or launches.supports_row(arrays[0].shape[-1] if arrays else 0)


def _backward(name: str, static: Static, saved: Residuals, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cotangents of x and scale."""
    settings = dataclasses.replace(static.norm, implementation=name)
    return norm.raw_backward(settings, saved.x, saved.rstd, saved.scale, gradient)


IMPLEMENTATIONS = {
    "triton": dispatch.Implementation(_triton_forward, functools.partial(_backward, "triton"), _triton_supports, True),
    "xla": dispatch.Implementation(_xla_forward, functools.partial(_backward, "xla")),
}


def _choose(static: Static, *args) -> dispatch.Implementation:
    return dispatch.choose("rms_norm_quantize", IMPLEMENTATIONS, static.implementation, static, *args)


def raw_forward(static: Static, x: jax.Array, scale: jax.Array) -> tuple[MXFP8Tensor | mxfp8.Rounded, jax.Array]:
    """The tensor, rstd [...]."""
    rows = " ".join(f"t{i}" for i in range(x.ndim - 1))
    copies = ", ".join([f"{rows} K"] * 2 * len(static.quantize.usages))
    chosen = _choose(static, x, scale)
    forward = once_differentiable("rms_norm_quantize", functools.partial(chosen.forward, static))
    rule = f"{rows} K, K -> {copies}, {rows}"
    arrays = x, sharding.follow(scale)
    *arrays, rstd = sharding.local("rms_norm_quantize", rule, forward, *arrays, opaque=chosen.opaque)
    return static.quantize.tensor(*arrays), rstd


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_quantize(static: Static, x: jax.Array, scale: jax.Array) -> MXFP8Tensor:
    return raw_forward(static, x, scale)[0]


def _norm_quantize_fwd(static: Static, x: jax.Array, scale: jax.Array):
    t, rstd = raw_forward(static, x, scale)
    return t, Residuals(x, rstd, scale)


def _norm_quantize_bwd(static: Static, saved: Residuals, dt: MXFP8Tensor):
    return _choose(static, saved.x, saved.scale).backward(static, saved, dt.proxy)


_norm_quantize.defvjp(_norm_quantize_fwd, _norm_quantize_bwd)
