"""Takes `q_up_proj_rope(implementation="cudnn")` as far as it goes without a GPU: `python tests/blackwell.py` prints,
as JSON, what programs lower to for CUDA, what CuTe DSL makes of NVIDIA's kernel for sm_100a, and what XLA makes of the
programs for B200s. Nothing is run. Two questions of NVIDIA's code are answered for the device that is not there: is it
there (and which is it), and how many clusters does it hold. A process of its own: settings are read once.
"""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["CUTE_DSL_ARCH"] = "sm_100a"
os.environ["CUTE_DSL_KEEP"] = "ptx,cubin"

import jax
import jax.numpy as jnp
import numpy as np
from gpu_programs import H200, use_compiler
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax_mla.ffi import cudnn
from jax_mla.ffi.triton import TARGETS, compile_for

from jax_mla import MLAConfig, init, mla, q_up_proj_rope

# What differs from an H200.
B200 = {
    "{ major: 9 }": "{ major: 10 feature_extension: ACCELERATED_FEATURES }",
    "core_count: 132": "core_count: 148",
    "clock_rate_ghz: 1.98": "clock_rate_ghz: 1.965",
    "l2_cache_size: 52428800": "l2_cache_size: 132644864",
    "memory_bandwidth: 4800000000000": "memory_bandwidth: 7672320000000",
    "device_memory_size: 151397597184": "device_memory_size: 191514411008",
    "NVIDIA H200 141GB HBM3e": "NVIDIA B200",
}
# DeepSeek-V3's queries.
B, S, RANK, H, NOPE, ROTARY = 2, 2048, 1536, 128, 128, 64
NAMES = dict.fromkeys(TARGETS, "triton") | {cudnn.TARGET: "cudnn", "__cublas$lt$matmul": "cublas"}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def main() -> None:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["CUTE_DSL_DUMP_DIR"] = folder
        use_compiler(Path(folder))
        stack.enter_context(device())
        devices = topology().devices
        mesh = Mesh(np.reshape(devices, (2, 2)), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
        found = {"runs on": {capability: runs_on(capability) for capability in (90, 100, 103, 120)}}
        with compile_for(100):
            found["unchecked"] = {name: accepted(*sizes) for name, sizes in UNCHECKED.items()}
            found["programs"] = {recipe: program(recipe, devices[0]) for recipe in ("bfloat16", "mxfp8")}
            found["kernels"] = kernels(Path(folder))
            found["sharded"] = {recipe: program(recipe, devices[0], mesh) for recipe in ("bfloat16", "mxfp8")}
            found["shard_map"] = manual(devices)
            found["vmap"] = vmapped()
            found["layer"] = [layer(how) for how in (None, ("cudnn", "triton", "xla"), ("triton", "xla"))]
    print(json.dumps(found))


@contextlib.contextmanager
def device():
    """Answers for a B200."""
    import cutlass.utils
    from cudnn.gemm.cutedsl.dense.proj_rope_mxfp8 import api

    class HardwareInfo:
        def get_max_active_clusters(self, size: int) -> int:
            return 148 // size

    with (
        mock.patch.object(api, "cuda_is_available", lambda: True),
        mock.patch.object(api, "get_compute_capability", lambda: (10, 0)),
        mock.patch.object(cutlass.utils, "HardwareInfo", HardwareInfo),
    ):
        yield


def topology():
    text = H200
    for there, here in B200.items():
        assert there in text, there
        text = text.replace(there, here)
    return topologies.get_topology_desc(platform="cuda", topology_name="", target_config=text, topology="1x1x4")


def runs_on(capability: int, launcher=cudnn) -> str:
    with compile_for(capability):
        return launcher.unavailable() or ""


# (tokens, rank, heads): what the kernel's scheduler or its scales would run past the end for, and a size it checks.
UNCHECKED = {
    "12 heads": (1024, 1536, 12),
    "rank 160": (1024, 160, 16),
    "100 tokens": (100, 1536, 16),
}


def accepted(tokens: int, rank: int, heads: int) -> list[str]:
    """The precisions in which NVIDIA's own checks let these sizes pass."""
    from cudnn.gemm.cutedsl.dense.proj_rope_mxfp8 import gemm_proj_rope_mxfp8_jax_sm100 as kernel

    found = []
    for dtype, scales in ((jnp.bfloat16, False), (cudnn.CODES, True)):
        given = [((tokens, rank), dtype), ((heads * cudnn.HEAD, rank), dtype), *[((tokens, ROTARY), jnp.bfloat16)] * 2]
        given += [((n, rank // 32), jnp.uint8) for n in (tokens, heads * cudnn.HEAD)] if scales else []
        with contextlib.suppress(ValueError):
            jax.eval_shape(kernel, *(jax.ShapeDtypeStruct(*a) for a in given))
            found.append(jnp.dtype(dtype).name)
    return found


def program(recipe: str, device, mesh: Mesh | None = None) -> dict:
    """Norm, queries and every gradient, in one program. Over a mesh: rows and the latent's dim (FSDP), and heads."""

    def array(shape, dtype, *over):
        sharding = SingleDeviceSharding(device) if mesh is None else NamedSharding(mesh, PartitionSpec(*over))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def forward(tables, implementation, x, w, norm_scale):
        settings = dict(nope_dim=NOPE, recipe=None if recipe == "bfloat16" else recipe, out="mxfp8")
        q = q_up_proj_rope(x, w, *tables, norm_scale=norm_scale, implementation=implementation, **settings)
        return q.proxy, q.detach()

    def pull(tables, implementation, *arguments):
        _, pullback, q = jax.vjp(lambda *a: forward(tables, implementation, *a), *arguments, has_aux=True)
        return q, pullback

    def step(seed, tables, *arguments):
        q, pullback = pull(tables, None, *arguments)  # None takes it
        return q, pullback(seed * 0.5)

    tables = [array((S, ROTARY // 2), jnp.float32)] * 2
    arguments = [array((B, S, RANK), jnp.bfloat16, "data"), array((RANK, H, 192), jnp.float32, "data", "model")]
    arguments += [array((RANK,), jnp.float32)]
    seed = array((B, S, H, 192), jnp.bfloat16, "data", None, "model")
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        lowered = jax.jit(step).trace(seed, tables, *arguments).lower(lowering_platforms=("cuda",))
        saved = {
            how: shapes(jax.eval_shape(lambda t, *a, how=how: pull(t, how, *a)[1], tables, *arguments))
            for how in ("cudnn", "triton")
        }
    text = lowered.compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    (results,) = re.findall(rf'= \((.*?)\) custom-call\(.*custom_call_target="{cudnn.TARGET}"', entry)
    moved = Counter(
        f"{name} {dtype}"
        for name in COLLECTIVES
        for shape in re.findall(rf"= (.*?) {name}-done\(", entry)
        for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape)
        if np.prod([int(n) for n in dims.split(",") if n]) > 10**6
    )
    return {
        "lowered": Counter(re.findall(r"custom_call @(\w+)", lowered.as_text()))[cudnn.TARGET],
        "compiled": Counter(NAMES.get(name, name) for name in re.findall(r'custom_call_target="([^"]+)"', entry)),
        "results": re.sub(r"\{.*?\}", "", results),
        "moved": moved,
        "saved": saved["cudnn"],
        "saved by triton": saved["triton"],
    }


def manual(devices) -> int:
    """How often a device of four launches the kernel inside `shard_map`, which checks what differs between devices."""
    mesh = Mesh(np.reshape(devices, (2, 2)), ("data", "model"))
    rows, heads = PartitionSpec("data"), PartitionSpec(None, "model")

    def step(x, w, table):
        def forward(x, w):
            q = q_up_proj_rope(x, w, table, table, nope_dim=NOPE, recipe="mxfp8", out="mxfp8", implementation="cudnn")
            return q.proxy, q.detach()

        seed, pullback, q = jax.vjp(forward, x, w, has_aux=True)
        return q, pullback(seed * 0.5)

    returned = PartitionSpec("data", None, "model"), (rows, heads)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(rows, heads, PartitionSpec()), out_specs=returned)
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in (
            ((2, 128, 256), jnp.bfloat16, rows),
            ((256, 16, 192), jnp.float32, heads),
            ((128, ROTARY // 2), jnp.float32, PartitionSpec()),
        )
    ]
    return jax.jit(mapped).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text().count(f"@{cudnn.TARGET}")


def shapes(tree) -> list[str]:
    return sorted(f"{a.dtype}{list(a.shape)}" for a in jax.tree.leaves(tree) if a.size)


def kernels(folder: Path) -> dict:
    """Of each kernel that was compiled."""
    return {
        "mxfp8" if "Float8E8M0" in path.name else "bfloat16": kernel(path) for path in sorted(folder.glob("*.cubin"))
    }


def kernel(path: Path) -> dict:
    """Its MMAs in PTX and in machine code, what it uses of an SM."""
    tools = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"

    def read(tool, *arguments):
        return subprocess.run([tools / tool, *arguments], check=True, capture_output=True, text=True).stdout

    ptx = path.with_suffix(".ptx").read_text(encoding="utf-8")
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", read("cuobjdump", "-res-usage", path)))
    return {
        "target": re.findall(r"^\.target (\w+)", ptx, re.MULTILINE),
        "ptx": Counter(re.findall(r"tcgen05\.mma[\w.:]*", ptx)),
        "sass": Counter(re.findall(r"\bUTC\w*MMA\b", read("nvdisasm", path))),
        "registers": int(usage["REG"]),
        "spilled bytes": int(usage["STACK"]) + int(usage["LOCAL"]),
    }


def vmapped() -> dict:
    arrays = [((3, 128, 256), jnp.bfloat16), ((256, 8, 192), jnp.bfloat16), *[((128, ROTARY // 2), jnp.float32)] * 2]

    def run(x, w, cos, sin):
        q = q_up_proj_rope(x, w, cos, sin, nope_dim=NOPE, out="mxfp8", implementation="cudnn")
        return q.detach()

    traced = jax.jit(jax.vmap(run, (0, None, None, None))).trace(*(jax.ShapeDtypeStruct(*a) for a in arrays))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return {"calls": text.count(f"@{cudnn.TARGET}"), "loops": text.count("stablehlo.while")}


def layer(implementation) -> int:
    """How often a layer's training step launches NVIDIA's kernels."""
    config = dataclasses.replace(MLAConfig.deepseek_v3(), hidden_size=256, num_heads=8)
    params = jax.eval_shape(lambda key: init(key, config), jax.random.key(0))

    def loss(params, x):
        return jnp.sum(mla(params, x, config, recipe="mxfp8", implementation=implementation).astype(jnp.float32))

    x = jax.ShapeDtypeStruct((1, 128, config.hidden_size), jnp.bfloat16)
    text = jax.jit(jax.grad(loss, (0, 1))).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    return text.count(f"@{cudnn.TARGET}")


if __name__ == "__main__":
    main()
