"""What a GEMM multiplies, by recipe: arrays as they are, or quantised tensors read along the axis that is contracted.

The recipe "mxfp8", for y = x . w with x [..., T, K] and w [K, O]: x, w and dy are quantised once each, in both
directions, from the widest values at hand, and each GEMM reads the copies whose blocks run along what it contracts:

    y  = x (row-wise, along K)     . w (column-wise, along K)
    dx = dy (row-wise, along O)    . w (row-wise, along O)
    dW = x (column-wise, along T)  . dy (column-wise, along T)

So the backward pass keeps x's column-wise copy and w's row-wise one. Products are exact in bfloat16 (an E4M3 code times
a power of two), sums are float32. An `MXFP8Tensor` in an array's place stands for its values: already quantised under
"mxfp8", dequantised first under None. One without a proxy gets no gradient, and nothing is kept for one.

"fp8_block" reads the same copies, of blocks of 128: x and dy in 1 x 128 along K and O, and in 128 x 1 along T, each
from the values in x's dtype; w in 128 x 128, one copy for both GEMMs. Its scales are any float32: values, code * scale,
are rounded once to x's dtype (2^-9 of each in bfloat16, beside E4M3's own 2^-4; nothing with powers of two) and
multiplied in it, in float32 where x is float32 or float16. Sums are float32 throughout, which is what DeepSeek's
promotion of every 128 products is for.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_mla import checks, coded, dispatch, fp8, fp8_block, mxfp8, mxfp8_tensor, sharding
from jax_mla.coded import Coded
from jax_mla.dequantize import CHECKS, raw_dequantize
from jax_mla.fp8_block_tensor import FP8BlockTensor
from jax_mla.fp8_tensor import FP8Tensor
from jax_mla.mxfp8 import Rounded
from jax_mla.mxfp8_bits import BLOCK
from jax_mla.mxfp8_tensor import MXFP8Tensor
from jax_mla.recipes import FP8BlockRecipe, FP8Recipe, Recipe

Operand = jax.Array | MXFP8Tensor | FP8Tensor | FP8BlockTensor


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of an operand what its cotangent is made of."""

    shell: tuple | None = None  # of a tensor; None for an array
    frozen: bool = False  # a tensor without proxy, which gets no gradient


def kind(x: Operand) -> Kind:
    return Kind(x.shell, x.proxy is None) if isinstance(x, Coded) else Kind()


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Codes that a GEMM multiplies, and their scale; transposed: the dims of the other side in front."""

    codes: jax.Array
    scale_inv: jax.Array
    transposed: bool

    @property
    def ndim(self) -> int:
        return self.codes.ndim


def weight_axis(ndim: int, contract: int = 1) -> int:
    """The token axis of a quantised weight [*K, *O]: the last axis that is contracted, -3 for [R, H, D]."""
    return contract - 1 - ndim


def check(argument: str, x: Operand, letters: str, recipe: Recipe, token_axis: int, usage: str, **sizes: int):
    """Shape, dtype, a tensor's kind and token axis and, under a recipe, that `usage`, which the forward pass reads, is
    there or can be made. Returns the sizes."""
    if isinstance(x, Coded):
        check_tensor(argument, x, token_axis)
        sizes = checks.dims(argument, shaped(x), letters, **sizes)
    else:
        sizes = checks.dims(argument, x, letters, **sizes)
        checks.floating(argument, x)
    check_usages(argument, x, recipe, token_axis, usage)
    return sizes


def shaped(x: Operand):
    """What has x's shape and logical dtype, for checks of arrays."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Coded) else x


def placed(x: Operand) -> jax.Array:
    """What has x's shape, and how it is spread over a mesh."""
    return x.placed() if isinstance(x, Coded) else x


def check_tensor(argument: str, t: Coded, token_axis: int, *usages: str) -> None:
    CHECKS[type(t)](argument, t, *usages)
    if t.token_axis != token_axis:
        raise checks.found(argument, t, f"token_axis={token_axis}")


def check_usages(argument: str, x: Operand, recipe: Recipe, token_axis: int, *usages: str) -> None:
    """Errors unless x has these copies as the recipe multiplies them, or can be made into them."""
    if recipe is None:
        return
    wanted = {FP8Recipe: FP8Tensor, FP8BlockRecipe: FP8BlockTensor}.get(type(recipe), MXFP8Tensor)
    if isinstance(x, Coded):
        if not isinstance(x, wanted):
            raise TypeError(f"{argument}: found {x!r}, wanted an array or an {wanted.__name__} under this recipe")
        CHECKS[wanted](argument, x, *usages)
        return
    mxfp8_tensor.check_dtype(argument, x.dtype)
    if wanted is MXFP8Tensor:
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
    """x in MXFP8 with these copies, no proxy, and the logical dtype `dtype`, which x's own may be wider than. reads:
    those of them that `read` is to give at once, in `products`, and nothing keeps. What is quantised already stays as
    it is."""
    if isinstance(x, MXFP8Tensor | Rounded):
        return x.detach()
    static = quantization(usages, token_axis, dtype, implementation, reads, products)
    return mxfp8.raw_quantize(static, x).detach()


def quantize_fp8(
    x: Operand,
    usages: tuple[str, ...],
    token_axis: int,
    recipe: FP8Recipe,
    format: str = "e4m3",
    implementation: dispatch.Choice = None,
) -> FP8Tensor:
    """As `quantize`, in FP8."""
    if isinstance(x, FP8Tensor):
        return x.detach()
    usage = "both" if len(usages) == 2 else usages[0]
    static = fp8.Static(usage, token_axis, format, recipe.power_of_two, jnp.dtype(x.dtype), implementation)
    return fp8.raw_quantize(static, x).detach()


def quantize_blocks(
    x: Operand, usages: tuple[str, ...], token_axis: int, recipe: FP8BlockRecipe, block: str = "1x128"
) -> FP8BlockTensor:
    """As `quantize`, in FP8 with a scale a block."""
    if isinstance(x, FP8BlockTensor):
        return x.detach()
    usage = "both" if len(usages) == 2 else usages[0]
    static = fp8_block.Static(usage, token_axis, block, recipe.power_of_two, jnp.dtype(x.dtype))
    return fp8_block.raw_quantize(static, x).detach()


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
    if not isinstance(x, Coded):
        return x
    return x.detach().only(x.usages[0] if usage is None else usage).bytes()


def read(x: Operand | Rounded, dtype, usage: str | None = None, implementation: dispatch.Choice = None) -> jax.Array:
    """The values in `dtype`: of a tensor those of the copy, by default of the first it has."""
    if isinstance(x, Rounded):
        return getattr(x, usage).astype(dtype)
    if not isinstance(x, Coded):
        return x.astype(dtype)
    t = x.detach() if usage is None else x.detach().only(usage)
    return raw_dequantize(jnp.dtype(dtype), t, implementation)


def scaled(x: FP8Tensor, usage: str) -> Scaled:
    """The codes that a GEMM reads."""
    return Scaled(*x.copy(usage), usage == "columnwise")


def named(x: Operand, name: str) -> Operand:
    """x under a checkpoint name; of a tensor the codes and scales, since a policy is not to keep a proxy."""
    if not isinstance(x, Coded):
        return checkpoint_name(x, name)
    return dataclasses.replace(checkpoint_name(x.detach().bytes(), name), proxy=x.proxy)


def products(dtype: np.dtype) -> np.dtype:
    """What values of a logical dtype are multiplied in, where they are of codes: MXFP8's are exact in it, as they are
    not in float16."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def like(x: Operand) -> jax.Array:
    """No numbers, but x's logical dtype and how it is spread over a mesh: for `sharding.cotangent`."""
    if isinstance(x, Coded):  # by the copy that is kept of activations: nothing else is then to be there for it
        x = mxfp8_tensor.make_proxy(x.only(x.usages[-1]).placed(), x.dtype)
    # Of a dim that is whole everywhere, if there is one: a sharded dim of size 0 would lose its mesh axes.
    whole = [axis for axis, axes in enumerate(sharding.spec(x)) if not axes]
    return jax.lax.slice_in_dim(x, 0, 0, axis=whole[-1] if whole else -1)


def give(given: Kind, gradient: jax.Array | None) -> Operand:
    """A gradient as the cotangent of an operand of that kind."""
    return gradient if given.shell is None else coded.of_gradient(given.shell, gradient)


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
