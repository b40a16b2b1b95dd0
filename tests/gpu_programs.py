"""Compiles up-projections for an H200 that is not there: `python tests/gpu_programs.py "q, float32"` prints, as JSON,
what a program, by XLA's GPU compiler and at DeepSeek-V3's shapes, writes to memory and keeps for the backward pass; and
attention, by that name.

Forward and backward are one program, and the cotangents of the heads are computed in it, as attention's backward pass
would: so nobody else wants the buffer that the inverse RoPE is to overwrite. Needs triton, jax-triton, and jax's CUDA
plugin with its PJRT library. A process of its own: XLA reads its flags once.
"""

import functools
import json
import os
import re
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from math import prod
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_mla.ffi import cudnn_attention
from jax_mla.ffi.triton import TARGETS, compile_for

from jax_mla import MLAConfig, attention, init, kv_up_proj_rope, mla, q_up_proj_rope

# What XLA asks about a GPU; those that jax ships descriptions of differ from version to version.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H200 141GB HBM3e"
"""

B, S, H, NOPE, ROTARY, V = 2, 4096, 128, 128, 64, 128
BF16, F32 = jnp.bfloat16, jnp.float32
# op: (rank of the latent, dims a head of its GEMM, dims a head of what it returns)
OPS = {"q": (1536, NOPE + ROTARY, [NOPE + ROTARY]), "kv": (512, NOPE + V, [NOPE + ROTARY, V])}
# variant: (implementation, dtype of the weight, norm, bias, recipe, out)
VARIANTS = {
    "float32": ("triton", F32, False, False, None, None),
    "bfloat16": ("triton", BF16, False, False, None, None),
    "float32, norm and bias": ("triton", F32, True, True, None, None),
    "mxfp8": ("triton", F32, False, False, "mxfp8", None),
    "fused": ("mosaic", F32, True, False, None, None),
    "fused, mxfp8": ("mosaic", F32, True, False, "mxfp8", "mxfp8"),
}


def main(*names: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        use_compiler(Path(folder))
        sharding = jax.sharding.SingleDeviceSharding(gpus("1x1x1")[0])
        with compile_for(90):
            print(
                json.dumps(
                    {n: OTHERS[n](sharding) if n in OTHERS else program(*n.split(", ", 1), sharding) for n in names}
                )
            )


def gpus(topology: str):
    """As many H200s as a topology of slices, hosts and GPUs a host has."""
    found = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H200, topology=topology)
    return found.devices


def use_compiler(folder: Path) -> None:
    """XLA's flags, and Triton's own ptxas and libdevice laid out as XLA looks for them."""
    nvidia = Path(find_spec("triton").origin).parent / "backends" / "nvidia"
    (folder / "bin").mkdir()
    (folder / "nvvm").mkdir()
    # The one for Blackwell is the newest, which PTX from the newest triton asks for.
    ptxas = max((nvidia / "bin").glob("ptxas*"), key=lambda path: path.name == "ptxas-blackwell")
    (folder / "bin" / "ptxas").symlink_to(ptxas)
    (folder / "nvvm" / "libdevice").symlink_to(nvidia / "lib")
    os.environ["PATH"] = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", "")])
    os.environ["XLA_FLAGS"] = (
        f"--xla_gpu_cuda_data_dir={folder} --xla_gpu_enable_command_buffer= "  # one list of launches
        "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"  # nothing to time GEMMs on: they are cuBLAS's
    )


def program(op: str, variant: str, sharding) -> dict:
    rank, width, returned = OPS[op]
    implementation, weight, norm, bias, recipe, out = VARIANTS[variant]
    up = dict(nope_dim=NOPE, recipe=recipe, out=out, implementation=implementation)

    def array(*shape, dtype=BF16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def forward(tables, x, w, norm_scale, bias, *k_pe):
        run = q_up_proj_rope if op == "q" else kv_up_proj_rope
        heads = run(x, w, *k_pe, *tables, norm_scale=norm_scale, bias=bias, **up)
        heads = [heads] if op == "q" else heads
        # A tensor's proxy is for its gradient alone; what attention reads are the codes.
        return [t if out is None else t.proxy for t in heads], [t if out is None else t.detach() for t in heads]

    def pull(tables, *arguments):
        _, pullback, heads = jax.vjp(lambda *arguments: forward(tables, *arguments), *arguments, has_aux=True)
        return heads, pullback

    def step(seeds, *arguments):
        heads, pullback = pull(*arguments)
        return heads, pullback([seed * 0.5 for seed in seeds])

    arguments = [[array(S, ROTARY // 2, dtype=F32)] * 2, array(B, S, rank), array(rank, H, width, dtype=weight)]
    arguments += [array(rank, dtype=F32) if norm else None, array(H, width, dtype=F32) if bias else None]
    arguments += [array(B, S, ROTARY)] * (op == "kv")
    saved = jax.tree.leaves(jax.eval_shape(pull, *arguments)[1])
    seeds = [array(B, S, H, d) for d in returned]
    compiled = jax.jit(step).trace(seeds, *arguments).lower(lowering_platforms=("cuda",)).compile()
    heads = {B * S * H * d for d in (width, *returned)}
    sizes = {n // 32: "scales" for n in heads} | {B * S * rank: "latent", rank * H * width: "weight"}
    sizes |= dict.fromkeys(heads, "heads")
    return launches(compiled.as_text(), sizes) | {"saved": sorted(f"{a.dtype}{list(a.shape)}" for a in saved if a.size)}


def layer_in_fp8(sharding) -> dict:
    """The layer of DeepSeek-V3 and all its gradients under the recipe "fp8": how many GEMMs of which kind, the types of
    the scales that FP8's read, and how many scalars are rounded to bfloat16 anywhere."""
    config = MLAConfig.deepseek_v3()

    def array(shape, dtype=BF16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def step(params, x, dy):
        run = functools.partial(mla, config=config, recipe="fp8", implementation=("cudnn", "triton", "xla"))
        y, pullback = jax.vjp(run, params, x)
        return y, pullback(dy)

    params = jax.eval_shape(lambda: init(jax.random.key(0), config))
    params = {name: array(a.shape, a.dtype) for name, a in params.items()}
    x = array((B, S, config.hidden_size))
    text = jax.jit(step).trace(params, x, x).lower(lowering_platforms=("cuda",)).compile().as_text()
    shapes, gemms, scales = {}, Counter(), Counter()
    for line in text.splitlines():
        found = _INSTRUCTION.match(line.strip())
        if found is None:
            continue
        name, shape, _, operands = found.groups()
        shapes[name] = shape.partition("{")[0]
        if '"__cublas' in line:
            kind = line.partition('custom_call_target="')[2].partition('"')[0]
            gemms[kind] += 1
            if kind.endswith("$f8"):
                read = [shapes[operand.split("%")[1]] for operand in operands.split(", ")]
                scales[" ".join(shape for shape in read if shape.endswith("[]"))] += 1
    return dict(gemms=gemms, scales=scales, rounded=len(re.findall(r" = bf16\[\]\S* convert\(", text)))


COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def layer_on_eight(_) -> dict:
    """What the layer and its gradients, batch over 2 and heads over 4 GPUs of an Auto mesh, say to each other: the
    numbers of elements by collective; and how many of our kernels, and of cuDNN's for attention, a GPU launches."""
    mesh = Mesh(np.reshape(gpus("1x1x8"), (2, 4)), ("data", "model"))
    config = MLAConfig(512, 8, 256, 128, NOPE, ROTARY, V)
    heads = {"wq_b": P(None, "model"), "wkv_b": P(None, "model"), "wo": P("model")}

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = jax.eval_shape(lambda: init(jax.random.key(0), config))
    params = {name: array(a.shape, a.dtype, heads.get(name, P())) for name, a in params.items()}
    x = array((4, 256, config.hidden_size), BF16, P("data"))

    run = functools.partial(mla, config=config, implementation=("cudnn", "triton", "xla"))
    return said(run, params, x)


def fp8_on_eight(_) -> dict:
    """The layer in FP8 and its gradients, batch and parameters over 4 and heads over 2 GPUs of an Auto mesh: the types
    of what collectives give, and how many GEMMs of which kind a GPU does."""
    mesh = Mesh(np.reshape(gpus("1x1x8"), (4, 2)), ("data", "model"))
    config = MLAConfig(512, 8, 256, 128, NOPE, ROTARY, V)
    specs = {"wq_a": P("data"), "wkv_a": P("data"), "wq_b": P("data", "model"), "wkv_b": P("data", "model")}
    specs["wo"] = P("model", None, "data")

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def step(params, x, dy):
        run = functools.partial(mla, config=config, recipe="fp8", implementation=("cudnn", "triton", "xla"))
        y, pullback = jax.vjp(run, params, x)
        return y, pullback(dy)

    params = jax.eval_shape(lambda: init(jax.random.key(0), config))
    params = {name: array(a.shape, a.dtype, specs.get(name, P())) for name, a in params.items()}
    x = array((4, 256, config.hidden_size), BF16, P("data"))
    outputs = jax.tree.map(lambda a: a.sharding, (x, (params, x)))
    traced = jax.jit(step, out_shardings=outputs).trace(params, x, x)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    found = {name: [] for name in COLLECTIVES}
    for line in text.splitlines():
        for name in COLLECTIVES:
            if f" {name}(" in line or f" {name}-start(" in line:
                given = _SHAPE.findall(line.partition(" = ")[2].partition(f" {name}")[0])
                found[name] += [f"{dtype}[{dims}]" for dtype, dims in given]
    return found | {"gemms": Counter(re.findall(r'"(__cublas[^"]*)"', text))}


def context_on_eight(_) -> dict:
    """The same of packed rows whose tokens are spread too: batch, tokens and heads over 2 GPUs each."""
    mesh = Mesh(np.reshape(gpus("1x1x8"), (2, 2, 2)), ("data", "context", "model"))
    config = MLAConfig(512, 8, 256, 128, NOPE, ROTARY, V)
    heads = {"wq_b": P(None, "model"), "wkv_b": P(None, "model"), "wo": P("model")}

    def array(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    params = jax.eval_shape(lambda: init(jax.random.key(0), config))
    params = {name: array(a.shape, a.dtype, *heads.get(name, P())) for name, a in params.items()}
    x, ids = array((4, 256, 512), BF16, "data", "context"), array((4, 256), jnp.int32, "data", "context")

    def run(params, x, ids):
        return mla(params, x, config, segment_ids=ids, context_axis="context", implementation=("triton", "xla"))

    return said(run, params, x, ids)


def said(run, params, x, *others) -> dict:
    """Of y = run(params, x, *others), which is like x, and its gradients: what collectives give, and launches."""

    def step(params, x, dy, *others):
        y, pullback = jax.vjp(lambda p, x: run(p, x, *others), params, x)
        return y, pullback(dy)

    text = jax.jit(step).trace(params, x, x, *others).lower(lowering_platforms=("cuda",)).compile().as_text()
    found = {name: [] for name in COLLECTIVES}
    for line in text.splitlines():
        for name in COLLECTIVES:
            if f" {name}(" in line or f" {name}-start(" in line:
                dims = _SHAPE.findall(line.partition(" = ")[2].partition(f" {name}")[0])
                found[name].append(sum(prod(map(int, filter(None, d.split(",")))) for _, d in dims))
    for name, targets in (("kernels", TARGETS), ("attention", cudnn_attention.TARGETS)):
        found[name] = sum(any(f'"{target}"' in line for target in targets) for line in text.splitlines())
    return found


def attention_alone(sharding) -> dict:
    """By cuDNN, forward and backward: which sorts of instruction that do anything, how often, and XLA's temporaries."""
    heads = [(B, S, H, NOPE + ROTARY), (B, S, H, NOPE + ROTARY), (B, S, H, V), (B, S, H, V)]
    heads = [jax.ShapeDtypeStruct(shape, BF16, sharding=sharding) for shape in heads]

    def step(q, k, v, do):
        o, pullback = jax.vjp(lambda *a: attention(*a, implementation="cudnn"), q, k, v)
        return o, pullback(do)

    compiled = jax.jit(step).trace(*heads).lower(lowering_platforms=("cuda",)).compile()
    text = compiled.as_text()
    lines = (_INSTRUCTION.match(line.strip()) for line in text[text.index("\nENTRY ") :].splitlines())
    found = Counter(line.group(3) for line in lines if line and line.group(3) not in _FREE)
    return found | {"temporaries": compiled.memory_analysis().temp_size_in_bytes}


# What is not an up-projection, by name.
OTHERS = {"fp8": layer_in_fp8, "mesh": layer_on_eight, "context": context_on_eight, "attention": attention_alone}
OTHERS["fp8 mesh"] = fp8_on_eight

_INSTRUCTION = re.compile(r"(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")


def launches(text: str, sizes: dict[int, str]) -> dict:
    """What the program's launches write, by size: how many arrays of which dtype which sort of launch writes to memory;
    and the dtypes of its GEMMs. Arrays smaller than the smallest of `sizes` are left out."""
    dtypes, written, gemms = {}, {}, []
    for line in text[text.index("\nENTRY ") :].splitlines():
        found = _INSTRUCTION.match(line.strip())
        if found is None:
            continue
        name, shape, opcode, operands = found.groups()
        arrays = [(dtype, prod(map(int, filter(None, dims.split(","))))) for dtype, dims in _SHAPE.findall(shape)]
        dtypes[name] = arrays[0][0]
        if opcode in _FREE:
            continue
        kind = opcode
        if "__cublas" in line:
            kind = "gemm"
            del arrays[1:]  # its workspace
            read = [dtypes[operand.split("%")[1]] for operand in operands.split(", ")]
            gemms.append(f"{' . '.join(read)} -> {arrays[0][0]}")
        elif '"mosaic_gpu_v2"' in line:
            kind = "fused kernel"
        elif any(f'"{target}"' in line for target in TARGETS):
            kind = "kernel in place" if "output_to_operand_aliasing" in line else "kernel"
        for dtype, size in arrays:
            if size >= min(sizes):
                counts = written.setdefault(sizes.get(size, "other"), {})
                counts[f"{kind} {dtype}"] = counts.get(f"{kind} {dtype}", 0) + 1
    return {"written": written, "gemms": sorted(gemms)}


if __name__ == "__main__":
    main(*sys.argv[1:])
