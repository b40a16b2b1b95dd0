"""The ops a layer is made of, at a preset's dims: what each is timed on, against what, and what it may cost at best."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jax_mla
from benchmarks import peers
from jax_mla import launches


@dataclasses.dataclass(frozen=True)
class Case:
    """One pass of an op: candidates by implementation, each a function of `args`.

    reference: a function of `args` in float32, or None: results are then compared with the xla implementation's.
    donate: the first argument's buffer may be reused, and the result is its successor. bytes, flops: the fewest that
    must be moved and done. before: what is timed and taken off, a producer of the cotangent whose buffer a backward
    pass may reuse.
    """

    direction: str
    candidates: dict[str, Callable]
    args: tuple
    bytes: float = 0
    flops: float = 0
    reference: Callable | None = None
    donate: bool = False
    before: Callable | None = None


def names() -> list[str]:
    """Our implementations that can run here."""
    return ["xla"] if launches.supports() else ["triton", "xla"]


def _size(*arrays) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays))


class Inputs:
    """Fresh random arrays of a preset's dims."""

    def __init__(self, preset, tokens: int, seed: int):
        self.config, self.batch, self.tokens = preset.config, preset.batch, tokens
        self.dtype, self.key = jnp.dtype(preset.dtype), jax.random.key(seed)
        c = self.config
        self.heads, self.nope, self.rope, self.value = c.num_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.cos, self.sin = jax_mla.rope_tables(jnp.arange(tokens, dtype=jnp.int32), c.rope, self.rope)

    def draw(self, *shape, dtype=None):
        self.key, key = jax.random.split(self.key)
        return jax.random.normal(key, shape, dtype or self.dtype)

    def per_token(self, *shape):
        return self.draw(self.batch, self.tokens, *shape)


def rope_q(i: Inputs) -> list[Case]:
    x = i.per_token(i.heads, i.nope + i.rope)
    tables = (i.cos, i.sin)
    touched = 2 * _size(x) * i.rope / (i.nope + i.rope)

    def ours(name, layout):
        return lambda x: jax_mla.apply_rope(x, *tables, rotary_dim=i.rope, input_layout=layout, implementation=name)

    candidates = {name: ours(name, "pairs") for name in names()}
    candidates["jnp_usual"] = lambda x: peers.rope_usual(x, *tables, i.nope)
    halves = {name: ours(name, "halves") for name in names()}
    halves["jnp_best"] = lambda x: peers.rope_best(x, *tables, i.nope)
    usual = lambda x: peers.rope_usual(x.astype(jnp.float32), *tables, i.nope)  # noqa: E731
    best = lambda x: peers.rope_best(x.astype(jnp.float32), *tables, i.nope)  # noqa: E731
    return [
        Case("fwd", candidates, (x,), touched, 0, usual, donate=True),
        Case("fwd_halves", halves, (x,), touched, 0, best, donate=True),
    ]


def rope_kv(i: Inputs) -> list[Case]:
    kv, k_pe = i.per_token(i.heads, i.nope + i.value), i.per_token(i.rope)
    moved = _size(kv) * (1 + (i.nope + i.rope + i.value) / (i.nope + i.value))

    def ours(name):
        return lambda kv, k_pe: jax_mla.apply_rope_kv(kv, k_pe, i.cos, i.sin, nope_dim=i.nope, implementation=name)

    def usual(kv, k_pe):
        return peers.split_usual(kv, k_pe, i.cos, i.sin, i.nope)

    def backward(function):
        def run(kv, k_pe, dk, dv):
            return jax.vjp(function, kv, k_pe)[1]((dk, dv))

        return run

    candidates = {name: ours(name) for name in names()} | {"jnp_usual": usual}
    cotangents = i.per_token(i.heads, i.nope + i.rope), i.per_token(i.heads, i.value)
    wide = lambda f: lambda *a: f(*(x.astype(jnp.float32) for x in a))  # noqa: E731
    return [
        Case("fwd", candidates, (kv, k_pe), moved, 0, wide(usual)),
        Case(
            "bwd",
            {n: backward(f) for n, f in candidates.items()},
            (kv, k_pe, *cotangents),
            moved,
            0,
            wide(backward(usual)),
        ),
    ]


def _codes(t):
    return t.detach().bytes()


def _norm_codes(name: str, x, scale):
    return _codes(jax_mla.rms_norm_quantize(x, scale, 1e-6, usage="both", implementation=name))


def rms_norm_mxfp8(i: Inputs) -> list[Case]:
    cases = []
    for name, width in (("fwd_latent", i.config.q_lora_rank), ("fwd_hidden", i.config.hidden_size)):
        x, scale = i.per_token(width), i.draw(width, dtype=jnp.float32)

        candidates = {n: functools.partial(_norm_codes, n) for n in names()}
        candidates["jnp_usual"] = lambda x, s: peers.quantize_usual(peers.norm_usual(x, s, 1e-6), -1, 1)
        cases.append(Case(name, candidates, (x, scale), _size(x) * 2))
    return cases


def rope_mxfp8(i: Inputs) -> list[Case]:
    """What stands before the backward GEMMs of queries: the inverse rotation of dq and its codes, both ways."""
    from jax_mla import rope, rope_quantize

    x = i.per_token(i.heads, i.nope + i.rope)
    tables = [t[None] for t in (i.cos, i.sin)]

    def ours(name):
        static = rope.RopeStatic(i.rope, "pairs", "halves", False, name)
        return lambda x: _codes(rope_quantize.raw(static, x, *tables))

    candidates = {name: ours(name) for name in names()}
    candidates["jnp_usual"] = lambda x: peers.quantize_usual(
        peers.rope_usual(x.astype(jnp.float32), i.cos, i.sin, i.nope), -1, 1
    )
    return [Case("fwd", candidates, (x,), _size(x) * 2)]


def dequantize(i: Inputs) -> list[Case]:
    x = i.per_token(i.heads, i.nope + i.rope)
    t = jax.jit(lambda x: jax_mla.quantize_mxfp8(x, usage="both", token_axis=-3).detach())(x)
    from jax_mla.mxfp8 import raw_dequantize

    cases = []
    for usage in ("rowwise", "columnwise"):
        one = t.only(usage)
        candidates = {n: lambda t, n=n: raw_dequantize(i.dtype, t, n) for n in names()}
        cases.append(Case(f"fwd_{usage}", candidates, (one,), _size(x) * 1.5))
    return cases


def _up(i: Inputs, recipe):
    """q_up_proj_rope with its norm: forward, and backward with a cotangent that is made in the program."""
    rank, width = i.config.q_lora_rank, i.nope + i.rope
    x, w, scale = i.per_token(rank), i.draw(rank, i.heads, width) * rank**-0.5, 1 + 0.1 * i.draw(rank)
    row = i.draw(1, 1, i.heads, width)
    gemm = 2 * i.batch * i.tokens * rank * i.heads * width

    def ours(name):
        def run(x, w, scale):
            options = dict(nope_dim=i.nope, norm_scale=scale, recipe=recipe, out=recipe, implementation=name)
            return jax_mla.q_up_proj_rope(x, w, i.cos, i.sin, **options)

        return run

    def usual(x, w, scale):
        return peers.q_up_usual(x, w, scale, i.cos, i.sin, i.nope)

    def best(x, w, scale):
        return peers.q_up_best(x, w, scale, i.cos, i.sin, i.nope)

    def made(row):
        steps = jnp.cos(jnp.arange(i.tokens, dtype=jnp.float32))[None, :, None, None]
        dq = jnp.broadcast_to(row * steps.astype(row.dtype), (i.batch, i.tokens, i.heads, width))
        return jax.lax.optimization_barrier(dq)

    def backward(function):
        def run(x, w, scale, row):
            outputs, pullback = jax.vjp(function, x, w, scale)
            dq = made(row)
            if recipe is not None:  # a tensor's cotangent is its proxy's
                dq = dataclasses.replace(jax.tree.map(jnp.zeros_like, outputs), proxy=dq)
            return pullback(dq)

        return run

    return x, w, scale, row, gemm, ours, usual, best, made, backward


def q_up(i: Inputs) -> list[Case]:
    x, w, scale, row, gemm, ours, usual, best, made, backward = _up(i, None)
    candidates = {n: ours(n) for n in names()} | {"jnp_usual": usual, "jnp_best": best}
    wide = lambda f: lambda *a: f(*(x.astype(jnp.float32) for x in a))  # noqa: E731
    q_bytes = _size(x) * i.heads * (i.nope + i.rope) / i.config.q_lora_rank
    return [
        Case("fwd", candidates, (x, w, scale), q_bytes, gemm, wide(usual)),
        Case(
            "bwd",
            {n: backward(f) for n, f in candidates.items()},
            (x, w, scale, row),
            q_bytes * 2 * i.rope / (i.nope + i.rope),
            2 * gemm,
            wide(backward(usual)),
            before=lambda x, w, scale, row: made(row),
        ),
    ]


def q_up_mxfp8(i: Inputs) -> list[Case]:
    x, w, scale, row, gemm, ours, *_, made, backward = _up(i, "mxfp8")
    candidates = {n: (lambda f: lambda *a: _codes(f(*a)))(ours(n)) for n in names()}
    bodies = {n: backward(ours(n)) for n in names()}
    return [
        Case("fwd", candidates, (x, w, scale), 0, gemm),
        Case("bwd", bodies, (x, w, scale, row), 0, 2 * gemm, before=lambda x, w, scale, row: made(row)),
    ]


def copy(i: Inputs) -> list[Case]:
    """The ceiling of what moves bytes: one elementwise pass over the queries."""
    x = i.per_token(i.heads, i.nope + i.rope)
    return [Case("fwd", {"xla": lambda x: -x}, (x,), 2 * _size(x), 0, lambda x: -x.astype(jnp.float32))]


def gemm(i: Inputs) -> list[Case]:
    """The ceiling of what multiplies: the Q up-projection alone."""
    rank, width = i.config.q_lora_rank, i.heads * (i.nope + i.rope)
    x, w = i.draw(i.batch * i.tokens, rank), i.draw(rank, width) * rank**-0.5
    wide = lambda x, w: jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32))  # noqa: E731
    flops = 2 * i.batch * i.tokens * rank * width
    return [Case("fwd", {"xla": jnp.dot}, (x, w), 0, flops, wide)]


OPS = {f.__name__: f for f in (rope_q, rope_kv, rms_norm_mxfp8, rope_mxfp8, dequantize, q_up, q_up_mxfp8, copy, gemm)}


def error(found, wanted) -> float:
    """The worst over all arrays: of bytes the share that differ, of floats the largest error over the largest entry."""
    return max(float(_error(f, w)) for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))


@jax.jit
def _error(found, wanted):
    if found.dtype == jnp.uint8:
        return jnp.mean((found != wanted).astype(jnp.float32))
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.max(jnp.abs(found - wanted)) / jnp.maximum(jnp.max(jnp.abs(wanted)), 1e-30)
