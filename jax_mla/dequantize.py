"""From codes back to values: `dequantize`. The arithmetic of MXFP8 is in `mxfp8_bits.py`, FP8's a multiplication, by
one scale here and by those of blocks in `fp8_block.py`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import dispatch, fp8_block, fp8_block_tensor, fp8_tensor, launches, sharding
from jax_mla import mxfp8_bits as bits
from jax_mla.fp8_block_tensor import FP8BlockTensor
from jax_mla.fp8_tensor import FP8Tensor
from jax_mla.mxfp8_tensor import MXFP8Tensor, Saved, check, check_dtype, cotangent, once_differentiable, saved

CHECKS = {MXFP8Tensor: check, FP8Tensor: fp8_tensor.check, FP8BlockTensor: fp8_block_tensor.check}


def dequantize(
    t: MXFP8Tensor | FP8Tensor | FP8BlockTensor, dtype=None, *, implementation: dispatch.Choice = None
) -> jax.Array:
    """The values of t, code * 2^(scale - 127), from its row-wise copy if it has one. Of an `FP8Tensor` code * scale_inv
    in float32, of an `FP8BlockTensor` code * scale, both by XLA alone.

    dtype: bfloat16, float16 or float32; by default t's logical dtype. Exact in float32 and, but for subnormals below
    2^-133, in bfloat16; else rounded to nearest even, to infinity beyond the dtype's range. Subnormal results are
    written bit by bit, under jit too; arithmetic on them afterwards may flush them. NaN for scale 255 and code 0x7F.

    Returns [..., K]. Backward: the gradient, in t's logical dtype, on t's proxy; nothing of t is read for it.

    Raises TypeError or ValueError naming the argument; NotImplementedError if no implementation fits.
    """
    CHECKS.get(type(t), check)("t", t)
    dtype = t.dtype if dtype is None else check_dtype("dtype", dtype)
    return _dequantize(dtype, dispatch.check(implementation), t.only(t.usages[0]))


@dataclasses.dataclass(frozen=True)
class Static:
    usage: str
    token_axis: int
    dtype: np.dtype


def _xla(static: Static, codes: jax.Array, scales: jax.Array) -> jax.Array:
    return bits.decode(codes, scales, -1 if static.usage == "rowwise" else static.token_axis, static.dtype)


@launches.batched("data", "data")
def _triton(static: Static, codes: jax.Array, scales: jax.Array) -> jax.Array:
    from jax_mla.ffi import triton
    from jax_mla.kernels import mxfp8 as kernels

    if codes.size == 0:
        return _xla(static, codes, scales)
    code_bytes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    flat = launches.matrix(code_bytes, static.token_axis if static.usage == "columnwise" else -2)
    launch = kernels.dequantize(*flat.shape, static.usage, static.dtype.name, arch=triton.compute_capability())
    return triton.call(launch, flat, scales)[0].reshape(codes.shape)


IMPLEMENTATIONS = {
    "triton": dispatch.Implementation(_triton, None, lambda *_: launches.supports(), opaque=True),
    "xla": dispatch.Implementation(_xla, None),
}


def _fp8(dtype: np.dtype, t: FP8Tensor) -> jax.Array:
    return (t.placed().astype(jnp.float32) * t.scale_inv).astype(dtype)


def raw_dequantize(dtype: np.dtype, t, implementation: dispatch.Choice = None) -> jax.Array:
    """For the rules of ops that take tensors; from t's first copy."""
    if isinstance(t, FP8Tensor):
        return _fp8(dtype, t)
    if isinstance(t, FP8BlockTensor):
        return fp8_block.raw_dequantize(dtype, t)
    static = Static(t.usages[0], t.token_axis, np.dtype(dtype))
    chosen = dispatch.choose("dequantize", IMPLEMENTATIONS, implementation)
    dims = " ".join(f"t{i}" for i in range(t.ndim))
    rule = f"{dims}, {dims} -> {dims}"
    forward = once_differentiable("dequantize", functools.partial(chosen.forward, static))
    return sharding.local("dequantize", rule, forward, *t.copy(t.usages[0]), opaque=chosen.opaque)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dequantize(dtype: np.dtype, implementation: dispatch.Choice, t: MXFP8Tensor) -> jax.Array:
    return raw_dequantize(dtype, t, implementation)


def _dequantize_fwd(dtype: np.dtype, implementation: dispatch.Choice, t: MXFP8Tensor):
    return raw_dequantize(dtype, t, implementation), saved(t)


def _dequantize_bwd(dtype: np.dtype, implementation: dispatch.Choice, kept: Saved, gradient: jax.Array):
    return (cotangent(kept, gradient),)


_dequantize.defvjp(_dequantize_fwd, _dequantize_bwd)
