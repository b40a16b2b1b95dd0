"""Launches NVIDIA's MXFP8 attention for Blackwell from JAX: the forward pass of heads of 192 and 128 dims.

`sdpa/fwd/kernels/sm100/prefill_d192_d128_mxfp8.py` of nvidia-cudnn-frontend, a CuTe DSL kernel. The package launches it
from torch alone, so its host function, which is private, is called here through the package's `cudnn.jax.call`: in the
one release whose source has been read. None of that package's checks run on this way; `supports` is all there is.
Compiled and lowered, not run on Blackwell. A call is opaque to vmap, which loops over the batch; derivatives are the
op's own.
"""

import functools
import importlib.metadata
import math
from pathlib import Path

import jax
import jax.numpy as jnp
from jax_mla.ffi import cudnn
from jax_mla.ffi.varying import vary_like

# What the kernel is written for: dims of a head, tokens of a tile, of queries as of keys.
QK, V, TILE = 192, 128, 128
TARGET = cudnn.TARGET
RELEASE = "1.32"
KERNEL = "prefill_d192_d128_mxfp8.py"
# Bytes that the scales of a tile take, in atoms of 128 rows by 4 blocks: 6 blocks of a head's 192 dims are padded to 8;
# of values the rows are their 128 dims, and the blocks the tile's 4.
SCALES_QK, SCALES_V = 1024, 512
_GRID = 65535  # heads and rows are the grid's second and third dims


def unavailable() -> str | None:
    """Why the kernel cannot be launched here, or None."""
    reason = cudnn.unavailable()
    if reason is not None:
        return reason
    found = importlib.metadata.version("nvidia-cudnn-frontend")
    if found.split(".")[:2] != RELEASE.split("."):
        return f"needs nvidia-cudnn-frontend {RELEASE}, whose private kernel it calls; found {found}"
    return None


def supports(*, rows: int, queries: int, keys: int, heads: int, qk: int, v: int, scale: float) -> str | None:
    """Why the kernel cannot take `rows` sequences of as many queries, keys and heads, or None. rows and heads are those
    of one device."""
    if (qk, v) != (QK, V):
        return f"found heads of {qk} and {v} dims, wants {QK} and {V}"
    for name, length in (("queries", queries), ("keys", keys)):
        # Keys past the end of the last tile would be seen: it is compiled without a mask for them.
        if not length or length % TILE:
            return f"found {length} {name}, wants a multiple of {TILE}"
    for name, size in (("rows", rows), ("heads", heads)):
        if not 0 < size <= _GRID:
            return f"found {size} {name}, wants 1 to {_GRID}"
    if rows * heads * queries >= 2**31:
        return f"found {rows} rows of {queries} queries of {heads} heads, wants fewer than 2^31 numbers of lse"
    if not 0 < scale < math.inf:
        return f"found scale={scale}, wants one above 0 and finite: masked logits are scaled too"
    return None


def forward(q, k, v, q_scales, k_scales, v_scales, *, scale: float, causal: bool) -> tuple[jax.Array, jax.Array]:
    """o [B, T, H, V] in bfloat16 and lse [B, H, T], natural, float32.

    q [B, T, H, D], k [B, S, H, D], v [B, S, H, V]: E4M3 codes. Scales in the 128x4 tiling, head-major, [B, H, bytes],
    as `swizzle_scales` makes them with token_axis -3: of q and k row-wise, of v column-wise. causal: key j is seen by
    queries i >= j. NotImplementedError for what `supports` refuses.
    """

    @jax.custom_batching.sequential_vmap
    def run(*arrays):
        return tuple(vary_like(result, *arrays) for result in _launch(scale, causal, *arrays))

    return run(q, k, v, q_scales, k_scales, v_scales)


def _launch(scale: float, causal: bool, q, k, v, *scales):
    (rows, queries, heads, qk), keys = q.shape, k.shape[1]
    reason = supports(rows=rows, queries=queries, keys=keys, heads=heads, qk=qk, v=v.shape[-1], scale=scale)
    if reason is not None:
        raise NotImplementedError(f"{KERNEL}: {reason}")
    from cudnn.jax import call

    launch = call(
        _adapter(causal),
        output_shape_dtype=(
            jax.ShapeDtypeStruct((rows, queries, heads, V), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows, heads, queries), jnp.float32),
            jax.ShapeDtypeStruct((1,), jnp.float32),
        ),
        sizes=(rows, heads, heads, queries, keys, 0),
        scale=scale * math.log2(math.e),
    )
    o, lse, _ = launch(*inputs(q, k, v, *scales))
    return o, lse


def inputs(q, k, v, q_scales, k_scales, v_scales) -> tuple[jax.Array, ...]:
    """What the kernel is handed: codes as they are, scales tile by tile, and three arrays that it does not read, of
    sinks, of lengths and of descriptors for packed sequences."""
    tiles = (
        s.reshape(*s.shape[:2], -1, size)
        for s, size in zip((q_scales, k_scales, v_scales), (SCALES_QK, SCALES_QK, SCALES_V), strict=True)
    )
    unread = (jnp.zeros(n, dtype) for n, dtype in ((q.shape[2], jnp.float32), (q.shape[0], jnp.int32), (2, jnp.int32)))
    return q, k, v, *tiles, *(vary_like(x, q, k, v) for x in unread)


def settings(causal: bool):
    """How NVIDIA's file is specialised: E4M3 in, bfloat16 out, the diagonal from the top left, tiles in their natural
    order, and exponentials as its own launcher has them for compute capability 10.0."""
    from cudnn.sdpa.fwd import config_sm100 as config

    return config.TemplateParams(
        dtype_qkv=config.DTYPE_E4M3,
        dtype_o=config.DTYPE_BF16,
        window_right=0 if causal else None,
        exp2_fma_split=True,
    )


def kernel(causal: bool):
    """NVIDIA's file, specialised."""
    from cudnn.frost.template_loader import load_template
    from cudnn.sdpa.fwd import kernels

    path = Path(kernels.__file__).parent / "sm100" / KERNEL
    return load_template(str(path), settings(causal), tag="jax_mla_attention_mxfp8")


@functools.cache
def _adapter(causal: bool):
    import cutlass
    from cutlass import cute

    host = kernel(causal)._host

    @cute.jit
    def adapter(stream, q, k, v, sf_q, sf_k, sf_v, sinks, lengths, descriptors, o, lse, amax, *, sizes, scale):
        # amax: of o, by an atomic maximum on what the array happens to hold; nobody reads it.
        arrays = (q, k, v, o, sf_q, sf_k, sf_v, lse, amax, sinks, lengths, descriptors)
        no_units, no_lengths = cutlass.Int32(0), cutlass.Int64(0)
        host(*arrays, sizes, cutlass.Float32(scale), no_units, no_lengths, stream=stream)

    return adapter
