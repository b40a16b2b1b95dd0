"""Sequence parallelism: x's tokens spread over the mesh axis that heads are spread over, on eight fake CPU devices.
Values and every gradient equal one device's, and between devices go latents, y and its cotangent: no heads."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from judge import assert_close, draw
from test_sharding import opaque, place, step

from jax_mla import MLAConfig, init, init_cache, mla, prefill, sharding

B, T, M, H, R, C, N, PE, V = 4, 24, 20, 4, 12, 10, 6, 8, 5
CONFIG = MLAConfig(M, H, R, C, N, PE, V, norm_eps=1e-2, attention_bias=True)
IDS = jnp.asarray(np.sort(np.random.default_rng(9).integers(0, 4, (B, T)))[:, ::-1].copy(), jnp.int32)
TP = {"wq": P(None, "tp"), "wq_b": P(None, "tp"), "wkv_b": P(None, "tp"), "wo": P("tp")}
FSDP = {"wq_a": P("fsdp"), "wkv_a": P("fsdp"), "wq_b": P("fsdp", "tp"), "wkv_b": P("fsdp", "tp")}
FSDP |= {"wo": P("tp", None, "fsdp"), "q_norm": P("fsdp"), "wo_bias": P("fsdp")}
# name: (sizes of dp, fsdp, tp, parameters, keywords of `mla`)
LAYERS = {
    "tp": ((2, 1, 4), TP, {}),
    "fsdp, tp, latents": ((1, 2, 4), FSDP, dict(remat="latents")),
    "dp, fsdp, tp, packed": ((2, 2, 2), FSDP, dict(segment_ids=IDS, remat="nothing")),
}


def mesh(kind, sizes):
    return jax.make_mesh(sizes, ("dp", "fsdp", "tp"), axis_types=(getattr(AxisType, kind),) * 3)


def inputs(config=CONFIG, tokens=T):
    rng, width = np.random.default_rng(2), config.hidden_size
    params = {n: v + 0.2 * draw(rng, *v.shape) for n, v in init(jax.random.key(0), config).items()}
    return params, draw(rng, B, tokens, width), draw(rng, B, tokens, width)


@functools.cache
def wanted(name):
    params, x, dy = inputs()
    return step(lambda p, x: mla(p, x, CONFIG, **LAYERS[name][2]))((params, x), dy)


def spread(kind, sizes, specs, params, *tokens):
    """Everything on its devices: where parameters lie, where x and y do, and the arrays."""
    devices, batch = mesh(kind, sizes), tuple(a for a, n in zip(("dp", "fsdp"), sizes, strict=False) if n > 1)
    layout = {name: specs.get(name, P()) for name in params}, P(batch, "tp")
    return devices, layout, place(devices, params, layout[0]), *(place(devices, a, layout[1]) for a in tokens)


def gathered(text):
    """Shapes of what is gathered, of two dims or more."""
    found = re.findall(r" = \w+\[([\d,]+)\]\S* all-gather\(", text)
    return {tuple(map(int, dims.split(","))) for dims in found if "," in dims}


CASES = [(name, kind) for name in LAYERS for kind in ("Auto", "Explicit")] + [("dp, fsdp, tp, packed", "Auto, opaque")]


@pytest.mark.parametrize("name, kind", CASES)
def test_the_layer_gives_one_devices_values_and_gradients(name, kind, monkeypatch):
    sizes, specs, options = LAYERS[name]
    params, x, dy = inputs()
    expected = wanted(name)
    if kind == "Auto, opaque":
        opaque(monkeypatch)
    devices, layout, params, x, dy = spread(kind.split(",")[0], sizes, specs, params, x, dy)
    ids = options.get("segment_ids")
    if ids is not None:  # spread as x is
        options = options | dict(segment_ids=place(devices, ids, layout[1]))
    shardings = jax.tree.map(lambda s: NamedSharding(devices, s), layout, is_leaf=lambda s: isinstance(s, P))

    def run(params, x, dy):
        y, pullback = jax.vjp(lambda p, x: x + mla(p, x, CONFIG, **options), params, x)  # y lies as x does
        return y - x, pullback(dy)

    run = jax.jit(run, out_shardings=(shardings[1], shardings) if kind != "Explicit" else None)
    compiled = run.lower(params, x, dy).compile()
    y, (dparams, dx) = compiled(params, x, dy)
    assert_close((y, (dparams, dx - dy)), expected, 1e-5)
    for found, sharding_ in zip((y, dx, *dparams.values()), (*shardings[1:] * 2, *shardings[0].values()), strict=True):
        assert found.sharding.is_equivalent_to(sharding_, found.ndim)
    text, rows = compiled.as_text(), B // (sizes[0] * sizes[1])
    tokens = {(rows, T, R), (rows, T, C + PE), (rows, T, M)}
    heads = {"wq_b": H // sizes[2], "wkv_b": H // sizes[2]}
    weights = {tuple(heads.get(n, d) if i == 1 else d for i, d in enumerate(params[n].shape)) for n in params}
    weights.add((H // sizes[2], V, M))
    assert tokens <= gathered(text) <= tokens | (weights if sizes[1] > 1 else set()) | {(rows, T)}
    if sizes != (2, 2, 2):  # of two axes of one length XLA takes the one for the other, in wq_a's gradient
        assert " all-to-all(" not in text


@pytest.mark.parametrize("kind, rank", [("Auto", 12), ("Explicit", None)])
def test_positions_spread_as_tokens_are_and_largest_logits(kind, rank):
    """With and without a query low rank: then x itself is gathered for queries."""
    config = MLAConfig(M, H, rank, C, N, PE, V)
    params, x, dy = inputs(config)
    positions = jnp.asarray(np.random.default_rng(3).integers(0, 50, (B, T)), jnp.int32)

    def run(params, x, positions):
        return mla(params, x, config, positions=positions, return_max_logit=True)

    expected = jax.jit(run)(params, x, positions)
    _, _, params, x, positions = spread(kind, (2, 1, 4), TP, params, x, positions)
    assert_close(jax.jit(run)(params, x, positions), expected, 1e-5)
    for array in (x, positions):  # outside jit
        whole = sharding.whole_tokens(array)
        assert whole.sharding.is_equivalent_to(NamedSharding(array.sharding.mesh, P("dp")), array.ndim)


@pytest.mark.parametrize("kind, rank", [("Auto", 64), ("Explicit", None)])
def test_in_mxfp8(kind, rank):
    """A device's tokens are whole blocks. Under an Auto mesh y alone: gradients take long to compile."""
    config = MLAConfig(64, 2, rank, 64, 32, 32, 32, norm_eps=1e-2, attention_bias=True)
    params, x, dy = inputs(config, 64)
    forward = lambda p, x: mla(p, x, config, recipe="mxfp8")  # noqa: E731
    run = step(forward) if kind == "Explicit" else jax.jit(lambda args, _: forward(*args))
    expected = run((params, x), dy)
    _, _, params, x, dy = spread(kind, (2, 2, 2), FSDP | dict(wq=P("fsdp", "tp")), params, x, dy)
    found = run((params, x), dy)
    # Sums in another order move few codes, each by one step.
    for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(np.asarray(f) - w) < 1e-2 * np.linalg.norm(w)


def test_prefill():
    params, x, _ = inputs()

    def run(params, x):
        return prefill(params, x, CONFIG, init_cache(CONFIG, B, T, x.dtype))

    expected = jax.jit(run)(params, x)
    _, _, params, x = spread("Explicit", (2, 1, 4), TP, params, x)
    assert_close(jax.tree.leaves(jax.jit(run)(params, x)), jax.tree.leaves(expected), 1e-5)


def test_whole_tokens_compile_to_the_same_program(monkeypatch):
    """What XLA is told about tokens changes nothing where they are not spread."""
    params, x, dy = inputs()

    def text():
        run = step(lambda p, x: mla(p, x, CONFIG, segment_ids=IDS, remat="latents"))
        _, _, p, *_ = spread("Auto", (2, 2, 2), FSDP, params)
        devices = mesh("Auto", (2, 2, 2))
        a, b = (place(devices, array, P(("dp", "fsdp"))) for array in (x, dy))
        lowered = run.lower((p, a), b)
        # Opcodes and shapes, whatever their names.
        found = re.findall(r" = (\(.*?\)|\S+) ([\w-]+)\(", lowered.compile().as_text())
        return "sharding_constraint" in lowered.as_text(), sorted(found)

    (told, program), _ = text(), monkeypatch.setattr(sharding, "whole_tokens", lambda x: x)
    assert (told, False, program) == (True, *text())
