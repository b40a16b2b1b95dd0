"""x . w on Hopper as a persistent Pallas Mosaic GPU kernel that hands every head's accumulators to who finishes it.

A warpgroup loads tiles of x and w through a ring in shared memory (TMA; the w tile multicast to a cluster), two
warpgroups multiply them (wgmma, float32 accumulators), each one head wide, and finish the head from registers. Only JAX
launches these kernels, so the files that hold them hold their launch as well.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_heads import ROWS

SHARED_MEMORY = 232_448 - 1_024  # bytes of a Hopper block, less what barriers take
ACCUMULATORS = 128 * 192  # float32 that a warpgroup can hold and still finish a head of 128 + 64 without spilling

WGMMA = plgpu.Layout.WGMMA
_INDEX = (...,) if "idx" in inspect.signature(plgpu.load).parameters else ()  # of jax 0.10


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut. Both warpgroups have `rows` tokens of one head at a time.

    alternate: each warpgroup has a tile of its own and multiplies while the other one finishes its head; else both
    share the w tile and multiply together. blocks: of the persistent grid, a multiprocessor each. cluster: blocks that
    take neighbouring tokens and share each w tile. width: token tiles whose heads are walked through together, for L2.
    """

    rows: int = 128
    alternate: bool = True
    depth: int = 64
    stages: int = 4
    cluster: int = 2
    width: int = 16
    blocks: int = 132

    @property
    def block_rows(self) -> int:
        return self.rows if self.alternate else 2 * self.rows


def project(x, w, inputs, outputs, staging, finish: Callable, heads, width, tiles: Tiles, interpret, name):
    """The outputs that `finish` writes, for each tile of tokens and each head, from x . w."""
    (tokens, depth), consumers = x.shape, 2
    w = w.reshape(depth, heads * width)
    lanes = common_columns(depth, width)
    step = min(tiles.depth, lanes)
    steps, turns = depth // step, 1 if tiles.alternate else consumers
    slots = stages(tiles, depth, width, staging)
    if slots < 2:
        raise ValueError(f"{name}: found shared memory for {slots} tiles of {width} columns, wanted two")
    token_tiles = pl.cdiv(tokens, tiles.block_rows * tiles.cluster)
    total = token_tiles * heads
    clusters = min(tiles.blocks // tiles.cluster, total)
    shared = "cluster" if tiles.cluster > 1 else None

    def body(x, w, *refs):
        inputs_, refs = refs[: len(inputs)], refs[len(inputs) :]
        outputs_, (x_ring, w_ring, staging_, full, empty) = refs[: len(outputs)], refs[len(outputs) :]
        wg, cluster = lax.axis_index("wg"), lax.axis_index("clusters")
        count = lax.div(total - cluster + clusters - 1, clusters)

        def tile(i):
            tokens_, head = plgpu.planar_snake(cluster + i * clusters, (token_tiles, heads), 0, tiles.width)
            return (tokens_ * tiles.cluster + lax.axis_index("cluster")) * tiles.block_rows, head

        def ready(i, slot):
            # A warpgroup that waits on a barrier must wait for each of its phases: those of its own tiles only.
            return full.at[lax.rem(i, consumers) if tiles.alternate else 0, slot]

        @pl.when(wg == consumers)
        def _load_tiles():
            plgpu.set_max_registers(24, action="decrease")

            # One loop over all tiles' steps: a loop over one tile's would be unrolled, out of registers.
            @pl.loop(0, count * steps)
            def _step(n):
                i, slot = lax.div(n, steps), lax.rem(n, slots)
                row, head = tile(i)
                inner, barrier = pl.ds(lax.rem(n, steps) * step, step), ready(i, slot)

                @pl.when(n >= slots)
                def _wait():
                    plgpu.barrier_wait(empty.at[slot])

                plgpu.copy_gmem_to_smem(x.at[pl.ds(row, tiles.block_rows), inner], x_ring.at[slot], barrier)
                columns = w.at[inner, pl.ds(head * width, width)]
                plgpu.copy_gmem_to_smem(columns, w_ring.at[slot], barrier, collective_axes=shared)

            # No block may leave while its neighbours still tell it that a slot is free.
            @pl.loop(jnp.maximum(count * steps - slots, 0), count * steps)
            def _drain(n):
                plgpu.barrier_wait(empty.at[lax.rem(n, slots)])

        @pl.when(wg < consumers)
        def _multiply_tiles():
            plgpu.set_max_registers(240, action="increase")
            own = pl.ds(0 if tiles.alternate else wg * tiles.rows, tiles.rows)

            @pl.loop(0, lax.div(count + 1 - wg, 2) if tiles.alternate else count)
            def _tile(j):
                i = 2 * j + wg if tiles.alternate else j
                row, head = tile(i)

                def product(acc):
                    @pl.loop(0, steps)
                    def _step(k):
                        slot = lax.rem(i * steps + k, slots)
                        plgpu.barrier_wait(ready(i, slot))
                        plgpu.wgmma(acc, x_ring.at[slot, own], w_ring.at[slot])
                        plgpu.wgmma_wait(1)

                        @pl.when(k > 0)
                        def _free():
                            plgpu.barrier_arrive(empty.at[lax.rem(i * steps + k - 1, slots)])

                    y = acc[...]
                    plgpu.barrier_arrive(empty.at[lax.rem(i * steps + steps - 1, slots)])
                    return y

                y = pl.run_scoped(product, plgpu.ACC((tiles.rows, width), jnp.float32))
                row = row if tiles.alternate else row + wg * tiles.rows
                finish(y, row, head, wg, inputs_, outputs_, staging_)

            plgpu.wait_smem_to_gmem(0)

    empty = dict(num_arrivals=turns, num_barriers=slots)
    kernel = plgpu.kernel(
        body,
        out_type=outputs,
        scratch_types=[
            _swizzled((slots, tiles.block_rows, step), lanes),
            _swizzled((slots, step, width), lanes),
            staging,
            plgpu.Barrier(num_arrivals=2, num_barriers=(consumers if tiles.alternate else 1, slots)),
            plgpu.ClusterBarrier(collective_axes=("cluster",), **empty) if shared else plgpu.Barrier(**empty),
        ],
        grid=(clusters,),
        grid_names=("clusters",),
        cluster=(tiles.cluster,),
        cluster_names=("cluster",),
        num_threads=consumers + 1,
        thread_name="wg",
        kernel_name=name,
        # Safe: nothing that a thread writes to shared memory is read by a thread.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(x, w, *inputs)


def store(parts, staging, wg, to) -> None:
    """Writes each of `parts`, ROWS rows of a tile, to (array, rows, first column), through shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for part, buffer in zip(parts, staging, strict=True):
        buffer[wg] = part.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for part, buffer, (array, rows, column) in zip(parts, staging, to, strict=True):
        target = array.at[rows, pl.ds(column, part.shape[1])]
        plgpu.copy_smem_to_gmem(buffer.at[wg], target, commit_group=buffer is staging[-1])


def load(ref, layout) -> jax.Array:
    return plgpu.load(ref, *_INDEX, layout=layout, optimized=False)


def _swizzled(shape: tuple[int, ...], columns: int):
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def staging_for(width: int, columns: int):
    """Where both warpgroups put ROWS rows for a bulk copy to memory."""
    return _swizzled((2, ROWS, width), columns)


def common_columns(*dims: int) -> int:
    """Of the widest swizzled tile that divides them all."""
    return math.gcd(64, *dims)


def stages(tiles: Tiles, depth: int, width: int, staging) -> int:
    """Of the ring: what is asked for, or as many as fit. It takes two: a tile is free when the next is multiplied."""
    step = min(tiles.depth, common_columns(depth, width))
    left = SHARED_MEMORY - sum(2 * math.prod(buffer.shape) for buffer in staging)
    return min(tiles.stages, left // (2 * step * (tiles.block_rows + width)))


def padded(table: jax.Array, tiles: Tiles, per_row: int = 1) -> jax.Array:
    """With whole tiles of rows, each `per_row` tokens: threads read it without looking where it ends."""
    missing = -table.shape[0] % (tiles.block_rows * tiles.cluster // per_row)
    return jnp.pad(table, ((0, missing), *[(0, 0)] * (table.ndim - 1))) if missing else table
