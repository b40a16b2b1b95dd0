"""To FP8 before the backward GEMMs of the KV up-projection: the cotangents of keys and values side by side, which are
not written before they are quantised."""

import functools
import math

import jax
import jax.numpy as jnp

from jax_mla import fp8, fp8_bits, launches, rope_kv, sharding
from jax_mla.fp8_tensor import FP8Tensor
from jax_mla.mxfp8_tensor import once_differentiable
from jax_mla.recipes import FP8Recipe


def joined(static: rope_kv.KVStatic, recipe: FP8Recipe, k_pe, cos, sin, dk, dv) -> tuple[FP8Tensor, jax.Array]:
    """`rope_kv.raw_backward` with the cotangent of kv in FP8: both copies, no proxy. dk, dv: bfloat16 or float16."""
    find = functools.partial(_split_amax, static)
    rule = "b s h D, b s h V, b s Q, b s Q -> b s P, b s h"
    dk_pe, amax = sharding.local("kv_up_proj_rope", rule, find, dk, dv, cos, sin, opaque=True)

    def quantize(amax, dk, dv):
        scale, inverse = fp8_bits.scales(amax, recipe.grad_format, recipe.power_of_two)
        run = functools.partial(_join_quantize, static.nope_dim, recipe.grad_format)
        rule = "b s h D, b s h V, One -> b s h E, h E b s"
        return *sharding.local("kv_up_proj_rope", rule, run, dk, dv, scale[None], opaque=True), inverse

    codes = once_differentiable("kv_up_proj_rope", quantize)(fp8.over_all(amax), dk, dv)
    return FP8Tensor(*codes, dk.dtype, -3, recipe.grad_format), sharding.cotangent(dk_pe, k_pe)


@launches.batched("data", "data", "table", "table")
def _split_amax(static: rope_kv.KVStatic, dk, dv, cos, sin) -> tuple[jax.Array, jax.Array]:
    from jax_mla.ffi import triton
    from jax_mla.kernels import fp8_heads as kernels

    *tokens, heads, width = dk.shape
    if dk.size == 0:
        return jnp.zeros((*tokens, width - static.nope_dim), jnp.float32), jnp.zeros(dk.shape[:-1], jnp.int32)
    cos, sin, table = launches.tables(cos, sin, tuple(tokens))
    sizes = math.prod(tokens), heads, static.nope_dim, width - static.nope_dim, dv.shape[-1], table
    settings = static.input_layout, static.output_layout, triton.compute_capability()
    launch = kernels.split_amax(*sizes, *settings)
    dk_pe, amax = triton.call(launch, launches.flat(dk, 2), launches.flat(dv, 2), cos, sin)
    return dk_pe.reshape(*tokens, -1), amax.reshape(dk.shape[:-1])


@launches.batched("data", "data", "data")
def _join_quantize(nope: int, format: str, dk, dv, scale) -> tuple[jax.Array, ...]:
    """scale [..., 1]: with the dims that vmap has put in front of dk's."""
    from jax_mla.ffi import triton
    from jax_mla.kernels import fp8_heads as kernels

    batch, tokens = dk.shape[: scale.ndim - 1], dk.shape[scale.ndim - 1 : -2]
    heads, width, value = *dk.shape[-2:], dv.shape[-1]
    shapes = (*batch, *tokens, heads, nope + value), (*batch, heads, nope + value, *tokens)
    if dk.size == 0:
        return tuple(jnp.zeros(shape, fp8_bits.CODES[format]) for shape in shapes)
    sizes = math.prod(batch), math.prod(tokens), heads
    settings = nope, width - nope, value, dk.dtype.name, format, triton.compute_capability()
    arrays = dk.reshape(*sizes, width), dv.reshape(*sizes, value), scale.reshape(-1)
    codes = triton.call(kernels.join_quantize(*sizes, *settings), *arrays)
    return tuple(
        jax.lax.bitcast_convert_type(c.reshape(shape), fp8_bits.CODES[format])
        for c, shape in zip(codes, shapes, strict=True)
    )
