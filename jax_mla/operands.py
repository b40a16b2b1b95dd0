"""What a GEMM multiplies, by recipe: arrays as they are, or MXFP8 tensors read along the axis that is contracted.

The recipe "mxfp8", for y = x . w with x [..., T, K] and w [K, O]: x, w and dy are quantised once each, in both
directions, from the widest values at hand, and each GEMM reads the copies whose blocks run along what it contracts:

    y  = x (row-wise, along K)     . w (column-wise, along K)
    dx = dy (row-wise, along O)    . w (row-wise, along O)
    dW = x (column-wise, along T)  . dy (column-wise, along T)

So the backward pass keeps x's column-wise copy and w's row-wise one. Products are exact in bfloat16 (an E4M3 code times
a power of two), sums are float32. An `MXFP8Tensor` in an array's place stands for its values: already quantised under
"mxfp8", dequantised first under None. One without a proxy gets no gradient, and nothing is kept for one.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_mla import checks, dispatch, mxfp8, mxfp8_tensor, sharding
from jax_mla.dequantize import raw_dequantize
from jax_mla.mxfp8 import Rounded
from jax_mla.mxfp8_bits import BLOCK
from jax_mla.mxfp8_tensor import MXFP8Tensor

RECIPES = (None, "mxfp8")

Operand = jax.Array | MXFP8Tensor
Kind = Literal["array", "tensor", "frozen"]  # "frozen": a tensor without proxy


def kind(x: Operand) -> Kind:
    if not isinstance(x, MXFP8Tensor):
        return "array"
    return "frozen" if x.proxy is None else "tensor"


def weight_axis(ndim: int, contract: int = 1) -> int:
    """The token axis of a quantised weight [*K, *O]: the last axis that is contracted, -3 for [R, H, D]."""
    return contract - 1 - ndim


def check(argument: str, x: Operand, letters: str, recipe: str | None, token_axis: int, usage: str, **sizes: int):
    """Shape, dtype, a tensor's token axis and, under "mxfp8", whole blocks of `usage`, which the forward pass reads.
    Returns the sizes."""
    if isinstance(x, MXFP8Tensor):
        check_tensor(argument, x, token_axis)
        sizes = checks.dims(argument, shaped(x), letters, **sizes)
    else:
        sizes = checks.dims(argument, x, letters, **sizes)
        checks.floating(argument, x)
    if recipe is not None:
        check_blocks(argument, x, token_axis, usage)
    return sizes


def shaped(x: Operand):
    """What has x's shape and logical dtype, for checks of arrays."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, MXFP8Tensor) else x


def placed(x: Operand) -> jax.Array:
    """What has x's shape, and how it is spread over a mesh."""
    return x.copy(x.usages[0])[0] if isinstance(x, MXFP8Tensor) else x


def check_tensor(argument: str, t: MXFP8Tensor, token_axis: int, *usages: str) -> None:
    mxfp8_tensor.check(argument, t, *usages)
    if t.token_axis != token_axis:
        raise checks.found(argument, t, f"token_axis={token_axis}")


def check_blocks(argument: str, x: Operand, token_axis: int, *usages: str) -> None:
    """Errors unless x has these copies, or can be cut into them."""
    if isinstance(x, MXFP8Tensor):
        mxfp8_tensor.check(argument, x, *usages)
        return
    mxfp8_tensor.check_dtype(argument, x.dtype)
    for usage in usages:
        mxfp8_tensor.blocked_axis(argument, x, usage, token_axis)


def quantize(
    x: Operand | Rounded,
    usages: tuple[str, ...],
    token_axis: int,
    dtype: np.dtype,
    implementation: dispatch.Choice = None,
    reads: tuple[str, ...] = (),
    products: np.dtype | None = None,
) -> MXFP8Tensor | Rounded:
    """x with these copies, no proxy, and the logical dtype `dtype`, which x's own may be wider than. reads: those of
    them that `read` is to give at once, in `products`, and nothing keeps. What is quantised already stays as it is."""
    if isinstance(x, MXFP8Tensor | Rounded):
        return x.detach()
    static = quantization(usages, token_axis, dtype, implementation, reads, products)
    return mxfp8.raw_quantize(static, x).detach()


def quantization(
    usages, token_axis: int, dtype, implementation: dispatch.Choice = None, reads=(), products=None
) -> mxfp8.Static:
    usage = "both" if len(usages) == 2 else usages[0]
    return mxfp8.Static(usage, token_axis, "up", jnp.dtype(dtype), implementation, reads, products)


def keep(x: Operand | Rounded, usage: str | None = None) -> Operand:
    """What the backward pass keeps: an array, or one copy of a tensor, by default the first it has. As bytes: scan
    stacks residuals, and XLA may widen fp8 arrays."""
    if isinstance(x, Rounded):
        x = x.tensor
    if not isinstance(x, MXFP8Tensor):
        return x
    return x.detach().only(x.usages[0] if usage is None else usage).bytes()


def read(x: Operand | Rounded, dtype, usage: str | None = None, implementation: dispatch.Choice = None) -> jax.Array:
    """The values in `dtype`: of a tensor those of the copy, by default of the first it has."""
    if isinstance(x, Rounded):
        return getattr(x, usage).astype(dtype)
    if not isinstance(x, MXFP8Tensor):
        return x.astype(dtype)
    t = x.detach() if usage is None else x.detach().only(usage)
    return raw_dequantize(jnp.dtype(dtype), t, implementation)


def named(x: Operand, name: str) -> Operand:
    """x under a checkpoint name; of a tensor the codes and scales, since a policy is not to keep a proxy."""
    if not isinstance(x, MXFP8Tensor):
        return checkpoint_name(x, name)
    return dataclasses.replace(checkpoint_name(x.detach().bytes(), name), proxy=x.proxy)


def products(dtype: np.dtype) -> np.dtype:
    """What MXFP8 values of a logical dtype are multiplied in: exact in it, as they are not in float16."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def like(x: Operand) -> jax.Array:
    """No numbers, but x's logical dtype and how it is spread over a mesh: for `sharding.cotangent`."""
    if isinstance(x, MXFP8Tensor):
        x = mxfp8_tensor.make_proxy(placed(x), x.dtype)
    # Of a dim that is whole everywhere, if there is one: a sharded dim of size 0 would lose its mesh axes.
    whole = [axis for axis, axes in enumerate(sharding.spec(x)) if not axes]
    return jax.lax.slice_in_dim(x, 0, 0, axis=whole[-1] if whole else -1)


def give(given: Kind, token_axis: int, dtype: np.dtype, gradient: jax.Array | None) -> Operand:
    """A gradient as the cotangent of an operand of that kind and logical dtype."""
    return gradient if given == "array" else MXFP8Tensor(None, None, None, None, dtype, token_axis, gradient)


OUTS = (None, "mxfp8")


def check_out(out: str | None, x: Operand, **widths: int) -> None:
    """`out`, and that what it asks for can be cut into blocks: x's tokens, axis -2, and the named last dims."""
    checks.choice("out", out, OUTS)
    if out is None:
        return
    mxfp8_tensor.check_dtype("x", x.dtype)
    mxfp8_tensor.blocked_axis("x", placed(x), "columnwise", -2)
    for name, width in widths.items():
        if width % BLOCK:
            raise ValueError(f"out: found 'mxfp8' for {name} of {width}, wanted a multiple of {BLOCK}")
