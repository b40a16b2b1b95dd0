"""Eight fake CPU devices: values and every gradient equal one device's under Auto and Explicit meshes and in shard_map.

Meshes of (2, 4) over batch ("data") and heads ("model"). Dims that do not divide, and sequences, come later.
"""

import dataclasses
import functools
import importlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from judge import assert_close, assert_same, draw

from jax_mla import (
    MLAConfig,
    apply_rope,
    apply_rope_kv,
    attention,
    dequantize,
    init,
    kv_up_proj_rope,
    mla,
    mxfp8,
    norm,
    norm_quantize,
    q_up_proj_rope,
    quantize_mxfp8,
    rms_norm,
    rope,
    rope_kv,
    rope_tables,
)

dequantize_op = importlib.import_module("jax_mla.dequantize")  # whose name in the package is the op's

B, T, H, N, PE, V, R, M = 4, 6, 4, 6, 8, 5, 12, 16
COS, SIN = rope_tables(jnp.arange(7, 7 + T), MLAConfig.tiny().rope, PE)
COS_32, SIN_32 = rope_tables(jnp.arange(7, 39), MLAConfig.tiny().rope, 32)
IDS = jnp.asarray(np.array([[1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 3, 3], [1, 2, 3, 4, 5, 6], [1, 1, 1, 1, 0, 0]]), jnp.int32)


def mesh(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(getattr(AxisType, kind),) * 2)


def packed(q, k, v):
    """Ids sharded as the batch is, by hand where the function sees one device's shard."""
    ids = IDS if q.shape[0] == B else jax.lax.dynamic_slice_in_dim(IDS, 2 * jax.lax.axis_index("data"), 2)
    return attention(q, k, v, segment_ids=ids)


DATA, HEADS = P("data"), P("data", None, "model")
SELF = dict(q=(B, T, H, N + PE), k=(B, T, H, N + PE), v=(B, T, H, V))
# op: (function, argument shapes, argument specs, output specs). What a spec leaves out is replicated.
OPS = {
    "apply_rope": (
        lambda x, cos, sin: apply_rope(x, cos, sin, rotary_dim=PE),
        [(B, T, H, 14), COS, SIN],
        [HEADS, P(), P()],
        HEADS,
    ),
    "apply_rope_kv": (
        lambda kv, k_pe, cos, sin: apply_rope_kv(kv, k_pe, cos, sin, nope_dim=N),
        [(B, T, H, N + V), (B, T, PE), COS, SIN],
        [HEADS, DATA, P(), P()],
        (HEADS, HEADS),
    ),
    "rms_norm": (lambda x, s: rms_norm(x, s, 1e-2), [(B, T, R), (R,)], [DATA, P()], DATA),
    "q_up_proj_rope": (
        lambda x, w, s, b: q_up_proj_rope(x, w, COS, SIN, nope_dim=N, norm_scale=s, norm_eps=1e-2, bias=b),
        [(B, T, R), (R, H, N + PE), (R,), (H, N + PE)],
        [DATA, P(None, "model"), P(), P("model")],
        HEADS,
    ),
    "kv_up_proj_rope": (
        lambda x, w, k_pe, s, b: kv_up_proj_rope(x, w, k_pe, COS, SIN, nope_dim=N, norm_scale=s, bias=b),
        [(B, T, R), (R, H, N + V), (B, T, PE), (R,), (H, N + V)],
        [DATA, P(None, "model"), DATA, P(), P("model")],
        (HEADS, HEADS),
    ),
    "attention": (lambda *a: attention(*a, return_lse=True), list(SELF.values()), [HEADS] * 3, (HEADS, HEADS)),
    "attention, packed": (packed, list(SELF.values()), [HEADS] * 3, HEADS),
    "q_up_proj_rope, mxfp8": (
        lambda x, w, s, b: dequantize(
            q_up_proj_rope(x, w, COS_32, SIN_32, nope_dim=32, norm_scale=s, bias=b, recipe="mxfp8", out="mxfp8")
        ),
        [(B, 32, 32), (32, H, 64), (32,), (H, 64)],
        [DATA, P(None, "model"), P(), P("model")],
        HEADS,
    ),
    "kv_up_proj_rope, mxfp8": (
        lambda x, w, k_pe, s: kv_up_proj_rope(x, w, k_pe, COS_32, SIN_32, nope_dim=32, norm_scale=s, recipe="mxfp8"),
        [(B, 32, 32), (32, H, 64), (B, 32, 32), (32,)],
        [DATA, P(None, "model"), DATA, P()],
        (HEADS, HEADS),
    ),
    "attention, mxfp8": (
        lambda *a: attention(*(quantize_mxfp8(x, usage="both", token_axis=-3) for x in a)),
        [(B, 32, H, 64), (B, 32, H, 64), (B, 32, H, 32)],
        [HEADS] * 3,
        HEADS,
    ),
}


def arrays(shapes):
    rng = np.random.default_rng(0)
    return [draw(rng, *s) if isinstance(s, tuple) else s for s in shapes]


def step(function):
    def run(args, cotangents):
        outputs, pullback = jax.vjp(function, *args)
        return outputs, pullback(cotangents)

    return jax.jit(run)


def place(mesh, tree, specs):
    return jax.tree.map(
        lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, specs, is_leaf=lambda x: isinstance(x, P)
    )


def opaque(monkeypatch):
    """Every op's pure-jnp implementation taken for one that XLA cannot look into, as it cannot into our kernels."""
    for module in (dequantize_op, mxfp8, norm, norm_quantize, rope, rope_kv):
        hidden = dataclasses.replace(module.IMPLEMENTATIONS["xla"], opaque=True)
        monkeypatch.setitem(module.IMPLEMENTATIONS, "xla", hidden)


KINDS = ["Auto", "Explicit", "Manual", "Manual, unchecked"]
OPAQUE = ["apply_rope", "apply_rope_kv", "rms_norm", "q_up_proj_rope, mxfp8", "kv_up_proj_rope, mxfp8"]


@functools.cache
def on_one_device(name):
    """Arguments, cotangents, and what they give: once for all kinds of mesh."""
    function, shapes, _, _ = OPS[name]
    rng, args = np.random.default_rng(1), tuple(arrays(shapes))
    cotangents = jax.tree.map(lambda s: draw(rng, *s.shape), jax.eval_shape(function, *args))
    return args, cotangents, step(function)(args, cotangents)


CASES = [(name, kind) for name, kind in itertools.product(OPS, KINDS) if "mxfp8" not in name or kind != "Manual"]


@pytest.mark.parametrize("name, kind", CASES + [(name, "Auto, opaque") for name in OPAQUE])
def test_an_op_gives_one_devices_values_and_gradients(name, kind, monkeypatch):
    function, _, specs, out_specs = OPS[name]
    args, cotangents, wanted = on_one_device(name)
    if kind == "Auto, opaque":
        opaque(monkeypatch)
    devices = mesh("Explicit" if kind == "Explicit" else "Auto")
    if kind.startswith("Manual"):
        function = jax.shard_map(
            function, mesh=devices, in_specs=tuple(specs), out_specs=out_specs, check_vma="unchecked" not in kind
        )
    given = place(devices, args, tuple(specs)), place(devices, cotangents, out_specs)
    compiled = step(function).lower(*given).compile()
    found = compiled(*given)
    assert_close(found, wanted)
    if kind == "Explicit":  # the type says so, and the array is so
        for leaf, spec in zip(jax.tree.leaves(found[0]), jax.tree.leaves(out_specs, is_leaf=_is_spec), strict=True):
            assert leaf.sharding.is_equivalent_to(NamedSharding(devices, spec), leaf.ndim)
        for leaf, spec in zip(found[1], specs, strict=True):
            assert leaf.sharding.is_equivalent_to(NamedSharding(devices, spec), leaf.ndim)
    # Gradients of what is replicated are summed over devices; no activation is gathered.
    assert not re.search(r" all-gather\(| all-to-all\(", compiled.as_text())


@pytest.mark.parametrize("tokens", [64, 256])
def test_blocks_that_no_device_has_whole_are_gathered(tokens, monkeypatch):
    """Over 4 devices: 64 tokens are 16 each, half a block; 256 are two blocks each."""
    opaque(monkeypatch)
    x = arrays([(2, tokens, 3, 32)])[0]
    run = jax.jit(lambda x: quantize_mxfp8(x, usage="both", token_axis=-3).bytes())
    wanted = run(x)
    devices = mesh("Auto")
    sharded = place(devices, x, P("data", "model"))
    compiled = run.lower(sharded).compile()
    assert_same(compiled(sharded), wanted)
    gathers = re.search(r" all-gather\(", compiled.as_text())
    assert bool(gathers) == (tokens == 64)


def test_vmap_of_what_xla_cannot_look_into(monkeypatch):
    """Twice, one argument of three batched or two: the batch is one more dim by which XLA may spread the arrays."""
    opaque(monkeypatch)
    x, tables = arrays([(3, 2, B, T, H, 14)])[0], [jnp.stack([t, 2 * t]) for t in (COS, SIN)]
    function = jax.vmap(lambda x, c, s: apply_rope(x, c, s, rotary_dim=PE), (0, 0, 0))
    function = jax.vmap(function, (0, None, None))
    wanted = jax.jit(function)(x, *tables)
    devices = mesh("Auto")
    sharded = place(devices, x, P(None, "data", None, None, "model"))
    compiled = jax.jit(function).lower(sharded, *tables).compile()
    assert_close(compiled(sharded, *tables), wanted)
    assert not re.search(r" all-gather\(| all-to-all\(", compiled.as_text())


def _is_spec(x):
    return isinstance(x, P)


CONFIG = MLAConfig(M, H, R, 8, N, PE, V, norm_eps=1e-2, attention_bias=True)
# Tensor parallel over heads, as Megatron-LM: latents and their parameters are replicated.
TP = {"wq_b": P(None, "model"), "wkv_b": P(None, "model"), "wo": P("model")}
# FSDP besides: the first dim of every matrix over "data".
FSDP = {
    "wq_a": P("data"),
    "wkv_a": P("data"),
    "wq_b": P("data", "model"),
    "wkv_b": P("data", "model"),
    "wo": P("model", None, "data"),
    "q_norm": P("data"),
    "kv_norm": P("data"),
    "wo_bias": P("data"),
}


def layer_inputs():
    rng = np.random.default_rng(2)
    params = {n: v + 0.2 * draw(rng, *v.shape) for n, v in init(jax.random.key(0), CONFIG).items()}
    return params, draw(rng, B, T, M), draw(rng, B, T, M)


LAYERS = [("Auto", None, {}), ("Auto", IDS, TP), ("Auto", None, FSDP), ("Auto, opaque", IDS, FSDP)]
LAYERS += [("Explicit", IDS, {}), ("Explicit", None, TP), ("Explicit", IDS, FSDP)]


@pytest.mark.parametrize(
    "kind, ids, specs",
    LAYERS,
    ids=lambda v: (
        v if isinstance(v, str) else f"{len(v)} specs" if isinstance(v, dict) else "dense" if v is None else "packed"
    ),
)
def test_the_layer_gives_one_devices_values_and_gradients(kind, ids, specs, monkeypatch):
    if kind == "Auto, opaque":
        opaque(monkeypatch)
        kind = "Auto"
    params, x, c = layer_inputs()
    run = step(lambda p, x: mla(p, x, CONFIG, segment_ids=ids))
    wanted = run((params, x), c)
    devices = mesh(kind)
    specs = {name: specs.get(name, P()) for name in params}
    found = run((place(devices, params, specs), place(devices, x, DATA)), place(devices, c, DATA))
    assert_close(found, wanted)
    if kind == "Explicit":
        for name, spec in specs.items():
            assert found[1][0][name].sharding.is_equivalent_to(NamedSharding(devices, spec), params[name].ndim)


@pytest.mark.parametrize("kind", ["Explicit"])  # its ops under an Auto mesh: above
def test_the_layer_in_mxfp8_gives_one_devices_values_and_gradients(kind):
    """Data, heads and FSDP at once: blocks are cut on each device, and weights gathered as what the GEMM reads."""
    config = MLAConfig(64, H, 64, 64, 32, 32, 32, norm_eps=1e-2, attention_bias=True)
    params, x, c = init(jax.random.key(0), config), *(draw(np.random.default_rng(s), B, 32, 64) for s in (2, 3))
    run = step(lambda p, x: mla(p, x, config, recipe="mxfp8"))
    wanted = run((params, x), c)
    devices = mesh(kind)
    specs = {name: FSDP.get(name, P()) for name in params}
    found = run((place(devices, params, specs), place(devices, x, DATA)), place(devices, c, DATA))
    # Sums in another order move few codes, each by one step.
    for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(np.asarray(f) - w) < 5e-3 * np.linalg.norm(w)


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_row_parallel_bias_counts_once(kind, recipe):
    """Case 22 of public reports: the output projection contracts sharded heads, and its bias is added to the sum."""
    from jax_mla.linear import linear

    devices, (rows, width, out) = mesh(kind), (2, 8, 3) if recipe is None else (32, 128, 32)
    a = jax.device_put(jnp.ones((rows, width)), NamedSharding(devices, P(None, "model")))
    w = jax.device_put(jnp.full((width, out), 8 / width), NamedSharding(devices, P("model")))
    b = jax.device_put(jnp.full(out, 5.0), NamedSharding(devices, P()))
    y, db = jax.jit(lambda b: jax.value_and_grad(lambda b: jnp.sum(linear(a, w, b, recipe=recipe)))(b))(b)
    assert y == rows * out * 13 and db.tolist() == [rows] * out


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_a_replicated_weight_is_summed_once(check_vma):
    """Case 6 of public reports: 36, never 144 (summed again) or 3 (one shard)."""
    from jax_mla.linear import linear

    devices = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    x, w = jnp.arange(1.0, 9.0)[:, None], jnp.ones((1, 1))
    sharded = jax.shard_map(linear, mesh=devices, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=check_vma)
    for function in (linear, sharded):
        assert jax.jit(jax.grad(lambda w, f=function: jnp.sum(f(x, w))))(w).item() == 36
    explicit = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
    x, w = place(explicit, (x, w), (P("d"), P()))
    assert jax.jit(jax.grad(lambda w, x: jnp.sum(linear(x, w))))(w, x).item() == 36


def test_a_sharded_sequence_is_refused_by_attention():
    devices = mesh("Explicit")
    q, k, v = (
        jax.device_put(jnp.ones(s), NamedSharding(devices, P(None, "data"))) for s in (SELF["q"], SELF["k"], SELF["v"])
    )
    with pytest.raises(
        ValueError, match=r"attention: found dim 1 \(T\) of input 0.*sharded over mesh axes \('data',\)"
    ):
        attention(q, k, v)


def test_modules_train_under_a_mesh():
    """Logical axes to mesh axes the Flax way, and a gradient step through the linen module under jit."""
    import flax.linen as nn

    from jax_mla.linen import MLA

    devices = mesh("Auto")
    module, (_, x, _) = MLA(CONFIG), layer_inputs()
    rules = [("embed", "data"), ("q_heads", "model"), ("kv_heads", "model"), ("heads", "model"), ("kv", None)]
    rules += [(n, None) for n in ("q_lora", "q_lora_up_proj", "kv_lora", "kv_lora_up_proj", "kv_head_dim", "norm")]
    abstract = jax.eval_shape(module.init, jax.random.key(0), x)
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), devices, rules)
    variables = jax.jit(module.init, out_shardings=shardings)(jax.random.key(0), x)
    params = nn.unbox(variables)["params"]
    assert params["wq_b"].sharding.is_equivalent_to(NamedSharding(devices, P(None, "model")), 3)
    assert params["wo"].sharding.is_equivalent_to(NamedSharding(devices, P("model", None, "data")), 3)
    loss = lambda params, x: jnp.sum(module.apply({"params": params}, x) ** 2)  # noqa: E731
    found = jax.jit(jax.grad(loss))(params, jax.device_put(x, NamedSharding(devices, DATA)))
    assert_close(found, jax.jit(jax.grad(loss))(init(jax.random.key(0), CONFIG), x), 1e-5)
