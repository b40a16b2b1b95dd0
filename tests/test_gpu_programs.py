"""What XLA's GPU compiler makes of both up-projections at DeepSeek-V3's shapes, forward and backward together: every
array of the size of the heads, a latent or a weight that is written to memory, and by what; what GEMMs multiply; what
is kept between the passes. Compiled for an H200, not run."""

import importlib.metadata
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from test_lowering import LOWERING, script

OPS, ROTARY = ("q", "kv"), 64
LATENT = {"q": "[2, 4096, 1536]", "kv": "[2, 4096, 512]"}
WEIGHT = {"q": "[1536, 128, 192]", "kv": "[512, 128, 256]"}
# Beside x and w: cos, sin, and the shared rotary key.
SAVED = {"q": ["float32[1, 4096, 32]"] * 2, "kv": ["float32[1, 4096, 32]"] * 2 + ["bfloat16[2, 4096, 64]"]}
# With norm and bias also both of them and rstd: neither the normalised latent nor heads.
SAVED_EXTRAS = {
    "q": ["float32[1536]", "float32[128, 192]", "float32[2, 4096]"],
    "kv": ["float32[512]", "float32[128, 256]", "float32[2, 4096]"],
}
# Codes and scales: x's column-wise and w's row-wise.
SAVED_MXFP8 = {
    "q": ["uint8[2, 4096, 1536]", "uint8[2, 128, 1536]", "uint8[1536, 128, 192]", "uint8[1536, 128, 6]"],
    "kv": ["uint8[2, 4096, 512]", "uint8[2, 128, 512]", "uint8[512, 128, 256]", "uint8[512, 128, 8]"],
}
# One GEMM; RoPE and its inverse in place, or the split and its gradient (k, v; dkv). The fusions are the cotangents of
# what is returned, made in the program.
HEADS = {
    "q": Counter({"gemm bf16": 1, "kernel in place bf16": 2, "fusion bf16": 1}),
    "kv": Counter({"gemm bf16": 1, "kernel bf16": 3, "fusion bf16": 2}),
}
# A cast and the gradient: kernels rotate pairs, and nothing is reordered.
WEIGHTS = {"float32": Counter({"fusion bf16": 1, "gemm f32": 1}), "bfloat16": Counter({"gemm bf16": 1})}
DX = Counter({"gemm bf16": 1})
BIAS = Counter({"fusion bf16": 1})
NORM = Counter({"kernel bf16": 2, "fusion bf16": 1})  # with its gradient, and once more for wgrad
ROUNDED = Counter({"kernel bf16": 2})  # the values of both copies, a GEMM each
SAVED_CODES = Counter({"kernel u8": 1, "kernel bf16": 2})  # those of one as it is quantised, and later of the other
# In place of a GEMM and what follows it.
FUSED = {"q": Counter({"fused kernel bf16": 1}), "kv": Counter({"fused kernel bf16": 2})}
UNFUSED = {"q": Counter({"gemm bf16": 1, "kernel in place bf16": 1}), "kv": Counter({"gemm bf16": 1, "kernel bf16": 2})}
GEMMS = {
    "float32": ["bf16 . bf16 -> bf16", "bf16 . bf16 -> bf16", "bf16 . bf16 -> f32"],
    "bfloat16": ["bf16 . bf16 -> bf16"] * 3,
}


def compiled(monkeypatch, *names: str) -> dict:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([pjrt(), os.environ.get("PYTHONPATH", "")]))
    return script("gpu_programs.py", *names, needs=LOWERING)


def pjrt() -> str:
    """Where jax's PJRT library for CUDA is: with jax, or beside it, where it troubles no process that wants a CPU."""
    version = importlib.metadata.version("jax")
    folders = [*sys.path, str(Path(sys.prefix) / "pjrt")]
    for found in importlib.metadata.distributions(name="jax-cuda13-pjrt", path=folders):
        if found.version == version:
            return str(found.locate_file(""))
    pytest.skip(f"needs jax-cuda13-pjrt=={version} (`tests/run` installs it on x86-64 Linux)")


def expected(op: str) -> dict[str, dict]:
    """By program."""
    programs = {}
    for weight, gemms in GEMMS.items():
        written = {"heads": HEADS[op], "latent": DX, "weight": WEIGHTS[weight]}
        kept = [f"bfloat16{LATENT[op]}", f"{weight}{WEIGHT[op]}", *SAVED[op]]
        programs[f"{op}, {weight}"] = dict(written=written, gemms=gemms, saved=sorted(kept))
        if weight == "float32":
            written = written | {"heads": HEADS[op] + BIAS, "latent": DX + NORM}
            kept += SAVED_EXTRAS[op]
            programs[f"{op}, {weight}, norm and bias"] = dict(written=written, gemms=gemms, saved=sorted(kept))
    kept = [f"bfloat16{LATENT[op]}", f"float32{WEIGHT[op]}", *SAVED[op], *SAVED_EXTRAS[op][::2]]
    written = {"heads": HEADS[op] - UNFUSED[op] + FUSED[op], "latent": DX + NORM, "weight": WEIGHTS["float32"]}
    programs[f"{op}, fused"] = dict(written=written, gemms=GEMMS["float32"][1:], saved=sorted(kept))
    written = {
        "heads": HEADS[op] - Counter({"kernel in place bf16": 1}) + ROUNDED,  # the inverse RoPE gives what GEMMs read
        "scales": Counter({"kernel u8": 2}),
        "latent": DX + SAVED_CODES,
        "weight": Counter({"gemm f32": 1}) + SAVED_CODES,
    }
    kept = sorted(SAVED_MXFP8[op] + SAVED[op])
    return programs | {f"{op}, mxfp8": dict(written=written, gemms=GEMMS["float32"], saved=kept)}


def test_passes_over_memory(monkeypatch):
    """No array of such a size but these: no copy or transpose, the RoPE's neither, and no float32 but dW. Of the layer
    in FP8, in the same process: every GEMM is an FP8 one, with scales that nothing rounded from float32."""
    programs = expected("q") | expected("kv")
    fused = {"q, fused, mxfp8": 2, "kv, fused, mxfp8": 4}
    found = compiled(monkeypatch, "fp8", *programs, *fused)
    # Five products, each with the gradients of both factors.
    wanted = dict(gemms={"__cublas$lt$matmul$f8": 15}, scales={"f32[] f32[]": 15}, rounded=0)
    assert found["fp8"] == wanted
    for name, wanted in programs.items():
        assert found[name] == wanted, name
    for name, copies in fused.items():  # from the latent to codes in one kernel: forward writes nothing else
        heads = found[name]["written"]["heads"]
        assert heads.pop("fused kernel u8") == copies, name
        assert set(heads) == {"fusion bf16", "kernel bf16"}, heads  # cotangents, rotated and rounded
        assert found[name]["gemms"] == GEMMS["float32"][1:], name


def test_kernels_under_an_auto_mesh_gather_nothing(monkeypatch):
    """XLA cannot look into a launch: what is told about the ops keeps it from gathering the arrays. Eight GPUs: the
    partial sums of y and dx over heads, of dk_pe over heads, and of parameters' gradients over the batch."""
    programs = compiled(monkeypatch, "mesh", "fp8 mesh")
    fp8_gathers_codes(programs["fp8 mesh"])
    found = programs["mesh"]
    assert (found.pop("kernels"), found.pop("attention")) == (8, 2)
    assert [name for name, sizes in found.items() if sizes] == ["all-reduce"], found
    assert 2 * 256 * ROTARY in found["all-reduce"], "the shared rotary key's gradient, once"
    activation = 2 * 256 * 8 // 4 * 192  # of a GPU: batch 4 over 2, 8 heads over 4
    assert activation not in found["all-reduce"], found


def fp8_gathers_codes(found: dict) -> None:
    """In FP8, with parameters spread like the batch too: of weights codes are gathered, a byte a number, and nothing
    else is; every GEMM is an FP8 one; dW is summed in float32. (What is asynchronous lists what it reads as well.)"""
    assert found["gemms"] == {"__cublas$lt$matmul$f8": 15}
    gathered = [re.fullmatch(r"f8e4m3fn\[([\d,]+)\]", array) for array in found["all-gather"]]
    assert all(gathered), found["all-gather"]
    # Of wq_b, wkv_b and wo a GPU has half of the heads.
    weights = {(512, 256), (512, 192), (256, 4, 192), (128, 4, 256), (4, 128, 512)}
    spread = {tuple(sorted(w[:i] + (n // 4,) + w[i + 1 :])) for w in weights for i, n in enumerate(w)}
    sizes = {tuple(sorted(map(int, array[1].split(",")))) for array in gathered}
    assert sizes <= spread | {tuple(sorted(w)) for w in weights}, sizes
    assert all(array.startswith("f32[") for array in found["reduce-scatter"])
    assert any(array == "s32[2]" for array in found["all-reduce"]), "amax of several tensors at once"


def test_context_parallelism_gathers_latents(monkeypatch):
    """With our Triton kernels, attention's three among them, on packed rows: one all-gather, of latents and ids, one
    reduce-scatter, of the latents' gradient. (What is asynchronous lists what it reads as well.)"""
    found = compiled(monkeypatch, "context")["context"]
    assert (found.pop("kernels"), found.pop("attention")) == (11, 0)
    rows, tokens, latent = 4 // 2, 256, 128 + ROTARY
    each = rows * tokens * (latent + 1)
    assert found["all-gather"] in ([each], [each + each // 2]), found
    each = rows * tokens * latent
    assert found["reduce-scatter"] in ([each // 2], [each + each // 2]), found
    assert not found["all-to-all"] and not found["collective-permute"], found
    heads = {rows * tokens * (8 // 2) * width for width in (192, 128)}  # dk and dv meet nowhere
    assert not heads.intersection(found["all-reduce"]), found
