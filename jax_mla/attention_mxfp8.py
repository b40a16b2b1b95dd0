"""`attention` of MXFP8 tensors by NVIDIA's kernel for Blackwell, which multiplies the codes: the forward pass alone.

There is no such backward pass for heads of 192 and 128 dims; gradients are those of the dequantised values, by cuDNN in
bfloat16 (`attention_cudnn`). Compiled and lowered, not run on Blackwell; hence only who names "cudnn" gets it. Its
probabilities are rounded to E4M3: docs/blackwell.md.
"""

import functools

import jax
import jax.numpy as jnp

from jax_mla import attention_cudnn, operands, sharding
from jax_mla.ffi import cudnn_attention_mxfp8
from jax_mla.mxfp8_tensor import once_differentiable
from jax_mla.swizzle import swizzle_scales

_COPIES = ("rowwise", "rowwise", "columnwise")  # of q, k and v
# Sequences whole, and every head's tiles of scales.
_RULE = "b T h D, b S h D, b S h V, b h X, b h Y, b h Z -> b T h V, b T h"


def supports(static, q, k, v, q_ids) -> str | None:
    """Why the forward pass of these arguments of `attention` is not NVIDIA's MXFP8 kernel, or None."""
    if any(kind.shell is None for kind in static.kinds):
        return "found arrays, wants MXFP8Tensors"
    first = static.implementation[0] if isinstance(static.implementation, tuple) else static.implementation
    if first != "cudnn":
        return f"found implementation={static.implementation!r}, wants 'cudnn' by name, first"
    return _misfit(static, q, k, v, q_ids) or cudnn_attention_mxfp8.unavailable() or _backward(static, q, k, v, q_ids)


def _misfit(static, q, k, v, q_ids) -> str | None:
    """Why the kernel could run these arguments on no machine, or None."""
    if static.dtype != jnp.bfloat16:
        return f"found tensors of {static.dtype}, wants bfloat16, which o is written in"
    if static.ordered:
        return "found last_key: the kernel is causal by index alone"
    if q_ids is not None or static.own_order:
        return "found packed sequences, whose scales would have to be tiled apart"
    if static.max_logit:
        return "found return_max_logit=True: the kernel keeps no largest logits"
    (_, queries, heads, qk), keys = q.shape, k.shape[1]
    if static.causal == "bottom_right" and queries != keys:
        return f"found causal='bottom_right' for {queries} queries and {keys} keys, wants as many"
    *lead, _ = sharding.spec(operands.placed(q))
    rows, _, heads, _ = sharding.shard_shape(operands.placed(q), (lead[0], (), lead[2], ()))
    return cudnn_attention_mxfp8.supports(
        rows=rows, queries=queries, keys=keys, heads=heads, qk=qk, v=v.shape[-1], scale=static.scale
    )


def _backward(static, q, k, v, q_ids) -> str | None:
    """Why cuDNN has no backward pass for what this would be the forward pass of, or None."""
    arrays = (jax.ShapeDtypeStruct(x.shape, static.dtype) for x in (q, k, v))
    return attention_cudnn.supports(static, *arrays, q_ids, None)


def forward(static, q, k, v) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o, lse, and, where the largest logits belong, lse again: nobody asks for them."""
    copies = [x.copy(usage) for x, usage in zip((q, k, v), _COPIES, strict=True)]
    tiles = [swizzle_scales(s, usage=u, token_axis=-3) for (_, s), u in zip(copies, _COPIES, strict=True)]
    kernel = once_differentiable("attention", functools.partial(_launch, static))
    o, lse = sharding.local("attention", _RULE, kernel, *(codes for codes, _ in copies), *tiles, opaque=True)
    return o, lse, lse


def _launch(static, *arrays) -> tuple[jax.Array, jax.Array]:
    # "bottom_right" for as many queries as keys is the same as True.
    o, lse = cudnn_attention_mxfp8.forward(*arrays, scale=static.scale, causal=bool(static.causal))
    return o, jnp.swapaxes(lse, 1, 2)
