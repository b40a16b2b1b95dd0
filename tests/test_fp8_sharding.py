"""FP8 on eight fake CPU devices: a scale is of the whole tensor, whatever it is spread over, so codes, values and
gradients are one device's, for a maximum of one number a tensor."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from judge import assert_same
from test_fp8 import oracle
from test_fp8_recipe import RMS, gap

from jax_mla import MLAConfig, init, mla, quantize_fp8, zigzag

B, T, M, H, R, C, N, PE, V = 4, 8, 16, 4, 12, 10, 6, 8, 5
CONFIG = MLAConfig(M, H, R, C, N, PE, V, norm_eps=1e-2)
TP = {"wq_b": P(None, "tp"), "wkv_b": P(None, "tp"), "wo": P("tp")}
FSDP = {"wq_a": P("dp"), "wkv_a": P("dp"), "wq_b": P("dp", "tp"), "wkv_b": P("dp", "tp"), "wo": P("tp", None, "dp")}
COLLECTIVE = re.compile(r" = (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(")


def mesh(kind, **axes):
    size = int(np.prod(list(axes.values())))
    types = (AxisType.Explicit if kind == "Explicit" else AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=jax.devices()[:size])


def place(devices, tree, specs):
    is_spec = lambda s: isinstance(s, P)  # noqa: E731
    return jax.tree.map(lambda s, a: jax.device_put(a, NamedSharding(devices, s)), specs, tree, is_leaf=is_spec)


def collectives(text):
    """(name, dtype, dims) of every array that one gives."""
    found = []
    for shape, name in COLLECTIVE.findall(text):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", shape)
        found += [(name, dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in arrays]
    return found


@pytest.mark.parametrize("kind", ["Explicit", "Auto", "Manual"])
def test_a_scale_is_of_the_whole_tensor(kind):
    """Its largest number lies on one device. Codes lie as x does, transposed with its dims, and gradients as x; what
    goes between devices is one number, under a mesh once for each of its axes."""
    rng = np.random.default_rng(0)
    x, c = rng.normal(size=(2, 4, 6, 8)).astype(np.float32)
    x[3, 2, 7] = 40
    spec, turned = P("dp", None, "tp"), P("tp", "dp")
    devices = mesh(kind, dp=2, tp=4)

    def run(x, c):
        def quantize(x):
            t = quantize_fp8(x, usage="both", format="e5m2")
            return t.proxy, t.detach()

        _, pullback, t = jax.vjp(quantize, x, has_aux=True)
        return t.rowwise_codes, t.columnwise_codes, t.scale_inv, pullback(c)[0]

    if kind == "Manual":
        run = jax.shard_map(run, mesh=devices, in_specs=(spec, spec), out_specs=(spec, turned, P(), spec))
    given = place(devices, (x, c), (spec, spec))
    compiled = jax.jit(run).lower(*given).compile()
    rows, columns, inverse, dx = compiled(*given)
    codes, _, wanted = oracle(x, "e5m2")
    assert np.array_equal(np.asarray(rows).view(np.uint8), codes) and inverse == wanted
    assert np.array_equal(np.asarray(columns).view(np.uint8), np.moveaxis(codes, -1, 0))
    assert_same(dx, c)
    for array, s in ((rows, spec), (columns, turned), (dx, spec)):
        assert array.sharding.is_equivalent_to(NamedSharding(devices, s), array.ndim)
    moved = [(name, dims) for name, _, dims in collectives(compiled.as_text())]
    assert moved == [("all-reduce", ())] * (1 if kind == "Manual" else 2)


def parameters():
    rng, shapes = np.random.default_rng(3), jax.eval_shape(lambda: init(jax.random.key(0), CONFIG))
    return {n: np.float32(rng.normal(size=s.shape) * 0.3) for n, s in shapes.items()}


def inputs():
    rng = np.random.default_rng(4)
    return parameters(), *rng.normal(size=(2, B, T, M)).astype(np.float32)


def step(x, options, in_shard_map=lambda run: run):
    def run(p, x, c):
        forward = in_shard_map(lambda p, x: mla(p, x, CONFIG, recipe="fp8", **options))
        y, pullback = jax.vjp(forward, p, x)
        return y, *pullback(c)

    return jax.jit(run, out_shardings=x)


@functools.cache
def on_one_device():
    return jax.device_get(step(None, {})(*inputs()))


ROWS = (B // 2, T)
# name: (mesh, parameters, x; how many numbers go between devices, at most; which activations are gathered).
# One number a mesh axis for the scale of each tensor that the axis spreads: of x, two latents, o and five weights, and
# of the cotangents of y, q, k and v, and the latents.
LAYERS = {
    "data, heads, FSDP": ("Explicit", dict(dp=2, tp=4), FSDP, P("dp"), 14 + 6, set()),
    "data, heads, FSDP, tokens over heads": (
        "Auto",
        dict(dp=2, tp=4),
        FSDP,
        P("dp", "tp"),
        14 + 6 + 4,
        {(*ROWS, M), (*ROWS, R), (*ROWS, C + PE)},
    ),
    "heads, context": ("Explicit", dict(tp=2, cp=2), TP, P(None, "cp"), 9 + 6, {(B, T, C + PE)}),
    "data, in shard_map": ("Manual", dict(dp=4), {}, P("dp"), 9 + 4, set()),  # some again in the backward pass
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_gives_one_devices_values_and_gradients(name):
    kind, axes, specs, rows, numbers, activations = LAYERS[name]
    devices, (params, x, c) = mesh(kind, **axes), inputs()
    specs = {n: specs.get(n, P()) for n in params}
    order = zigzag(T, axes["cp"]) if "cp" in axes else np.arange(T)
    given = place(devices, (params, x[:, order], c[:, order]), (specs, rows, rows))
    layout = jax.tree.map(lambda s: NamedSharding(devices, s), (rows, specs, rows), is_leaf=lambda s: isinstance(s, P))
    mapped = functools.partial(jax.shard_map, mesh=devices, in_specs=(P(), rows), out_specs=rows)
    options = dict(context_axis="cp") if "cp" in axes else dict(remat="qkv" if kind == "Manual" else None)
    run = step(layout if kind == "Auto" else None, options, mapped if kind == "Manual" else lambda run: run)
    compiled = run.lower(*given).compile()
    found = compiled(*given)
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(layout), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
    y, gradients, dx = jax.device_get(found)
    back = np.argsort(order)
    found, wanted = ({"y": y, "x": dx} | p for y, p, dx in ((y[:, back], gradients, dx[:, back]), on_one_device()))
    for parameter, value in wanted.items():
        # Sums in another order, in which a tie may become another code. Along the context every device rounds the
        # cotangent of keys and values that its own queries give, before they are summed.
        partial = "cp" in axes and parameter in ("x", "wkv_a", "wkv_b", "kv_norm")
        assert gap(found[parameter], value) < (3 * RMS["e5m2"] if partial else 1e-3), parameter
    moved = collectives(compiled.as_text())
    assert sum(np.prod(dims, dtype=int) == 1 for _, _, dims in moved) <= numbers
    assert not {"all-to-all", "reduce-scatter"}.intersection(name for name, _, _ in moved)
    gathered = {(dims, dtype) for name, dtype, dims in moved if name == "all-gather"}
    assert {dims for dims, _ in gathered if dims[:2] in (ROWS, (B, T))} == activations
    weights = {(tuple(sorted(dims)), dtype) for dims, dtype in gathered if dims not in activations}
    of_weights = {tuple(sorted(shape)) for shape in ((M, R), (M, C + PE), (R, 1, N + PE), (C, 1, N + V), (1, V, M))}
    assert {shape for shape, _ in weights} == (of_weights if LAYERS[name][2] is FSDP else set())
    # What FSDP gathers of weights: codes where types say how they are spread (which XLA's CPU moves as float16), of
    # each copy; where XLA decides, on a CPU the float32 values that it multiplies.
    assert {dtype for _, dtype in weights} <= ({"f16", "f8e4m3fn", "u8"} if kind == "Explicit" else {"f32"})
