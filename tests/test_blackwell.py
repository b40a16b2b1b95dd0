"""Opt-in, by `.ci/blackwell`: what can be said of `implementation="cudnn"` without a Blackwell GPU. Programs are
lowered for CUDA, NVIDIA's kernels are compiled for sm_100a and looked at, whole programs are compiled by XLA for B200s,
all by `tests/blackwell.py` and `tests/blackwell_attention.py`. Not run on Blackwell.
"""

import os

import numpy as np
import pytest
from jax_mla.ffi import cudnn_attention_mxfp8
from test_attention_mxfp8 import place
from test_gpu_programs import pjrt
from test_lowering import LOWERING, script

from jax_mla import swizzle_scales

NEEDS = ("cudnn", "cutlass", *LOWERING)


def printed(name: str) -> dict:
    """By a script that compiles for Blackwell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([pjrt(), os.environ.get("PYTHONPATH", "")]))
        return script(name, needs=NEEDS)


@pytest.fixture(scope="module")
def found():
    return printed("blackwell.py")


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
    """By itself, and where it is named first, attention's kernel with it."""
    assert found["layer"] == [1, 2, 0]


# --- Attention of MXFP8 tensors --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attends():
    return printed("blackwell_attention.py")


def test_attention_is_for_compute_capability_10_0_alone(attends):
    assert attends["runs on"].pop("100") == ""
    assert sorted(attends["runs on"]) == ["103", "120", "90"] and all(attends["runs on"].values())


def test_nvidias_file_is_specialised_as_our_contract_says(attends):
    """Heads of 192 and 128, tiles of 128, the tiles of scales that it is handed; causal from the top left or no mask,
    natural lse, no sink, not packed, probabilities in E4M3."""
    for how, settings in attends["settings"].items():
        assert (settings["dims"], settings["tiles"]) == ([192, 128], [128, 128])
        assert settings["scales"] == [cudnn_attention_mxfp8.SCALES_QK] * 2 + [cudnn_attention_mxfp8.SCALES_V]
        assert bool(settings["masks"]) == (how == "causal") and settings["split"] == 1
        assert not any(settings["others"]) and settings["dtypes"] == ["Float8E4M3FN", "BFloat16"]


def test_scales_lie_where_nvidias_rule_puts_them(attends):
    """Of (row, block) in the two atoms of a head's 192 dims, padded to 256; and `swizzle_scales` puts them there."""
    assert attends["scales"] == place(np.arange(128)[:, None], np.arange(8)).tolist()
    scales = np.random.default_rng(0).integers(0, 255, (1, 256, 1, 6)).astype(np.uint8)
    tiles = np.asarray(swizzle_scales(scales, token_axis=-3)).reshape(2, 1024)
    found = tiles[:, np.asarray(attends["scales"])[:, :6]].reshape(256, 6)
    np.testing.assert_array_equal(found, scales[0, :, 0])


@pytest.mark.parametrize("how", ["causal", "full"])
def test_nvidias_attention_for_sm_100a(attends, how):
    """Both products are block-scaled, by pairs of SMs. It spills 32 bytes a thread."""
    kernel = attends["kernels"][how]
    assert kernel["target"] == ["sm_100a"] and kernel["ptx"]
    assert all("cta_group::2.kind::mxf8f6f4.block_scale.block32" in instruction for instruction in kernel["ptx"])
    assert kernel["sass"] == {"UTCQMMA": sum(kernel["ptx"].values())}
    assert kernel["registers"] <= 128 and kernel["spilled bytes"] <= 32


@pytest.mark.parametrize("how", ["causal", "full"])
def test_attention_forward_and_backward_for_one_b200(attends, how):
    """Beside NVIDIA's kernel: three quantised, three of scales tiled, three dequantised for cuDNN's backward pass."""
    program = attends["programs"][how]
    assert program["lowered"] == program["compiled"] == {"triton": 9, "cudnn": 1, "cudnn backward": 1}
    assert program["results"] == ["bf16[2,1024,16,128], f32[2,16,1024], f32[1]"]


def test_who_does_not_name_it_gets_bfloat16(attends):
    """Three quantised; three dequantised, for either pass."""
    assert attends["unnamed"] == {"triton": 9, "cudnn forward": 1, "cudnn backward": 1}


@pytest.mark.parametrize("mesh", ["explicit", "auto"])
def test_attention_for_four_b200s(attends, mesh):
    """Rows over two, heads over two: each device launches it on its share, and nothing moves."""
    program = attends[mesh]
    assert program["compiled"] == {"triton": 9, "cudnn": 1, "cudnn backward": 1}
    assert program["results"] == ["bf16[1,1024,8,128], f32[1,8,1024], f32[1]"] and not program["moved"]


def test_lse_with_a_gradient_is_refused_as_before(attends):
    assert "found heads of 192 and 192 dims as cuDNN is given them" in attends["wider lse"]


def test_attention_in_shard_map_and_vmap(attends):
    """Inside the first each device launches it on its share; the second loops."""
    assert attends["shard_map"] == {"triton": 9, "cudnn": 1, "cudnn backward": 1}
    assert attends["vmap"] == {"calls": 1, "loops": 1}
