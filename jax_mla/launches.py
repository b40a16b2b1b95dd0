"""From an op's arrays to the launches of `kernels/`: flat shapes, how tables broadcast, vmap, and what Triton can run.

Kernels are imported when one is first launched: the package itself needs no triton.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_mla import sharding
from jax_mla.ffi import triton

_DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))


def supports(*arrays: jax.Array | None) -> str | None:
    """Why these arrays cannot go to Triton kernels here, or None."""
    reason = triton.unavailable()
    if reason is not None:
        return reason
    for array in arrays:
        if array is not None and jnp.dtype(array.dtype) not in _DTYPES:
            return f"found dtype {array.dtype}, wants bfloat16, float16 or float32"
    return None


LONGEST_ROW = 16384  # what a program of the norm's kernels holds in registers


def supports_row(length: int) -> str | None:
    """Why a norm's kernels cannot take rows that long, or None."""
    return f"found rows of {length}, wants at most {LONGEST_ROW}" if length > LONGEST_ROW else None


def tables(cos: jax.Array, sin: jax.Array, leading: tuple[int, ...]):
    """cos, sin as [rows, P/2], and (n1, s0, s1): token t = i0 * n1 + i1 of the flattened `leading` dims reads row
    i0 * s0 + i1 * s1. One table shared along the first dims, or along the last, stays one; else it is spread out."""
    shape = jnp.broadcast_shapes(cos.shape, sin.shape)
    cos, sin = jnp.broadcast_to(cos, shape), jnp.broadcast_to(sin, shape)
    own, half = shape[:-1], shape[-1]
    shared = 0  # how many dims at the front are broadcast
    while shared < len(own) and own[shared] != leading[shared]:
        shared += 1
    kept = len(own)  # dims from here on are broadcast
    while kept > 0 and own[kept - 1] != leading[kept - 1]:
        kept -= 1
    if own[shared:] == leading[shared:]:
        table = (max(math.prod(leading[shared:]), 1), 0, 1)
    elif own[:kept] == leading[:kept]:
        table = (max(math.prod(leading[kept:]), 1), 1, 0)
    else:
        cos, sin = (jnp.broadcast_to(t, (*leading, half)) for t in (cos, sin))
        table = (max(math.prod(leading), 1), 0, 1)
    return cos.reshape(-1, half), sin.reshape(-1, half), table


def flat(x: jax.Array, trailing: int) -> jax.Array:
    """x with all but its last `trailing` dims in one."""
    return x.reshape(-1, *x.shape[x.ndim - trailing :])


def matrix(x: jax.Array, token_axis: int) -> jax.Array:
    """x [..., T, ..., K] as rows of tokens, columns of the rest: blocks along K lie in a row, along T in a column."""
    return x.reshape(-1, math.prod(x.shape[x.ndim + token_axis + 1 :]))


def batched(*kinds: str) -> Callable:
    """Decorates `function(*settings, *arrays)`, which launches kernels on arrays of any number of leading dims: under
    vmap it runs once, the batch one more leading dim of what it is given and of all that it returns.

    kinds, one an array: "data" has that dim, and is spread out if it does not differ over the batch. "table": as data,
    but a dim of 1 stands for any. "weight" [K], read by every row, gets a dim of 1, by which a function that returns
    its gradient sees for how many batch dims; one that differs over the batch makes a loop over it.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args):
            settings, arrays = args[: -len(kinds)], args[-len(kinds) :]
            if not any(isinstance(array, jax.core.Tracer) for array in arrays):
                return function(*args)  # and can tell that it is not in a program
            run = jax.custom_batching.custom_vmap(functools.partial(function, *settings))

            @run.def_vmap
            def rule(size, differs, *arrays):
                if any(d and kind == "weight" for d, kind in zip(differs, kinds, strict=True)):
                    outputs = _loop(run, differs, arrays)
                else:
                    arrays = [
                        a if d else jnp.broadcast_to(a, (size if kind == "data" else 1, *a.shape))
                        for a, d, kind in zip(arrays, differs, kinds, strict=True)
                    ]
                    outputs = _over_devices(functools.partial(call, *settings), arrays)
                return outputs, jax.tree.map(lambda _: True, outputs)

            return sharding.underivable(function.__module__.rpartition(".")[2], run)(*arrays)

        return call

    return decorate


def _loop(run: Callable, differs, arrays):
    """`run` on one entry of the batch after another."""

    def entry(own):
        own = iter(own)
        return run(*(next(own) if d else a for a, d in zip(arrays, differs, strict=True)))

    return jax.lax.map(entry, [a for a, d in zip(arrays, differs, strict=True) if d])


def _over_devices(function: Callable, arrays):
    """`function` on each device's part of the batch, the first dim; no other is sharded where kernels are launched."""
    if not any(map(any, map(sharding.spec, arrays))):
        return function(*arrays)
    names = [" ".join(["n", *(f"D{i}" for i in range(1, a.ndim))]) for a in arrays]
    outputs = len(jax.tree.leaves(jax.eval_shape(function, *arrays)))
    return sharding.local("vmap", ", ".join(names) + " -> " + ", ".join(["n"] * outputs), function, *arrays)
