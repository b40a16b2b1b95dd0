"""Q up-projection: RMSNorm of the latent, GEMM to heads, bias, RoPE on the rotary dims of each head, MXFP8."""

import dataclasses
import functools
from typing import NamedTuple

import jax

from jax_mla import (
    checks,
    dispatch,
    linear,
    norm,
    operands,
    q_up_cudnn,
    recipes,
    rope,
    rope_quantize,
    sharding,
    up_mosaic,
)
from jax_mla.coded import Coded
from jax_mla.ffi import cudnn
from jax_mla.mxfp8_tensor import MXFP8Tensor
from jax_mla.operands import Operand
from jax_mla.recipes import Recipe


def q_up_proj_rope(
    x: Operand,
    w: Operand,
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
) -> jax.Array | MXFP8Tensor:
    """q = RoPE(RMSNorm(x) . w + bias): the queries of every head from the query latent.

    x: floating [..., T, R] (R is M where there is no query low rank). w: floating [R, H, D], D = nope_dim + P.
    cos, sin: as `rope_tables`, width P/2, leading dims equal to x's or 1. norm_scale: floating [R], or None for no
    norm; norm_eps: Python float. bias: floating [H, D] or None, added before RoPE. Layouts: as `apply_rope`.
    recipe: None, or "mxfp8": the GEMMs of both passes multiply MXFP8, quantised from the float32 norm, from w and from
    the float32 inverse RoPE of q's cotangent. "fp8", or an `FP8Recipe`: FP8, quantised from the norm in x's dtype, from
    w, and from the inverse RoPE in x's dtype; "fp8_block", or an `FP8BlockRecipe`: in blocks of 128, from the float32
    inverse RoPE. x (if norm_scale is None) and w may be an `MXFP8Tensor` (`FP8Tensor`, `FP8BlockTensor`), of token_axis
    -2 and -3, under that recipe or none; what it misses for a pass raises, and without a proxy it gets no gradient.
    out: None, or "mxfp8": q is an `MXFP8Tensor` with both copies, token_axis -3, quantised from float32. (NVIDIA's
    kernel, "cudnn", rounds to bfloat16 on the way: docs/blackwell.md.)

    Returns q [..., T, H, D] in x's dtype: GEMM with float32 accumulation, bias and RoPE in float32.
    Backward: inverse RoPE, dgrad and wgrad GEMMs, bias and RMSNorm gradients; dW, dbias and dscale come from float32
    accumulators in their parameter's dtype. Saved: x, rstd float32 [..., T], the parameters and the tables; the
    normalised latent is recomputed (elementwise), q is not needed. Under a recipe: the normalised latent's column-wise
    codes (checkpoint name mla_q), w's row-wise ones instead of w, and x only if it was normalised here.

    implementation: "mosaic" and "cudnn" are a kernel for the forward pass; the norm in front of it and the backward
    pass are then Triton's kernels, where they can run, else XLA's.

    Raises ValueError or TypeError naming the argument; NotImplementedError if no implementation fits.
    """
    recipe = recipes.check(recipe)
    sizes = operands.check("x", x, "... T R", recipe, -2, "rowwise")
    sizes = operands.check("w", w, "R H D", recipe, -3, "columnwise", R=sizes["R"])
    rotary = _rotary_dim(nope_dim, sizes["D"])
    operands.check_out(out, x, D=sizes["D"])
    rope.check_layouts(input_layout, output_layout)
    cos, sin = rope.check_tables(cos, sin, x.shape[:-1], rotary)
    norm_eps = check_norm(x, norm_scale, norm_eps)
    if bias is not None:
        checks.dims("bias", bias, "H D", H=sizes["H"], D=sizes["D"])
        checks.floating("bias", bias)
    project = linear.Static(
        operands.kind(x),
        operands.kind(w),
        recipe=recipe,
        norm=norm.NormStatic(norm_eps, False, "xla"),
        name="mla_q",
        widen=out is not None,
    )
    rotation = rope.RopeStatic(rotary, input_layout, output_layout, False, "xla")
    return _q_up(Static(project, rotation, out, dispatch.check(implementation)), x, w, cos, sin, norm_scale, bias)


def _rotary_dim(nope_dim: int, head_dim: int) -> int:
    nope_dim = checks.static_int("nope_dim", nope_dim, 0)
    if nope_dim >= head_dim or (head_dim - nope_dim) % 2:
        raise checks.found("nope_dim", nope_dim, f"less than w's head dim, {head_dim}, by an even number")
    return head_dim - nope_dim


def check_norm(x: Operand, norm_scale: jax.Array | None, norm_eps: float) -> float:
    if norm_scale is not None:
        checks.dims("norm_scale", norm_scale, "K", K=x.shape[-1])
        checks.floating("norm_scale", norm_scale)
        if isinstance(x, Coded):
            raise checks.found("norm_scale", norm_scale, "None beside a quantised x (`rms_norm_quantize` makes one)")
    return checks.static_float("norm_eps", norm_eps, 0.0)


@dataclasses.dataclass(frozen=True)
class Static:
    project: linear.Static
    rope: rope.RopeStatic
    out: str | None
    implementation: dispatch.Choice

    def using(self, implementation: str) -> "Static":
        """With every part of the flow in that implementation."""
        project, rotation = self.project.using(implementation), self.rope
        # Kernels reorder as they rotate. Under a recipe w's and the cotangent's row-wise blocks are cut from the stored
        # order.
        if implementation == "xla" and project.recipe is None and rotation.input_layout == "pairs":
            project = dataclasses.replace(project, halves=rotation.rotary_dim)
            rotation = dataclasses.replace(rotation, input_layout="halves")
        rotation = dataclasses.replace(rotation, implementation=implementation)
        return dataclasses.replace(self, project=project, rope=rotation)


class Residuals(NamedTuple):
    project: linear.Residuals
    cos: jax.Array
    sin: jax.Array
    projected: jax.Array | None  # in `input_layout`, only if a table is differentiated


def _forward(implementation: str, static: Static, train: bool, x, w, cos, sin, norm_scale, bias):
    """q, and what `linear.project_backward` needs (None unless `train`)."""
    static = static.using(implementation)
    projected, saved = linear.project(static.project, x, w, norm_scale, bias, train)
    if static.out is None:
        return rope.raw(static.rope, projected, cos, sin), saved
    return rope_quantize.raw(static.rope, projected, cos, sin, x.dtype), saved


def _backward(implementation: str, static: Static, saved: Residuals, dq):
    """Cotangents of x, w, cos, sin, norm_scale, bias."""
    given, static = static.rope, static.using(implementation)
    project, cos, sin, projected = saved
    adjoint, summed = static.rope.adjoint(), None
    one_gemm = static.project.x.frozen or static.project.w.frozen
    if static.project.recipe is None or static.project.fp8:
        dz = rope.raw(adjoint, dq, cos, sin)
    elif one_gemm or static.project.blocks:  # it is read in one direction; or there is no kernel
        dz = rope.raw(adjoint, rope.wide(dq), cos, sin)
    else:  # quantised both ways as it is rotated
        dz = rope_quantize.raw(adjoint, dq, cos, sin, products=operands.products(dq.dtype))
        if project.bias is not None:  # rotated again in the sum over tokens, in float32 and never written
            summed = rope.raw(dataclasses.replace(adjoint, implementation="xla"), rope.wide(dq), cos, sin)
    dx, dw, dscale, dbias = linear.project_backward(static.project, project, dz, summed)
    dcos = dsin = None
    if projected is not None:
        dcos, dsin = rope.table_cotangents(given, projected, dq, cos, sin)
    return dx, dw, dcos, dsin, dscale, dbias


_BY_PARTS = dispatch.composed(_forward, _backward, functools.partial(linear.norm_row, 4))
IMPLEMENTATIONS = {
    "cudnn": dispatch.fused(q_up_cudnn.forward, q_up_cudnn.misfit, cudnn.unavailable, _BY_PARTS),
    "mosaic": dispatch.fused(up_mosaic.q_forward, up_mosaic.q_misfit, up_mosaic.unavailable, _BY_PARTS),
    **_BY_PARTS,
}


def _choose(static: Static, *args) -> dispatch.Implementation:
    return dispatch.choose("q_up_proj_rope", IMPLEMENTATIONS, static.implementation, static, *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _q_up(static: Static, *args):
    return _choose(static, *args).forward(static, False, *args)[0]


def _q_up_fwd(static: Static, *args):
    tables = any(table.perturbed for table in args[2:4])
    args = sharding.values(args)
    x, w, cos, sin, norm_scale, bias = args
    q, saved = _choose(static, *args).forward(static, True, *args)
    projected = linear.project(static.project, x, w, norm_scale, bias)[0] if tables else None
    return q, Residuals(saved, cos, sin, projected)


def _q_up_bwd(static: Static, saved: Residuals, dq):
    dq = sharding.dense(dq.proxy if static.out is not None else dq)
    return _choose(static, saved).backward(static, saved, dq)


_q_up.defvjp(_q_up_fwd, _q_up_bwd, symbolic_zeros=True)
