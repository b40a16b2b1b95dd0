"""Fused up-projections on Hopper: what `mosaic_gemm` is given to finish each head with. RoPE for queries; keys, the
shared rotary key and values for the KV side; bf16, or MXFP8 both ways from the accumulators.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from . import mosaic_gemm as gemm
from . import mosaic_heads
from .mosaic_gemm import ACCUMULATORS, WGMMA, Tiles
from .mosaic_heads import BLOCK, ROWS
from .mosaic_threads import inline

# Of a dozen tried on one H200 at DeepSeek-V3's dims, 8,192 tokens.
Q_TILES = Tiles(width=4)
KV_TILES = Tiles(rows=64, alternate=False, stages=3, cluster=1)
# Of what leaves as MXFP8: nothing is staged in shared memory. Tiles of keys and of values take turns.
Q_MXFP8_TILES = Tiles(width=8)
KV_MXFP8_TILES = Tiles(width=8)


def q_up(
    x: jax.Array,
    w: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    bias: jax.Array | None = None,
    *,
    heads: int,
    nope: int,
    rotary: int,
    pairs: bool = False,
    tiles: Tiles = Q_TILES,
    interpret=None,
) -> jax.Array:
    """q = RoPE(x . w + bias), bf16 [T, heads * (nope + rotary)], rounded once, its rotary columns as halves.

    x: bf16 [T, K]. w: bf16 [K, heads, nope + rotary] or with the last two merged; its rotary columns are halves, or
    `pairs`. cos, sin: float32 [T, rotary / 2]. bias: float32, as w without K, or None. interpret: Pallas's parameters
    for a CPU (halves alone).
    """
    width, half = nope + rotary, rotary // 2
    cos, sin = (gemm.padded(table.astype(jnp.float32), tiles) for table in (cos, sin))
    tables = [mosaic_heads.table(cos, sin, True)] if pairs else [cos, sin]
    inputs = (*tables, *_biases(bias))
    columns, pair = gemm.common_columns(nope, width), gemm.common_columns(half, nope, width)
    staging = [gemm.staging_for(nope, columns), gemm.staging_for(half, pair), gemm.staging_for(half, pair)]

    def finish(y, row, head, wg, inputs, outputs, staging):
        tables_, bias, (q,), at = inputs[: len(tables)], inputs[len(tables) :], outputs, head * width
        for start in range(0, tiles.rows, ROWS):
            rows, part = slice(start, start + ROWS), pl.ds(row + start, ROWS)

            def columns_of(first, count, rows=rows):
                return _plus(y[rows, first : first + count], bias, at + first)

            if pairs:
                rotated = inline(
                    lambda t, arrays, refs, rows: mosaic_heads.halves(t, *arrays, *refs, *rows),
                    [columns_of(nope, rotary)],
                    tables_,
                    [row + start],
                    [(ROWS, half)] * 2,
                )
            else:
                c, s = (gemm.load(table.at[part], WGMMA) for table in tables_)
                left, right = columns_of(nope, half), columns_of(nope + half, half)
                rotated = left * c - right * s, right * c + left * s
            at_ = [(q, part, at), (q, part, at + nope), (q, part, at + nope + half)]
            gemm.store((columns_of(0, nope), *rotated), staging, wg, at_)

    outputs = [jax.ShapeDtypeStruct((x.shape[0], heads * width), x.dtype)]
    (q,) = gemm.project(x, w, inputs, outputs, staging, finish, heads, width, tiles, interpret, "q_up")
    return q


def q_up_mxfp8(
    x: jax.Array,
    w: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    bias: jax.Array | None = None,
    *,
    heads: int,
    nope: int,
    rotary: int,
    pairs: bool = False,
    tiles: Tiles = Q_MXFP8_TILES,
) -> tuple[jax.Array, ...]:
    """q = RoPE(x . w + bias) as MXFP8 both ways, from float32: codes (bytes) and scales along rows, [T, H D] and
    [T, H D / 32], then along columns, [T, H D] and [T / 32, H D]. Arguments as `q_up`; T is a multiple of 32."""
    tokens, width = x.shape[0], nope + rotary
    cos, sin = (gemm.padded(table.astype(jnp.float32), tiles) for table in (cos, sin))
    inputs = (mosaic_heads.table(cos, sin, pairs), *_biases(bias))

    def finish(y, row, head, wg, inputs, outputs, staging):
        def quantize(t, arrays, refs, scalars):
            sizes = dict(tokens=tokens, heads=heads, nope=nope, pairs=pairs, bias=refs[5] if len(refs) > 5 else None)
            mosaic_heads.quantize_query(t, *arrays, refs[0], refs[1:5], row=scalars[0], head=scalars[1], **sizes)

        inline(quantize, [y], [inputs[0], *outputs, *inputs[1:]], [row, head])

    outputs, x = _copies(tokens, heads * width), _grouped(x, tiles)
    return _ordered(gemm.project(x, w, inputs, outputs, [], finish, heads, width, tiles, None, "q_up_mxfp8"))


def kv_up(
    x: jax.Array,
    w: jax.Array,
    k_pe: jax.Array,
    *,
    heads: int,
    nope: int,
    value: int,
    tiles: Tiles = KV_TILES,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """k, bf16 [T, heads, nope + P]: x . w's first columns of each head, then k_pe; v, bf16 [T, heads, value]: the rest.

    x: bf16 [T, C]. w: bf16 [C, heads, nope + value] or with the last two merged. k_pe: bf16 [T, P], rotated, the same
    for every head. interpret: Pallas's parameters for a CPU.
    """
    tokens, rotary = k_pe.shape
    width, key = nope + value, nope + rotary
    inputs, staging = (gemm.padded(k_pe, tiles),), _kv_staging(nope, rotary, value)

    def finish(y, row, head, wg, inputs, outputs, staging):
        (shared,), (k, v) = inputs, outputs
        for start in range(0, tiles.rows, ROWS):
            rows, part = slice(start, start + ROWS), pl.ds(row + start, ROWS)
            parts = y[rows, :nope], gemm.load(shared.at[part], WGMMA), y[rows, nope:]
            at = [(k, part, head * key), (k, part, head * key + nope), (v, part, head * value)]
            gemm.store(parts, staging, wg, at)

    outputs = [jax.ShapeDtypeStruct((tokens, heads * n), x.dtype) for n in (key, value)]
    k, v = gemm.project(x, w, inputs, outputs, staging, finish, heads, width, tiles, interpret, "kv_up")
    return k.reshape(tokens, heads, key), v.reshape(tokens, heads, value)


def _kv_staging(nope: int, rotary: int, value: int) -> list:
    keys = [gemm.staging_for(n, gemm.common_columns(n, nope, nope + rotary)) for n in (nope, rotary)]
    return [*keys, gemm.staging_for(value, gemm.common_columns(value))]


def kv_up_mxfp8(
    x: jax.Array,
    w: jax.Array,
    k_pe: Sequence[jax.Array],
    *,
    heads: int,
    nope: int,
    value: int,
    tiles: Tiles = KV_MXFP8_TILES,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """k and v as MXFP8 both ways, from float32, each as `q_up_mxfp8`'s. k_pe: the same four of the rotated key [T, P],
    which every head is given. nope equals value: a tile is one or the other."""
    tokens, rotary = k_pe[0].shape
    key = nope + rotary
    codes, scales, *by_columns = k_pe
    shared = codes, mosaic_heads.tiled(scales), *by_columns
    inputs = tuple(gemm.padded(a, tiles, tokens // a.shape[0]) for a in shared)

    def finish(y, row, tile, wg, inputs, outputs, staging):
        def write(refs, width, shared=(), rotary=0):
            def quantize(t, arrays, refs, scalars):
                sizes = dict(tokens=tokens, heads=heads, width=width, shared=refs[4:], rotary=rotary)
                mosaic_heads.quantize(t, *arrays, refs[:4], row=scalars[0], head=scalars[1], **sizes)

            inline(quantize, [y], [*refs, *shared], [row, lax.div(tile, 2)])

        @pl.when(lax.rem(tile, 2) == 0)
        def _keys():
            write(outputs[:4], key, inputs, rotary)

        @pl.when(lax.rem(tile, 2) == 1)
        def _values():
            write(outputs[4:], value)

    outputs = [*_copies(tokens, heads * key), *_copies(tokens, heads * value)]
    args = outputs, [], finish, 2 * heads, nope, tiles, None, "kv_up_mxfp8"
    found = gemm.project(_grouped(x, tiles), w, inputs, *args)
    return _ordered(found[:4]), _ordered(found[4:])


def supports(
    *, tokens: int, rank: int, nope: int, rotary: int, value: int | None = None, dtype, pairs=False, mxfp8=False
) -> str | None:
    """Why `q_up`, or where a `value` dim is given `kv_up`, or of either what writes MXFP8, cannot run an x of
    [tokens, rank] and dtype, or None.

    That the GPU is a Hopper one (9.0) is for the caller to see to. What is asked of the dims: tiles that TMA and wgmma
    take whole; tokens, heads and the rank need not fill theirs.
    """
    query, step = value is None, BLOCK if mxfp8 else 16
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"found dtype {jnp.dtype(dtype)}, wants bfloat16"
    if tokens % (BLOCK if mxfp8 else 8) or not tokens:
        return f"found {tokens} tokens, wants a multiple of {BLOCK if mxfp8 else 8}"
    if rank % 32 or not rank:
        return f"found a latent of {rank}, wants a multiple of 32"
    parts = (nope, rotary // 2) if query else (nope, value, rotary)
    if any(n % step or not n for n in parts):
        return f"found parts of a head of {parts} columns, wants multiples of {step}"
    if query and pairs and rotary % 32:
        return f"found {rotary} rotary columns in pairs, wants a multiple of 32"
    if mxfp8 and not query:
        if nope != value:
            return f"found {nope} columns of a key and {value} of a value, wants as many"
        width, tiles = nope, KV_MXFP8_TILES
    else:
        width = nope + (rotary if query else value)
        tiles = Q_MXFP8_TILES if mxfp8 else Q_TILES if query else KV_TILES
    limit = min(256, ACCUMULATORS // tiles.rows)
    if width % 32 or width > limit:
        return f"found {width} columns a head, wants a multiple of 32 up to {limit}"
    if not query and not mxfp8 and gemm.stages(tiles, rank, width, _kv_staging(nope, rotary, value)) < 2:
        return f"found {rotary} rotary columns, wants fewer: they leave no shared memory for two tiles"
    return None


def _copies(rows: int, columns: int) -> list[jax.ShapeDtypeStruct]:
    """Codes and scales along rows, then along columns, as `mosaic_heads.Encoder` writes them."""
    shapes = (rows, columns), (rows // BLOCK, columns // BLOCK, BLOCK), (rows, columns), (rows // BLOCK, columns)
    return [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes]


def _ordered(copies: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    codes, scales, *by_columns = copies
    return codes, mosaic_heads.untiled(scales), *by_columns


def _biases(bias: jax.Array | None) -> tuple[jax.Array, ...]:
    return () if bias is None else (bias.reshape(-1).astype(jnp.float32),)


def _plus(part, bias, column) -> jax.Array:
    """part [rows, columns] with the bias, if there is one, from that column on."""
    if not bias:
        return part
    added = gemm.load(bias[0].at[pl.ds(column, part.shape[1])], WGMMA.reduce(0))
    return part + lax.broadcast_in_dim(added, part.shape, [1])


def _grouped(x: jax.Array, tiles: Tiles) -> jax.Array:
    return mosaic_heads.grouped(gemm.padded(x, tiles))
