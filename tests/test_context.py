"""Context parallelism on eight fake CPU devices: values and every gradient are one device's, and what travels is
latents."""

import dataclasses
import functools
import importlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from judge import assert_close, check, draw

from jax_mla import MLAConfig, attention, blockwise, init, mla, zigzag

# --- The order of tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_zigzag_by_hand(cp, chunk):
    length, wanted = 2 * cp * chunk, []
    for device in range(cp):
        for number in (device, 2 * cp - 1 - device):
            wanted += range(number * chunk, (number + 1) * chunk)
    wanted = wanted if cp > 1 else list(range(length))
    order, back = zigzag(length, cp), zigzag(length, cp, inverse=True)
    assert order.tolist() == wanted and order.dtype == back.dtype == np.int32
    x = np.random.default_rng(0).normal(size=(2, length))
    assert np.array_equal(x[:, order][:, back], x)
    if chunk:  # every device's queries see as many keys as any other's
        assert len(set((order + 1).reshape(cp, -1).sum(1))) == 1


def test_zigzag_of_one_device_is_nothing():
    assert zigzag(7, 1).tolist() == zigzag(7, 1, inverse=True).tolist() == list(range(7))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((6, 2), ValueError, r"length: found 6, wanted a multiple of 2 \* cp = 4"),
        ((4, 4), ValueError, r"length: found 4, wanted a multiple of 2 \* cp = 8"),
        ((-4, 2), ValueError, "length: found -4"),
        ((4, 0), ValueError, "cp: found 0, wanted at least 1"),
        ((4.0, 2), TypeError, "length: found 4.0"),
        ((4, True), TypeError, "cp: found True"),
    ],
)
def test_zigzag_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        zigzag(*arguments)


# --- Attention of queries that say what they see ------------------------------------------------------------------

LAST = np.array([[4, 9, 0, 3, -1, 12, 2, 2, 99], [0, 1, 2, 3, 8, 9, 10, 11, 12]])
Q_IDS = np.array([[1, 1, 2, 2, 2, 2, 0, 7, 1], [1, 1, 1, 2, 2, 2, 2, 3, 3]])
KV_IDS = np.array([[1, 1, 1, 2, 2, 0, 0, 2, 2, 2, 2, 1, 1], [1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 0]])
PACKED = dict(segment_ids=Q_IDS, kv_segment_ids=KV_IDS)


def model(q, k, v, last, q_ids=None, k_ids=None):
    """o and lse in float64; what a mask hides is never touched."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    seen = np.arange(k.shape[1]) <= np.asarray(last)[..., None]
    if q_ids is not None:
        seen = seen & (q_ids[:, :, None] == k_ids[:, None]) & (q_ids != 0)[:, :, None]
    o, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for b, t, h in np.ndindex(lse.shape):
        keys = np.flatnonzero(seen[b, t])
        if keys.size:
            weights = np.exp(k[b, keys, h] @ q[b, t, h] * q.shape[3] ** -0.5)
            o[b, t, h], lse[b, t, h] = weights @ v[b, keys, h] / weights.sum(), np.log(weights.sum())
    return o, lse


@pytest.mark.parametrize("block", [4, 512])
@pytest.mark.parametrize("packed", [False, True])
def test_last_key_against_float64(monkeypatch, block, packed):
    monkeypatch.setattr(blockwise, "BLOCK", block)
    rng = np.random.default_rng(0)
    args = draw(rng, 2, 9, 2, 6), draw(rng, 2, 13, 2, 6), draw(rng, 2, 13, 2, 5)
    ours = functools.partial(attention, last_key=LAST, return_lse=True, **PACKED if packed else {})
    ids = tuple(PACKED.values()) if packed else ()
    check(ours, lambda q, k, v: model(q, k, v, LAST, *ids), args, rng)


def test_last_key_alike_in_all_rows_and_nan_in_padding():
    rng = np.random.default_rng(1)
    q, k, v = draw(rng, 2, 9, 2, 6), draw(rng, 2, 13, 2, 6), draw(rng, 2, 13, 2, 5)
    assert_close(attention(q, k, v, last_key=LAST[1]), model(q, k, v, np.stack([LAST[1]] * 2))[0])
    dead = [np.where((ids == 0)[..., None, None], np.nan, a) for a, ids in ((q, Q_IDS), (k, KV_IDS), (v, KV_IDS))]
    found = attention(*map(jnp.float32, dead), last_key=LAST, **PACKED)
    assert_close(found, model(q, k, v, LAST, *PACKED.values())[0])


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(last_key=LAST[:, :5]), ValueError, r"last_key: found int32\[2, 5\], wanted shape \[9\] or \[2, 9\]"),
        (dict(last_key=LAST * 1.0), TypeError, "last_key: found dtype float"),
        (dict(last_key=LAST, causal=False), ValueError, "last_key: found it besides causal=False"),
        (dict(last_key=LAST, cu_seqlens=np.array([[0, 9]] * 2)), ValueError, "wanted"),
        (dict(last_key=LAST, implementation="cudnn"), NotImplementedError, "'cudnn': found"),
    ],
)
def test_last_key_refuses(options, error, message):
    args = [jax.ShapeDtypeStruct((2, n, 2, 16), jnp.bfloat16) for n in (9, 13, 13)]
    if message.startswith("'cudnn"):
        message = "'cudnn': found last_key: cuDNN is causal by index alone"
    if "last_key: found int" in message:
        options = dict(last_key=LAST[:, :5].astype(np.int32))
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda *a: attention(*a, **options), *args)


COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def collectives(compiled) -> list[tuple[str, int]]:
    """Every one, and how many numbers it gives a device."""
    found = []
    for result, name in re.findall(rf"= (.*?) ({COLLECTIVES})(?:-start)?\(", compiled.as_text()):
        sizes = [math.prod(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\w+\[([\d,]*)\]", result)]
        found += [(name, size) for size in sizes]
    return found


def mesh_of(kind, **axes):
    count = math.prod(axes.values())
    types = (getattr(AxisType, kind),) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=jax.devices()[:count])


def step(function):
    def run(args, cotangents):
        outputs, pullback = jax.vjp(function, *args)
        return outputs, pullback(cotangents)

    return jax.jit(run)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_queries_may_be_spread_over_devices(kind, monkeypatch):
    """In several blocks, over whose loop XLA would gather them. No array is gathered; dk and dv are summed once."""
    monkeypatch.setattr(blockwise, "BLOCK", 4)
    rng, mesh = np.random.default_rng(2), mesh_of(kind, dp=2, cp=2, tp=2)
    shapes = [(2, 16, 2, 6), (2, 12, 2, 6), (2, 12, 2, 5)]
    args, last = [draw(rng, *s) for s in shapes], jnp.asarray(rng.integers(-1, 14, (2, 16)))
    cotangent = draw(rng, 2, 16, 2, 5)
    wanted = step(lambda *a: attention(*a, last_key=last))(args, cotangent)
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))  # noqa: E731
    queries, keys = ("dp", "cp", "tp"), ("dp", None, "tp")
    last = put(last, "dp", "cp")
    given = [put(a, *spec) for a, spec in zip(args, (queries, keys, keys), strict=True)], put(cotangent, *queries)
    compiled = step(lambda *a: attention(*a, last_key=last)).lower(*given).compile()
    found = compiled(*given)
    assert_close(found, wanted)
    assert found[0].sharding.is_equivalent_to(given[1].sharding, 4)
    assert {name for name, _ in collectives(compiled)} == {"all-reduce"}, collectives(compiled)


# --- The layer ----------------------------------------------------------------------------------------------------

CONFIG = MLAConfig(18, 4, 12, 8, 6, 8, 5, norm_eps=1e-2, attention_bias=True)
NO_Q_LORA = dataclasses.replace(CONFIG, q_lora_rank=None, attention_bias=False)
B, T = 4, 24
LATENT = CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim
TP = {"wq_b": P(None, "tp"), "wq": P(None, "tp"), "wkv_b": P(None, "tp"), "wo": P("tp")}
FSDP = {"wq": P("dp", "tp"), "wkv_b": P("dp", "tp"), "wo": P("tp", None, "dp"), "wkv_a": P("dp"), "kv_norm": P("dp")}
# Sequences that cross the borders of chunks of 6 and of 3, and padding at the end and in between.
LENGTHS = [(5, 9, 10), (24,), (1, 2, 3, 4, 5, 6), (13, -4, 7)]
IDS = np.zeros((B, T), np.int32)
for row, lengths in zip(IDS, LENGTHS, strict=True):
    ends = np.cumsum(np.abs((0, *lengths)))
    for number, (length, begin, end) in enumerate(zip(lengths, ends[:-1], ends[1:], strict=True)):
        row[begin:end] = number + 1 if length > 0 else 0


@functools.cache
def inputs(config, packed: bool):
    rng = np.random.default_rng(3)
    params = {n: v + 0.2 * draw(rng, *v.shape) for n, v in init(jax.random.key(0), config).items()}
    x, dy = draw(rng, B, T, config.hidden_size), draw(rng, B, T, config.hidden_size)
    return params, jnp.where((IDS == 0)[..., None], jnp.nan, x) if packed else x, dy


@functools.cache
def on_one_device(config, packed: bool, **options):
    params, x, dy = inputs(config, packed)
    ids = IDS if packed else None
    return jax.device_get(step(lambda p, x: mla(p, x, config, segment_ids=ids, **options))((params, x), dy))


def spread(mesh, config, packed: bool, specs):
    """Arguments in zig-zag order on the mesh, cotangents, and ids."""
    order, rows = zigzag(T, mesh.shape["cp"]), P("dp" if "dp" in mesh.shape else None, "cp")
    params, x, dy = inputs(config, packed)
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
    params = {name: put(value, specs.get(name, P())) for name, value in params.items()}
    return (params, put(x[:, order], rows)), put(dy[:, order], rows), put(IDS[:, order], rows) if packed else None


def natural(found, cp: int):
    y, (dparams, dx) = jax.device_get(found)
    back = zigzag(T, cp, inverse=True)
    return y[:, back], (dparams, dx[:, back])


MESHES = [
    ("Auto", dict(cp=2), False, CONFIG, {}),
    ("Auto", dict(cp=4), True, CONFIG, {}),
    ("Auto", dict(dp=2, cp=2), True, NO_Q_LORA, {}),
    ("Auto", dict(cp=2, tp=2), True, CONFIG, TP),
    ("Auto", dict(dp=2, cp=2, tp=2), False, NO_Q_LORA, TP),
    ("Explicit", dict(cp=4), False, CONFIG, {}),
    ("Explicit", dict(dp=2, cp=2), True, CONFIG, {}),
    ("Explicit", dict(cp=2, tp=2), False, CONFIG, TP),
    ("Explicit", dict(dp=2, cp=2, tp=2), True, NO_Q_LORA, FSDP),
    ("Auto, opaque", dict(dp=2, cp=2, tp=2), True, CONFIG, TP),
]


@pytest.mark.parametrize(
    "kind, axes, packed, config, specs",
    MESHES,
    ids=lambda v: "x".join(f"{n}{s}" for n, s in v.items() if isinstance(s, int)) if isinstance(v, dict) else None,
)
def test_the_layer_gives_one_devices_values_and_gradients(kind, axes, packed, config, specs, monkeypatch):
    if kind == "Auto, opaque":  # as kernels are, which XLA cannot look into
        for name in ("norm", "rope", "rope_kv"):
            module = importlib.import_module(f"jax_mla.{name}")
            hidden = dataclasses.replace(module.IMPLEMENTATIONS["xla"], opaque=True)
            monkeypatch.setitem(module.IMPLEMENTATIONS, "xla", hidden)
    mesh = mesh_of(kind.split(",")[0], **axes)
    args, dy, ids = spread(mesh, config, packed, specs)
    run = step(lambda p, x: mla(p, x, config, segment_ids=ids, context_axis="cp"))
    compiled = run.lower(args, dy).compile()
    found = compiled(args, dy)
    assert_close(natural(found, axes["cp"]), on_one_device(config, packed))
    if kind == "Explicit":
        for leaf, given in zip(jax.tree.leaves(found), jax.tree.leaves((dy, args)), strict=True):
            assert leaf.sharding.is_equivalent_to(given.sharding, leaf.ndim)
    # Latents are gathered, of a device's own part of the batch; keys, values and queries are not, nor are x and y.
    rows = B // axes.get("dp", 1)
    moved = collectives(compiled)
    gathered = [size for name, size in moved if name == "all-gather"]
    assert gathered.count(rows * T * LATENT) == 1, moved
    parameters = {value.size for value in args[0].values()} | {value.size // 2 for value in args[0].values()}
    assert max(set(gathered) - (parameters if specs is FSDP else set())) == rows * T * LATENT, moved
    assert max(size for _, size in moved) <= max(rows * T * LATENT, *parameters), moved
    assert "all-to-all" not in {name for name, _ in moved}, moved


@pytest.mark.parametrize("check_vma, packed", [(True, True), (False, False)])
def test_inside_shard_map(check_vma, packed):
    mesh = mesh_of("Auto", dp=2, cp=2)
    args, dy, ids = spread(mesh, CONFIG, packed, {})
    rows = P("dp", "cp")
    run = lambda p, x, ids: mla(p, x, CONFIG, segment_ids=ids, context_axis="cp")  # noqa: E731
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(), rows, rows), out_specs=rows, check_vma=check_vma)
    compiled = step(lambda p, x: mapped(p, x, ids)).lower(args, dy).compile()
    assert_close(natural(compiled(args, dy), 2), on_one_device(CONFIG, packed))
    gathered = [size for name, size in collectives(compiled) if name == "all-gather" and size > B * T]
    scattered = [size for name, size in collectives(compiled) if name == "reduce-scatter"]
    assert gathered == [B * T * LATENT // 2] and scattered == [B * T * LATENT // 4]


@pytest.mark.parametrize("kind", ["Explicit", "Manual"])
def test_remat_positions_and_largest_logits(kind):
    """Positions of the caller's; what is kept is latents; the largest logit over all devices."""
    mesh = mesh_of("Auto" if kind == "Manual" else kind, cp=4)
    args, dy, _ = spread(mesh, CONFIG, False, {})
    positions = np.random.default_rng(5).integers(0, 50, (B, T)).astype(np.int32)
    options = dict(remat="latents", return_max_logit=True)
    run = functools.partial(mla, config=CONFIG, **options)
    params, x, cotangent = inputs(CONFIG, False)
    nothing = jnp.zeros(CONFIG.num_heads)
    (y, wanted_largest), gradients = step(lambda p, x: run(p, x, positions=positions))(
        (params, x), (cotangent, nothing)
    )
    positions = jax.device_put(positions[:, zigzag(T, 4)], NamedSharding(mesh, P(None, "cp")))
    run = functools.partial(run, context_axis="cp")
    if kind == "Manual":
        rows = P(None, "cp")
        mapped = jax.shard_map(
            lambda p, x, at: run(p, x, positions=at), mesh=mesh, in_specs=(P(), rows, rows), out_specs=(rows, P())
        )
    else:
        mapped = lambda p, x, at: run(p, x, positions=at)  # noqa: E731
    (y_found, largest), found = step(lambda p, x: mapped(p, x, positions))(args, (dy, nothing))
    assert_close(natural((y_found, found), 4), (y, gradients))
    assert_close(largest, wanted_largest)


def test_mxfp8_is_one_devices_to_the_block():
    """No block of 32 tokens has two chunks: the codes of the forward pass are the same. In the backward pass each
    device rounds its own terms of dk and dv, before they are summed: that is what may differ by E4M3's steps."""
    config = MLAConfig(64, 2, None, 32, 32, 32, 32, norm_eps=1e-2)
    rng, mesh = np.random.default_rng(6), mesh_of("Auto", cp=2)
    params, x, dy = init(jax.random.key(0), config), draw(rng, 1, 128, 64), draw(rng, 1, 128, 64)
    wanted = step(lambda p, x: mla(p, x, config, recipe="mxfp8"))((params, x), dy)
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))  # noqa: E731
    order, back = zigzag(128, 2), zigzag(128, 2, inverse=True)
    args = jax.tree.map(put, params), put(x[:, order], None, "cp")
    run = step(lambda p, x: mla(p, x, config, recipe="mxfp8", context_axis="cp"))
    y, (dparams, dx) = jax.device_get(run(args, put(dy[:, order], None, "cp")))
    found = dict(dparams, x=dx[:, back], y=y[:, back])
    for name, w in dict(wanted[1][0], x=wanted[1][1], y=wanted[0]).items():
        limit = 6e-2 if name in ("x", "kv_norm", "wkv_a", "wkv_b") else 5e-3
        assert np.linalg.norm(found[name] - w) < limit * np.linalg.norm(w), name
    assert_close(found["y"], wanted[0])


def test_without_jit_and_in_the_modules():
    """The mesh that is set serves where arrays lie on none."""
    from flax import nnx

    from jax_mla import linen
    from jax_mla import nnx as in_nnx

    params, x, _ = inputs(CONFIG, True)
    x, ids = x[:, zigzag(T, 2)], IDS[:, zigzag(T, 2)]
    wanted = on_one_device(CONFIG, True)[0]
    module = in_nnx.MLA(CONFIG, rngs=nnx.Rngs(0))
    for name, value in params.items():
        getattr(module, name)[...] = value
    with jax.set_mesh(mesh_of("Auto", cp=2)):
        options = dict(segment_ids=ids, context_axis="cp")
        found = [linen.MLA(CONFIG).apply({"params": params}, x, **options), module(x, **options)]
    for kind in ("Auto", "Explicit"):
        put = lambda a, kind=kind: jax.device_put(a, NamedSharding(mesh_of(kind, cp=2), P(None, "cp")))  # noqa: E731
        found.append(mla(params, put(x), CONFIG, segment_ids=put(ids), context_axis="cp"))
    for y in found:
        assert_close(np.asarray(y)[:, zigzag(T, 2, inverse=True)], wanted)


@pytest.mark.parametrize(
    "tokens, axes, options, error, message",
    [
        (22, dict(cp=4), {}, ValueError, r"x: found T=22 over context_axis 'cp' of 4 devices, wanted .* 2 \* cp = 8"),
        (1, dict(cp=2), {}, ValueError, r"x: found T=1 over context_axis 'cp' of 2 devices, wanted .* 2 \* cp = 4"),
        (64, dict(cp=2), dict(recipe="mxfp8"), ValueError, r"found T=64 .* wanted a multiple of 32 \* 2 \* cp = 128"),
        (24, dict(dp=2), {}, ValueError, r"context_axis: found 'cp', wanted one of the mesh's, \['dp'\]"),
        (24, {}, {}, ValueError, "context_axis: found 'cp', wanted a mesh: `jax.set_mesh`, or x placed on one"),
        (24, dict(cp=2), dict(context_axis=0), TypeError, "context_axis: found 0, wanted the name of a mesh axis"),
    ],
)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_layer_refuses(kind, tokens, axes, options, error, message):
    config = MLAConfig(64, 4, 64, 32, 32, 32, 32)
    params = jax.eval_shape(lambda: init(jax.random.key(0), config))
    run = functools.partial(mla, config=config, **dict(context_axis="cp") | options)
    x = jax.ShapeDtypeStruct((2, tokens, 64), jnp.float32)
    with jax.set_mesh(mesh_of(kind, **axes or dict(other=1))) if axes else jax.set_mesh(None):
        with pytest.raises(error, match=message):
            jax.eval_shape(run, params, x)


def test_a_share_of_tokens_is_refused_inside_shard_map():
    """Case 49 of public reports: three tokens on each of two devices are no chunks of one length."""
    mesh, (params, x, _) = mesh_of("Auto", cp=2), inputs(CONFIG, False)
    run = lambda p, x: mla(p, x, CONFIG, context_axis="cp")  # noqa: E731
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(), P(None, "cp")), out_specs=P(None, "cp"))
    with pytest.raises(ValueError, match=r"found T=6 over context_axis 'cp' of 2 devices, wanted .* 2 \* cp = 4"):
        jax.eval_shape(mapped, params, x[:, :6])
