"""From the KV up-projection's output to keys and values: split, rotate the shared rotary key, give it to every head."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_mla import checks, dispatch, launches, rope, sharding


def apply_rope_kv(
    kv: jax.Array,
    k_pe: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    nope_dim: int,
    input_layout: str = "pairs",
    output_layout: str = "halves",
    implementation: dispatch.Choice = None,
) -> tuple[jax.Array, jax.Array]:
    """k = [k_nope | RoPE(k_pe)] and v, from kv = [k_nope | v] of every head and the one rotary key they share.

    kv: floating [B, S, H, N + V], N = nope_dim. k_pe: floating [B, S, P], not yet rotated, of kv's dtype.
    cos, sin: floating, width P/2 (or P, of which the first half is read), leading dims equal to [B, S] or 1.
    Layouts: as `apply_rope`.

    Returns k [B, S, H, N + P] and v [B, S, H, V] in kv's dtype; k_nope and v are copied bit for bit.
    Backward: dk_pe is the inverse rotation of the float32 sum of dk's rotary part over all heads (of all devices,
    once).
    Saved: the tables (and k_pe only if a table is differentiated).

    Raises ValueError or TypeError naming the argument; NotImplementedError if no implementation fits.
    """
    sizes = checks.dims("kv", kv, "B S H E")
    checks.floating("kv", kv)
    sizes = checks.dims("k_pe", k_pe, "B S P", B=sizes["B"], S=sizes["S"])
    if k_pe.dtype != kv.dtype:
        raise TypeError(f"k_pe: found dtype {k_pe.dtype}, wanted kv's, which is {kv.dtype}")
    nope_dim = check_split("kv", kv.shape[-1], nope_dim, k_pe)
    rope.check_layouts(input_layout, output_layout)
    cos, sin = rope.check_tables(cos, sin, k_pe.shape[:-1], sizes["P"])
    static = KVStatic(nope_dim, input_layout, output_layout, dispatch.check(implementation))
    # As arrays of JAX's own: v is a part of kv, and must not be a view of a caller's numpy memory.
    return _rope_kv(static, jnp.asarray(kv), jnp.asarray(k_pe), cos, sin)


def check_split(argument: str, width: int, nope_dim: int, k_pe: jax.Array) -> int:
    """nope_dim, checked against the last dim, `width`, of `argument`, which holds k_nope and v; k_pe is checked too."""
    nope_dim = checks.static_int("nope_dim", nope_dim, 0)
    if nope_dim >= width:
        raise checks.found("nope_dim", nope_dim, f"less than {argument}'s last dim, {width}, which holds k_nope and v")
    if k_pe.shape[-1] % 2 or not k_pe.shape[-1]:
        raise checks.found("k_pe", k_pe, "an even, positive last dim (RoPE rotates pairs)")
    return nope_dim


@dataclasses.dataclass(frozen=True)
class KVStatic:
    nope_dim: int
    input_layout: str
    output_layout: str
    implementation: dispatch.Choice

    def rope(self, rotary_dim: int) -> rope.RopeStatic:
        return rope.RopeStatic(rotary_dim, self.input_layout, self.output_layout, False, self.implementation)


def _xla_forward(static: KVStatic, kv, k_pe, cos, sin) -> tuple[jax.Array, jax.Array]:
    rotated = rope.rotate(static.rope(k_pe.shape[-1]), k_pe[..., None, :], cos, sin).astype(kv.dtype)
    shared = jnp.broadcast_to(rotated, (*kv.shape[:-1], k_pe.shape[-1]))
    return jnp.concatenate([kv[..., : static.nope_dim], shared], axis=-1), kv[..., static.nope_dim :]


def _xla_backward(static: KVStatic, dk, dv, cos, sin) -> tuple[jax.Array, jax.Array]:
    """dkv like kv; dk_pe [B, S, P] of this device's heads, not yet rounded to k_pe's dtype."""
    dkv = jnp.concatenate([dk[..., : static.nope_dim], dv], axis=-1)
    summed = jnp.sum(rope.wide(dk[..., static.nope_dim :]), axis=-2, keepdims=True)
    adjoint = static.rope(summed.shape[-1]).adjoint()
    return dkv, rope.rotate(adjoint, summed, cos, sin)[..., 0, :]


def _launch(static: KVStatic, make: str, tokens, heads, rotary, value, cos, sin, dtype, *arrays):
    from jax_mla.ffi import triton
    from jax_mla.kernels import rope as kernels

    cos, sin, table = launches.tables(cos, sin, tokens)
    sizes = (math.prod(tokens), heads, static.nope_dim, rotary, value, table)
    launch = getattr(kernels, make)(
        *sizes, static.input_layout, static.output_layout, dtype.name, arch=triton.compute_capability()
    )
    return triton.call(launch, *arrays, cos, sin)


@launches.batched("data", "data", "table", "table")
def _triton_forward(static: KVStatic, kv, k_pe, cos, sin) -> tuple[jax.Array, jax.Array]:
    if kv.size == 0:
        return _xla_forward(static, kv, k_pe, cos, sin)
    *tokens, heads, width = kv.shape
    sizes = (tuple(tokens), heads, k_pe.shape[-1], width - static.nope_dim)
    arrays = launches.flat(kv, 2), launches.flat(k_pe, 1).astype(kv.dtype)  # rotated in float32 either way
    k, v = _launch(static, "split", *sizes, cos, sin, kv.dtype, *arrays)
    return k.reshape(*kv.shape[:-1], -1), v.reshape(*kv.shape[:-1], -1)


@launches.batched("data", "data", "table", "table")
def _triton_backward(static: KVStatic, dk, dv, cos, sin) -> tuple[jax.Array, jax.Array]:
    if dk.size == 0:
        return _xla_backward(static, dk, dv, cos, sin)
    *tokens, heads, width = dk.shape
    sizes = (tuple(tokens), heads, width - static.nope_dim, dv.shape[-1])
    arrays = launches.flat(dk, 2), launches.flat(dv, 2)
    dkv, dk_pe = _launch(static, "split_backward", *sizes, cos, sin, dk.dtype, *arrays)
    return dkv.reshape(*dk.shape[:-1], -1), dk_pe.reshape(*tokens, -1)


def _triton_supports(static: KVStatic | None = None, *arrays) -> str | None:
    return launches.supports(*arrays)


IMPLEMENTATIONS = {
    "triton": dispatch.Implementation(_triton_forward, _triton_backward, _triton_supports, opaque=True),
    "xla": dispatch.Implementation(forward=_xla_forward, backward=_xla_backward),
}


def raw_forward(static: KVStatic, kv, k_pe, cos, sin) -> tuple[jax.Array, jax.Array]:
    chosen = dispatch.choose("apply_rope_kv", IMPLEMENTATIONS, static.implementation, static, kv, k_pe, cos, sin)
    rule = "b s h E, b s P, b s Q, b s Q -> b s h D, b s h V"
    forward = functools.partial(chosen.forward, static)
    return sharding.local("apply_rope_kv", rule, forward, kv, k_pe, cos, sin, opaque=chosen.opaque)


def raw_backward(static: KVStatic, k_pe, cos, sin, dk, dv) -> tuple[jax.Array, jax.Array]:
    """Cotangents of kv and of k_pe, which is given for its type alone."""
    chosen = dispatch.choose("apply_rope_kv", IMPLEMENTATIONS, static.implementation, static, dk, k_pe, cos, sin)
    rule = "b s h D, b s h V, b s Q, b s Q -> b s h E, b s P"
    backward = functools.partial(chosen.backward, static)
    dkv, dk_pe = sharding.local("apply_rope_kv", rule, backward, dk, dv, cos, sin, opaque=chosen.opaque)
    return dkv, sharding.cotangent(dk_pe, k_pe)


def table_cotangents(static: KVStatic, k_pe, dk, cos, sin) -> tuple[jax.Array, jax.Array]:
    """Cotangents of cos and sin: the rotation's linear, so dk is summed over the heads first."""
    rule = "b s h D -> b s P"
    summed = sharding.local("apply_rope_kv", rule, lambda dk: jnp.sum(rope.wide(dk[..., static.nope_dim :]), -2), dk)
    return rope.table_cotangents(static.rope(k_pe.shape[-1]), k_pe[..., None, :], summed[..., None, :], cos, sin)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rope_kv(static: KVStatic, kv, k_pe, cos, sin):
    return raw_forward(static, kv, k_pe, cos, sin)


class _Residuals(NamedTuple):
    like: jax.Array  # kv[..., :0]: no numbers, but kv's dtype and how it is spread over a mesh
    k_pe: jax.Array
    cos: jax.Array
    sin: jax.Array
    differentiates_tables: tuple | None


def _rope_kv_fwd(static: KVStatic, kv, k_pe, cos, sin):
    tables = cos.perturbed or sin.perturbed
    kv, k_pe, cos, sin = kv.value, k_pe.value, cos.value, sin.value
    return raw_forward(static, kv, k_pe, cos, sin), _Residuals(kv[..., :0], k_pe, cos, sin, () if tables else None)


def _rope_kv_bwd(static: KVStatic, saved: _Residuals, cotangents):
    like, k_pe, cos, sin, differentiates_tables = saved
    dk, dv = map(sharding.dense, cotangents)
    dkv, dk_pe = raw_backward(static, k_pe, cos, sin, dk, dv)
    dkv = sharding.cotangent(dkv, like)
    if differentiates_tables is None:
        return dkv, dk_pe, None, None
    return dkv, dk_pe, *table_cotangents(static, k_pe, dk, cos, sin)


_rope_kv.defvjp(_rope_kv_fwd, _rope_kv_bwd, symbolic_zeros=True)
