"""Attention alone: causal, of MXFP8 operands, and of packed sequences against one long row.

All are checked against `peers.attention_exact`, in float32, which goes through the heads one by one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_mla
from benchmarks import peers
from benchmarks.cases import Case, Inputs, moved, names, wide

SEQUENCES = 8  # of a packed row


def attention(i: Inputs) -> list[Case]:
    """Also with every head's largest logit, forward."""
    arrays = _draw(i, i.batch, i.tokens)
    *qkv, _ = arrays

    def ours(name):
        return functools.partial(jax_mla.attention, return_max_logit=True, implementation=name)

    def peer(function):
        return lambda q, k, v: (function(q, k, v), peers.largest_logits(q, k))

    candidates = {name: ours(name) for name in names("attention")}
    candidates |= {name: peer(function) for name, function in peers.attentions(i.dtype).items()}
    (width, value), pairs = (qkv[0].shape[-1], qkv[2].shape[-1]), _pairs(i.batch, i.tokens)
    reference, flops = wide(peer(peers.attention_exact)), 2 * i.heads * pairs * (width + value)
    case = Case("fwd", candidates, tuple(qkv), reference, "max_logit", moved(candidates["jnp_usual"], *qkv), flops)
    return [*_cases(arrays, i.dtype), case]


def attention_packed(i: Inputs) -> list[Case]:
    """All of the preset's tokens as one row: of eight packed sequences, of eight of other lengths, and of one. Equal
    work a visible pair would make the last eight times the first. "batch": the eight as eight rows."""
    length = i.batch * i.tokens
    arrays = _draw(i, 1, length)
    even = np.arange(SEQUENCES + 1, dtype=np.int32)[None] * length // SEQUENCES
    uneven = even + np.pad(np.arange(1, SEQUENCES) % 3 * (length // SEQUENCES // 4), 1).astype(np.int32)
    rows = tuple(a.reshape(SEQUENCES, -1, *a.shape[2:]) for a in arrays)
    cases = _cases(arrays, i.dtype, "packed", even) + _cases(arrays, i.dtype, "uneven", uneven)
    return cases + _cases(rows, i.dtype, "batch") + _cases(arrays, i.dtype, "one_row")


def attention_mxfp8(i: Inputs) -> list[Case]:
    """q and k row-wise, v column-wise; peers dequantise them first. Gradients are those of the values."""
    *arrays, do = _draw(i, i.batch, i.tokens)
    usages = {"rowwise": -1, "columnwise": 1}
    of = ("rowwise", "rowwise", "columnwise")

    def quantize(x, usage):
        return jax_mla.quantize_mxfp8(x, usage=usage, token_axis=-3, implementation="xla").detach()

    tensors = tuple(jax.jit(quantize, static_argnums=1)(*pair) for pair in zip(arrays, of, strict=True))

    def ours(name):
        attend = functools.partial(jax_mla.attention, implementation=name)

        def both(q, k, v, do):
            def of_proxies(*proxies):
                return attend(*(dataclasses.replace(t, proxy=p) for t, p in zip((q, k, v), proxies, strict=True)))

            return _both(of_proxies)(*(jnp.zeros(t.shape, t.dtype) for t in (q, k, v)), do)

        return attend, both

    def peer(function, dequantize, dtype=i.dtype):
        def values(*tensors):
            return (dequantize(*t.copy(u), usages[u], dtype) for t, u in zip(tensors, of, strict=True))

        return lambda *qkv: function(*values(*qkv)), lambda *a: _both(function)(*values(*a[:3]), a[3].astype(dtype))

    functions = {name: ours(name) for name in names("attention")}
    functions |= {name: peer(f, peers.DEQUANTIZE[name]) for name, f in peers.attentions(i.dtype).items()}
    exact = peer(peers.attention_exact, peers.dequantize_usual, jnp.float32)
    return _passes(functions, exact, tensors, do, _pairs(i.batch, i.tokens))


def _draw(i: Inputs, batch: int, length: int) -> tuple:
    """q, k, v and o's cotangent."""
    wide, narrow = i.nope + i.rope, i.value
    return tuple(i.draw(batch, length, i.heads, width) for width in (wide, wide, narrow, narrow))


def _choices() -> dict[str, str | None]:
    """Our implementations by name, and, where there are kernels, what None takes for each pass."""
    named = {name: name for name in names("attention")}
    return {"best": None} | named if len(named) > 1 else named


def _pairs(batch: int, length: int) -> int:
    """Queries and keys that see each other, in one head."""
    return batch * length * (length + 1) // 2


def _both(function):
    """The result and the gradients of the arguments before the cotangent: of one forward pass, since what is called
    beside its own derivative may run twice (JAX's private function does)."""

    def run(*args):
        *arrays, do = args
        o, pullback = jax.vjp(function, *arrays)
        return o, pullback(do.astype(o.dtype))

    return run


def _cases(arrays: tuple, dtype, variant: str | None = None, boundaries=None) -> list[Case]:
    *qkv, do = arrays
    batch, length = qkv[0].shape[:2]
    given, pairs = tuple(qkv), _pairs(batch, length)
    if boundaries is not None:
        given += (jnp.asarray(boundaries),)
        pairs = sum(_pairs(1, n) for n in np.diff(boundaries[0]).tolist())

    def ours(name):
        attend = functools.partial(jax_mla.attention, implementation=name)
        return attend if boundaries is None else lambda q, k, v, at: attend(q, k, v, cu_seqlens=at)

    def both(function):
        def run(q, k, v, *rest):
            return _both(lambda q, k, v: function(q, k, v, *rest[:-1]))(q, k, v, rest[-1])

        return function, run

    functions = {name: both(ours(choice)) for name, choice in _choices().items()}
    functions |= {name: both(function) for name, function in peers.attentions(dtype).items()}
    exact = tuple(wide(function) for function in both(peers.attention_exact))
    return _passes(functions, exact, given, do, pairs, variant)


def _passes(functions: dict, exact: tuple, given: tuple, do, pairs: int, variant: str | None = None) -> list[Case]:
    """Forward, and forward with all gradients: two functions a candidate."""
    (*_, heads, width), value = given[0].shape, given[2].shape[-1]
    forward = 2 * heads * pairs * (width + value)  # q k^T and p v
    backward = 2 * heads * pairs * (3 * width + 2 * value)  # q k^T again, dq, dk; do v^T, dv
    cases = []
    for direction, index, args, flops in (("fwd", 0, given, forward), ("fwd_bwd", 1, (*given, do), forward + backward)):
        candidates = {name: pair[index] for name, pair in functions.items()}
        touched = moved(candidates["jnp_usual"], *args)
        cases.append(Case(direction, candidates, args, exact[index], variant, touched, flops))
    return cases
