"""`q_up_proj_rope` with NVIDIA's fused kernel for Blackwell: the norm in front of it, the shared backward pass behind.

Compiled and lowered, not run on Blackwell. What it returns is not quantised from float32: docs/blackwell.md.
"""

import functools
import math

from jax_mla import linear, mxfp8, operands, sharding
from jax_mla.ffi import cudnn
from jax_mla.mxfp8_tensor import once_differentiable
from jax_mla.operands import Operand


def misfit(static, x: Operand, w: Operand, cos, sin, norm_scale, bias) -> str | None:
    """Why the kernel could run these arguments of `q_up_proj_rope` on no machine, or None."""
    if static.out != "mxfp8":
        return f"found out={static.out!r}, wants 'mxfp8'"
    if bias is not None:
        return "found a bias, which the kernel does not add"
    if static.rope.output_layout != "halves":
        return f"found output_layout={static.rope.output_layout!r}, wants 'halves'"
    dtype = x.dtype if static.project.recipe is None else cudnn.CODES
    x, w = operands.placed(x), operands.placed(w)
    *tokens, whole = sharding.spec(x)
    if whole:
        return f"found x's last dim sharded over mesh axes {whole}, wants it whole on every device"
    *rows, length, rank = sharding.shard_shape(x, (*tokens, whole))
    _, heads, width = sharding.shard_shape(w, ((), sharding.own_heads(x, w), ()))
    return cudnn.supports(
        rows=math.prod(rows),
        length=length,
        rank=rank,
        heads=heads,
        nope=width - static.rope.rotary_dim,
        rotary=static.rope.rotary_dim,
        dtype=dtype,
    )


def forward(parts: str, static, train: bool, x: Operand, w: Operand, cos, sin, norm_scale, bias):
    """q, and what `linear.project_backward` needs (None unless `train`)."""
    dtype, project = x.dtype, static.project.using(parts)
    x, w, saved = linear.factors(project, x, w, norm_scale, bias, train, codes=True)
    if project.recipe is None:
        xs, ws = ((a,) for a in linear.values(project, dtype, x, w))
    else:
        xs, ws = x.copy("rowwise"), w.copy("columnwise")
    heads = sharding.own_heads(xs[0], ws[0])
    ws = tuple(sharding.gather_but_heads(a, heads) for a in ws)
    pairs = static.rope.input_layout == "pairs"
    tokens = " ".join(f"t{i}" for i in range(xs[0].ndim - 1))
    x_and_w = [f"{tokens} R", "R h D"]
    rule = ", ".join([*x_and_w, f"{tokens} P", f"{tokens} P", *x_and_w * (len(xs) - 1)])
    rule += " -> " + ", ".join([f"{tokens} h D"] * 4)
    kernel = once_differentiable("q_up_proj_rope", functools.partial(cudnn.q_up, pairs))
    arrays = sharding.local("q_up_proj_rope", rule, kernel, xs[0], ws[0], cos, sin, *xs[1:], *ws[1:], opaque=True)
    return mxfp8.Static("both", -3, "up", dtype, project.implementation).tensor(*arrays), saved
