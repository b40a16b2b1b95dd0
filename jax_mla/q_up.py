"""Q up-projection: RMSNorm of the latent, GEMM to heads, bias, RoPE on the rotary dims of each head."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_mla import checks, dispatch, linear, norm, rope, sharding


def q_up_proj_rope(
    x: jax.Array,
    w: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    nope_dim: int,
    norm_scale: jax.Array | None = None,
    norm_eps: float = 1e-6,
    bias: jax.Array | None = None,
    input_layout: str = "pairs",
    output_layout: str = "halves",
    implementation: dispatch.Choice = None,
) -> jax.Array:
    """q = RoPE(RMSNorm(x) . w + bias): the queries of every head from the query latent.

    x: floating [..., T, R] (R is M where there is no query low rank). w: floating [R, H, D], D = nope_dim + P.
    cos, sin: as `rope_tables`, width P/2, leading dims equal to x's or 1. norm_scale: floating [R], or None for no
    norm; norm_eps: Python float. bias: floating [H, D] or None, added before RoPE. Layouts: as `apply_rope`.

    Returns q [..., T, H, D] in x's dtype: GEMM with float32 accumulation, bias and RoPE in float32.
    Backward: inverse RoPE, dgrad and wgrad GEMMs, bias and RMSNorm gradients; dW, dbias and dscale come from float32
    accumulators in their parameter's dtype. Saved: x, rstd float32 [..., T], the parameters and the tables; the
    normalised latent is recomputed (elementwise), q is not needed.

    Raises ValueError or TypeError naming the argument; NotImplementedError if no implementation fits.
    """
    sizes = checks.dims("x", x, "... T R")
    checks.floating("x", x)
    sizes = checks.dims("w", w, "R H D", R=sizes["R"])
    checks.floating("w", w)
    rotary = _rotary_dim(nope_dim, sizes["D"])
    rope.check_layouts(input_layout, output_layout)
    cos, sin = rope.check_tables(cos, sin, x.shape[:-1], rotary)
    norm_eps = check_norm(norm_scale, norm_eps, sizes["R"])
    if bias is not None:
        checks.dims("bias", bias, "H D", H=sizes["H"], D=sizes["D"])
        checks.floating("bias", bias)
    implementation = dispatch.check(implementation)
    static = Static(rotary, norm_eps, input_layout, output_layout, implementation)
    return _q_up(static, x, w, cos, sin, norm_scale, bias)


def _rotary_dim(nope_dim: int, head_dim: int) -> int:
    nope_dim = checks.static_int("nope_dim", nope_dim, 0)
    if nope_dim >= head_dim or (head_dim - nope_dim) % 2:
        raise checks.found("nope_dim", nope_dim, f"less than w's head dim, {head_dim}, by an even number")
    return head_dim - nope_dim


def check_norm(norm_scale: jax.Array | None, norm_eps: float, size: int) -> float:
    if norm_scale is not None:
        checks.dims("norm_scale", norm_scale, "K", K=size)
        checks.floating("norm_scale", norm_scale)
    return checks.static_float("norm_eps", norm_eps, 0.0)


@dataclasses.dataclass(frozen=True)
class Static:
    rotary_dim: int
    norm_eps: float
    input_layout: str
    output_layout: str
    implementation: dispatch.Choice

    @property
    def norm(self) -> norm.NormStatic:
        return norm.NormStatic(self.norm_eps, False, "xla")

    @property
    def rope(self) -> rope.RopeStatic:
        """The rotation of the GEMM's output, whose rotary dims `to_halves` has put into halves."""
        return rope.RopeStatic(self.rotary_dim, "halves", self.output_layout, False, "xla")


class Residuals(NamedTuple):
    x: jax.Array
    rstd: jax.Array | None
    w: jax.Array
    cos: jax.Array
    sin: jax.Array
    norm_scale: jax.Array | None
    bias: jax.Array | None
    differentiates_tables: tuple | None  # () for yes: a structure, so that it is known when the backward is traced


def to_halves(w: jax.Array | None, static: Static) -> jax.Array | None:
    """w [..., D] with its rotary dims reordered from `input_layout` to halves.

    Reordering the weight once moves R H P numbers; reordering what it produces moves T H P, twice a training step.
    """
    if w is None or static.input_layout == "halves":
        return w
    kept = w.shape[-1] - static.rotary_dim
    return jnp.concatenate([w[..., :kept], *rope.split(w[..., kept:], "pairs")], axis=-1)


def from_halves(w: jax.Array | None, static: Static) -> jax.Array | None:
    """The inverse of `to_halves`."""
    if w is None or static.input_layout == "halves":
        return w
    kept = w.shape[-1] - static.rotary_dim
    pairs = rope.join(*rope.split(w[..., kept:], "halves"), "pairs")
    return jnp.concatenate([w[..., :kept], pairs], axis=-1)


def _xla_forward(static: Static, x, w, cos, sin, norm_scale, bias) -> tuple[jax.Array, jax.Array | None]:
    """q, rstd."""
    rstd = None
    if norm_scale is not None:
        x, rstd = norm.raw_forward(static.norm, x, norm_scale)
        x = checkpoint_name(x, "mla_q")
    projected = _project(static, x, w, bias)
    return rope.raw(static.rope, projected, cos, sin), rstd


def _project(static: Static, normalised, w, bias) -> jax.Array:
    w, bias = to_halves(w.astype(normalised.dtype), static), to_halves(bias, static)
    return linear.add_bias(linear.multiply(normalised, w), bias)


def _xla_backward(static: Static, saved: Residuals, dq):
    """Cotangents of x, w, cos, sin, norm_scale, bias."""
    x, rstd, w, cos, sin, norm_scale, bias, differentiates_tables = saved
    normalised = x if norm_scale is None else norm.renormalize(static.norm, x, rstd, norm_scale)
    projected = rope.raw(static.rope.adjoint(), dq, cos, sin)  # the cotangent of what RoPE was given, in halves
    dx = linear.input_cotangent(projected, to_halves(w.astype(dq.dtype), static), normalised)
    dw = from_halves(linear.weight_cotangent(normalised, projected, w), static)
    dbias = None if bias is None else from_halves(linear.bias_cotangent(projected, bias), static)
    dscale = None
    if norm_scale is not None:
        dx, dscale = norm.raw_backward(static.norm, x, rstd, norm_scale, dx)
    dcos = dsin = None
    if differentiates_tables is not None:
        dcos, dsin = rope.table_cotangents(static.rope, _project(static, normalised, w, bias), dq, cos, sin)
    return dx, dw, dcos, dsin, dscale, dbias


IMPLEMENTATIONS = {"xla": dispatch.Implementation(forward=_xla_forward, backward=_xla_backward)}


def _choose(static: Static, *args) -> dispatch.Implementation:
    return dispatch.choose("q_up_proj_rope", IMPLEMENTATIONS, static.implementation, static, *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _q_up(static: Static, *args):
    return _choose(static, *args).forward(static, *args)[0]


def _q_up_fwd(static: Static, *args):
    tables = any(table.perturbed for table in args[2:4])
    args = sharding.values(args)
    x, w, cos, sin, norm_scale, bias = args
    q, rstd = _choose(static, *args).forward(static, *args)
    return q, Residuals(x, rstd, w, cos, sin, norm_scale, bias, () if tables else None)


def _q_up_bwd(static: Static, saved: Residuals, dq):
    args = (saved.x, *saved[2:7])
    return _choose(static, *args).backward(static, saved, sharding.dense(dq))


_q_up.defvjp(_q_up_fwd, _q_up_bwd, symbolic_zeros=True)
