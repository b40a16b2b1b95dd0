"""Opt-in, by `.ci/blackwell`: what can be said of `implementation="cudnn"` without a Blackwell GPU. Programs are
lowered for CUDA, NVIDIA's kernel is compiled for sm_100a and looked at, whole programs are compiled by XLA for B200s,
all by `tests/blackwell.py`. Not run on Blackwell.
"""

import os

import pytest
from test_gpu_programs import pjrt
from test_lowering import LOWERING, script

NEEDS = ("cudnn", "cutlass", *LOWERING)


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([pjrt(), os.environ.get("PYTHONPATH", "")]))
        return script("blackwell.py", needs=NEEDS)


def test_it_is_for_compute_capability_10_0_alone(found):
    assert found["runs on"].pop("100") == ""
    assert sorted(found["runs on"]) == ["103", "120", "90"]
    assert all("needs a Blackwell GPU of compute capability 10.0" in reason for reason in found["runs on"].values())


def test_nvidias_own_checks_are_not_enough(found):
    """Why ours are there. The bfloat16 kernel may be given any rank that TMA can read."""
    assert found["unchecked"] == {
        "12 heads": ["bfloat16", "float8_e4m3fn"],
        "rank 160": ["bfloat16", "float8_e4m3fn"],
        "100 tokens": [],
    }


def test_nvidias_kernel_for_sm_100a(found):
    """Tensor cores multiply bfloat16 and, by its scales, MXFP8; no register is spilled."""
    assert set(found["kernels"]) == {"bfloat16", "mxfp8"}
    for name, kind, mma in (("bfloat16", "kind::f16", "UTCHMMA"), ("mxfp8", "kind::mxf8f6f4.block_scale", "UTCQMMA")):
        kernel = found["kernels"][name]
        assert kernel["target"] == ["sm_100a"] and kernel["ptx"]
        assert all(kind in instruction for instruction in kernel["ptx"]), kernel["ptx"]
        assert kernel["sass"] == {mma: sum(kernel["ptx"].values())}
        assert kernel["spilled bytes"] == 0 and kernel["registers"] <= 128


# Beside NVIDIA's kernel: norm, RoPE back, norm back; with MXFP8 also its rstd, w quantised, two copies dequantised.
TRITON = {"bfloat16": 3, "mxfp8": 7}


@pytest.mark.parametrize("recipe", TRITON)
def test_a_training_step_for_one_b200(found, recipe):
    """`implementation=None` takes the kernel; what is saved is what the other implementations save."""
    program = found["programs"][recipe]
    assert program["lowered"] == 1
    assert program["compiled"] == {"cudnn": 1, "triton": TRITON[recipe], "cublas": 2}
    assert program["results"] == ("f8e4m3fn[4096,128,192], u8[4096,128,6], f8e4m3fn[4096,128,192], u8[128,128,192]")
    assert not program["moved"]
    assert program["saved"] == program["saved by triton"]


@pytest.mark.parametrize("recipe", TRITON)
def test_a_training_step_for_four_b200s(found, recipe):
    """Rows and FSDP over two, heads over two: each launches the kernel on its share. The weight is gathered, for the
    kernel under "mxfp8" as codes, and no activation is."""
    program = found["sharded"][recipe]
    assert program["lowered"] == program["compiled"]["cudnn"] == 1
    assert program["results"] == "f8e4m3fn[2048,64,192], u8[2048,64,6], f8e4m3fn[2048,64,192], u8[64,64,192]"
    gathered = {"all-gather bf16": 2} if recipe == "bfloat16" else {"all-gather f8e4m3fn": 1, "all-gather bf16": 1}
    assert program["moved"] == gathered | {"all-reduce bf16": 1, "reduce-scatter f32": 1}


def test_shard_map_and_vmap(found):
    """Inside the first each device launches it on its share; the second loops."""
    assert found["shard_map"] == 1
    assert found["vmap"] == {"calls": 1, "loops": 1}


def test_the_layer_uses_it(found):
    """By itself, and where it is named first."""
    assert found["layer"] == [1, 1, 0]
