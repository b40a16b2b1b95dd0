"""The dispatch table: a name runs or raises, a list is tried in order, None takes what can run."""

import pytest

from jax_mla import compile_for, dispatch, implementations


def table(**reasons):
    return {
        name: dispatch.Implementation(forward=name, backward=name, supports=lambda *a, r=reason: r)
        for name, reason in reasons.items()
    }


def test_none_takes_the_first_that_can_run():
    choices = table(triton="no GPU here", xla=None)
    assert dispatch.choose("op", choices, None).forward == "xla"
    assert dispatch.choose("op", table(triton=None, xla=None), None).forward == "triton"


def test_a_name_never_falls_back():
    with pytest.raises(NotImplementedError, match="op: found no implementation that can run; 'triton': no GPU here"):
        dispatch.choose("op", table(triton="no GPU here", xla=None), "triton")
    with pytest.raises(NotImplementedError, match="'mosaic': this version has no mosaic implementation"):
        dispatch.choose("op", table(xla=None), "mosaic")


def test_a_list_is_tried_in_order_and_gives_every_reason():
    choices = table(triton="no GPU here", mosaic="not Hopper", xla=None)
    assert dispatch.choose("op", choices, ("triton", "xla", "mosaic")).forward == "xla"
    with pytest.raises(NotImplementedError, match="'mosaic': not Hopper; 'triton': no GPU here"):
        dispatch.choose("op", choices, ("mosaic", "triton"))


@pytest.mark.parametrize("choice", [3, (), [], ["xla", 3], {"xla"}, b"xla"])
def test_what_is_not_a_choice(choice):
    with pytest.raises(TypeError, match="implementation: found"):
        dispatch.check(choice)


def test_unknown_names():
    with pytest.raises(ValueError, match="found 'cuda', wanted one of 'xla', 'triton', 'mosaic', 'cudnn'"):
        dispatch.check(["xla", "cuda"])
    assert dispatch.check(["xla"]) == ("xla",) and hash(dispatch.check(["xla"]))


def test_implementations_say_what_runs_here_and_why_the_rest_does_not():
    report = implementations()
    assert set(report) == {
        "apply_rope",
        "apply_rope_kv",
        "rms_norm",
        "q_up_proj_rope",
        "kv_up_proj_rope",
        "attention",
        "quantize_mxfp8",
        "quantize_fp8",
        "dequantize",
        "rms_norm_quantize",
        "swizzle_scales",
        "quantize_swizzled",
    }
    for reasons in report.values():
        assert list(reasons) == list(dispatch.NAMES) and reasons["xla"] == ""
        assert all(reasons[name] for name in ("triton", "mosaic", "cudnn"))


@pytest.mark.parametrize("capability", [9.0, "90", True, 9])
def test_a_gpu_to_compile_for_is_an_int(capability):
    with pytest.raises(ValueError, match=f"compute_capability: found {capability!r}, wanted an int like 90"):
        with compile_for(capability):
            pass
