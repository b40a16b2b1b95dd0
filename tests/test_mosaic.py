"""The fused up-projections of kernels/mosaic_up_proj.py: what they refuse, what they lower and compile to, and their
values, in Pallas's interpreter (with its race detection) and on a GPU."""

import dataclasses
import os
import re

import jax
import jax.numpy as jnp
import judge
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax_mla.ffi.triton import compile_for
from jax_mla.kernels import mosaic_up_proj
from judge import draw
from test_gpu_programs import pjrt
from test_lowering import script

from jax_mla import RopeConfig, kv_up_proj_rope, launches, q_up_proj_rope, rope_tables, up_mosaic
from jax_mla.q_up import IMPLEMENTATIONS

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


def check_q(tokens, rank, heads, nope=128, rotary=64, biased=False, interpret=None, **tiles):
    x, w, cos, sin, bias, _ = arguments(tokens, rank, heads, nope, rotary, nope + rotary)
    y = projected(x, w, bias if biased else 0.0)
    left, right, c, s = y[..., nope : nope + rotary // 2], y[..., nope + rotary // 2 :], cos[:, None], sin[:, None]
    wanted = jnp.concatenate([y[..., :nope], left * c - right * s, right * c + left * s], axis=-1)
    tiles = dataclasses.replace(mosaic_up_proj.Q_TILES, **tiles)
    sizes = dict(heads=heads, nope=nope, rotary=rotary, tiles=tiles, interpret=interpret)
    run = jax.jit(lambda *args: mosaic_up_proj.q_up(*args, **sizes))
    assert_close(run(x, w, cos, sin, bias if biased else None), wanted)


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


def test_compiled_for_hopper(monkeypatch):
    """The tensor cores' and the bulk copies' instructions, a w tile for two blocks, accumulators that stay in
    registers."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([pjrt(), os.environ.get("PYTHONPATH", "")]))
    found = script("mosaic_programs.py", needs=("triton", "jax_triton", "jax_cuda13_plugin"))
    assert set(found) == {"q", "kv"}
    for name, kernel in found.items():
        assert kernel["target"] == "sm_90a", name
        assert kernel["shapes"] == [f"m64n{256 if name == 'kv' else 192}k16.f32.bf16.bf16"], name
        assert kernel["load"] > 0 and kernel["store"] > 0 and kernel["wgmma"] > 0, name
        assert kernel["multicast"] == (kernel["load"] if name == "q" else 0), name
        assert kernel["spilled"] == 0, name


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

    def rotated(y, cos, sin, nope):
        left, right = jnp.split(y[..., nope:], 2, axis=-1)
        cos, sin = cos[:, None], sin[:, None]
        return jnp.concatenate([y[..., :nope], left * cos - right * sin, right * cos + left * sin], axis=-1)

    def q_up(x, w, cos, sin, bias=None, *, heads, nope, rotary):
        assert x.dtype == w.dtype == BF16 and cos.shape == (len(x), rotary // 2) and w.shape[1] == heads
        y = projected(x, w, 0.0 if bias is None else bias.astype(F32))
        return rotated(y, cos, sin, nope).astype(BF16).reshape(len(x), -1)

    def kv_up(x, w, k_pe, *, heads, nope, value):
        y = projected(x, w, 0.0)
        shared = jnp.broadcast_to(k_pe[:, None], (len(x), heads, k_pe.shape[-1]))
        return jnp.concatenate([y[..., :nope].astype(BF16), shared], axis=-1), y[..., nope:].astype(BF16)

    monkeypatch.setattr(mosaic_up_proj, "q_up", q_up)
    monkeypatch.setattr(mosaic_up_proj, "kv_up", kv_up)
    monkeypatch.setattr(up_mosaic, "_unavailable", lambda: None)


B, T, R, H = 2, 32, 64, 3
COS, SIN = rope_tables(jnp.arange(3, 3 + T), RopeConfig(), 64)


def op_case(op, weight=F32, normed=True, biased=True):
    """The op as a function of an implementation's name and of arrays, and the arrays."""
    rng, columns = np.random.default_rng(0), 192 if op is q_up_proj_rope else 256
    x, w, k_pe = draw(rng, B, T, R, dtype=BF16), draw(rng, R, H, columns) / 8, draw(rng, B, T, 64, dtype=BF16)
    extras = [1 + 0.1 * draw(rng, R)] * normed + [draw(rng, H, columns)] * biased

    def run(name, x, w, k_pe, *extras):
        extras = iter(extras)
        options = dict(nope_dim=128, norm_eps=1e-3, implementation=name)
        options |= dict(norm_scale=next(extras) if normed else None, bias=next(extras) if biased else None)
        return op(x, w, *([] if op is q_up_proj_rope else [k_pe]), COS, SIN, **options)

    return run, (x, w.astype(weight), k_pe, *extras)


@pytest.mark.parametrize(
    "op, case",
    [
        (q_up_proj_rope, {}),
        (q_up_proj_rope, dict(weight=BF16, normed=False, biased=False)),
        (kv_up_proj_rope, dict(biased=False)),
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


def test_the_ops_refuse(monkeypatch):
    run, (x, w, k_pe, *extras) = op_case(q_up_proj_rope)
    with pytest.raises(NotImplementedError, match="q_up_proj_rope: .*'mosaic': needs a Hopper GPU.*backend cpu"):
        run("mosaic", x, w, k_pe, *extras)
    stand_ins(monkeypatch)
    with pytest.raises(NotImplementedError, match="'mosaic': found dtype float32, wants bfloat16"):
        run("mosaic", x.astype(F32), w, k_pe, *extras)
    up = dict(nope_dim=128, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="'mosaic': found recipe='mxfp8', out=None, wants None of both"):
        q_up_proj_rope(x, w, COS, SIN, recipe="mxfp8", **up)
    with pytest.raises(NotImplementedError, match="'mosaic': found layouts .'halves', 'pairs'.*wants halves"):
        q_up_proj_rope(x, w, COS, SIN, output_layout="pairs", **up)
    run, (x, w, k_pe, *extras) = op_case(kv_up_proj_rope)
    with pytest.raises(NotImplementedError, match="kv_up_proj_rope: .*'mosaic': found a bias"):
        run("mosaic", x, w, k_pe, *extras)
    assert "mosaic" not in list(IMPLEMENTATIONS)[: list(IMPLEMENTATIONS).index("xla")], "None must not choose it"


@pytest.mark.gpu
@pytest.mark.parametrize("op", [q_up_proj_rope, kv_up_proj_rope])
def test_the_ops_on_a_gpu(op):
    run, args = op_case(op, biased=op is q_up_proj_rope)
    found, wanted = (jax.jit(pulled, static_argnums=(0, 1))(run, name, args) for name in ("mosaic", "xla"))
    judge.assert_close(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, rank, heads", [(8192, 1536, 128), (1024, 2048, 16), (72, 96, 5), (1000, 1536, 5)])
def test_queries_on_a_gpu(tokens, rank, heads):
    check_q(tokens, rank, heads)
    check_q(tokens, rank, heads, biased=True)


@pytest.mark.gpu
@pytest.mark.parametrize("nope, rotary", [(96, 32), (64, 64), (128, 32)])
def test_other_heads_on_a_gpu(nope, rotary):
    check_q(1024, 512, 7, nope=nope, rotary=rotary)
    check_kv(1024, 512, 7, nope=nope, value=nope, rotary=rotary)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, rank, heads", [(8192, 512, 128), (1024, 512, 16), (72, 96, 5), (1000, 512, 5)])
def test_keys_and_values_on_a_gpu(tokens, rank, heads):
    check_kv(tokens, rank, heads)
