"""The up-projections with their norms and rotations: forward, and backward alone."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

import jax_mla
from benchmarks import peers
from benchmarks.cases import Case, Inputs, codes, moved, names, pull, rms_error, wide
from benchmarks.timing import size
from jax_mla import MXFP8Tensor


def q_up(i: Inputs) -> list[Case]:
    return _q_up(i, None, {"jnp_usual": peers.q_up_usual, "jnp_best": peers.q_up_best})


def q_up_mxfp8(i: Inputs) -> list[Case]:
    """Codes both ways forward; backward straight through, with every GEMM's operands rounded to MXFP8."""
    return _q_up(i, "mxfp8", {"jnp_usual": peers.q_up_mxfp8_usual, "jnp_best": peers.q_up_mxfp8_best})


def q_up_fp8(i: Inputs) -> list[Case]:
    """In FP8, beside what is written by hand in the preset's dtype; forward also of a weight quantised before."""
    by_hand = {"jnp_usual": peers.q_up_usual, "jnp_best": peers.q_up_best}
    fwd, bwd = _q_up(i, "fp8", by_hand)
    x, w, scale = fwd.args
    t = jax.jit(lambda w: jax_mla.quantize_fp8(w, usage="columnwise", token_axis=-3).detach())(w)

    exact = fwd.reference

    def peer(function):
        return lambda x, w, scale: function(x, jax_mla.dequantize(w), scale)

    candidates = {n: peer(f) if n in by_hand else f for n, f in fwd.candidates.items()}
    quantized = dataclasses.replace(
        fwd,
        variant="quantized",
        candidates=candidates,
        args=(x, t, scale),
        reference=lambda x, w, scale: exact(x, jax_mla.dequantize(w), scale),
    )
    return [fwd, quantized, bwd]


def _q_up(i: Inputs, recipe, by_hand) -> list[Case]:
    """The cotangent is made in the program: its buffer is the backward pass's to reuse."""
    rank, width = i.rank, i.nope + i.rope
    args = i.per_token(rank), i.draw(rank, i.heads, width) * rank**-0.5, 1 + 0.1 * i.draw(rank)
    row = i.draw(1, 1, i.heads, width)
    gemm = 2 * i.batch * i.tokens * rank * i.heads * width

    def ours(name):
        def run(x, w, scale):
            options = dict(nope_dim=i.nope, norm_scale=scale, recipe=recipe, out=_out(recipe), implementation=name)
            return jax_mla.q_up_proj_rope(x, w, i.cos, i.sin, **options)

        return run

    def peer(function):
        return lambda x, w, scale: function(x, w, scale, i.cos, i.sin, i.nope)

    def made(row):
        steps = jnp.cos(jnp.arange(i.tokens, dtype=jnp.float32))[None, :, None, None]
        dq = row.astype(i.dtype) * steps.astype(i.dtype)
        return jax.lax.optimization_barrier(jnp.broadcast_to(dq, (i.batch, i.tokens, i.heads, width)))

    def backward(function):
        return lambda x, w, scale, row: pull(function, (x, w, scale), made(row))

    functions = {name: ours(name) for name in names("q_up_proj_rope")}
    functions |= {name: peer(function) for name, function in by_hand.items()}
    fwd, pulled = _forward_case(functions, args, recipe, gemm), {n: backward(f) for n, f in functions.items()}
    best, args = pulled["jnp_best"], (*args, row)
    touched = moved(best, *args) + size(jax.eval_shape(made, row))
    before = lambda x, w, scale, row: made(row)  # noqa: E731
    return [fwd, Case("bwd", pulled, args, wide(best), bytes=touched, flops=2 * gemm, before=before)]


def kv_up(i: Inputs) -> list[Case]:
    return _kv_up(i, None, {"jnp_usual": peers.kv_up_usual, "jnp_best": peers.kv_up_best})


def kv_up_mxfp8(i: Inputs) -> list[Case]:
    """As `q_up_mxfp8`."""
    return _kv_up(i, "mxfp8", {"jnp_usual": peers.kv_up_mxfp8_usual, "jnp_best": peers.kv_up_mxfp8_best})


def _kv_up(i: Inputs, recipe, by_hand) -> list[Case]:
    rank, width = i.config.kv_lora_rank, i.nope + i.value
    x, w, scale = i.per_token(rank), i.draw(rank, i.heads, width) * rank**-0.5, 1 + 0.1 * i.draw(rank)
    args = x, w, scale, i.per_token(i.rope)
    cotangents = i.per_token(i.heads, i.nope + i.rope), i.per_token(i.heads, i.value)
    gemm = 2 * i.batch * i.tokens * rank * i.heads * width

    def ours(name):
        def run(x, w, scale, k_pe):
            options = dict(nope_dim=i.nope, norm_scale=scale, recipe=recipe, out=_out(recipe), implementation=name)
            return jax_mla.kv_up_proj_rope(x, w, k_pe, i.cos, i.sin, **options)

        return run

    def peer(function):
        return lambda *args: function(*args, i.cos, i.sin, i.nope)

    def backward(function):
        return lambda x, w, scale, k_pe, *cotangents: pull(function, (x, w, scale, k_pe), cotangents)

    functions = {name: ours(name) for name in names("kv_up_proj_rope")}
    functions |= {name: peer(function) for name, function in by_hand.items()}
    fwd, pulled = _forward_case(functions, args, recipe, gemm), {n: backward(f) for n, f in functions.items()}
    best, args = pulled["jnp_best"], (*args, *cotangents)
    return [fwd, Case("bwd", pulled, args, wide(best), bytes=moved(best, *args), flops=2 * gemm)]


def _out(recipe):
    return "mxfp8" if recipe == "mxfp8" else None


def _forward_case(functions: dict, args: tuple, recipe, flops: float) -> Case:
    forward = {name: _forward(name, function, recipe) for name, function in functions.items()}
    best = forward["jnp_best"]
    return Case("fwd", forward, args, wide(best), bytes=moved(best, *args), flops=flops, **_judged(recipe))


def _forward(name: str, function, recipe):
    """The pass whose results are compared: under "mxfp8" codes both ways, which peers make of what they return."""
    if recipe != "mxfp8":
        return function

    def encode(x):
        return codes(x) if isinstance(x, MXFP8Tensor) else peers.QUANTIZE[name](x, -1, 1)

    return lambda *args: jax.tree.map(encode, function(*args), is_leaf=lambda x: isinstance(x, MXFP8Tensor))


def _judged(recipe) -> dict:
    """Codes as the values of both copies: a sum in another order moves a code here and there by a step."""
    if recipe != "mxfp8":
        return dict(error=rms_error) if recipe else {}

    def values(results):
        arrays = iter(jax.tree.leaves(results))
        pairs = zip(arrays, arrays, itertools.cycle((-1, 1)), strict=False)
        return [peers.dequantize_best(codes, scales, axis, jnp.float32) for codes, scales, axis in pairs]

    return dict(read=values, error=rms_error)
