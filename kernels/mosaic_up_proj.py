import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Tiles:
    rows: int = 128
    depth: int = 64
    stages: int = 4
    cluster: int = 2
    width: int = 16
    ahead: int = 1
    registers: int = 240
    minor: int = 0
    semantics: str = "Warpgroup"


def _swizzled(shape, columns):
    bytes_ = columns * 2
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(bytes_)))


def q_up(x, w, cos, sin, *, heads, nope, rotary, tiles=Tiles(), sms=132, bias=None, interpret=None):
    (tokens, depth), half = x.shape, rotary // 2
    width = nope + rotary
    w = w.reshape(depth, heads * width)
    blocks = pl.cdiv(tokens, tiles.rows * tiles.cluster)
    k_steps = pl.cdiv(depth, tiles.depth)
    total = blocks * heads
    clusters = min(sms // tiles.cluster, total)
    stages = min(tiles.stages, k_steps * 2)

    def body(x, w, cos, sin, q, x_smem, w_smem, nope_smem, left_smem, right_smem, full, empty):
        wg = lax.axis_index("wg")
        position = lax.axis_index("cluster")
        first = lax.axis_index("grid")
        count = lax.div(total - first + clusters - 1, clusters)

        def tile(i):
            block, head = plgpu.planar_snake(first + i * clusters, (blocks, heads), tiles.minor, tiles.width)
            return (block * tiles.cluster + position) * tiles.rows, head

        @pl.when(wg == 2)
        def _load():
            plgpu.set_max_registers(24, action="decrease")

            @pl.loop(0, count)
            def _tile(i):
                row, head = tile(i)

                @pl.loop(0, k_steps)
                def _step(k):
                    step = i * k_steps + k
                    slot = lax.rem(step, stages)

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    at = pl.ds(k * tiles.depth, tiles.depth)
                    plgpu.copy_gmem_to_smem(x.at[pl.ds(row, tiles.rows), at], x_smem.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(
                        w.at[at, pl.ds(head * width, width)], w_smem.at[slot], full.at[slot],
                        collective_axes="cluster" if tiles.cluster > 1 else None,
                    )

            @pl.loop(0, jnp.minimum(stages, count * k_steps))
            def _quiesce(i):
                plgpu.barrier_wait(empty.at[lax.rem(count * k_steps - jnp.minimum(stages, count * k_steps) + i, stages)])

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(tiles.registers, action="increase")

            @pl.loop(0, lax.div(count + 1 - wg, 2))
            def _tile(j):
                i = 2 * j + wg
                row, head = tile(i)

                def product(acc):
                    @pl.loop(0, k_steps)
                    def _step(k):
                        step = i * k_steps + k
                        slot = lax.rem(step, stages)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(acc, x_smem.at[slot], w_smem.at[slot])
                        plgpu.wgmma_wait(tiles.ahead)
                        if tiles.ahead:
                            @pl.when(k > 0)
                            def _():
                                plgpu.barrier_arrive(empty.at[lax.rem(step - 1 , stages)])
                        else:
                            plgpu.barrier_arrive(empty.at[slot])
                    y = acc[...]
                    if tiles.ahead:
                        plgpu.barrier_arrive(empty.at[lax.rem((i + 1) * k_steps - 1, stages)])
                    return y

                y = pl.run_scoped(product, plgpu.ACC((tiles.rows, width), jnp.float32))
                for r in range(0, tiles.rows, WGMMA_ROWS):
                    rows = slice(r, r + WGMMA_ROWS)
                    part = pl.ds(row + r, WGMMA_ROWS)
                    c = plgpu.load(cos.at[part], layout=plgpu.Layout.WGMMA, optimized=False)
                    s = plgpu.load(sin.at[part], layout=plgpu.Layout.WGMMA, optimized=False)
                    x1, x2 = y[rows, nope : nope + half], y[rows, nope + half :]
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    nope_smem[wg] = y[rows, :nope].astype(jnp.bfloat16)
                    left_smem[wg] = (x1 * c - x2 * s).astype(jnp.bfloat16)
                    right_smem[wg] = (x2 * c + x1 * s).astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    at = head * width
                    plgpu.copy_smem_to_gmem(nope_smem.at[wg], q.at[part, pl.ds(at, nope)], commit_group=False)
                    plgpu.copy_smem_to_gmem(left_smem.at[wg], q.at[part, pl.ds(at + nope, half)], commit_group=False)
                    plgpu.copy_smem_to_gmem(right_smem.at[wg], q.at[part, pl.ds(at + nope + half, half)])
            plgpu.wait_smem_to_gmem(0)

    scratch = dict(
        x_smem=_swizzled((stages, tiles.rows, tiles.depth), 64),
        w_smem=_swizzled((stages, tiles.depth, width), 64),
        nope_smem=_swizzled((2, WGMMA_ROWS, nope), 64),
        left_smem=_swizzled((2, WGMMA_ROWS, half), 32),
        right_smem=_swizzled((2, WGMMA_ROWS, half), 32),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        empty=plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=stages) if tiles.cluster > 1 else plgpu.Barrier(num_barriers=stages),
    )
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, heads * width), x.dtype),
        scratch_types=scratch,
        grid=(clusters,),
        grid_names=("grid",),
        cluster=(tiles.cluster,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics[tiles.semantics], unsafe_no_auto_barriers=True),
        **({} if interpret is None else dict(interpret=interpret)),
    )
    return kernel(x, w, cos, sin)
