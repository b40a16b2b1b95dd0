"""Takes attention of MXFP8 tensors, `implementation="cudnn"`, as far as it goes without a GPU: `python
tests/blackwell_attention.py` prints, as JSON, what programs lower to for CUDA, what CuTe DSL makes of NVIDIA's kernel
for sm_100a, what XLA makes of forward and backward for B200s, and what NVIDIA's files say of the layout of scales and
of how the kernel is specialised. Nothing is run, and nothing asks for a device. A process of its own, as
`blackwell.py`.
"""

import contextlib
import json
import os
import re
import tempfile
from collections import Counter
from pathlib import Path

import blackwell  # sets what CuTe DSL and jax read once
import jax
import jax.numpy as jnp
import numpy as np
from blackwell import NAMES, kernel, runs_on, topology
from gpu_programs import use_compiler
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax_mla.ffi import cudnn_attention, cudnn_attention_mxfp8
from jax_mla.ffi.triton import compile_for

from jax_mla import attention, quantize_mxfp8

B, S, H, D, V = 2, 1024, 16, 192, 128
HOW = {"causal": True, "full": False}
COPIES = ("rowwise", "rowwise", "columnwise")
NAMES = NAMES | dict(zip(cudnn_attention.TARGETS, ("cudnn forward", "cudnn backward"), strict=True))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["CUTE_DSL_DUMP_DIR"] = name
        use_compiler(folder)
        devices = topology().devices
        mesh = Mesh(np.reshape(devices, (2, 2)), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
        auto = Mesh(np.reshape(devices, (2, 2)), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        found = {
            "runs on": {c: runs_on(c, cudnn_attention_mxfp8) for c in (90, 100, 103, 120)},
            "scales": scales(),
            "settings": {how: specialised(causal) for how, causal in HOW.items()},
        }
        with compile_for(100):
            found["programs"], found["kernels"] = {}, {}
            for how, causal in HOW.items():
                found["programs"][how] = program(causal, devices[0])
                found["kernels"][how] = compiled(folder)
            found["unnamed"] = lowered(None, devices[0])
            found["wider lse"] = refused(devices[0])
            found["explicit"] = program(True, devices[0], mesh)
            found["auto"] = program(True, devices[0], auto)
            found["shard_map"] = manual(mesh)
            found["vmap"] = vmapped()
    print(json.dumps(found))


def scales() -> list:
    """The bytes of a tile, by NVIDIA's own rule: at which of them scale (row, block) is."""
    from cudnn.frost.tile_dsl.sf_layout import sf_atom_offset

    return [[sf_atom_offset(row, block) for block in range(8)] for row in range(128)]


def specialised(causal: bool) -> dict:
    """What NVIDIA's file makes of our settings."""
    module = cudnn_attention_mxfp8.kernel(causal)
    c = module.CFG
    return {
        "dims": [c.TILE_K, c.TILE_O],
        "tiles": [c.TILE_M, c.TILE_N],
        "scales": [module.SF_SMEM_SIZE_Q, module.SF_SMEM_SIZE_K, module.SF_SMEM_SIZE_V],
        "masks": c.MASK_FLAGS,
        "others": [getattr(c, name) for name in ("BOTTOM_RIGHT", "STATS_LOG2", "HAS_SINK", "THD_VARLEN", "PV_BF16")],
        "dtypes": [module.STORAGE_DTYPE.__name__, module.OUT_STORAGE_DTYPE.__name__],
        "split": c.SPLIT_KV,
    }


def arguments(device, mesh=None) -> list:
    over = PartitionSpec("data", None, "model")
    sharding = SingleDeviceSharding(device) if mesh is None else NamedSharding(mesh, over)
    shapes = [(B, S, H, width) for width in (D, D, V, V)]
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]


def forward(implementation, causal, q, k, v, **more):
    tensors = (quantize_mxfp8(x, usage=u, token_axis=-3) for x, u in zip((q, k, v), COPIES, strict=True))
    return attention(*tensors, causal=causal, implementation=implementation, **more)


def training(implementation, causal, device, mesh=None):
    def step(q, k, v, do):
        o, pullback = jax.vjp(lambda *a: forward(implementation, causal, *a), q, k, v)
        return o, pullback(do)

    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        return jax.jit(step).trace(*arguments(device, mesh)).lower(lowering_platforms=("cuda",))


def named(targets) -> Counter:
    return Counter(NAMES.get(name, name) for name in targets)


def program(causal: bool, device, mesh=None) -> dict:
    step = training("cudnn", causal, device, mesh)
    text = step.compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    results = re.findall(rf'= \((.*?)\) custom-call\(.*custom_call_target="{cudnn_attention_mxfp8.TARGET}"', entry)
    return {
        "lowered": named(re.findall(r"custom_call @([\w$]+)", step.as_text())),
        "compiled": named(re.findall(r'custom_call_target="([^"]+)"', entry)),
        "results": [re.sub(r"\{.*?\}", "", r) for r in results],
        "moved": sorted(name for name in blackwell.COLLECTIVES if f" {name}" in entry),
    }


def lowered(implementation, device) -> Counter:
    return named(re.findall(r"custom_call @([\w$]+)", training(implementation, True, device).as_text()))


def refused(device) -> str:
    """lse with a gradient wants columns that cuDNN has no room for on Blackwell: as without this kernel."""
    try:
        jax.eval_shape(lambda *a: forward("cudnn", True, *a, return_lse=True), *arguments(device)[:3])
    except NotImplementedError as error:
        return str(error)
    return ""


def compiled(folder: Path) -> dict:
    """Of the one kernel that has been compiled since it was last asked for; its files are removed."""
    paths = sorted(folder.glob("*.cubin"))
    assert len(paths) == 1, paths
    found = kernel(paths[0])
    for path in [*paths, *folder.glob("*.ptx")]:
        path.unlink()
    return found


def manual(mesh) -> Counter:
    """Inside `shard_map`, which checks what differs between devices."""
    spec = PartitionSpec("data", None, "model")

    def step(q, k, v, do):
        o, pullback = jax.vjp(lambda *a: forward("cudnn", True, *a), q, k, v)
        return o, pullback(do)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec, (spec,) * 3))
    text = jax.jit(mapped).trace(*arguments(None, mesh)).lower(lowering_platforms=("cuda",)).as_text()
    return named(re.findall(r"custom_call @([\w$]+)", text))


def vmapped() -> dict:
    arrays = [jax.ShapeDtypeStruct((3, 1, 128, 2, width), jnp.bfloat16) for width in (D, D, V)]
    run = jax.jit(jax.vmap(lambda *a: forward("cudnn", True, *a)))
    text = run.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return {"calls": text.count(f"@{cudnn_attention_mxfp8.TARGET}"), "loops": text.count("stablehlo.while")}


if __name__ == "__main__":
    main()
