"""To FP8 before the backward GEMMs of the up-projections: the inverse RoPE of queries' cotangent, and the cotangents of
keys and values side by side. Neither is written before it is quantised where there is a kernel."""

import functools
import math

import jax
import jax.numpy as jnp

from jax_mla import fp8, fp8_bits, launches, rope, rope_kv, sharding
from jax_mla.fp8_tensor import FP8Tensor
from jax_mla.mxfp8_tensor import once_differentiable
from jax_mla.recipes import FP8Recipe


def _tensor(recipe: FP8Recipe, dtype, arrays, amax: jax.Array, run) -> FP8Tensor:
    """What `run`, of the arrays and a scale [1], gives as codes both ways."""
    format = recipe.grad_format

    def quantize(amax, *arrays):
        scale, inverse = fp8_bits.scales(amax, format, recipe.power_of_two)
        return *run(*arrays, scale[None]), inverse

    codes = once_differentiable("fp8", quantize)(amax, *arrays)
    return FP8Tensor(*codes, dtype, -3, format)


def _bytes(format: str, codes, shapes) -> tuple[jax.Array, ...]:
    return tuple(fp8.as_codes(c, shape, fp8_bits.CODES[format]) for c, shape in zip(codes, shapes, strict=True))


def _encoded(format: str, batch: int, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """In jnp: codes of x [..., T, H, D] both ways, a scale for each entry of its first `batch` dims."""
    codes = fp8_bits.encode(x, scale.reshape(*scale.shape[:batch], *[1] * (x.ndim - batch)), format)
    order = *range(batch), x.ndim - 2, x.ndim - 1, *range(batch, x.ndim - 2)
    return codes, jnp.transpose(codes, order)


def _sizes(x: jax.Array, scale: jax.Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims of x [..., T, H, D] that vmap has put in front, each entry of which has a scale, and those of tokens."""
    batch = scale.ndim - 1
    return x.shape[:batch], x.shape[batch:-2]


def rotated(static: rope.RopeStatic, recipe: FP8Recipe, x, cos, sin) -> FP8Tensor:
    """RoPE(x) of x [..., T, H, D], in float32, with both copies and without a proxy. `static.implementation` is
    "triton"."""
    tokens = " ".join(f"t{i}" for i in range(x.ndim - 2))
    tables = f"{tokens} P, {tokens} P"
    find = functools.partial(_rope_amax, static)
    amax = sharding.local("fp8", f"{tokens} h D, {tables} -> {tokens} h", find, x, cos, sin, opaque=True)
    run = functools.partial(_rope_quantize, static, recipe.grad_format)
    rule = f"{tokens} h D, {tables}, One -> {tokens} h D, h D {tokens}"
    return _tensor(
        recipe,
        x.dtype,
        (x, cos, sin),
        fp8.over_all(amax),
        lambda *arrays: sharding.local("fp8", rule, run, *arrays, opaque=True),
    )


def _layouts(static: rope.RopeStatic) -> tuple[str, str]:
    return (static.input_layout, static.output_layout)[:: -1 if static.inverse else 1]


@launches.batched("data", "table", "table")
def _rope_amax(static: rope.RopeStatic, x, cos, sin) -> jax.Array:
    from jax_mla.ffi import triton
    from jax_mla.kernels import fp8_heads as kernels

    if x.size == 0:
        return jnp.zeros(x.shape[:-1], jnp.int32)
    cos, sin, table = launches.tables(cos, sin, x.shape[:-2])
    flat = launches.flat(x, 2)
    settings = static.rotary_dim, table, _layouts(static)[0], static.inverse, triton.compute_capability()
    return triton.call(kernels.rope_amax(*flat.shape, *settings), flat, cos, sin)[0].reshape(x.shape[:-1])


@launches.batched("data", "table", "table", "data")
def _rope_quantize(static: rope.RopeStatic, format: str, x, cos, sin, scale) -> tuple[jax.Array, ...]:
    from jax_mla.ffi import triton
    from jax_mla.kernels import fp8_heads as kernels

    batch, tokens = _sizes(x, scale)
    shapes = x.shape, (*batch, *x.shape[-2:], *tokens)
    if x.size == 0 or kernels.supports(math.prod(tokens)) is not None:
        kept = x.shape[-1] - static.rotary_dim
        turned = rope.rotate(static, x[..., kept:], cos, sin)
        return _encoded(format, len(batch), jnp.concatenate([rope.wide(x[..., :kept]), turned], axis=-1), scale)
    cos, sin, table = launches.tables(cos, sin, x.shape[:-2])
    sizes = math.prod(batch), math.prod(tokens), *x.shape[-2:]
    settings = static.rotary_dim, table, *_layouts(static), static.inverse, format, triton.compute_capability()
    launch = kernels.rope_quantize(*sizes, *settings)
    return _bytes(format, triton.call(launch, x.reshape(sizes), cos, sin, scale.reshape(-1)), shapes)


def joined(static: rope_kv.KVStatic, recipe: FP8Recipe, k_pe, cos, sin, dk, dv) -> tuple[FP8Tensor, jax.Array]:
    """`rope_kv.raw_backward` with the cotangent of kv in FP8: both copies, no proxy. `static.implementation` is
    "triton"."""
    rule = "b s h D, b s h V, b s Q, b s Q -> b s P, b s h"
    find = functools.partial(_split_amax, static)
    dk_pe, amax = sharding.local("fp8", rule, find, dk, dv, cos, sin, opaque=True)
    run = functools.partial(_join_quantize, static.nope_dim, recipe.grad_format)
    rule = "b s h D, b s h V, One -> b s h E, h E b s"
    t = _tensor(
        recipe,
        dk.dtype,
        (dk, dv),
        fp8.over_all(amax),
        lambda *arrays: sharding.local("fp8", rule, run, *arrays, opaque=True),
    )
    return t, sharding.cotangent(dk_pe, k_pe)


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
    from jax_mla.ffi import triton
    from jax_mla.kernels import fp8_heads as kernels

    batch, tokens = _sizes(dk, scale)
    heads, width, value = *dk.shape[-2:], dv.shape[-1]
    shapes = (*batch, *tokens, heads, nope + value), (*batch, heads, nope + value, *tokens)
    if dk.size == 0 or kernels.supports(math.prod(tokens)) is not None:
        return _encoded(format, len(batch), jnp.concatenate([dk[..., :nope], dv], axis=-1), scale)
    sizes = math.prod(batch), math.prod(tokens), heads
    launch = kernels.join_quantize(*sizes, nope, width - nope, value, format, triton.compute_capability())
    arrays = dk.reshape(*sizes, width), dv.reshape(*sizes, value), scale.reshape(-1)
    return _bytes(format, triton.call(launch, *arrays), shapes)
