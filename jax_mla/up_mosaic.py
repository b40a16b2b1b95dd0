"""The up-projections with the fused kernels for Hopper: the norm in front of them, the shared backward pass behind."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_mla import launches, linear, mxfp8, operands, rope, sharding
from jax_mla.ffi import triton
from jax_mla.ffi.varying import vary_like
from jax_mla.mxfp8_tensor import once_differentiable
from jax_mla.operands import Operand

_HOPPER = 90


def unavailable() -> str | None:
    found = triton.compute_capability()
    if found != _HOPPER:
        where = f"jax's default backend {jax.default_backend()}" if found is None else f"{found / 10}"
        return f"needs a Hopper GPU of compute capability 9.0; found {where}"
    try:
        import jax_mla.kernels.mosaic_up_proj  # noqa: F401
    except (ImportError, AttributeError) as error:  # of JAX's, some of it private
        return f"needs Pallas's Mosaic GPU part, which this jax has not as it was: {error}"
    return None


def q_misfit(static, x: Operand, w: Operand, cos, sin, norm_scale, bias) -> str | None:
    """Why the kernel cannot run these arguments of `q_up_proj_rope`, or None."""
    if static.rope.output_layout != "halves":
        return f"found output_layout={static.rope.output_layout!r}, wants 'halves'"
    return _misfit(x, w, **_q_sizes(static, w))


def kv_misfit(static, x: Operand, w: Operand, k_pe, cos, sin, norm_scale, bias) -> str | None:
    """The same of `kv_up_proj_rope`."""
    if bias is not None:
        return "found a bias, which the kernel does not add"
    return _misfit(x, w, **_kv_sizes(static, w, k_pe))


def _q_sizes(static, w) -> dict:
    sizes = dict(nope=w.shape[-1] - static.rope.rotary_dim, rotary=static.rope.rotary_dim)
    return sizes | dict(pairs=static.rope.input_layout == "pairs", mxfp8=static.out is not None)


def _kv_sizes(static, w, k_pe) -> dict:
    nope = static.rope_kv.nope_dim
    return dict(nope=nope, rotary=k_pe.shape[-1], value=w.shape[-1] - nope, mxfp8=static.out is not None)


def _misfit(x: Operand, w: Operand, padded: bool = False, **sizes) -> str | None:
    """padded: that tokens will be, to as many as the kernel wants."""
    reason = unavailable()
    if reason is not None:
        return reason  # where that is the machine, Pallas's GPU part is not even imported
    from jax_mla.kernels import mosaic_up_proj as kernels

    dtype, x = x.dtype, operands.placed(x)
    *tokens, rank = sharding.shard_shape(x, sharding.spec(x))
    if rank != x.shape[-1]:
        return f"found x's last dim sharded over mesh axes {sharding.spec(x)[-1]}, wants it whole on every device"
    if sizes["mxfp8"] and tokens[-1] % mxfp8.bits.BLOCK:
        return f"found {tokens[-1]} tokens in a row, wants whole blocks of {mxfp8.bits.BLOCK}"
    if not w.shape[-2]:
        return "found no heads"
    count = math.prod(tokens)
    return kernels.supports(tokens=count + (_missing(count, sizes) if padded else 0), rank=rank, dtype=dtype, **sizes)


def _missing(tokens: int, sizes: dict) -> int:
    return 0 if sizes["mxfp8"] else -tokens % 8


def _on_shards(op: str, sizes: dict, kinds: tuple[str, ...], function: Callable) -> Callable:
    """function(rows, x [..., R], w [R, H, D], *arrays) for what `sharding.local` gives, also under vmap.

    rows: flattens an array [..., K], and pads it to tokens that the kernel takes: under an Auto mesh what a device has
    is known no sooner, when it is too late for another implementation."""

    @launches.batched("data", "weight", *kinds)
    def run(x, w, *arrays):
        reason = _misfit(x, w, padded=True, **sizes)
        if reason is not None:
            raise NotImplementedError(f"{op}: 'mosaic': {reason}, on each device")
        missing = _missing(math.prod(x.shape[:-1]), sizes)

        def rows(array):
            flat = launches.flat(array, 1)
            return jnp.pad(flat, ((0, missing), (0, 0))) if missing else flat

        outputs = function(rows, x, w.reshape(w.shape[-3:]), *arrays)
        return jax.tree.map(lambda output: vary_like(output, x, w, *arrays), outputs)

    return run


def _prepared(parts: str, static, train: bool, x, w, norm_scale, bias):
    """x, normalised if it is to be; w, whole but for its heads; residuals."""
    project, dtype = static.project.using(parts), x.dtype
    x, w, saved = linear.factors(project, x, w, norm_scale, bias, train)
    x, w = linear.values(project, dtype, x, w)
    return x, sharding.gather_but_heads(w, sharding.own_heads(x, w)), saved


def _tokens(x: jax.Array) -> str:
    return " ".join(f"t{i}" for i in range(x.ndim - 1))


def q_forward(parts: str, static, train: bool, x, w, cos, sin, norm_scale, bias):
    """q, and what `linear.project_backward` needs (None unless `train`)."""
    op, sizes = "q_up_proj_rope", _q_sizes(static, w)
    quantization = operands.quantization(mxfp8.COPIES, -3, x.dtype, parts)

    def kernel(rows, x, w, cos, sin, bias=None):
        from jax_mla.kernels import mosaic_up_proj as kernels

        shape = (*x.shape[:-1], *w.shape[1:])
        tables = (rows(jnp.broadcast_to(t, (*x.shape[:-1], t.shape[-1]))) for t in (cos, sin))
        bias = None if bias is None else bias.reshape(bias.shape[-2:])
        given = dict(heads=w.shape[1], **{n: sizes[n] for n in ("nope", "rotary", "pairs")})
        if static.out is None:
            return kernels.q_up(rows(x), w, *tables, bias, **given)[: math.prod(shape[:-2])].reshape(shape)
        return quantization.unflatten(kernels.q_up_mxfp8(rows(x), w, *tables, bias, **given), shape)

    x, w, saved = _prepared(parts, static, train, x, w, norm_scale, bias)
    biases = () if bias is None else (bias,)
    kinds = ("table", "table", *["weight"] * len(biases))
    tokens = _tokens(x)
    rule = f"{tokens} R, R h D, {tokens} P, {tokens} P" + ", h D" * len(biases)
    run, heads = _on_shards(op, sizes, kinds, kernel), f"{tokens} h D"
    if static.out is None:
        return sharding.local(op, f"{rule} -> {heads}", run, x, w, cos, sin, *biases, opaque=True), saved
    rule += " -> " + ", ".join([heads] * 4)
    arrays = sharding.local(op, rule, once_differentiable(op, run), x, w, cos, sin, *biases, opaque=True)
    return quantization.tensor(*arrays), saved


def kv_forward(parts: str, static, train: bool, x, w, k_pe, cos, sin, norm_scale, bias):
    """k, v, and what `linear.project_backward` needs (None unless `train`)."""
    op, sizes = "kv_up_proj_rope", _kv_sizes(static, w, k_pe)
    quantization = operands.quantization(mxfp8.COPIES, -3, x.dtype, parts)
    nope, value = sizes["nope"], sizes["value"]

    def kernel(rows, x, w, *shared):
        from jax_mla.kernels import mosaic_up_proj as kernels

        given = dict(heads=w.shape[1], nope=nope, value=value)
        shapes = [(*x.shape[:-1], w.shape[1], n) for n in (nope + shared[0].shape[-1], value)]
        if static.out is None:
            found = kernels.kv_up(rows(x), w, rows(*shared), **given)
            return tuple(a[: math.prod(s[:-2])].reshape(s) for a, s in zip(found, shapes, strict=True))
        found = kernels.kv_up_mxfp8(rows(x), w, [launches.flat(a, 1) for a in shared], **given)
        return tuple(a for copies, s in zip(found, shapes, strict=True) for a in quantization.unflatten(copies, s))

    x, w, saved = _prepared(parts, static, train, x, w, norm_scale, bias)
    rotation, tokens = static.using(parts).rope_kv.rope(k_pe.shape[-1]), _tokens(x)
    k_pe = k_pe if static.out is None else rope.wide(k_pe)
    rotated = rope.raw(rotation, k_pe[..., None, :], cos, sin)[..., 0, :]
    rule, heads = f"{tokens} R, R h E", [f"{tokens} h D", f"{tokens} h V"]
    if static.out is None:
        run = _on_shards(op, sizes, ("data",), kernel)
        rule += f", {tokens} P -> " + ", ".join(heads)
        return *sharding.local(op, rule, run, x, w, rotated, opaque=True), saved
    # The rotary key, the same for every head, is quantised once.
    quantized = operands.quantize(rotated, mxfp8.COPIES, -2, quantization.dtype, parts).bytes()
    shared = jax.tree.leaves(quantized)
    rule += f", {tokens} P" * 4 + " -> " + ", ".join([heads[0]] * 4 + [heads[1]] * 4)
    run = once_differentiable(op, _on_shards(op, sizes, ("data",) * 4, kernel))
    arrays = sharding.local(op, rule, run, x, w, *shared, opaque=True)
    return quantization.tensor(*arrays[:4]), quantization.tensor(*arrays[4:]), saved
