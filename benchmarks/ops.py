"""The ops around the GEMMs and the two ceilings, and the table of all ops that have cases."""

import functools

import jax
import jax.numpy as jnp

import jax_mla
from benchmarks import attentions, peers, projections
from benchmarks.cases import Case, Inputs, codes, moved, names, pull, wide
from benchmarks.timing import size


def copy(i: Inputs) -> list[Case]:
    """The ceiling of what moves bytes, the best row: one elementwise pass over the queries, and over as many bytes of
    float32, which XLA reads in wider pieces."""
    x = i.per_token(i.heads, i.nope + i.rope)
    cases = [Case("fwd", {"xla": jnp.negative}, (x,), wide(jnp.negative), bytes=2 * size(x))]
    if x.dtype != jnp.float32:
        x = i.draw(size(x) // 4, dtype=jnp.float32)
        cases.append(Case("fwd", {"xla": jnp.negative}, (x,), jnp.negative, "float32", bytes=2 * size(x)))
    return cases


def gemm(i: Inputs) -> list[Case]:
    """The ceiling of what multiplies: the Q up-projection alone."""
    rank, width = i.rank, i.heads * (i.nope + i.rope)
    x, w = i.draw(i.batch * i.tokens, rank), i.draw(rank, width) * rank**-0.5
    return [Case("fwd", {"xla": jnp.dot}, (x, w), wide(jnp.dot), flops=2 * i.batch * i.tokens * rank * width)]


def rope_q(i: Inputs) -> list[Case]:
    """In place: the result may have the queries' buffer, and most of it stays as it is."""
    x = i.per_token(i.heads, i.nope + i.rope)
    touched = 2 * size(x) * i.rope / (i.nope + i.rope)
    cases = []
    for variant, layout, usual in ((None, "pairs", peers.rope_usual), ("halves", "halves", peers.rope_halves_usual)):

        def ours(name, layout=layout):
            options = dict(rotary_dim=i.rope, input_layout=layout, implementation=name)
            return lambda x: jax_mla.apply_rope(x, i.cos, i.sin, **options)

        def best(x, layout=layout):
            return peers.rope_best(x, i.cos, i.sin, i.nope, layout)

        plain = lambda x, usual=usual: usual(x, i.cos, i.sin, i.nope)  # noqa: E731
        candidates = {name: ours(name) for name in names("apply_rope")} | {"jnp_usual": plain, "jnp_best": best}
        cases.append(Case("fwd", candidates, (x,), wide(plain), variant, bytes=touched, donate=True))
    return cases


def rope_kv(i: Inputs) -> list[Case]:
    kv, k_pe = i.per_token(i.heads, i.nope + i.value), i.per_token(i.rope)
    cotangents = i.per_token(i.heads, i.nope + i.rope), i.per_token(i.heads, i.value)

    def ours(name):
        return lambda kv, k_pe: jax_mla.apply_rope_kv(kv, k_pe, i.cos, i.sin, nope_dim=i.nope, implementation=name)

    def peer(function):
        return lambda kv, k_pe: function(kv, k_pe, i.cos, i.sin, i.nope)

    def backward(function):
        return lambda kv, k_pe, *cotangents: pull(function, (kv, k_pe), cotangents)

    candidates = {name: ours(name) for name in names("apply_rope_kv")}
    candidates |= {"jnp_usual": peer(peers.split_usual), "jnp_best": peer(peers.split_best)}
    pulled = {n: backward(f) for n, f in candidates.items()}
    touched = moved(candidates["jnp_usual"], kv, k_pe)  # the other way in the backward pass
    args = (kv, k_pe)
    return [
        Case("fwd", candidates, args, wide(candidates["jnp_usual"]), bytes=touched),
        Case("bwd", pulled, (*args, *cotangents), wide(pulled["jnp_usual"]), bytes=touched),
    ]


def rms_norm_mxfp8(i: Inputs) -> list[Case]:
    def ours(name, x, scale):
        return codes(jax_mla.rms_norm_quantize(x, scale, 1e-6, usage="both", implementation=name))

    def usual(x, scale):
        return peers.quantize_usual(peers.norm_usual(x, scale, 1e-6), -1, 1)

    def best(x, scale):
        return peers.quantize_best(peers.norm_best(x, scale, 1e-6), -1, 1)

    cases = []
    for variant, width in (("latent", i.rank), ("hidden", i.config.hidden_size)):
        args = i.per_token(width), i.draw(width, dtype=jnp.float32)
        candidates = {name: functools.partial(ours, name) for name in names("rms_norm_quantize")}
        candidates |= {"jnp_usual": usual, "jnp_best": best}
        cases.append(Case("fwd", candidates, args, wide(best), variant, bytes=moved(best, *args)))
    return cases


def rope_mxfp8(i: Inputs) -> list[Case]:
    """What stands before the backward GEMMs of queries, in the other direction: a rotation and its codes, both ways."""
    from jax_mla import rope, rope_quantize

    x = i.per_token(i.heads, i.nope + i.rope)
    tables = [t[None] for t in (i.cos, i.sin)]

    def ours(name):
        static = rope.RopeStatic(i.rope, "pairs", "halves", False, name)
        return lambda x: codes(rope_quantize.raw(static, x, *tables))

    def usual(x):
        return peers.quantize_usual(peers.rope_usual(x.astype(jnp.float32), i.cos, i.sin, i.nope), -1, 1)

    def best(x):
        return peers.quantize_best(peers.rope_reshaped(x.astype(jnp.float32), i.cos, i.sin, i.nope), -1, 1)

    candidates = {name: ours(name) for name in names("q_up_proj_rope")} | {"jnp_usual": usual, "jnp_best": best}
    return [Case("fwd", candidates, (x,), wide(best), bytes=moved(best, x))]


def fp8_quantize(i: Inputs) -> list[Case]:
    """Attention's output to FP8, as it lies and transposed: with its amax at hand, and without."""
    from jax_mla import fp8

    x = i.per_token(i.heads, i.value)
    largest = jax.jit(fp8.amax)(x)

    def ours(name, x, *largest):
        static = fp8.Static("both", -3, "e4m3", False, x.dtype, name)
        t = fp8.raw_quantize(static, x, *largest).detach().bytes()
        return t.rowwise_codes, t.columnwise_codes, t.scale_inv

    names_ = {name: functools.partial(ours, name) for name in names("quantize_fp8")}
    candidates = names_ | {"jnp_usual": peers.fp8_usual, "jnp_best": peers.fp8_best}
    touched = moved(candidates["jnp_best"], x)
    return [
        Case("fwd", candidates, args, peers.fp8_usual, variant, bytes=touched)
        for variant, args in (("known amax", (x, largest)), ("amax too", (x,)))
    ]


def dequantize(i: Inputs) -> list[Case]:
    from jax_mla.dequantize import raw_dequantize

    x = i.per_token(i.heads, i.nope + i.rope)
    t = jax.jit(lambda x: jax_mla.quantize_mxfp8(x, usage="both", token_axis=-3, implementation="xla").detach())(x)
    cases = []
    for usage, axis in (("rowwise", -1), ("columnwise", 1)):

        def peer(function, dtype=i.dtype, usage=usage, axis=axis):
            return lambda t: function(*t.copy(usage), axis, dtype)

        args = (t.only(usage),)
        candidates = {n: functools.partial(raw_dequantize, i.dtype, implementation=n) for n in names("quantize_mxfp8")}
        candidates |= {name: peer(function) for name, function in peers.DEQUANTIZE.items()}
        reference = peer(peers.dequantize_usual, jnp.float32)
        cases.append(Case("fwd", candidates, args, reference, usage, bytes=moved(candidates["jnp_best"], *args)))
    return cases


_AROUND = (copy, gemm, rope_q, rope_kv, rms_norm_mxfp8, rope_mxfp8, dequantize, fp8_quantize)
_PRODUCTS = (projections.q_up, projections.q_up_mxfp8, projections.q_up_fp8)
_PRODUCTS += (projections.kv_up, projections.kv_up_mxfp8)
_ATTENTIONS = (attentions.attention, attentions.attention_mxfp8, attentions.attention_packed)
OPS = {f.__name__: f for f in (*_AROUND, *_PRODUCTS, *_ATTENTIONS)}
