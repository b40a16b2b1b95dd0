"""Launches NVIDIA's fused queries for Blackwell from JAX: GEMM, RoPE and MXFP8 in both directions in one kernel.

`gemm_proj_rope_mxfp8` of nvidia-cudnn-frontend, a CuTe DSL kernel, which is compiled as a program is lowered. It checks
some of what it takes for granted; `supports` checks all of it. Compiled and lowered, not run on Blackwell. A call is
opaque to vmap, which loops over the batch; derivatives are the op's own.
"""

import functools
import importlib.metadata
import math

import jax
import jax.numpy as jnp
from jax_mla.ffi import triton
from jax_mla.ffi.varying import vary_like

# What the kernel is written for: dims of a head, tokens of a tile, values of an MXFP8 block.
NOPE, ROTARY, TILE, BLOCK = 128, 64, 128, 32
HEAD = NOPE + ROTARY
ARCHITECTURE = 100  # and no later one: it has been compiled for no other
TARGET = "CuteDSLRT_NvJaxCutlassCall_v2"  # the name of the custom call in lowered text
CODES = jnp.dtype(jnp.float8_e4m3fn)

_PACKAGES = {"nvidia-cudnn-frontend": (1, 32), "nvidia-cutlass-dsl": (4, 8)}


@functools.cache
def _absent() -> tuple[str, ...]:
    """The packages that are not installed, or not recent enough."""
    absent = []
    for name, least in _PACKAGES.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "0"
        if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < least:
            absent.append(f"{name} >= {'.'.join(map(str, least))}")
    return tuple(absent)


def unavailable() -> str | None:
    """Why the kernel cannot be launched here, or None. Within `triton.compile_for(100)` no GPU is asked for, except by
    NVIDIA's own check, which wants one to be there."""
    if _absent():
        return f"needs {' and '.join(_absent())} (extra `blackwell`)"
    found = triton.compute_capability()
    if found != ARCHITECTURE:
        return f"needs a Blackwell GPU of compute capability 10.0 (B200); found {_show(found)}"
    return None


def _show(capability: int | None) -> str:
    return f"jax's default backend {jax.default_backend()}" if capability is None else f"{capability / 10}"


def swizzle(tokens: int, heads: int, dtype) -> int:
    """How many heads the kernel's scheduler takes at a time: it rounds the heads up to a multiple, and what it adds is
    written, past the end of every output."""
    if dtype != CODES:
        return 8
    least = min(tokens // TILE, heads)
    return 4 if least < 4 else 1 << least.bit_length() - 1


def supports(*, rows: int, length: int, rank: int, heads: int, nope: int, rotary: int, dtype) -> str | None:
    """Why the kernel cannot take `rows` sequences of `length` tokens, of a latent of that rank, or None. All sizes are
    of one device; dtype is that of x and w as multiplied: bfloat16, or float8_e4m3fn with scales."""
    if dtype not in (jnp.bfloat16, CODES):
        return f"found operands in {jnp.dtype(dtype)}, wants bfloat16 or MXFP8"
    if (nope, rotary) != (NOPE, ROTARY):
        return f"found heads of {nope} + {rotary} dims, wants {NOPE} + {ROTARY}"
    tokens = rows * length
    if not tokens or tokens % TILE:
        return f"found {tokens} tokens on each device, wants a multiple of {TILE}"
    if length % BLOCK:
        return f"found sequences of {length} tokens on each device, wants multiples of {BLOCK}: blocks of one sequence"
    multiple = 128 if dtype == CODES else 8  # words of four scales a tile of K; 16 bytes, which TMA wants of a row
    if not rank or rank % multiple:
        return f"found a latent of {rank} dims, wants a multiple of {multiple} for operands in {jnp.dtype(dtype)}"
    multiple = swizzle(tokens, heads, dtype)
    if not heads or heads % multiple:
        return (
            f"found {heads} heads on each device, wants a multiple of {multiple} for {tokens} tokens in "
            f"{jnp.dtype(dtype)}: the kernel would write past the last head"
        )
    return None


def weight(w: jax.Array, pairs: bool) -> jax.Array:
    """[R, H, D] as the kernel reads it, [H * D, R], rotary dims in pairs; also codes [R, H, D], scales [R/32, H, D]."""
    if not pairs:
        left, right = w[..., NOPE : NOPE + ROTARY // 2], w[..., NOPE + ROTARY // 2 :]
        rotary = jnp.stack([left, right], axis=-1).reshape(*w.shape[:-1], ROTARY)
        w = jnp.concatenate([w[..., :NOPE], rotary], axis=-1)
    return w.reshape(w.shape[0], -1).T


def table(t: jax.Array, leading: tuple[int, ...]) -> jax.Array:
    """cos or sin [..., P/2], its leading dims the tokens' or 1, as the kernel reads it: [tokens, P] in bfloat16, once
    for each half of the rotary dims."""
    t = jnp.broadcast_to(t.astype(jnp.bfloat16), (*leading, ROTARY // 2)).reshape(-1, ROTARY // 2)
    return jnp.concatenate([t, t], axis=-1)


def inputs(pairs: bool, x, w, cos, sin, *scales) -> tuple[jax.Array, ...]:
    """What `q_up` is given, as the kernel takes it: matrices of tokens, or of output dims, by what they read."""
    tables = (table(t, x.shape[:-1]) for t in (cos, sin))
    if scales:
        scales = (scales[0].reshape(-1, scales[0].shape[-1]), weight(scales[1], pairs))
    return x.reshape(-1, x.shape[-1]), weight(w, pairs), *tables, *scales


def outputs(leading: tuple[int, ...], arrays) -> tuple[jax.Array, ...]:
    """What the kernel returns for tokens [tokens, ...], with the leading dims of the tokens; column-wise scales have a
    32nd of the last of them."""
    blocks = (*leading[:-1], leading[-1] // BLOCK)
    dims = (leading, leading, leading, blocks)
    return tuple(a.reshape(*d, *a.shape[1:]) for a, d in zip(arrays, dims, strict=True))


def q_up(pairs: bool, x, w, cos, sin, *scales) -> tuple[jax.Array, ...]:
    """MXFP8(RoPE(x . w)): row-wise codes [..., T, H, D] and scales [..., T, H, D/32], column-wise codes [..., T, H, D]
    and scales [..., T/32, H, D]; rotary dims are written as halves.

    x [..., T, R] and w [R, H, D], rotary dims in pairs or (not `pairs`) in halves, in bfloat16; or as codes, with
    scales x [..., T, R/32] and w [R/32, H, D]. cos, sin: [..., P/2], leading dims as x's or 1.
    NotImplementedError for what `supports` refuses: the kernel would go past the end of its arrays.
    """

    @jax.custom_batching.sequential_vmap
    def run(*arrays):
        return tuple(vary_like(result, *arrays) for result in _launch(pairs, *arrays))

    return run(x, w, cos, sin, *scales)


def _launch(pairs: bool, x, w, cos, sin, *scales):
    reason = supports(
        rows=math.prod(x.shape[:-2]),
        length=x.shape[-2],
        rank=x.shape[-1],
        heads=w.shape[1],
        nope=w.shape[2] - 2 * cos.shape[-1],
        rotary=2 * cos.shape[-1],
        dtype=x.dtype,
    )
    if reason is not None:
        raise NotImplementedError(f"gemm_proj_rope_mxfp8: {reason}")
    from cudnn.gemm.cutedsl.dense.proj_rope_mxfp8 import gemm_proj_rope_mxfp8_jax_sm100 as kernel

    return outputs(x.shape[:-1], kernel(*inputs(pairs, x, w, cos, sin, *scales)))
