"""RMSNorm with the gradients a large model wants: float32 inside, one float32 number a row saved."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_mla import checks, dispatch, launches, sharding
from jax_mla.rope import wide


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    eps: float,
    *,
    zero_centered: bool = False,
    implementation: dispatch.Choice = None,
) -> jax.Array:
    """y = x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467).

    x: floating [..., K]. scale: floating [K]; with zero_centered the factor is 1 + scale. eps: Python float >= 0.
    Computed in float32 (float64 for float64 x) and rounded once to x's dtype. Saved for the backward pass: x, scale and
    rstd, float32 [...]. scale's gradient is summed in float32 and has scale's dtype.

    Raises ValueError or TypeError naming the argument; NotImplementedError if no implementation fits.
    """
    sizes = checks.dims("x", x, "... K")
    checks.floating("x", x)
    checks.dims("scale", scale, "K", K=sizes["K"])
    checks.floating("scale", scale)
    eps = checks.static_float("eps", eps, 0.0)
    static = NormStatic(eps, checks.static_bool("zero_centered", zero_centered), dispatch.check(implementation))
    return _norm(static, x, scale)


@dataclasses.dataclass(frozen=True)
class NormStatic:
    eps: float
    zero_centered: bool
    implementation: dispatch.Choice


def factor(static: NormStatic, scale: jax.Array) -> jax.Array:
    return wide(scale) + 1.0 if static.zero_centered else wide(scale)


def _xla_forward(static: NormStatic, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """y like x, rstd [...]."""
    x_wide = wide(x)
    rstd = jax.lax.rsqrt(jnp.mean(x_wide * x_wide, axis=-1) + static.eps)
    return _normalize(static, x, rstd, scale), rstd


def _normalize(static: NormStatic, x: jax.Array, rstd: jax.Array, scale: jax.Array) -> jax.Array:
    return (wide(x) * rstd[..., None] * factor(static, scale)).astype(x.dtype)


def _xla_backward(
    static: NormStatic, x: jax.Array, rstd: jax.Array, scale: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """dx like x; dscale [K], not yet rounded to scale's dtype.

    With h = x rstd and g = dy scale: dx = rstd (g - h mean(g h)), dscale = sum over rows of dy h.
    """
    h, dy = wide(x) * rstd[..., None], wide(dy)
    g = dy * factor(static, scale)
    dx = rstd[..., None] * (g - h * jnp.mean(g * h, axis=-1, keepdims=True))
    return dx.astype(x.dtype), jnp.sum(dy * h, axis=tuple(range(x.ndim - 1)))


@launches.batched("data", "weight")
def _triton_forward(static: NormStatic, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    from jax_mla.ffi import triton
    from jax_mla.kernels import norm as kernels

    if x.size == 0:
        return _xla_forward(static, x, scale)
    flat = launches.flat(x, 1)
    launch = kernels.norm(*flat.shape, static.eps, static.zero_centered, x.dtype.name)
    y, rstd = triton.call(launch, flat, scale.reshape(-1))
    return y.reshape(x.shape), rstd.reshape(x.shape[:-1])


@launches.batched("data", "data", "weight", "data")
def _triton_backward(static: NormStatic, x, rstd, scale, dy) -> tuple[jax.Array, jax.Array]:
    """scale [..., K] with a dim of 1 for each that vmap batches: dscale has one sum for each entry of those."""
    from jax_mla.ffi import triton
    from jax_mla.kernels import norm as kernels

    batch, columns = x.shape[: scale.ndim - 1], x.shape[-1]
    if x.size == 0:
        return x, jnp.zeros((*batch, columns), jnp.float32)
    flat, dy = launches.flat(x, 1), launches.flat(dy, 1)
    launch = kernels.norm_backward(*flat.shape, static.zero_centered, x.dtype.name, *_programs(len(flat), batch))
    dx, partial = triton.call(launch, flat, rstd.reshape(-1), scale.reshape(-1), dy)
    return dx.reshape(x.shape), jnp.sum(partial.reshape(*batch, -1, columns), axis=-2)


def _programs(rows: int, batch: tuple[int, ...]) -> tuple[int, ...]:
    """How many programs share the rows so that none has rows of two entries of the batch: () for as many as the kernel
    takes, else at least as many."""
    entries = math.prod(batch)
    if entries == 1:
        return ()
    own = rows // entries
    each = max(n for n in range(1, max(rows // 1024, 1) + 1) if own % n == 0)
    return (rows // each,)


def _triton_supports(static: NormStatic | None = None, *arrays: jax.Array) -> str | None:
    return launches.supports(*arrays) or launches.supports_row(arrays[0].shape[-1] if arrays else 0)


IMPLEMENTATIONS = {
    "triton": dispatch.Implementation(_triton_forward, _triton_backward, _triton_supports, opaque=True),
    "xla": dispatch.Implementation(forward=_xla_forward, backward=_xla_backward),
}


def raw_forward(static: NormStatic, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    chosen = dispatch.choose("rms_norm", IMPLEMENTATIONS, static.implementation, static, x, scale)
    rows = " ".join(f"t{i}" for i in range(x.ndim - 1))
    rule = f"{rows} K, K -> {rows} K, {rows}"
    forward = functools.partial(chosen.forward, static)
    return sharding.local("rms_norm", rule, forward, x, sharding.follow(scale), opaque=chosen.opaque)


def renormalize(static: NormStatic, x: jax.Array, rstd: jax.Array, scale: jax.Array) -> jax.Array:
    """y from a saved rstd: elementwise, which is why backward passes recompute it."""
    rows = " ".join(f"t{i}" for i in range(x.ndim - 1))
    rule = f"{rows} K, {rows}, K -> {rows} K"
    return sharding.local("rms_norm", rule, functools.partial(_normalize, static), x, rstd, sharding.follow(scale))


def raw_backward(
    static: NormStatic, x: jax.Array, rstd: jax.Array, scale: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cotangents of x and scale."""
    chosen = dispatch.choose("rms_norm", IMPLEMENTATIONS, static.implementation, static, x, scale)
    rows = " ".join(f"t{i}" for i in range(x.ndim - 1))
    rule = f"{rows} K, {rows}, K, {rows} K -> {rows} K, K"
    backward = functools.partial(chosen.backward, static)
    arrays = x, rstd, sharding.follow(scale), dy
    dx, dscale = sharding.local("rms_norm", rule, backward, *arrays, opaque=chosen.opaque)
    return sharding.cotangent(dx, x), sharding.cotangent(dscale, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(static: NormStatic, x: jax.Array, scale: jax.Array) -> jax.Array:
    return raw_forward(static, x, scale)[0]


class _Residuals(NamedTuple):
    x: jax.Array
    rstd: jax.Array
    scale: jax.Array


def _norm_fwd(static: NormStatic, x: jax.Array, scale: jax.Array):
    y, rstd = raw_forward(static, x, scale)
    return y, _Residuals(x, rstd, scale)


def _norm_bwd(static: NormStatic, saved: _Residuals, dy: jax.Array):
    return raw_backward(static, *saved, dy)


_norm.defvjp(_norm_fwd, _norm_bwd)
