"""RoPE whose float32 result goes straight to MXFP8, both ways: after the Q up-projection, before its backward GEMMs."""

import functools

import jax
import numpy as np

from jax_mla import launches, mxfp8, rope, sharding
from jax_mla.mxfp8_tensor import MXFP8Tensor, once_differentiable


def raw(
    static: rope.RopeStatic, x: jax.Array, cos: jax.Array, sin: jax.Array, dtype=None, products=None
) -> MXFP8Tensor | mxfp8.Rounded:
    """MXFP8(RoPE(x)) of x [..., T, H, D], as a tensor of `dtype`, by default x's, with both copies, token axis -3, or
    the values of both in the dtype `products`. One kernel where there is one, else `rope.raw` in float32 and
    `quantize_mxfp8`. `static.implementation` is a name."""
    reads = () if products is None else mxfp8.COPIES
    settings = "both", -3, "up", np.dtype(dtype or x.dtype), static.implementation, reads, products
    quantization = mxfp8.Static(*settings)
    if static.implementation != "triton" or _unsupported(static, x) is not None:
        return mxfp8.raw_quantize(quantization, rope.raw(static, rope.wide(x), cos, sin))
    tokens = " ".join(f"t{i}" for i in range(x.ndim - 2))
    copies = ", ".join([f"{tokens} h D"] * 4)
    rule = f"{tokens} h D, {tokens} P, {tokens} P -> {copies}"
    forward = once_differentiable("q_up_proj_rope", functools.partial(_triton, static, quantization))
    arrays = sharding.local("rope_quantize", rule, forward, x, cos, sin, opaque=True)
    return quantization.tensor(*arrays)


def _unsupported(static: rope.RopeStatic, x: jax.Array) -> str | None:
    from jax_mla.kernels import rope_mxfp8 as kernels

    tokens = sharding.shard_shape(x, sharding.spec(x))[-3]
    if not x.size or tokens % mxfp8.bits.BLOCK:
        return f"found {tokens} tokens, wants whole blocks of {mxfp8.bits.BLOCK}"
    return kernels.supports(x.shape[-1], static.rotary_dim)


@launches.batched("data", "table", "table")
def _triton(static: rope.RopeStatic, quantization: mxfp8.Static, x, cos, sin) -> tuple[jax.Array, ...]:
    from jax_mla.ffi import triton
    from jax_mla.kernels import rope_mxfp8 as kernels

    cos, sin, table = launches.tables(cos, sin, x.shape[:-2])
    layouts = (static.input_layout, static.output_layout)[:: -1 if static.inverse else 1]
    flat = launches.flat(x, 2)
    settings = static.rotary_dim, table, *layouts, static.inverse
    launch = kernels.rope_quantize(*flat.shape, *settings, values=quantization.values, arch=triton.compute_capability())
    return quantization.unflatten(triton.call(launch, flat, cos, sin), x.shape)
