"""The up-projections with the fused kernels for Hopper: the norm in front of them, the shared backward pass behind."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_mla import dispatch, launches, linear, operands, rope, sharding
from jax_mla.ffi import triton
from jax_mla.operands import Operand

_HOPPER = 90


def implementation(forward: Callable, misfit: Callable, backward: Callable) -> dispatch.Implementation:
    """For an op's table: `q_forward` or `kv_forward`, its `_misfit`, and the shared backward pass, which takes its
    parts' name."""

    def supports(static=None, *args):
        if static is None or len(args) == 1:  # this machine; the backward pass, which has other kernels
            return _unavailable()
        return misfit(static, *args) or _unavailable()

    return dispatch.Implementation(forward, lambda *args: backward(launches.parts(), *args), supports)


def _unavailable() -> str | None:
    found = triton.compute_capability()
    if found != _HOPPER:
        where = f"jax's default backend {jax.default_backend()}" if found is None else f"{found / 10}"
        return f"needs a Hopper GPU of compute capability 9.0; found {where}"
    return None


def q_misfit(static, x: Operand, w: Operand, cos, sin, norm_scale, bias) -> str | None:
    """Why the kernel could run these arguments of `q_up_proj_rope` on no machine, or None."""
    rotary = static.rope.rotary_dim
    return _shared_misfit(static, x, w, static.rope.input_layout, static.rope.output_layout) or _dims(
        x, w, nope=w.shape[-1] - rotary, rotary=rotary
    )


def kv_misfit(static, x: Operand, w: Operand, k_pe, cos, sin, norm_scale, bias) -> str | None:
    if bias is not None:
        return "found a bias, which the kernel does not add"
    nope = static.rope_kv.nope_dim
    return _shared_misfit(static, x, w) or _dims(x, w, nope=nope, rotary=k_pe.shape[-1], value=w.shape[-1] - nope)


def _shared_misfit(static, x: Operand, w: Operand, *layouts: str) -> str | None:
    if static.project.recipe is not None or static.out is not None:
        return f"found recipe={static.project.recipe!r}, out={static.out!r}, wants None of both"
    if {operands.kind(x), operands.kind(w)} != {"array"}:
        return "found an MXFP8Tensor, wants arrays"
    if any(layout != "halves" for layout in layouts):
        return f"found layouts {layouts} around the rotation, wants halves"
    return None


def _dims(x: jax.Array, w: jax.Array, **dims) -> str | None:
    from jax_mla.kernels import mosaic_up_proj as kernels

    *tokens, rank = sharding.shard_shape(x, sharding.spec(x))
    if rank != x.shape[-1]:
        return f"found x's last dim sharded over mesh axes {sharding.spec(x)[-1]}, wants it whole on every device"
    return kernels.supports(tokens=math.prod(tokens), rank=rank, dtype=x.dtype, **dims)


def _check_shard(op: str, x: jax.Array, w: jax.Array, **dims) -> None:
    """Under an Auto mesh what a device has is known no sooner."""
    reason = _dims(x, w, **dims)
    if reason is not None:
        raise NotImplementedError(f"{op}: 'mosaic': {reason}, on each device")


def _prepared(static, train: bool, x, w, norm_scale, bias):
    """x, normalised if it is to be; w in its dtype, as halves, whole but for its heads; residuals."""
    project = static.project.using(launches.parts())
    x, w, saved = linear.factors(project, x, w, norm_scale, bias, train)
    w = linear.to_halves(w.astype(x.dtype), project)
    return x, sharding.gather_but_heads(w, sharding.own_heads(x, w)), saved


def _tokens(x: jax.Array) -> str:
    return " ".join(f"t{i}" for i in range(x.ndim - 1))


def q_forward(static, train: bool, x, w, cos, sin, norm_scale, bias):
    """q, and what `linear.project_backward` needs (None unless `train`)."""
    rotary = static.rope.rotary_dim

    def kernel(x, w, cos, sin, bias):
        from jax_mla.kernels import mosaic_up_proj as kernels

        _check_shard("q_up_proj_rope", x, w, nope=w.shape[2] - rotary, rotary=rotary)
        tables = (jnp.broadcast_to(t, (*x.shape[:-1], t.shape[-1])).reshape(-1, t.shape[-1]) for t in (cos, sin))
        sizes = dict(heads=w.shape[1], nope=w.shape[2] - rotary, rotary=rotary)
        q = kernels.q_up(launches.flat(x, 1), w, *tables, bias, **sizes)
        return q.reshape(*x.shape[:-1], *w.shape[1:])

    x, w, saved = _prepared(static, train, x, w, norm_scale, bias)
    bias = None if bias is None else linear.to_halves(bias, static.project)
    tokens = _tokens(x)
    rule = f"{tokens} R, R h D, {tokens} P, {tokens} P, h D -> {tokens} h D"
    return sharding.local("q_up_proj_rope", rule, kernel, x, w, cos, sin, bias, opaque=True), saved


def kv_forward(static, train: bool, x, w, k_pe, cos, sin, norm_scale, bias):
    """k, v, and what `linear.project_backward` needs (None unless `train`)."""

    def kernel(x, w, k_pe):
        from jax_mla.kernels import mosaic_up_proj as kernels

        nope = static.rope_kv.nope_dim
        _check_shard("kv_up_proj_rope", x, w, nope=nope, rotary=k_pe.shape[-1], value=w.shape[2] - nope)
        sizes = dict(heads=w.shape[1], nope=nope, value=w.shape[2] - nope)
        k, v = kernels.kv_up(launches.flat(x, 1), w, launches.flat(k_pe, 1), **sizes)
        return tuple(a.reshape(*x.shape[:-1], *a.shape[1:]) for a in (k, v))

    x, w, saved = _prepared(static, train, x, w, norm_scale, bias)
    rotation = static.using(launches.parts()).rope_kv.rope(k_pe.shape[-1])
    rotated = rope.raw(rotation, k_pe[..., None, :], cos, sin)[..., 0, :]
    tokens = _tokens(x)
    rule = f"{tokens} R, R h E, {tokens} P -> {tokens} h D, {tokens} h V"
    return *sharding.local("kv_up_proj_rope", rule, kernel, x, w, rotated, opaque=True), saved
