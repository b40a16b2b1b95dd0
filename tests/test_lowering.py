"""What can be said of the GPU without one: programs lower to our custom calls, kernels compile without spills."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Custom calls of each program, forward and backward together.
CALLS = {
    "apply_rope": 2,
    "apply_rope_kv": 2,
    "rms_norm": 2,
    "quantize_mxfp8": 3,  # and dequantised both ways
    "quantize_fp8": 1,  # dequantised by XLA
    "rms_norm_quantize": 5,  # rstd, quantise, dequantise twice, norm's backward
    "q_up_proj_rope": 4,  # norm, RoPE; inverse RoPE, norm's backward (which recomputes the norm in jnp)
    "kv_up_proj_rope": 4,
    "q_up_proj_rope, fp8": 7,  # norm, x, w, RoPE; what is largest in the inverse RoPE, its codes; norm's backward
    "kv_up_proj_rope, fp8": 7,
    "swizzle_scales": 1,
    "vmap swizzle_scales": 1,
    "vmap tables": 1,
    "vmap weights": 1,  # in a loop
    "spread": 2,
    "scan": 1,
    # dq, then dk and dv
    "attention, packed": 3,
    "attention, by ids": 1,  # forward alone
    "attention, largest logits": 3,
    "attention": 0,  # cuDNN's
}
CALLS |= {
    f"vmap {name}": CALLS[name]
    for name in (
        *("apply_rope", "apply_rope_kv", "rms_norm", "quantize_mxfp8", "rms_norm_quantize", "kv_up_proj_rope"),
        *("quantize_fp8", "q_up_proj_rope, fp8"),
    )
}
# Less would mean that something is not ours: each of x, w and the cotangent once, and of x and w the other copy later.
QUANTIZED = {"q_up_proj_rope, mxfp8": 10, "kv_up_proj_rope, mxfp8": 15}


def script(name: str, *arguments, needs: tuple[str, ...]) -> dict | list:
    absent = [module for module in needs if importlib.util.find_spec(module) is None]
    if absent:
        pytest.skip(f"needs {' and '.join(absent)}")
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "XLA_FLAGS")}
    command = [sys.executable, ROOT / "tests" / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


LOWERING = ("triton", "jax_triton", "jax_cuda13_plugin")


@functools.cache
def lowered() -> tuple[dict, dict]:
    """For Hopper everything, for Blackwell what is other there; one process."""
    return script("lowering.py", 90, "/".join(["100", *BLACKWELL]), needs=LOWERING)


BLACKWELL = ("q_up_proj_rope, mxfp8", "swizzle_scales")


def test_every_op_lowers_to_our_kernels_for_hopper():
    found, _ = lowered()
    assert {name: found[name] for name in CALLS} == CALLS
    for name, least in QUANTIZED.items():
        assert found[name] >= least, (name, found[name])
    assert found["mla"] >= 8
    assert [name for name in found["loops"] if "mla" not in name] == ["vmap weights", "scan"]
    assert found["sums over devices"] == ["spread"]
    # A policy that keeps o and lse runs no forward pass again; operands are quantised and dequantised by kernels.
    assert found["by cuDNN"] == {"checkpoint": [1, 1], "attention": [1, 1]} and found["checkpoint"] >= 6


def test_ops_lower_for_blackwell():
    _, found = lowered()
    assert set(found) == {*BLACKWELL, "loops", "sums over devices", "by cuDNN"}
    assert found["q_up_proj_rope, mxfp8"] >= QUANTIZED["q_up_proj_rope, mxfp8"]
    assert found["swizzle_scales"] == CALLS["swizzle_scales"]


@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile_without_spills(capability):
    """Registers are what tells a regression; casts saturate in hardware; nothing is fused or flushed, since results are
    compared bit for bit."""
    for name, report in script("compiled_kernels.py", capability, needs=("triton",)).items():
        if "attention" in name:
            # Its sums are the tensor cores'; fma and ex2 are asked for. What is spilled lies outside of the loops.
            assert report["tensor cores"] > 0 and report["spilled"] <= 32 and report["registers"] <= 255, (name, report)
            continue
        assert report["spilled"] == 0 and report["registers"] <= 255, (name, report)
        assert (report["casts"] > 0) == ("quantize" in name and "dequantize" not in name), (name, report)
        assert report["fused"] == 0 and report["flushing"] == 0, (name, report)
