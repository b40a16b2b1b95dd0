"""RMSNorm whose float32 result goes straight to MXFP8, with no rounding to the activation's dtype in between."""

import dataclasses
import functools
from typing import NamedTuple

import jax

from jax_mla import checks, dispatch, mxfp8, norm
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
) -> mxfp8.MXFP8Tensor:
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


def _xla_forward(static: Static, x: jax.Array, scale: jax.Array) -> tuple[mxfp8.MXFP8Tensor, jax.Array]:
    """The tensor, rstd [...]."""
    y, rstd = norm.raw_forward(static.norm, wide(x), scale)  # float32 in, float32 out: no rounding
    return mxfp8.raw_quantize(static.quantize, y), rstd


def _xla_backward(static: Static, saved: Residuals, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cotangents of x and scale."""
    return norm.raw_backward(static.norm, saved.x, saved.rstd, saved.scale, gradient)


IMPLEMENTATIONS = {"xla": dispatch.Implementation(forward=_xla_forward, backward=_xla_backward)}


def _choose(static: Static, *args) -> dispatch.Implementation:
    return dispatch.choose("rms_norm_quantize", IMPLEMENTATIONS, static.implementation, static, *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_quantize(static: Static, x: jax.Array, scale: jax.Array) -> mxfp8.MXFP8Tensor:
    return _choose(static, x, scale).forward(static, x, scale)[0]


def _norm_quantize_fwd(static: Static, x: jax.Array, scale: jax.Array):
    t, rstd = _choose(static, x, scale).forward(static, x, scale)
    return t, Residuals(x, rstd, scale)


def _norm_quantize_bwd(static: Static, saved: Residuals, dt: mxfp8.MXFP8Tensor):
    return _choose(static, saved.x, saved.scale).backward(static, saved, dt.proxy)


_norm_quantize.defvjp(_norm_quantize_fwd, _norm_quantize_bwd)
