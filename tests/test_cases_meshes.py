"""Public reports of sharding: gradients summed zero times or N times, activations gathered, blocks cut differently on
every device, heads that do not divide; beyond the tables of `test_sharding.py`."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as S
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
    q_up_proj_rope,
    quantize_mxfp8,
    rms_norm_quantize,
    rope_tables,
)
from jax_mla.linear import linear

KINDS = ("Auto", "Explicit", "Manual", "Manual, unchecked")
B, T, H, N, P, V, R = 4, 32, 4, 32, 32, 32, 32
CONFIG = MLAConfig(32, H, None, 32, N, P, V, norm_eps=1e-3)
COS, SIN = rope_tables(jnp.arange(7, 7 + T), CONFIG.rope, P)


def mesh(kind, **axes):
    size = int(np.prod(list(axes.values())))
    axis_type = AxisType.Explicit if kind == "Explicit" else AxisType.Auto
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (axis_type,) * len(axes), devices=jax.devices()[:size])


def place(devices, tree, specs):
    is_spec = lambda s: isinstance(s, S)  # noqa: E731
    return jax.tree.map(lambda s, a: jax.device_put(a, NamedSharding(devices, s)), specs, tree, is_leaf=is_spec)


def step(function):
    def run(args, cotangents):
        outputs, pullback = jax.vjp(function, *args)
        return outputs, pullback(cotangents)

    return jax.jit(run)


def sharded(kind, devices, function, args, specs, cotangents, out_specs):
    """Outputs and gradients on a mesh, and the compiled text."""
    if kind.startswith("Manual"):
        check = "unchecked" not in kind
        function = jax.shard_map(function, mesh=devices, in_specs=specs, out_specs=out_specs, check_vma=check)
    given = place(devices, args, specs), place(devices, cotangents, out_specs)
    compiled = step(function).lower(*given).compile()
    return compiled(*given), compiled.as_text()


def gathers(text):
    return re.search(r" all-gather\(| all-to-all\(", text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_what_is_replicated_is_summed_zero_times_or_twice(kind):
    """Case 6 of public reports: x = [1 .. 8] over 4 devices gives dw 36; with MXFP8 dW and the norm's scale, inside
    q_up_proj_rope and of rms_norm_quantize, get what one device gives, and no sum comes twice."""
    devices = mesh(kind, d=4)
    x, w = jnp.arange(1.0, 9.0)[:, None], jnp.ones((1, 1))
    (_, (_, dw)), _ = sharded(kind, devices, linear, (x, w), (S("d"), S()), jnp.ones((8, 1)), S("d"))
    assert dw.item() == 36

    args, cotangents, wanted = quantised_on_one_device()
    found, text = sharded(kind, devices, quantised, args, (S("d"), S(), S()), cotangents, S("d"))
    assert_close(found, wanted, 1e-5)
    assert not gathers(text)
    if kind == "Auto":
        norm = lambda x, s: dequantize(rms_norm_quantize(x, s, 1e-2, usage="both"))  # noqa: E731
        args, c = (args[0], args[2]), cotangents[:, :, 0, :R]
        found, _ = sharded(kind, devices, norm, args, (S("d"), S()), c, S("d"))
        assert_close(found, step(norm)(args, c), 1e-5)


def quantised(x, w, s):
    return q_up_proj_rope(x, w, COS, SIN, nope_dim=N, norm_scale=s, norm_eps=1e-2, recipe="mxfp8")


@functools.cache
def quantised_on_one_device():
    rng = np.random.default_rng(0)
    args, c = (draw(rng, B, T, R), draw(rng, R, 3, N + P), draw(rng, R)), draw(rng, B, T, 3, N + P)
    return args, c, step(quantised)(args, c)


@pytest.mark.parametrize("kind,ways", [("Auto", 4), ("Explicit", 2), ("Explicit", 4), ("Manual", 2), (KINDS[3], 4)])
def test_the_shared_rotary_key_is_summed_over_some_heads_or_twice(kind, ways):
    """Case 10 of public reports: head h's cotangent is h + 1, so dk_pe is R^T (1 + 2 + 3 + 4) on every mesh."""
    devices, heads = mesh(kind, model=ways), S(None, None, "model")
    rng = np.random.default_rng(1)
    kv, k_pe, cos, sin = draw(rng, 1, 4, 4, 10), draw(rng, 1, 4, 8), *rope_tables(jnp.arange(3, 7), CONFIG.rope, 8)
    dk = jnp.broadcast_to(jnp.arange(1.0, 5.0)[:, None], (1, 4, 4, 14)).at[..., :6].set(0.5)
    (_, (dkv, dk_pe)), text = sharded(
        kind,
        devices,
        lambda kv, k_pe: apply_rope_kv(kv, k_pe, cos, sin, nope_dim=6)[0],
        (kv, k_pe),
        (heads, S()),
        dk,
        heads,
    )
    assert_close(dk_pe, apply_rope(jnp.full((1, 4, 1, 8), 10.0), cos, sin, inverse=True)[:, :, 0], 1e-6)
    assert np.all(np.asarray(dkv)[..., :6] == 0.5) and not gathers(text)


def test_a_head_sharded_layer_scales_the_gradient_of_the_down_projection():
    """Case 10 of public reports: rows of latents and of the rotary key both have a ratio of 1 to one device's, as every
    other gradient; tensor parallel, 2 and 4 ways, with no activation gathered."""
    rng = np.random.default_rng(2)
    params = {n: v + 0.1 * draw(rng, *v.shape) for n, v in init(jax.random.key(0), CONFIG).items()}
    x, c = draw(rng, 1, T, 32), draw(rng, 1, T, 32)
    function = lambda p, x: mla(p, x, CONFIG)  # noqa: E731
    tensor_parallel = {"wq": S(None, "model"), "wkv_b": S(None, "model"), "wo": S("model")}
    specs = {name: tensor_parallel.get(name, S()) for name in params}, S()
    wanted = step(function)((params, x), c)
    for ways in (2, 4):
        found, text = sharded("Explicit", mesh("Explicit", model=ways), function, (params, x), specs, c, S())
        assert_close(found, wanted, 1e-5)
        for part in (slice(0, 32), slice(32, 64)):
            got, want = (np.asarray(f[1][0]["wkv_a"])[:, part].ravel() for f in (found, wanted))
            assert got @ want / (want @ want) == pytest.approx(1, abs=1e-5)
        assert not gathers(text)


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("kind", KINDS[2:])
def test_a_row_parallel_bias_is_added_on_every_device(kind, recipe):
    """Case 22 of public reports: 8 + 5 is 13, not 28, and db the number of rows, inside shard_map too, where the sum
    over devices is the caller's and the bias comes after it (docs/sharding.md)."""
    a, w, b = jnp.full((32, 128), 1 / 16), jnp.ones((128, 32)), jnp.full(32, 5.0)
    rows = lambda a, w, b: jax.lax.psum(linear(a, w, recipe=recipe), "model") + b  # noqa: E731
    specs = S(None, "model"), S("model"), S()
    (y, gradients), _ = sharded(kind, mesh(kind, model=4), rows, (a, w, b), specs, jnp.ones((32, 32)), S())
    assert np.all(y == 13) and np.all(gradients[2] == 32)
    assert np.all(gradients[0] == 32) and np.all(gradients[1] == 2)  # 32 columns of w; 32 rows of 1/16


def test_blocks_are_cut_differently_under_sharding():
    """Case 27 of public reports: 64 rows over 4 devices are 16 a device. Where the types say so it is an error, of the
    ops with MXFP8 too; where only XLA knows, the blocks are one device's."""
    x = draw(np.random.default_rng(3), 64, 64)
    w = jnp.ones((64, 3, 64))
    cos, sin = rope_tables(jnp.arange(64), CONFIG.rope, 32)
    message = r"x: found axis -2 of size 64, 16 on each device of mesh axes \('d',\), wanted a multiple of 32"
    explicit = mesh("Explicit", d=4)
    (on_explicit,) = place(explicit, (x,), (S("d"),))
    calls = (
        lambda x: quantize_mxfp8(x, usage="columnwise"),
        lambda x: rms_norm_quantize(x, jnp.ones(64), 1e-3, usage="both"),
        jax.grad(lambda x: jnp.sum(linear(x, w, recipe="mxfp8"))),
        lambda x: q_up_proj_rope(x, w, cos, sin, nope_dim=32, out="mxfp8"),
    )
    for call in calls:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(call, on_explicit)
    manual = jax.shard_map(calls[0], mesh=mesh("Manual", d=4), in_specs=S("d"), out_specs=S("d"))
    with pytest.raises(ValueError, match="x: found axis -2 of size 16, wanted a multiple of 32"):
        jax.eval_shape(manual, x)
    run = jax.jit(lambda x: quantize_mxfp8(x, usage="both").detach())
    (on_auto,) = place(mesh("Auto", d=4), (x,), (S("d"),))
    assert_same(run(on_auto), run(x))


@pytest.mark.parametrize("shardy", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_scales_are_sharded_otherwise_than_their_codes(kind, shardy):
    """Case 37 of public reports: (128, 128) over (2, 2), with Shardy and with GSPMD: bits and placement."""
    x = draw(np.random.default_rng(4), 128, 128, dtype=jnp.bfloat16)
    devices, spec, before = mesh(kind, r=2, c=2), S("r", "c"), jax.config.jax_use_shardy_partitioner
    run = lambda x: quantize_mxfp8(x, usage="both").detach()  # noqa: E731
    wanted = run(x)
    try:
        jax.config.update("jax_use_shardy_partitioner", shardy)
        (given,) = place(devices, (x,), (spec,))
        compiled = jax.jit(run).lower(given).compile()
        found = compiled(given)
        assert_same(found, wanted)
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    for array in jax.tree.leaves(found):
        assert array.sharding.is_equivalent_to(NamedSharding(devices, spec), 2)
    assert not re.search(r"all-\w+|collective|reduce-scatter", compiled.as_text())


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_sharded_tokens_are_gathered_in_silence(recipe):
    """Cases 36 and 49 of public reports: attention alone does not know which tokens a device has, and says so. (The
    layer gathers latents: test_sequence_parallel.py, test_context.py.)"""
    devices = mesh("Explicit", seq=2)
    message = r"attention: found dim 1 \(T\) of input 0.*sharded over mesh axes \('seq',\), wanted it whole"
    q, v = (jax.device_put(jnp.ones((1, 64, 3, d)), NamedSharding(devices, S(None, "seq"))) for d in (64, 32))
    given = lambda a: a if recipe is None else quantize_mxfp8(a, usage="both", token_axis=-3)  # noqa: E731
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda q, v: attention(given(q), given(q), given(v)), q, v)


ARRAYS = dict(x=(1, T, R), w=(R, -1, N + P), wv=(R, -1, N + V), k_pe=(1, T, P), q=(1, T, -1, 64), v=(1, T, -1, V))
SPLIT = dict(w=S(None, "model"), wv=S(None, "model"), q=S(None, None, "model"), v=S(None, None, "model"))
WHOLE = {
    "q_up_proj_rope": ("x w", lambda x, w: q_up_proj_rope(x, w, COS, SIN, nope_dim=N)),
    "kv_up_proj_rope": ("x wv k_pe", lambda x, w, k_pe: kv_up_proj_rope(x, w, k_pe, COS, SIN, nope_dim=N)),
    "attention": ("q q v", attention),
}


@pytest.mark.parametrize("heads", [6, 2])
@pytest.mark.parametrize("name", WHOLE)
def test_heads_that_do_not_divide_are_rounded_down(name, heads):
    """Case 50 of public reports: 6 or 2 heads over a "model" axis of 4. JAX refuses the placement (Explicit and Auto)
    and the shard_map before an op sees them, with both numbers and the axis."""
    letters, function = WHOLE[name]
    args = [jnp.ones([heads if n < 0 else n for n in ARRAYS[a]]) for a in letters.split()]
    specs = tuple(SPLIT.get(a, S()) for a in letters.split())
    for kind in ("Explicit", "Auto"):
        with pytest.raises(ValueError, match=rf"(?s)model.*partitioned 4 times.*\b{heads}\b"):
            place(mesh(kind, model=4), tuple(args), specs)
        out = jax.tree.map(lambda _: S(None, None, "model"), jax.eval_shape(function, *args))
        mapped = jax.shard_map(function, mesh=mesh(kind, model=4), in_specs=specs, out_specs=out)
        with pytest.raises(ValueError, match=rf"of size {heads}\) to mesh axis 'model' \(of size 4\)"):
            jax.eval_shape(mapped, *args)


def test_a_module_rounds_heads_down():
    """Case 50 of public reports: the layer's and both modules' parameters, as they are initialised sharded."""
    import flax.linen as nn
    from flax import nnx

    from jax_mla import linen
    from jax_mla import nnx as nnx_mla

    config = MLAConfig(32, 6, R, 32, N, P, V)
    rules = [(name, "model") for name in ("q_heads", "kv_heads", "heads")]
    rules += [(n, None) for n in ("embed", "kv", "q_lora", "q_lora_up_proj", "kv_lora", "kv_lora_up_proj", "norm")]
    rules += [("kv_head_dim", None)]
    message = r"(?s)model.*partitioned 4 times.*\b6\b"
    key, x = jax.random.key(0), jnp.ones((1, T, 32))
    devices = mesh("Auto", model=4)
    with pytest.raises(ValueError, match=message):
        spec = NamedSharding(devices, S(None, "model"))
        jax.jit(lambda key: init(key, config)["wq_b"], out_shardings=spec)(key)
    module = linen.MLA(config)
    abstract = jax.eval_shape(module.init, key, x)
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), devices, rules)
    with pytest.raises(ValueError, match=message):
        jax.jit(module.init, out_shardings=shardings)(key, x)
    with jax.set_mesh(mesh("Explicit", model=4)), nnx.logical_axis_rules(rules):
        with pytest.raises(ValueError, match=message):
            nnx_mla.MLA(config, rngs=key)
