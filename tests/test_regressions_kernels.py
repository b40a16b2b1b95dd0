"""Faults that were found in what surrounds the Triton kernels, each as it showed. Nothing is launched: what would be is
looked at, or shapes alone are traced for a GPU."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_mla.ffi import triton
from judge import draw

from benchmarks import cases
from benchmarks.__main__ import main
from jax_mla import (
    MLAConfig,
    apply_rope,
    compile_for,
    launches,
    norm,
    q_up_proj_rope,
    quantize_mxfp8,
    quantize_swizzled,
    rms_norm,
    rms_norm_quantize,
    rope_quantize,
    rope_tables,
)

ROPE = MLAConfig.tiny().rope


def launched(monkeypatch, function, *args) -> list:
    """The launches of a program for Hopper, which give arrays of zeros."""
    found = []

    def call(launch, *arrays):
        found.append(launch)
        for i, (shape, _) in enumerate(launch.outputs):
            assert i not in dict(map(reversed, launch.aliases)) or arrays[0].shape == shape
        return tuple(jnp.zeros(shape, dtype) for shape, dtype in launch.outputs)

    monkeypatch.setattr(triton, "call", call)
    with compile_for(90):
        jax.eval_shape(function, *args)
    return found


@pytest.mark.parametrize("frozen", ["w", "x"])
@pytest.mark.parametrize("name", ["triton", "xla"])
def test_a_frozen_operand_takes_any_number_of_tokens(name, frozen, monkeypatch):
    """The backward pass made both copies of dq, also of 40 tokens, of which no column-wise one is wanted or whole: the
    kernel wrote past the arrays."""
    tokens, heads = (40, 64) if frozen == "w" else (64, 48)  # the blocks that nobody reads are not whole
    cos, sin = rope_tables(jnp.arange(tokens), ROPE, 16)
    rng = np.random.default_rng(0)
    x, w = draw(rng, 1, tokens, 64), draw(rng, 64, 3, heads)

    def gradient(x, w):
        def loss(a):
            q, k = (a, w) if frozen == "w" else (x, a)
            options = dict(nope_dim=heads - 16, recipe="mxfp8", implementation=name)
            return jnp.sum(q_up_proj_rope(q, k, cos, sin, **options) ** 2)

        if frozen == "w":
            w = quantize_mxfp8(w, usage="both", token_axis=-3, implementation="xla").detach()
            return jax.grad(loss)(x)
        x = quantize_mxfp8(x, usage="both", implementation="xla").detach()
        return jax.grad(loss)(w)

    if name == "xla":
        assert np.isfinite(jax.jit(gradient)(x, w)).all()
        return
    wrote = launched(monkeypatch, gradient, x, w)
    assert {launch.kernel.__name__ for launch in wrote} & {"quantize_rows", "quantize_columns"}
    assert not any("rope_quantize" in launch.kernel.__name__ for launch in wrote)


def test_half_a_block_on_each_device_is_not_the_fused_kernels():
    devices = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones((1, 64, 2, 64)), NamedSharding(devices, P(None, "d")))
    static = rope_quantize.rope.RopeStatic(32, "pairs", "halves", False, "triton")
    assert "found 16 tokens" in rope_quantize._unsupported(static, x)
    assert rope_quantize._unsupported(static, jnp.ones((1, 64, 2, 64))) is None


def test_none_takes_xla_where_a_part_has_no_kernel():
    """float64 and long rows: the op chose Triton, and its norm or RoPE then refused."""
    cos, sin = rope_tables(jnp.arange(4), ROPE, 32)
    up = lambda dtype, rank, **options: jax.eval_shape(  # noqa: E731
        lambda x, w, s: q_up_proj_rope(x, w, cos, sin, nope_dim=32, norm_scale=s, **options),
        *(jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, 4, rank), (rank, 2, 64), (rank,))),
    )
    with compile_for(90):
        for dtype, rank, reason in (("float64", 64, "dtype float64"), ("bfloat16", 20480, "rows of 20480")):
            with jax.enable_x64(True):
                assert up(dtype, rank).shape == (1, 4, 2, 64)
                with pytest.raises(NotImplementedError, match=f"q_up_proj_rope: .*'triton': found {reason}"):
                    up(dtype, rank, implementation="triton")
        x, s = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((32, 20480), (20480,)))
        with pytest.raises(NotImplementedError, match="rms_norm_quantize: .*found rows of 20480"):
            jax.eval_shape(lambda x, s: rms_norm_quantize(x, s, 1e-6, implementation="triton").detach(), x, s)


def test_the_named_implementation_normalises_without_a_gradient_too(monkeypatch):
    """One copy was wanted, and XLA made it."""
    x, w, s = (jnp.ones(shape) for shape in ((1, 40, 64), (64, 2, 64), (64,)))
    cos, sin = rope_tables(jnp.arange(40), ROPE, 32)
    up = dict(nope_dim=32, norm_scale=s, recipe="mxfp8", implementation="triton")
    wrote = launched(monkeypatch, lambda x, w: q_up_proj_rope(x, w, cos, sin, **up), x, w)
    assert "norm_quantize_rows_kernel" in {launch.kernel.__name__ for launch in wrote}


@pytest.mark.parametrize("op", ["apply_rope", "rms_norm"])
def test_a_second_derivative_of_a_kernel_says_what_to_do(op, monkeypatch):
    cos, sin = rope_tables(jnp.arange(4), ROPE, 32)
    run = {
        "apply_rope": lambda x: apply_rope(x, cos, sin, implementation="triton"),
        "rms_norm": lambda x: rms_norm(x, jnp.ones(32), 1e-6, implementation="triton"),
    }[op]
    loss = lambda x: jnp.sum(run(x) ** 2)  # noqa: E731
    with pytest.raises(NotImplementedError, match=f"{op}: found a derivative of a kernel.*implementation='xla'"):
        launched(monkeypatch, lambda x: jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(x), jnp.ones((4, 2, 32)))


def test_gradients_of_a_batchs_entries_stay_apart():
    """No program of the norm's backward pass has rows of two entries, however many rows there are."""
    for rows, entries in ((4096, 2), (3 * 2053, 3), (6144, 4), (64, 8)):
        (programs,) = norm._programs(rows, (entries,))
        assert rows % programs == 0 and (rows // entries) % (rows // programs) == 0
    assert norm._programs(4096, (1,)) == () and launches.supports_row(norm.launches.LONGEST_ROW) is None


TABLE = (4, 0, 1)
REFUSED = [
    (lambda k: k.rope.rope(2, 2, 8, 16, TABLE, "pairs", "halves", False, "float32", True), "rotary: found 16"),
    (lambda k: k.rope.rope(2, 2, 8, 5, TABLE, "pairs", "halves", False, "float32", True), "rotary: found 5"),
    (lambda k: k.rope.rope(2, 2, 8, 4, TABLE, "Pairs", "halves", False, "float32", True), "layout: found 'Pairs'"),
    (lambda k: k.rope.split(2, 2, 8, 0, 4, TABLE, "pairs", "halves", "float32"), "rotary: found 0"),
    (lambda k: k.rope_mxfp8.rope_quantize(40, 2, 64, 32, TABLE, "pairs", "halves", False), "rows: found 40"),
    (lambda k: k.rope_mxfp8.rope_quantize(32, 2, 96, 48, TABLE, "pairs", "halves", False), "rotary: found 48"),
    (lambda k: k.mxfp8.quantize(40, 32, "both"), "rows: found 40"),
    (lambda k: k.mxfp8.quantize(32, 48, "rowwise"), "columns: found 48"),
    (lambda k: k.mxfp8.quantize(32, 32, "rows"), "usage: found 'rows'"),
    (lambda k: k.mxfp8.quantize(32, 32, "both", "Up"), "rounding: found 'Up'"),
    (lambda k: k.mxfp8.quantize(40, 32, "rowwise", tiled=(40, 32)), "tiled: found"),
    (lambda k: k.mxfp8.dequantize(32, 32, "both", "float32"), "usage: found 'both'"),
    (lambda k: k.mxfp8.swizzle(1, 4, 1, 4, "row"), "usage: found 'row'"),
    (lambda k: k.norm.norm_quantize(40, 64, False), "rows: found 40"),
]


@pytest.mark.parametrize("make, message", REFUSED, ids=[message for _, message in REFUSED])
def test_a_launch_that_would_leave_its_arrays_is_refused(make, message):
    # Not before: what imports triton first decides whether it interprets.
    import jax_mla.kernels.mxfp8
    import jax_mla.kernels.norm
    import jax_mla.kernels.rope
    import jax_mla.kernels.rope_mxfp8

    with pytest.raises(ValueError, match=message):
        make(jax_mla.kernels)


def test_tiles_want_tokens():
    with pytest.raises(ValueError, match="x: found .*at least 2 dims"):
        quantize_swizzled(jnp.ones(32))


def test_a_result_that_is_nan_shows_wherever_it_is():
    good, bad = jnp.ones(4), jnp.full(4, jnp.nan)
    for error in (cases.error, cases.rms_error):
        assert error((good, bad), (good, good)) > 1e30 and error((bad, good), (good, good)) > 1e30
        assert json.loads(json.dumps(error((good, bad), (good, good)))) > 1e30


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["q_up_mxfp8", "--tokens", "33"], "--tokens: found 33, wanted a multiple of 32 for q_up_mxfp8"),
        (["attention_packed", "--tokens", "12"], "wanted a multiple of 8 for attention_packed"),
        (["copy", "--json", "."], "--json: cannot write '.'"),
        (["copy", "--json", ""], "--json: cannot write ''"),
    ],
)
def test_the_benchmark_refuses_before_the_work(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
