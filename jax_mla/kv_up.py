"""KV up-projection: RMSNorm of the latent, GEMM to heads, split into k_nope and v, shared rotary key, MXFP8."""

import dataclasses
import functools
from typing import NamedTuple

import jax

from jax_mla import (
    checks,
    dispatch,
    fp8,
    fp8_heads,
    linear,
    mxfp8,
    norm,
    operands,
    recipes,
    rope,
    rope_kv,
    sharding,
    up_mosaic,
)
from jax_mla.mxfp8_tensor import MXFP8Tensor
from jax_mla.operands import Operand
from jax_mla.q_up import check_norm
from jax_mla.recipes import Recipe


def kv_up_proj_rope(
    x: Operand,
    w: Operand,
    k_pe: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    nope_dim: int,
    norm_scale: jax.Array | None = None,
    norm_eps: float = 1e-6,
    bias: jax.Array | None = None,
    recipe: Recipe = None,
    out: str | None = None,
    input_layout: str = "pairs",
    output_layout: str = "halves",
    implementation: dispatch.Choice = None,
) -> tuple[jax.Array, jax.Array] | tuple[MXFP8Tensor, MXFP8Tensor]:
    """k = [k_nope | RoPE(k_pe)] and v of every head, where [k_nope | v] = RMSNorm(x) . w + bias.

    x: floating [B, S, C], the KV latent. w: floating [C, H, N + V], N = nope_dim. k_pe: [B, S, P] of x's dtype, the
    shared rotary key before rotation (it is not normalised). cos, sin: as `rope_tables`, width P/2, leading dims equal
    to [B, S] or 1. norm_scale: floating [C], or None for no norm; norm_eps: Python float. bias: floating [H, N + V]
    or None. Layouts: as `apply_rope`. recipe, out, and a quantised tensor as x or w: as `q_up_proj_rope`; k_pe is never
    quantised before its rotation.

    Returns k [B, S, H, N + P], v [B, S, H, V] in x's dtype.
    Backward: dk_pe from the float32 sum over heads; dgrad and wgrad GEMMs, bias and RMSNorm gradients as
    `q_up_proj_rope`. Saved: x, k_pe, rstd float32 [B, S], the parameters and the tables; neither k nor v. Under a
    recipe codes as there (checkpoint name mla_kv).

    implementation: "mosaic" as in `q_up_proj_rope`.

    Raises ValueError or TypeError naming the argument; NotImplementedError if no implementation fits.
    """
    recipe = recipes.check(recipe)
    sizes = operands.check("x", x, "B S C", recipe, -2, "rowwise")
    sizes = operands.check("w", w, "C H E", recipe, -3, "columnwise", **sizes)
    sizes |= checks.dims("k_pe", k_pe, "B S P", B=sizes["B"], S=sizes["S"])
    if k_pe.dtype != x.dtype:
        raise TypeError(f"k_pe: found dtype {k_pe.dtype}, wanted x's, which is {x.dtype}")
    nope_dim = rope_kv.check_split("w", sizes["E"], nope_dim, k_pe)
    operands.check_out(out, x, **{"N + P": nope_dim + sizes["P"], "V": sizes["E"] - nope_dim})
    rope.check_layouts(input_layout, output_layout)
    cos, sin = rope.check_tables(cos, sin, x.shape[:-1], sizes["P"])
    norm_eps = check_norm(x, norm_scale, norm_eps)
    if bias is not None:
        checks.dims("bias", bias, "H E", H=sizes["H"], E=sizes["E"])
        checks.floating("bias", bias)
    project = linear.Static(
        operands.kind(x),
        operands.kind(w),
        recipe=recipe,
        norm=norm.NormStatic(norm_eps, False, "xla"),
        name="mla_kv",
        widen=out is not None,
    )
    split = rope_kv.KVStatic(nope_dim, input_layout, output_layout, "xla")
    static = Static(project, split, out, dispatch.check(implementation))
    return _kv_up(static, x, w, k_pe, cos, sin, norm_scale, bias)


@dataclasses.dataclass(frozen=True)
class Static:
    project: linear.Static
    rope_kv: rope_kv.KVStatic
    out: str | None
    implementation: dispatch.Choice

    def using(self, implementation: str) -> "Static":
        """With every part of the flow in that implementation."""
        parts = dict(project=self.project.using(implementation))
        parts["rope_kv"] = dataclasses.replace(self.rope_kv, implementation=implementation)
        return dataclasses.replace(self, **parts)


class Residuals(NamedTuple):
    project: linear.Residuals
    k_pe: jax.Array
    cos: jax.Array
    sin: jax.Array
    differentiates_tables: tuple | None  # () for yes: a structure, so that it is known when the backward is traced


def _forward(implementation: str, static: Static, train: bool, x, w, k_pe, cos, sin, norm_scale, bias):
    """k, v, and what `linear.project_backward` needs (None unless `train`)."""
    static = static.using(implementation)
    kv, saved = linear.project(static.project, x, w, norm_scale, bias, train)
    k, v = rope_kv.raw_forward(static.rope_kv, kv, k_pe, cos, sin)
    if static.out is not None:
        quantize = functools.partial(mxfp8.raw_quantize, mxfp8.Static("both", -3, "up", x.dtype, implementation))
        k, v = quantize(k), quantize(v)
    return k, v, saved


def _backward(implementation: str, static: Static, saved: Residuals, dk, dv):
    """Cotangents of x, w, k_pe, cos, sin, norm_scale, bias."""
    static = static.using(implementation)
    project, k_pe, cos, sin, differentiates_tables = saved
    frozen = static.project.x.frozen or static.project.w.frozen
    # Quantised as it is read, for both GEMMs; where something else reads it too, it is written.
    kernel = static.project.fp8 and implementation == "triton" and fp8.transposes(dk.dtype)
    if kernel and project.bias is None and not frozen:
        dkv, dk_pe = fp8_heads.joined(static.rope_kv, static.project.recipe, k_pe, cos, sin, dk, dv)
    else:
        dkv, dk_pe = rope_kv.raw_backward(static.rope_kv, k_pe, cos, sin, dk, dv)
    dx, dw, dscale, dbias = linear.project_backward(static.project, project, dkv)
    dcos = dsin = None
    if differentiates_tables is not None:
        dcos, dsin = rope_kv.table_cotangents(static.rope_kv, k_pe, dk, cos, sin)
    return dx, dw, dk_pe, dcos, dsin, dscale, dbias


_BY_PARTS = dispatch.composed(_forward, _backward, functools.partial(linear.norm_row, 5))
IMPLEMENTATIONS = {
    "mosaic": dispatch.fused(up_mosaic.kv_forward, up_mosaic.kv_misfit, up_mosaic.unavailable, _BY_PARTS),
    **_BY_PARTS,
}


def _choose(static: Static, *args) -> dispatch.Implementation:
    return dispatch.choose("kv_up_proj_rope", IMPLEMENTATIONS, static.implementation, static, *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kv_up(static: Static, *args):
    return _choose(static, *args).forward(static, False, *args)[:2]


def _kv_up_fwd(static: Static, *args):
    tables = any(table.perturbed for table in args[3:5])
    args = sharding.values(args)
    k_pe, cos, sin = args[2:5]
    k, v, saved = _choose(static, *args).forward(static, True, *args)
    return (k, v), Residuals(saved, k_pe, cos, sin, () if tables else None)


def _kv_up_bwd(static: Static, saved: Residuals, cotangents):
    dk, dv = (sharding.dense(d.proxy if static.out is not None else d) for d in cotangents)
    return _choose(static, saved).backward(static, saved, dk, dv)


_kv_up.defvjp(_kv_up_fwd, _kv_up_bwd, symbolic_zeros=True)
