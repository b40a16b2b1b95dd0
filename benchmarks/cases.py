"""What an op is timed on: one `Case` a pass, made from a preset's dims."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_mla
from benchmarks.timing import shown, size
from jax_mla import MXFP8Tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """One pass of an op: candidates by implementation, and their reference in float32, each a function of `args`.

    variant: what tells passes of one direction apart. donate: the first argument's buffer may be reused, and the result
    is its successor. bytes, flops: the fewest that must be moved and done, None where it is the other that counts.
    before: what is timed and taken off, a producer of the cotangent whose buffer a backward pass may reuse. read: what
    results are compared as, and error: how.
    """

    direction: str  # fwd, bwd or fwd_bwd
    candidates: dict[str, Callable]
    args: tuple
    reference: Callable
    variant: str | None = None
    bytes: float | None = None
    flops: float | None = None
    donate: bool = False
    before: Callable | None = None
    read: Callable = lambda results: results
    error: Callable = lambda found, wanted: error(found, wanted)


class Inputs:
    """Fresh random arrays of a preset's dims."""

    def __init__(self, preset, tokens: int, seed: int):
        self.config, self.batch, self.tokens = preset.config, preset.batch, tokens
        self.dtype, self.key = jnp.dtype(preset.dtype), jax.random.key(seed)
        c = self.config
        self.rank = c.q_lora_rank or c.hidden_size  # of what queries are made of
        self.heads, self.nope, self.rope, self.value = c.num_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.cos, self.sin = jax_mla.rope_tables(jnp.arange(tokens, dtype=jnp.int32), c.rope, self.rope)

    def draw(self, *shape, dtype=None):
        self.key, key = jax.random.split(self.key)
        return jax.random.normal(key, shape, dtype or self.dtype)

    def per_token(self, *shape):
        return self.draw(self.batch, self.tokens, *shape)


def names(op: str) -> list[str]:
    """Our implementations of a public op that can run here, shapes and dtypes aside."""
    return [name for name, why_not in jax_mla.implementations()[op].items() if not why_not]


def wide(function: Callable) -> Callable:
    """`function` on its floating arguments in float32."""

    def run(*args):
        return function(*(a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in args))

    return run


def moved(function: Callable, *args) -> int:
    """Bytes of the arguments and of the results."""
    return size(args) + size(jax.eval_shape(function, *args))


def pull(function: Callable, args: tuple, cotangents) -> tuple:
    """The gradients of `args`. A tensor's cotangent is its proxy's; an array's is cast to the array's dtype."""
    outputs, pullback = jax.vjp(function, *args)

    def fit(output, cotangent):
        if isinstance(output, MXFP8Tensor):
            return dataclasses.replace(jax.tree.map(jnp.zeros_like, output), proxy=cotangent)
        return cotangent.astype(output.dtype)

    return pullback(jax.tree.map(fit, outputs, cotangents, is_leaf=lambda x: isinstance(x, MXFP8Tensor)))


def codes(t: MXFP8Tensor) -> MXFP8Tensor:
    """Of a tensor what is to be compared: its bytes."""
    return t.detach().bytes()


def error(found, wanted) -> float:
    """The worst over all arrays: of bytes the share that differ, of floats the largest error over the largest entry."""
    return _worst(_error, found, wanted)


def rms_error(found, wanted) -> float:
    """The worst over all arrays: the norm of the error over that of what is wanted. For values of codes, of which one
    step is 6 %, however small what moved it."""
    return _worst(_rms_error, found, wanted)


def _worst(error: Callable, found, wanted) -> float:
    errors = [error(f, w) for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)]
    return shown(np.max(np.asarray(errors)))


@jax.jit
def _rms_error(found, wanted):
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.linalg.norm(found - wanted) / jnp.maximum(jnp.linalg.norm(wanted), 1e-30)


@jax.jit
def _error(found, wanted):
    if found.dtype == jnp.uint8:
        return jnp.mean((found != wanted).astype(jnp.float32))
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.max(jnp.abs(found - wanted)) / jnp.maximum(jnp.max(jnp.abs(wanted)), 1e-30)
