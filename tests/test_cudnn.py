"""`implementation="cudnn"` without the packages it needs: what it refuses, reason by reason; what it hands to NVIDIA's
kernel and makes of its results, around that kernel's arithmetic in numpy. `.ci/blackwell` runs the rest.
"""

import itertools
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax_mla.ffi import cudnn, triton

from jax_mla import dispatch, implementations, q_up, q_up_proj_rope, quantize_mxfp8

BF16, CODES = jnp.dtype(jnp.bfloat16), cudnn.CODES
FITS = dict(rows=2, length=128, rank=256, heads=8, nope=128, rotary=64, dtype=BF16)


def test_what_it_takes():
    """DeepSeek-V3's and V2-Lite's queries among it (the latter have no latent: the rank is the hidden size)."""
    for dtype in (BF16, CODES):
        for changes in (
            {},
            dict(rank=1536, heads=128, length=4096),
            dict(rank=2048, heads=16),
            dict(rows=4, length=32),
        ):
            assert cudnn.supports(**FITS | dict(dtype=dtype) | changes) is None
    assert cudnn.supports(**FITS | dict(rank=264)) is None  # a bfloat16 row of 33 times 16 bytes
    assert cudnn.supports(**FITS | dict(dtype=CODES, heads=12)) is None  # two tiles of tokens: heads by 4


REFUSED = {
    "12 heads": (dict(heads=12), "found 12 heads on each device, wants a multiple of 8 for 256 tokens in bfloat16"),
    "6 heads, MXFP8": (dict(heads=6, dtype=CODES), "found 6 heads .* multiple of 4 for 256 tokens in float8_e4m3fn"),
    "12 heads, MXFP8": (dict(heads=12, length=1024, dtype=CODES), "found 12 heads .* multiple of 8 for 2048 tokens"),
    "24 heads, MXFP8": (dict(heads=24, length=4096, dtype=CODES), "found 24 heads .* multiple of 16 for 8192 tokens"),
    "no heads": (dict(heads=0), "found 0 heads"),
    "192 tokens": (dict(length=96), "found 192 tokens on each device, wants a multiple of 128"),
    "no tokens": (dict(rows=0), "found 0 tokens"),
    "sequences of 16": (dict(rows=8, length=16), "found sequences of 16 tokens on each device, wants multiples of 32"),
    "K of 192, MXFP8": (dict(rank=192, dtype=CODES), "latent of 192 dims, wants a multiple of 128 .* float8_e4m3fn"),
    "K of 260": (dict(rank=260), "found a latent of 260 dims, wants a multiple of 8 for operands in bfloat16"),
    "no K": (dict(rank=0), "found a latent of 0 dims"),
    "heads of 64 + 64": (dict(nope=64), r"found heads of 64 \+ 64 dims, wants 128 \+ 64"),
    "heads of 128 + 32": (dict(rotary=32), r"found heads of 128 \+ 32 dims"),
    "float32": (dict(dtype=jnp.dtype(jnp.float32)), "found operands in float32, wants bfloat16 or MXFP8"),
    "float16": (dict(dtype=jnp.dtype(jnp.float16)), "found operands in float16"),
    "E5M2": (dict(dtype=jnp.dtype(jnp.float8_e5m2)), "found operands in float8_e5m2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses(name):
    changes, reason = REFUSED[name]
    assert re.search(reason, cudnn.supports(**FITS | changes))


@pytest.mark.parametrize("dtype", [BF16, CODES], ids=str)
def test_no_tile_lies_past_the_last_head(dtype):
    """The scheduler's rule, spelled out: it covers heads rounded up to its swizzle."""
    for tiles, heads in itertools.product(range(1, 40), repeat=2):
        least = min(tiles, heads)
        step = 8 if dtype == BF16 else 4 if least < 4 else max(2**i for i in range(8) if 2**i <= least)
        taken = cudnn.supports(**FITS | dict(rows=tiles, heads=heads, dtype=dtype)) is None
        assert taken == (math.ceil(heads / step) * step == heads)


ROWS, LENGTH, RANK, HEADS, NOPE, ROTARY = 2, 128, 128, 8, 128, 64


def array(*shape, dtype=BF16, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


X, W, TABLE = array(ROWS, LENGTH, RANK), array(RANK, HEADS, NOPE + ROTARY), array(LENGTH, ROTARY // 2)


def refusal(x=X, w=W, table=TABLE, bias=None, **changes) -> str | None:
    """Why "cudnn" does not run the op: where the arguments fit, for what this machine lacks."""
    settings = dict(nope_dim=NOPE, out="mxfp8", implementation="cudnn") | changes
    try:
        jax.eval_shape(
            lambda x, w, table, bias: q_up_proj_rope(x, w, table, table, bias=bias, **settings), x, w, table, bias
        )
    except NotImplementedError as error:
        return str(error).removeprefix("q_up_proj_rope: found no implementation that can run; 'cudnn': ")


def mxfp8(x, token_axis):
    return jax.eval_shape(lambda x: quantize_mxfp8(x, usage="both", token_axis=token_axis), x)


FIT = {
    "bfloat16": {},
    "MXFP8": dict(recipe="mxfp8"),
    "MXFP8 from float32": dict(x=array(ROWS, LENGTH, RANK, dtype=jnp.float32), recipe="mxfp8"),
    "tensors": dict(x=mxfp8(X, -2), w=mxfp8(W, -3), recipe="mxfp8"),
    "tensors, dequantised": dict(x=mxfp8(X, -2), w=mxfp8(W, -3)),
    "float32 weight, halves": dict(w=array(*W.shape, dtype=jnp.float32), input_layout="halves"),
    "one row": dict(x=array(LENGTH, RANK)),
    "a table a row": dict(table=array(ROWS, LENGTH, ROTARY // 2, dtype=jnp.float32)),
}
MISFIT = {
    "out": (dict(out=None), "found out=None, wants 'mxfp8'"),
    "bias": (dict(bias=array(HEADS, NOPE + ROTARY)), "found a bias, which the kernel does not add"),
    "layout": (dict(output_layout="pairs"), "found output_layout='pairs', wants 'halves'"),
    "dtype": (dict(x=array(ROWS, LENGTH, RANK, dtype=jnp.float32)), "found operands in float32"),
    "heads": (dict(w=array(RANK, 12, NOPE + ROTARY)), "found 12 heads"),
    "head dim": (dict(w=array(RANK, HEADS, 96), nope_dim=32), r"found heads of 32 \+ 64 dims"),
    "tokens": (dict(x=array(ROWS, 96, RANK), table=array(96, ROTARY // 2)), "found 192 tokens"),
    "rank, MXFP8": (dict(x=array(ROWS, LENGTH, 64), w=array(64, HEADS, 192), recipe="mxfp8"), "latent of 64 dims"),
}


@pytest.mark.parametrize("name", FIT)
def test_what_the_op_may_hand_it(name):
    assert refusal(**FIT[name]) == cudnn.unavailable()


@pytest.mark.parametrize("name", MISFIT)
def test_what_the_op_may_not(name):
    changes, reason = MISFIT[name]
    assert re.search(reason, refusal(**changes))


def sharded(mesh, x=X, w=W, over_x=(), over_w=(), **changes):
    """`refusal` for arrays spread over a mesh."""
    x, w = (
        array(*a.shape, sharding=NamedSharding(mesh, PartitionSpec(*over))) for a, over in ((x, over_x), (w, over_w))
    )
    with jax.set_mesh(mesh):
        return refusal(x, w, array(x.shape[1], ROTARY // 2), **changes)


def test_what_it_refuses_it_refuses_of_a_device():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    wide, long = array(RANK, 32, NOPE + ROTARY), array(4, 64, RANK)
    fits = cudnn.unavailable()
    assert sharded(mesh, w=wide, over_x=("data",), over_w=(None, "model")) == fits
    assert "found 4 heads on each device" in sharded(mesh, w=array(RANK, 16, 192), over_w=(None, "model"))
    assert sharded(mesh, x=long, over_x=("data",)) == fits
    assert "found 64 tokens on each device" in sharded(mesh, x=long, over_x=("model",))
    assert sharded(mesh, x=array(2, 1024, RANK), over_x=(None, ("data", "model"))) == fits
    assert "found x's last dim sharded over mesh axes ('model',)" in sharded(mesh, over_x=(None, None, "model"))
    # Gathered before the kernel: the latent's dim (FSDP), and heads over an axis that the tokens are spread over.
    assert sharded(mesh, w=wide, over_x=("data",), over_w=("data", "model")) == fits
    assert sharded(mesh, over_x=("data",), over_w=(None, "data")) == fits
    # Of MXFP8 the tokens of a device decide too: 8 tiles of tokens want 8 heads, 4 want 4.
    few, many = array(RANK, 12, 192), array(2, 512, RANK)
    assert "found 12 heads on each device, wants a multiple of 8 for 1024" in sharded(mesh, many, few, recipe="mxfp8")
    assert sharded(mesh, many, few, over_x=("data",), recipe="mxfp8") == fits


def test_a_launch_checks_too():
    """Under vmap, or called from elsewhere, nobody else has."""
    x, w, table = jnp.zeros((128, 64), BF16), jnp.zeros((64, 12, 192), BF16), jnp.zeros((128, 32))
    with pytest.raises(NotImplementedError, match="found 12 heads on each device, wants a multiple of 8"):
        cudnn.q_up(True, x, w, table, table)
    with pytest.raises(NotImplementedError, match="found 64 tokens"):
        jax.vmap(lambda x: cudnn.q_up(True, x, w[:, :8], table[:64], table[:64]))(x.reshape(2, 64, 64))


def numpy_kernel(x, w, cos, sin, x_scales=None, w_scales=None):
    """What NVIDIA's kernel computes from what it is handed: x [tokens, K], w [out, in], tables [tokens, 64]; rotates
    neighbours, writes halves."""
    x, w, cos, sin = (np.asarray(a) for a in (x, w, cos, sin))
    assert cos.dtype == sin.dtype == BF16 and cos.shape == sin.shape == (len(x), ROTARY)
    if x_scales is not None:
        x, w = (reference.decode(a.view(np.uint8), np.asarray(s), 1) for a, s in ((x, x_scales), (w, w_scales)))
    q = (x.astype(np.float64) @ w.astype(np.float64).T).reshape(len(x), -1, NOPE + ROTARY)
    x1, x2 = q[..., NOPE::2], q[..., NOPE + 1 :: 2]
    (cl, cr), (sl, sr) = (np.split(t.astype(np.float64)[:, None], 2, axis=-1) for t in (cos, sin))
    q = np.concatenate([q[..., :NOPE], x1 * cl - x2 * sl, x2 * cr + x1 * sr], axis=-1)
    codes_row, scales_row = reference.mxfp8(q, -1)
    codes_col, scales_col = reference.mxfp8(q, 0)
    return codes_row, scales_row, codes_col, scales_col


@pytest.mark.parametrize("layout, rows", [("pairs", ()), ("halves", (2, 2))])
def test_what_it_is_handed_and_returns_is_the_ops(rows, layout):
    """Small integers, so that every sum is exact, and codes are the op's to the last bit."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-4, 5, (*rows, 64, RANK)), BF16)
    w = jnp.asarray(rng.integers(-3, 4, (RANK, 2, NOPE + ROTARY)), BF16)
    shared = [1] * len(rows[:1])  # one table for the first dim, one for each entry of the second
    cos, sin = (jnp.asarray(rng.integers(-8, 9, (*shared, *rows[1:], 64, ROTARY // 2)) / 8) for _ in range(2))
    up = dict(nope_dim=NOPE, out="mxfp8", input_layout=layout)
    wanted = jax.jit(lambda *args: q_up_proj_rope(*args, **up).detach())(x, w, cos, sin)
    x_codes, x_scales = quantize_mxfp8(x).copy("rowwise")  # exact, as the sums are
    w_codes, w_scales = quantize_mxfp8(w, usage="columnwise", token_axis=-3).copy("columnwise")
    for handed in ((x, w, cos, sin), (x_codes, w_codes, cos, sin, x_scales, w_scales)):
        given = cudnn.inputs(layout == "pairs", *handed)
        assert all(a.ndim == 2 for a in given)
        found = cudnn.outputs(x.shape[:-1], numpy_kernel(*given))
        for ours, usage in ((found[:2], "rowwise"), (found[2:], "columnwise")):
            for mine, theirs in zip(ours, wanted.copy(usage), strict=True):
                np.testing.assert_array_equal(mine, np.asarray(theirs).view(np.uint8))


def test_nobody_is_given_it_unasked():
    """None takes it on a Blackwell GPU of the kind it was compiled for, and on no other machine."""
    assert triton.compute_capability() is None and q_up.IMPLEMENTATIONS["cudnn"].supports()
    for capability in (75, 80, 90, 103, 120):
        with triton.compile_for(capability):
            assert triton.compute_capability() == capability
            assert q_up.IMPLEMENTATIONS["cudnn"].supports()
    assert dispatch.choose("q_up_proj_rope", q_up.IMPLEMENTATIONS, None) is q_up.IMPLEMENTATIONS["xla"]
    assert implementations()["q_up_proj_rope"]["cudnn"] == cudnn.unavailable()
    assert not {"cutlass", "cudnn"} & sys.modules.keys()  # asking loads neither
