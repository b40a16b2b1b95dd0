"""Products of FP8 codes, so spelled that XLA makes FP8 GEMMs of them."""

import jax
import jax.numpy as jnp

from jax_mla.ffi import triton

_FIRST = 89  # the compute capability of the first GPUs with FP8 tensor cores


def einsum(scales: tuple, equation: str, x, w, *, preferred_element_type, **options) -> jax.Array:
    """`jnp.einsum` of codes times scales, float32 []: of the values that they stand for.

    For a GPU so spelled that XLA makes an FP8 GEMM of it, to which it gives the scales as they are, in float32, however
    they are cast here (a test reads the compiled text); elsewhere in float32.
    """
    capability = triton.compute_capability()
    dtype = jnp.dtype(preferred_element_type)
    if capability is not None and capability >= _FIRST:
        # Else XLA makes one GEMM of two that share a factor, and of their joined factors no FP8 one (jax 0.11, 0.12).
        x, w = jax.lax.optimization_barrier((x, w))
        x, w = (codes.astype(dtype) * scale.astype(dtype) for codes, scale in zip((x, w), scales, strict=True))
        options["precision"] = jax.lax.Precision.DEFAULT
        return jnp.einsum(equation, x, w, preferred_element_type=dtype, **options)
    x, w = (codes.astype(jnp.float32) * scale for codes, scale in zip((x, w), scales, strict=True))
    return jnp.einsum(equation, x, w, preferred_element_type=jnp.float32, **options).astype(dtype)
