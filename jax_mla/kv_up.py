"""KV up-projection: RMSNorm of the latent, GEMM to heads, split into k_nope and v, shared rotary key."""

import dataclasses
import functools
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_mla import checks, dispatch, linear, norm, rope, rope_kv, sharding
from jax_mla.q_up import check_norm


def kv_up_proj_rope(
    x: jax.Array,
    w: jax.Array,
    k_pe: jax.Array,
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
) -> tuple[jax.Array, jax.Array]:
    """k = [k_nope | RoPE(k_pe)] and v of every head, where [k_nope | v] = RMSNorm(x) . w + bias.

    x: floating [B, S, C], the KV latent. w: floating [C, H, N + V], N = nope_dim. k_pe: [B, S, P] of x's dtype, the
    shared rotary key before rotation (it is not normalised). cos, sin: as `rope_tables`, width P/2, leading dims equal
    to [B, S] or 1. norm_scale: floating [C], or None for no norm; norm_eps: Python float. bias: floating [H, N + V]
    or None. Layouts: as `apply_rope`.

    Returns k [B, S, H, N + P], v [B, S, H, V] in x's dtype.
    Backward: dk_pe from the float32 sum over heads; dgrad and wgrad GEMMs, bias and RMSNorm gradients as
    `q_up_proj_rope`. Saved: x, k_pe, rstd float32 [B, S], the parameters and the tables; neither k nor v.

    Raises ValueError or TypeError naming the argument; NotImplementedError if no implementation fits.
    """
    sizes = checks.dims("x", x, "B S C")
    checks.floating("x", x)
    sizes = checks.dims("w", w, "C H E", C=sizes["C"], B=sizes["B"], S=sizes["S"])
    checks.floating("w", w)
    sizes |= checks.dims("k_pe", k_pe, "B S P", B=sizes["B"], S=sizes["S"])
    if k_pe.dtype != x.dtype:
        raise TypeError(f"k_pe: found dtype {k_pe.dtype}, wanted x's, which is {x.dtype}")
    nope_dim = rope_kv.check_split("w", sizes["E"], nope_dim, k_pe)
    rope.check_layouts(input_layout, output_layout)
    cos, sin = rope.check_tables(cos, sin, x.shape[:-1], sizes["P"])
    norm_eps = check_norm(norm_scale, norm_eps, sizes["C"])
    if bias is not None:
        checks.dims("bias", bias, "H E", H=sizes["H"], E=sizes["E"])
        checks.floating("bias", bias)
    static = Static(nope_dim, norm_eps, input_layout, output_layout, dispatch.check(implementation))
    return _kv_up(static, x, w, k_pe, cos, sin, norm_scale, bias)


@dataclasses.dataclass(frozen=True)
class Static:
    nope_dim: int
    norm_eps: float
    input_layout: str
    output_layout: str
    implementation: dispatch.Choice

    @property
    def norm(self) -> norm.NormStatic:
        return norm.NormStatic(self.norm_eps, False, "xla")

    @property
    def rope_kv(self) -> rope_kv.KVStatic:
        return rope_kv.KVStatic(self.nope_dim, self.input_layout, self.output_layout, "xla")


class Residuals(NamedTuple):
    x: jax.Array
    rstd: jax.Array | None
    w: jax.Array
    k_pe: jax.Array
    cos: jax.Array
    sin: jax.Array
    norm_scale: jax.Array | None
    bias: jax.Array | None
    differentiates_tables: tuple | None  # () for yes: a structure, so that it is known when the backward is traced


def _xla_forward(static: Static, x, w, k_pe, cos, sin, norm_scale, bias):
    """k, v, rstd."""
    rstd = None
    if norm_scale is not None:
        x, rstd = norm.raw_forward(static.norm, x, norm_scale)
        x = checkpoint_name(x, "mla_kv")
    kv = linear.add_bias(linear.multiply(x, w), bias)
    return *rope_kv.raw_forward(static.rope_kv, kv, k_pe, cos, sin), rstd


def _xla_backward(static: Static, saved: Residuals, dk, dv):
    """Cotangents of x, w, k_pe, cos, sin, norm_scale, bias."""
    x, rstd, w, k_pe, cos, sin, norm_scale, bias, differentiates_tables = saved
    normalised = x if norm_scale is None else norm.renormalize(static.norm, x, rstd, norm_scale)
    dkv, dk_pe = rope_kv.raw_backward(static.rope_kv, k_pe, cos, sin, dk, dv)
    dx = linear.input_cotangent(dkv, w, normalised)
    dw = linear.weight_cotangent(normalised, dkv, w)
    dbias = None if bias is None else linear.bias_cotangent(dkv, bias)
    dscale = None
    if norm_scale is not None:
        dx, dscale = norm.raw_backward(static.norm, x, rstd, norm_scale, dx)
    dcos = dsin = None
    if differentiates_tables is not None:
        dcos, dsin = rope_kv.table_cotangents(static.rope_kv, k_pe, dk, cos, sin)
    return dx, dw, dk_pe, dcos, dsin, dscale, dbias


IMPLEMENTATIONS = {"xla": dispatch.Implementation(forward=_xla_forward, backward=_xla_backward)}


def _choose(static: Static, *args) -> dispatch.Implementation:
    return dispatch.choose("kv_up_proj_rope", IMPLEMENTATIONS, static.implementation, static, *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kv_up(static: Static, *args):
    return _choose(static, *args).forward(static, *args)[:2]


def _kv_up_fwd(static: Static, *args):
    tables = any(table.perturbed for table in args[3:5])
    args = sharding.values(args)
    x, w, k_pe, cos, sin, norm_scale, bias = args
    k, v, rstd = _choose(static, *args).forward(static, *args)
    return (k, v), Residuals(x, rstd, w, k_pe, cos, sin, norm_scale, bias, () if tables else None)


def _kv_up_bwd(static: Static, saved: Residuals, cotangents):
    args = (saved.x, *saved[2:8])
    return _choose(static, *args).backward(static, saved, *map(sharding.dense, cotangents))


_kv_up.defvjp(_kv_up_fwd, _kv_up_bwd, symbolic_zeros=True)
