"""The scale layout of block-scaled GEMMs and attention on Blackwell: tiles of 128 rows by 4 blocks, 512 bytes each."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jax_mla import checks, dispatch, launches, mxfp8_tensor, sharding
from jax_mla.mxfp8_tensor import MXFP8Tensor

_ROWS, _BLOCKS = 128, 4  # a tile's


def swizzle_scales(
    scales: jax.Array | MXFP8Tensor,
    *,
    usage: str = "rowwise",
    token_axis: int | None = None,
    implementation: dispatch.Choice = None,
) -> jax.Array:
    """E8M0 scales in the 128x4 tiling, padded with zeros to whole tiles.

    A matrix of scales has a row for every row (or column) of the GEMM and a column for every block of 32 along what it
    contracts. The byte of (r, c) is at

        ((r // 128) * (Cpad / 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4

    with Cpad the columns rounded up to 4; rows are padded to 128 (cuBLAS, "1D block scaling factors layout"; cuDNN's
    F8_128x4).

    scales: uint8, or an MXFP8Tensor, of which the copy named by `usage` is taken. With token_axis -2:

    - "rowwise" [..., T, K/32]: rows T, blocks K/32, what a GEMM that contracts K reads;
    - "columnwise" [..., T/32, K]: rows K, blocks T/32 (the transpose is tiled), what a GEMM that contracts T reads.

    Dims between the token axis and the last come first: with token_axis -3, [B, T, H, D/32] is tiled head-major, one
    matrix [T, D/32] a batch entry and head, as attention reads it. token_axis: the tensor's own, else -2. Leading dims
    tile apart: flatten [B, T, K/32] to [B T, K/32] first for one GEMM over all tokens.

    Returns uint8 [..., bytes], leading dims as above ([B, H, bytes] head-major). Not differentiable. Under an Explicit
    mesh the leading dims may be sharded, a matrix's own may not.

    Raises TypeError or ValueError naming the argument, also where the tensor lacks the usage.
    """
    checks.choice("usage", usage, mxfp8_tensor.COPIES)
    if isinstance(scales, MXFP8Tensor):
        mxfp8_tensor.check("scales", scales, usage)
        if token_axis is not None and token_axis != scales.token_axis:
            raise checks.found("token_axis", token_axis, f"None or the tensor's own, {scales.token_axis}")
        token_axis, scales = scales.token_axis, scales.copy(usage)[1]
    static = _check(scales, "scales", usage, token_axis, implementation)
    chosen = dispatch.choose("swizzle_scales", IMPLEMENTATIONS, static.implementation, static, scales)
    scales_dims, buffer_dims = rule(scales.ndim, static.token_axis)
    forward = functools.partial(chosen.forward, static)
    return sharding.local("swizzle_scales", f"{scales_dims} -> {buffer_dims}", forward, scales, opaque=chosen.opaque)


def unswizzle_scales(
    buffer: jax.Array, shape: tuple[int, ...], *, usage: str = "rowwise", token_axis: int = -2
) -> jax.Array:
    """The scales that `swizzle_scales` made `buffer` of: its exact inverse, which reads no padding.

    buffer: uint8 [..., bytes]. shape: of the scales before, leading dims included. usage, token_axis: as there.

    Raises TypeError or ValueError naming the argument, also where the buffer's size is not that of `shape`.
    """
    checks.choice("usage", usage, mxfp8_tensor.COPIES)
    if not isinstance(shape, tuple | list):
        raise TypeError(f"shape: found {shape!r}, wanted the tuple of the scales' dims")
    shape = tuple(checks.static_int("shape", size, 0) for size in shape)
    static = _check(jax.ShapeDtypeStruct(shape, jnp.uint8), "shape", usage, token_axis, None)
    *lead, rows, blocks = static.matrices(shape)
    wanted = (*lead, _bytes(rows, blocks))
    checks.dims("buffer", buffer, "... N")
    if buffer.dtype != jnp.uint8 or buffer.shape != wanted:
        raise checks.found("buffer", buffer, f"uint8{list(wanted)} for scales {list(shape)}")
    scales_dims, buffer_dims = rule(len(shape), static.token_axis)
    inverse = functools.partial(_xla_unswizzle, static, rows, blocks)
    return sharding.local("unswizzle_scales", f"{buffer_dims} -> {scales_dims}", inverse, buffer)


@dataclasses.dataclass(frozen=True)
class Static:
    usage: str
    token_axis: int
    implementation: dispatch.Choice

    def matrices(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """[..., rows, blocks] of scales [..., T, ..., K]."""
        tokens, last = shape[self.token_axis], shape[-1]
        lead = shape[: self.token_axis] + shape[self.token_axis + 1 : -1]
        return (*lead, tokens, last) if self.usage == "rowwise" else (*lead, last, tokens)


def rule(ndim: int, token_axis: int) -> tuple[str, str]:
    """`sharding.local`'s names for scales, or what they are of, and for the tiles."""
    names = [f"b{i}" for i in range(ndim - 1)] + ["K"]
    names[token_axis] = "T"
    return " ".join(names), " ".join(name for name in names if name not in "TK") + " N"


def _check(scales, argument: str, usage: str, token_axis: int | None, implementation: dispatch.Choice) -> Static:
    static = Static(
        usage, mxfp8_tensor.check_token_axis(-2 if token_axis is None else token_axis), dispatch.check(implementation)
    )
    checks.dims(argument, scales, "... K")
    if scales.dtype != jnp.uint8:
        raise TypeError(f"{argument}: found dtype {scales.dtype}, wanted uint8 (E8M0 scales)")
    if scales.ndim < -static.token_axis:
        raise checks.found(argument, scales, f"at least {-static.token_axis} dims")
    return static


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def _bytes(rows: int, blocks: int) -> int:
    return _tiles(rows, _ROWS) * _tiles(blocks, _BLOCKS) * _ROWS * _BLOCKS


def _xla_swizzle(static: Static, scales: jax.Array) -> jax.Array:
    matrices = jnp.moveaxis(scales, static.token_axis, -2)
    if static.usage == "columnwise":
        matrices = jnp.swapaxes(matrices, -1, -2)
    *lead, rows, blocks = matrices.shape
    padded = jnp.pad(matrices, [(0, 0)] * len(lead) + [(0, -rows % _ROWS), (0, -blocks % _BLOCKS)])
    # Row 128 i + 32 j + k and block 4 l + m: stored in the order i, l, k, j, m.
    tiles = padded.reshape(*lead, _tiles(rows, _ROWS), 4, 32, _tiles(blocks, _BLOCKS), _BLOCKS)
    return jnp.swapaxes(tiles, -4, -2).reshape(*lead, _bytes(rows, blocks))


def _xla_unswizzle(static: Static, rows: int, blocks: int, buffer: jax.Array) -> jax.Array:
    lead = buffer.shape[:-1]
    tiles = buffer.reshape(*lead, _tiles(rows, _ROWS), _tiles(blocks, _BLOCKS), 32, 4, _BLOCKS)
    padded = (_tiles(rows, _ROWS) * _ROWS, _tiles(blocks, _BLOCKS) * _BLOCKS)
    matrices = jnp.swapaxes(tiles, -4, -2).reshape(*lead, *padded)[..., :rows, :blocks]
    if static.usage == "columnwise":
        matrices = jnp.swapaxes(matrices, -1, -2)
    return jnp.moveaxis(matrices, -2, static.token_axis)


@launches.batched("data")
def _triton_swizzle(static: Static, scales: jax.Array) -> jax.Array:
    from jax_mla.ffi import triton
    from jax_mla.kernels import mxfp8 as kernels

    if scales.size == 0:
        return _xla_swizzle(static, scales)
    axis = scales.ndim + static.token_axis
    outer, inner = math.prod(scales.shape[:axis]), math.prod(scales.shape[axis + 1 : -1])
    launch = kernels.swizzle(outer, scales.shape[axis], inner, scales.shape[-1], static.usage)
    lead = scales.shape[:axis] + scales.shape[axis + 1 : -1]
    return triton.call(launch, scales)[0].reshape(*lead, -1)


IMPLEMENTATIONS = {
    "triton": dispatch.Implementation(_triton_swizzle, None, lambda *_: launches.supports(), opaque=True),
    "xla": dispatch.Implementation(forward=_xla_swizzle, backward=None),
}
