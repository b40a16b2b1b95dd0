"""From an op's arrays to the launches of `kernels/`: flat shapes, how tables broadcast, and what Triton can run.

Kernels are imported when one is first launched: the package itself needs no triton.
"""

import math

import jax
import jax.numpy as jnp

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
