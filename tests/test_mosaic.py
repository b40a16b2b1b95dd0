"""The fused up-projections of kernels/mosaic_up_proj.py: what they refuse, what they lower and compile to, and their
values, in Pallas's interpreter (with its race detection) and on a GPU."""

import dataclasses
import functools
import os
import re
import sys

import jax
import jax.numpy as jnp
import judge
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec
from jax_mla.ffi import triton
from jax_mla.kernels import mosaic_up_proj
from judge import draw
from test_gpu_programs import pjrt
from test_lowering import script

from jax_mla import (
    MXFP8Tensor,
    RopeConfig,
    compile_for,
    dequantize,
    implementations,
    kv_up_proj_rope,
    launches,
    mxfp8,
    q_up_proj_rope,
    rope_tables,
)

BF16, F32 = jnp.bfloat16, jnp.float32
Q, KV = dict(nope=128, rotary=64), dict(nope=128, value=128)

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this jax's interpreter of Mosaic GPU kernels has no clusters"
)


def arguments(tokens, rank, heads, nope, rotary, columns, seed=0):
    """x, w, cos, sin, bias, k_pe: what either projection takes some of."""
    rng = np.random.default_rng(seed)
    x, w = draw(rng, tokens, rank), draw(rng, rank, heads, columns) / rank**0.5
    angles = draw(rng, tokens, rotary // 2) * 6
    bias, k_pe = draw(rng, heads, columns), draw(rng, tokens, rotary)
    return x.astype(BF16), w.astype(BF16), jnp.cos(angles), jnp.sin(angles), bias, k_pe.astype(BF16)


@jax.jit
def projected(x, w, bias):
    return jnp.einsum("tk,khd->thd", x, w, preferred_element_type=F32) + bias


def assert_close(found, wanted):
    """Rounded once from float32: bfloat16's 2^-9 of each entry, and what another order of adding up moves."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64).reshape(found.shape)
    assert (np.abs(found - wanted) <= 2.0**-8 * np.abs(wanted) + 1e-4).all()


def rotated(y, cos, sin, nope, pairs=False):
    rest, cos, sin = y[..., nope:], cos[:, None], sin[:, None]
    left, right = (rest[..., 0::2], rest[..., 1::2]) if pairs else jnp.split(rest, 2, axis=-1)
    return jnp.concatenate([y[..., :nope], left * cos - right * sin, right * cos + left * sin], axis=-1)


def check_q(tokens, rank, heads, nope=128, rotary=64, biased=False, pairs=False, interpret=None, **tiles):
    x, w, cos, sin, bias, _ = arguments(tokens, rank, heads, nope, rotary, nope + rotary)
    wanted = rotated(projected(x, w, bias if biased else 0.0), cos, sin, nope, pairs)
    tiles = dataclasses.replace(mosaic_up_proj.Q_TILES, **tiles)
    sizes = dict(heads=heads, nope=nope, rotary=rotary, pairs=pairs, tiles=tiles, interpret=interpret)
    run = jax.jit(lambda *args: mosaic_up_proj.q_up(*args, **sizes))
    assert_close(run(x, w, cos, sin, bias if biased else None), wanted)


@jax.jit
def encoded(y):
    """Both copies of float32 y [T, H, D]."""
    found = mxfp8.raw_quantize(mxfp8.Static("both", -3, "up", jnp.dtype(F32), "xla"), y).detach().bytes()
    return jax.tree.leaves(found)


def assert_codes(found, wanted):
    """Scales by a step at most, and under one code in a thousand another: where another order of adding up crosses a
    boundary between two."""
    for kind, f, w in zip(("codes", "scales") * 2, found, encoded(wanted), strict=True):
        f, w = np.asarray(f).reshape(w.shape), np.asarray(w)
        assert (f != w).mean() < 1e-3, f"{kind}: {(f != w).mean():.1e} differ"
        if kind == "scales":
            assert np.abs(f.astype(int) - w).max() <= 1


def check_q_mxfp8(tokens, rank, heads, nope=128, rotary=64, biased=False, pairs=True):
    x, w, cos, sin, bias, _ = arguments(tokens, rank, heads, nope, rotary, nope + rotary)
    wanted = rotated(projected(x, w, bias if biased else 0.0), cos, sin, nope, pairs)
    run = functools.partial(mosaic_up_proj.q_up_mxfp8, heads=heads, nope=nope, rotary=rotary, pairs=pairs)
    assert_codes(jax.jit(run)(x, w, cos, sin, bias if biased else None), wanted)


def check_kv_mxfp8(tokens, rank, heads, nope=128, rotary=64):
    x, w, _, _, _, k_pe = arguments(tokens, rank, heads, nope, rotary, 2 * nope)
    y, shared = projected(x, w, 0.0), jnp.broadcast_to(k_pe[:, None].astype(F32), (tokens, heads, rotary))
    run = functools.partial(mosaic_up_proj.kv_up_mxfp8, heads=heads, nope=nope, value=nope)
    given = [a.reshape(-1, *a.shape[2:]) if a.shape[1] == 1 else a for a in encoded(k_pe[:, None].astype(F32))]
    k, v = jax.jit(run)(x, w, given)
    assert_codes(k, jnp.concatenate([y[..., :nope], shared], axis=-1))
    assert_codes(v, y[..., nope:])


def check_kv(tokens, rank, heads, nope=128, value=128, rotary=64, interpret=None, **tiles):
    x, w, _, _, _, k_pe = arguments(tokens, rank, heads, nope, rotary, nope + value)
    y = projected(x, w, 0.0)
    tiles = dataclasses.replace(mosaic_up_proj.KV_TILES, **tiles)
    sizes = dict(heads=heads, nope=nope, value=value, tiles=tiles, interpret=interpret)
    k, v = jax.jit(lambda *args: mosaic_up_proj.kv_up(*args, **sizes))(x, w, k_pe)
    shared = jnp.broadcast_to(k_pe[:, None], (tokens, heads, rotary))
    assert (k[..., nope:] == shared).all()
    assert_close(k[..., :nope], y[..., :nope])
    assert_close(v, y[..., nope:])


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        (dict(tokens=200, rank=96), None),
        (dict(nope=96, rotary=32), None),
        (dict(rank=512, value=128), None),
        (dict(rank=512, value=64, nope=64, rotary=32), None),
        (dict(dtype=F32), "dtype float32"),
        (dict(tokens=8191), "8191 tokens"),
        (dict(tokens=0), "0 tokens"),
        (dict(rank=1500), "latent of 1500"),
        (dict(rotary=48), "(128, 24)"),
        (dict(nope=192), "256 columns"),
        (dict(nope=80), "wants a multiple of 32"),
        (dict(nope=0), "wants multiples of 16"),
        (dict(value=160), "288 columns"),
        (dict(pairs=True, rotary=96, nope=96), None),
        (dict(pairs=True, rotary=48, nope=48), "parts of a head"),
        (dict(pairs=True, rotary=16, nope=112), "parts of a head"),
        (dict(mxfp8=True), None),
        (dict(mxfp8=True, rotary=32), "(128, 16) columns, wants multiples of 32"),
        (dict(mxfp8=True, tokens=8200), "wants a multiple of 32"),
        (dict(mxfp8=True, value=128), None),
        (dict(mxfp8=True, value=96), "128 columns of a key and 96 of a value"),
        (dict(mxfp8=True, value=224, nope=224), "224 columns a head, wants a multiple of 32 up to 192"),
        (dict(rank=512, value=128, rotary=256), None),
        (dict(rank=512, value=128, rotary=272), "272 rotary columns, wants fewer"),
        (dict(rank=96, value=128, rotary=512), "512 rotary columns, wants fewer"),
    ],
)
def test_what_is_refused(change, reason):
    found = mosaic_up_proj.supports(**dict(tokens=8192, rank=1536, **Q, dtype=BF16) | change)
    assert found is None if reason is None else found is not None and reason in found, found


def test_each_is_one_kernel():
    """Also with tokens and heads that fill no tile, and a rank that the wider tiles do not divide."""

    def array(*shape, dtype=BF16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def calls(function, *args, **sizes):
        lowered = jax.jit(lambda *args: function(*args, **sizes)).trace(*args).lower(lowering_platforms=("cuda",))
        return re.findall(r"custom_call @(\w+)", lowered.as_text())

    for tokens, rank, heads in ((8192, 1536, 128), (200, 96, 5)):
        x, table, bias = array(tokens, rank), array(tokens, 32, dtype=F32), array(heads, 192, dtype=F32)
        w = array(rank, heads, 192)
        assert calls(mosaic_up_proj.q_up, x, w, table, table, bias, heads=heads, **Q) == ["mosaic_gpu_v2"]
        w, k_pe = array(rank, heads, 256), array(tokens, 64)
        assert calls(mosaic_up_proj.kv_up, x, w, k_pe, heads=heads, **KV) == ["mosaic_gpu_v2"]
    x, copies = array(96, 96), [array(*s, dtype=jnp.uint8) for s in ((96, 64), (96, 2), (96, 64), (3, 64))]
    w, table = array(96, 5, 256), array(96, 32, dtype=F32)
    assert calls(mosaic_up_proj.kv_up_mxfp8, x, w, copies, heads=5, **KV) == ["mosaic_gpu_v2"]
    w, bias = array(96, 5, 192), array(5, 192, dtype=F32)
    for function in (mosaic_up_proj.q_up, mosaic_up_proj.q_up_mxfp8):
        assert calls(function, x, w, table, table, bias, heads=5, pairs=True, **Q) == ["mosaic_gpu_v2"]


def test_compiled_for_hopper(monkeypatch):
    """The tensor cores' and the bulk copies' instructions, a w tile for two blocks, accumulators that stay in
    registers."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([pjrt(), os.environ.get("PYTHONPATH", "")]))
    found = script("mosaic_programs.py", needs=("triton", "jax_triton", "jax_cuda13_plugin"))
    columns = dict.fromkeys(("q", "q, pairs", "q, pairs, bias", "q, mxfp8", "q, mxfp8, bias"), 192)
    columns |= {"kv": 256, "kv, mxfp8": 128}
    assert set(found) == set(columns)
    for name, kernel in found.items():
        assert kernel["target"] == "sm_90a", name
        assert kernel["shapes"] == [f"m64n{columns[name]}k16.f32.bf16.bf16"], name
        assert kernel["load"] > 0 and kernel["wgmma"] > 0, name
        assert (kernel["store"] == 0) == ("mxfp8" in name) == (kernel["codes"] > 0), name
        assert kernel["multicast"] == (0 if name == "kv" else kernel["load"]), name
        assert kernel["spilled"] <= (64 if name == "q, pairs, bias" else 0), name  # 32 with jax 0.12, else none


@interpreted
@pytest.mark.parametrize(
    "check, case",
    [
        (check_q, dict(tokens=512, rank=384, heads=3, stages=3, width=1)),  # phases of the ring, in odd numbers
        (check_q, dict(tokens=200, rank=96, heads=5, biased=True)),
        (check_kv, dict(tokens=264, rank=512, heads=3)),
    ],
)
def test_values_and_races(check, case):
    """With one cluster for every tile: the ring is reused and both warpgroups take turns."""
    check(**case, blocks=2, interpret=plgpu.InterpretGPUParams(detect_races=True))


def stand_ins(monkeypatch):
    """What the kernels are to compute, in jnp, and a machine that is said to have a Hopper GPU."""

    def queries(x, w, cos, sin, bias, nope, rotary, pairs):
        assert x.dtype == w.dtype == BF16 and cos.shape == (len(x), rotary // 2)
        return rotated(projected(x, w, 0.0 if bias is None else bias.astype(F32)), cos, sin, nope, pairs)

    def q_up(x, w, cos, sin, bias=None, *, heads, **sizes):
        assert w.shape[1] == heads
        return queries(x, w, cos, sin, bias, **sizes).astype(BF16).reshape(len(x), -1)

    def q_up_mxfp8(x, w, cos, sin, bias=None, *, heads, **sizes):
        assert w.shape[1] == heads
        return encoded(queries(x, w, cos, sin, bias, **sizes))

    def kv_up(x, w, k_pe, *, heads, nope, value):
        y = projected(x, w, 0.0)
        shared = jnp.broadcast_to(k_pe[:, None], (len(x), heads, k_pe.shape[-1]))
        return jnp.concatenate([y[..., :nope].astype(BF16), shared], axis=-1), y[..., nope:].astype(BF16)

    def kv_up_mxfp8(x, w, k_pe, *, heads, nope, value):
        """The key's columns by their codes, which are the same for every head."""
        y, rotary = projected(x, w, 0.0), k_pe[0].shape[-1]
        k = encoded(y[..., :nope])
        shapes = [(len(x), heads, -1)] * 3 + [(len(x) // 32, heads, -1)]
        shared = [jnp.broadcast_to(a[:, None], (len(a), heads, a.shape[-1])) for a in k_pe]
        assert shared[0].shape[-1] == rotary and all(a.dtype == jnp.uint8 for a in shared)
        return [jnp.concatenate([a.reshape(s), b], -1) for a, s, b in zip(k, shapes, shared, strict=True)], encoded(
            y[..., nope:]
        )

    for function in (q_up, q_up_mxfp8, kv_up, kv_up_mxfp8):
        monkeypatch.setattr(mosaic_up_proj, function.__name__, function)
    monkeypatch.setattr(triton, "compute_capability", lambda: 90)


B, T, R, H = 2, 32, 64, 3
COS, SIN = rope_tables(jnp.arange(3, 3 + T), RopeConfig(), 64)


def op_case(op, weight=F32, normed=True, biased=True, recipe=None, out=None, layout="pairs"):
    """The op as a function of an implementation's name and of arrays, and the arrays. Tensors are given by value."""
    rng, columns = np.random.default_rng(0), 192 if op is q_up_proj_rope else 256
    x, w, k_pe = draw(rng, B, T, R, dtype=BF16), draw(rng, R, H, columns) / 8, draw(rng, B, T, 64, dtype=BF16)
    extras = [1 + 0.1 * draw(rng, R)] * normed + [draw(rng, H, columns)] * biased

    def run(name, x, w, k_pe, *extras):
        extras = iter(extras)
        options = dict(nope_dim=128, norm_eps=1e-3, recipe=recipe, out=out, input_layout=layout, implementation=name)
        options |= dict(norm_scale=next(extras) if normed else None, bias=next(extras) if biased else None)
        found = op(x, w, *([] if op is q_up_proj_rope else [k_pe]), COS, SIN, **options)
        tensors = jax.tree.leaves(found, is_leaf=lambda t: isinstance(t, MXFP8Tensor))
        return (
            found if out is None else [dequantize(t.only(u), implementation="xla") for t in tensors for u in t.usages]
        )

    return run, (x, w.astype(weight), k_pe, *extras)


@pytest.mark.parametrize(
    "op, case",
    [
        (q_up_proj_rope, {}),
        (q_up_proj_rope, dict(weight=BF16, normed=False, biased=False)),
        (q_up_proj_rope, dict(layout="halves")),
        (q_up_proj_rope, dict(recipe="mxfp8", out="mxfp8")),
        (q_up_proj_rope, dict(out="mxfp8", biased=False)),
        (kv_up_proj_rope, dict(biased=False)),
        (kv_up_proj_rope, dict(biased=False, recipe="mxfp8", out="mxfp8")),
    ],
)
def test_the_ops_around_the_kernels(op, case, monkeypatch):
    """Layouts, bias, tables that broadcast, norm, residuals: values and gradients are those of the jnp op."""
    stand_ins(monkeypatch)
    run, args = op_case(op, **case)
    found, wanted = (jax.jit(pulled, static_argnums=(0, 1))(run, name, args) for name in ("mosaic", "xla"))
    judge.assert_close(found, wanted)


@pytest.mark.parametrize("op", [q_up_proj_rope, kv_up_proj_rope])
def test_the_ops_lower_to_one_kernel(op, monkeypatch):
    """The shared key's RoPE in jnp: where Triton's interpreter was chosen, its kernels cannot be lowered."""
    monkeypatch.setattr(launches, "supports", lambda *arrays: "not here")
    run, args = op_case(op, weight=BF16, normed=False, biased=False)
    with compile_for(90):
        lowered = jax.jit(lambda *args: run("mosaic", *args)).trace(*args).lower(lowering_platforms=("cuda",))
    assert re.findall(r"custom_call @(\w+)", lowered.as_text()).count("mosaic_gpu_v2") == 1


def pulled(run, name, args):
    outputs, pullback = jax.vjp(lambda *args: run(name, *args), *args)
    rng = np.random.default_rng(1)
    return outputs, pullback(jax.tree.map(lambda o: draw(rng, *o.shape, dtype=o.dtype), outputs))


def test_shards_that_do_not_fit_are_padded(monkeypatch):
    """Under an Auto mesh a device's share is known when nothing else can be chosen any more."""
    stand_ins(monkeypatch)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def put(array, *names):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*names)))

    for op in (q_up_proj_rope, kv_up_proj_rope):
        rng, columns = np.random.default_rng(2), 192 if op is q_up_proj_rope else 256
        # 40 tokens, 20 a device
        x, w, k_pe = draw(rng, 2, 20, R, dtype=BF16), draw(rng, R, 4, columns, dtype=BF16) / 8, draw(rng, 2, 20, 64)
        between = [] if op is q_up_proj_rope else [k_pe.astype(BF16)]

        def run(name, x, w, *between, op=op):
            return op(x, w, *between, COS[:20], SIN[:20], nope_dim=128, implementation=name)

        spread = put(x, "data"), put(w, None, "model"), *(put(a, "data") for a in between)
        found = jax.jit(functools.partial(run, "mosaic"))(*spread)
        judge.assert_close(found, jax.jit(functools.partial(run, "xla"))(x, w, *between))
        assert {a.sharding.spec[0] for a in jax.tree.leaves(found)} == {"data"}


def test_what_jax_lacks_is_a_reason(monkeypatch):
    monkeypatch.setattr(triton, "compute_capability", lambda: 90)
    monkeypatch.setitem(sys.modules, "jax_mla.kernels.mosaic_up_proj", None)
    assert "needs Pallas's Mosaic GPU part" in implementations()["q_up_proj_rope"]["mosaic"]
    run, args = op_case(q_up_proj_rope)
    assert run(None, *args).shape == (B, T, H, 192)


def test_the_ops_refuse(monkeypatch):
    run, (x, w, k_pe, *extras) = op_case(q_up_proj_rope)
    with pytest.raises(NotImplementedError, match="q_up_proj_rope: .*'mosaic': needs a Hopper GPU.*backend cpu"):
        run("mosaic", x, w, k_pe, *extras)
    stand_ins(monkeypatch)
    with pytest.raises(NotImplementedError, match="'mosaic': found dtype float32, wants bfloat16"):
        run("mosaic", x.astype(F32), w, k_pe, *extras)
    up = dict(nope_dim=128, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="'mosaic': found output_layout='pairs', wants 'halves'"):
        q_up_proj_rope(x, w, COS, SIN, output_layout="pairs", **up)
    with pytest.raises(NotImplementedError, match="'mosaic': found no heads"):
        q_up_proj_rope(x, w[:, :0], COS, SIN, **up)
    assert q_up_proj_rope(x, w[:, :0], COS, SIN, nope_dim=128).shape == (B, T, 0, 192)
    run, (x, w, k_pe, *extras) = op_case(kv_up_proj_rope)
    with pytest.raises(NotImplementedError, match="kv_up_proj_rope: .*'mosaic': found a bias"):
        run("mosaic", x, w, k_pe, *extras)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op, case",
    [
        (q_up_proj_rope, {}),
        (q_up_proj_rope, dict(layout="halves")),
        (q_up_proj_rope, dict(recipe="mxfp8", out="mxfp8")),
        (kv_up_proj_rope, dict(biased=False)),
        (kv_up_proj_rope, dict(biased=False, recipe="mxfp8", out="mxfp8")),
    ],
)
def test_the_ops_on_a_gpu(op, case):
    """Also under vmap, which is one launch more of the same."""
    run, args = op_case(op, **case)
    found, wanted = (jax.jit(pulled, static_argnums=(0, 1))(run, name, args) for name in ("mosaic", "xla"))
    # Sums in float32 of what was rounded to bfloat16, in another order and, of codes, across another boundary.
    judge.assert_close(found, wanted, 4e-2 if "out" in case else judge.TOLERANCE["bfloat16"])
    x, w, k_pe, *rest = args
    batch = jax.jit(jax.vmap(lambda x, k_pe: pulled(run, "mosaic", (x[None], w, k_pe[None], *rest))))(x, k_pe)
    again = jax.jit(pulled, static_argnums=(0, 1))(run, "mosaic", args)
    judge.assert_close(jax.tree.map(lambda a: a[:, 0], batch[0]), again[0])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, rank, heads", [(8192, 1536, 128), (1024, 2048, 16), (72, 96, 5), (1000, 1536, 5)])
def test_queries_on_a_gpu(tokens, rank, heads):
    check_q(tokens, rank, heads)
    check_q(tokens, rank, heads, biased=True, pairs=True)


@pytest.mark.gpu
@pytest.mark.parametrize("nope, rotary", [(96, 32), (64, 64), (128, 32)])
def test_other_heads_on_a_gpu(nope, rotary):
    check_q(1024, 512, 7, nope=nope, rotary=rotary)
    check_q(1024, 512, 7, nope=nope, rotary=rotary, pairs=True)
    check_kv(1024, 512, 7, nope=nope, value=nope, rotary=rotary)
    check_kv_mxfp8(1024, 512, 7, nope=nope, rotary=rotary)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, rank, heads", [(8192, 512, 128), (1024, 512, 16), (72, 96, 5), (1000, 512, 5)])
def test_keys_and_values_on_a_gpu(tokens, rank, heads):
    check_kv(tokens, rank, heads)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, rank, heads", [(8192, 1536, 128), (1024, 2048, 16), (96, 96, 5), (1056, 512, 5)])
def test_codes_on_a_gpu(tokens, rank, heads):
    check_q_mxfp8(tokens, rank, heads)
    check_q_mxfp8(tokens, rank, heads, biased=True, pairs=False)
    check_q_mxfp8(tokens, rank, heads, nope=32, rotary=128)
    check_kv_mxfp8(tokens, min(rank, 512), heads)
