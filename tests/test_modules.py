"""The linen and nnx modules: one set of names and values, dtypes, logical axes, nothing that the config turns off."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from judge import assert_same, draw

from jax_mla import MLAConfig, init, logical_axes, mla
from jax_mla import linen as linen_mla
from jax_mla import nnx as nnx_mla

CONFIG = MLAConfig(48, 3, 32, 16, 16, 8, 24, norm_eps=1e-3, attention_bias=True)
CONFIGS = {
    "bias": (CONFIG, "wq_a wq_a_bias q_norm wq_b wkv_a wkv_a_bias kv_norm wkv_b wo wo_bias"),
    "no bias": (dataclasses.replace(CONFIG, attention_bias=False), "wq_a q_norm wq_b wkv_a kv_norm wkv_b wo"),
    "no query low rank": (
        dataclasses.replace(CONFIG, q_lora_rank=None),
        "wq wkv_a wkv_a_bias kv_norm wkv_b wo wo_bias",
    ),
}
IDS = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0, 0], [5, 5, 5, 5, 5, 5, 5, 5, 5]])
POSITIONS = jnp.asarray([[3, 4, 5, 0, 1, 2, 3, 0, 0], [0, 2, 4, 6, 8, 10, 12, 14, 16]])


def x_and_cotangent():
    rng = np.random.default_rng(0)
    return draw(rng, 2, 9, 48), draw(rng, 2, 9, 48)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_one_key_one_set_of_names_and_values(name, param_dtype):
    config, names = CONFIGS[name]
    key, (x, _) = jax.random.key(5), x_and_cotangent()
    wanted = init(key, config, param_dtype)
    assert list(wanted) == names.split()
    linen = nn.unbox(linen_mla.MLA(config, param_dtype=param_dtype).init(key, x))["params"]
    module = nnx_mla.MLA(config, param_dtype=param_dtype, rngs=key)
    states = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    assert set(linen) == set(states) == set(wanted)
    assert_same(linen, wanted)
    assert_same(states, wanted)
    assert_same(
        nnx.to_pure_dict(nnx.state(nnx_mla.MLA(config, param_dtype=param_dtype, rngs=nnx.Rngs(key)))),
        init(nnx.Rngs(key).params(), config, param_dtype),
    )


def test_turning_a_part_off_changes_no_other_value():
    key = jax.random.key(1)
    full, partial = init(key, CONFIG), init(key, CONFIGS["no query low rank"][0])
    for name in set(full) & set(partial):
        assert_same(full[name], partial[name])
    deviation = float(jnp.std(full["wo"])) * (3 * 24) ** 0.5  # drawn with (contracted size)^-0.5
    assert abs(deviation - 1) < 0.1 and jnp.all(full["q_norm"] == 1) and jnp.all(full["wo_bias"] == 0)
    assert not np.array_equal(init(jax.random.key(2), CONFIG)["wo"], full["wo"])


@pytest.mark.parametrize("options", [{}, dict(positions=POSITIONS), dict(segment_ids=IDS, positions=POSITIONS)])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_outputs_and_gradients_are_the_functions(dtype, options):
    key, (x, c) = jax.random.key(5), x_and_cotangent()
    params = init(key, CONFIG)
    cast = x if dtype is None else x.astype(dtype)
    linen, module = linen_mla.MLA(CONFIG, dtype=dtype), nnx_mla.MLA(CONFIG, dtype=dtype, rngs=key)
    graph, state = nnx.split(module)

    def gradients(function):
        def loss(p):
            y = function(p)
            assert y.dtype == cast.dtype
            return jnp.sum(y.astype(jnp.float32) * c)

        return jax.jit(jax.value_and_grad(loss))

    wanted = gradients(lambda p: mla(p, cast, CONFIG, **options))(params)
    assert all(g.dtype == jnp.float32 for g in wanted[1].values())
    assert_same(gradients(lambda p: linen.apply({"params": p}, x, **options))(params), wanted)
    value, gradient = gradients(lambda s: nnx.merge(graph, s)(x, **options))(state)
    assert_same((value, nnx.to_pure_dict(gradient)), wanted)


@pytest.mark.parametrize("remat", ["latents", "nothing"])
def test_remat_and_implementation_are_passed_on(remat):
    key, (x, _) = jax.random.key(5), x_and_cotangent()
    wanted = jax.jit(lambda p: mla(p, x, CONFIG, remat=remat))(init(key, CONFIG))
    linen = linen_mla.MLA(CONFIG, remat=remat, implementation="xla")
    assert_same(jax.jit(lambda p: linen.apply({"params": p}, x))(init(key, CONFIG)), wanted)
    for implementation in ("triton", ["mosaic", "cudnn"]):
        with pytest.raises(NotImplementedError, match="found no implementation that can run"):
            linen_mla.MLA(CONFIG, implementation=implementation).init(key, x)
        with pytest.raises(NotImplementedError, match="found no implementation that can run"):
            nnx_mla.MLA(CONFIG, implementation=implementation, rngs=key)(x)


@pytest.mark.parametrize("shape", [(0, 9, 48), (2, 0, 48), (2, 1, 48), (0, 0, 48)])
def test_empty_and_tiny(shape):
    params = init(jax.random.key(5), CONFIG)
    ids = jnp.ones(shape[:2], jnp.int32)
    for options in ({}, dict(segment_ids=ids), dict(positions=jnp.zeros(shape[1], jnp.int32), remat="latents")):
        step = jax.value_and_grad(lambda p, o=options: jnp.sum(mla(p, jnp.ones(shape), CONFIG, **o)))
        value, gradient = jax.jit(step)(params)
        assert np.isfinite(value) and all(np.all(np.isfinite(g)) for g in gradient.values())


def test_layers_of_a_model_draw_their_own_values():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return linen_mla.MLA(CONFIG)(linen_mla.MLA(CONFIG)(x))

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            body = nn.scan(
                lambda module, x, _: (module(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return body(linen_mla.MLA(CONFIG), x, None)[0]

    key, (x, _) = jax.random.key(5), x_and_cotangent()
    a, b = nn.unbox(jax.jit(Linen().init)(key, x))["params"].values()
    assert not np.array_equal(a["wo"], b["wo"])
    variables = jax.jit(Scanned().init)(key, x)
    wo = nn.unbox(variables)["params"]["MLA_0"]["wo"]
    assert wo.shape == (3, 3, 24, 48) and not np.array_equal(wo[0], wo[1])
    assert nn.get_partition_spec(variables)["params"]["MLA_0"]["wo"] == P("layers", "heads", "kv", "embed")

    @nnx.vmap(in_axes=0)
    def stack(rngs):
        return nnx_mla.MLA(CONFIG, rngs=rngs)

    stacked = stack(nnx.Rngs(0).split(3))
    assert stacked.wo[...].shape == (3, 3, 24, 48) and not np.array_equal(stacked.wo[...][0], stacked.wo[...][1])


def test_logical_axes():
    wanted = {name: P(*axes) for name, axes in logical_axes(CONFIG).items()}
    assert wanted["wq_b"] == P("q_lora", "q_heads", "kv") and wanted["wkv_b"] == P("kv_lora", "kv_heads", "kv_head_dim")
    assert wanted["wq_a"] == P("embed", "q_lora_up_proj") and wanted["wkv_a"] == P("embed", "kv_lora_up_proj")
    assert wanted["q_norm"] == P("norm") and wanted["wo"] == P("heads", "kv", "embed")
    assert wanted["wo_bias"] == P("embed")
    key, (x, _) = jax.random.key(5), x_and_cotangent()
    assert nn.get_partition_spec(jax.eval_shape(linen_mla.MLA(CONFIG).init, key, x))["params"] == wanted
    specs = nnx.get_partition_spec(nnx.state(nnx_mla.MLA(CONFIG, rngs=key)))
    assert nnx.to_pure_dict(specs) == wanted


def test_nnx_parameters_are_made_sharded_under_axis_rules():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    config = dataclasses.replace(CONFIG, num_heads=4)
    rules = {axis: None for axes in logical_axes(config).values() for axis in axes}
    rules |= {"embed": "data", "q_heads": "model", "kv_heads": "model", "heads": "model"}
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        module = nnx_mla.MLA(config, rngs=nnx.Rngs(0))
    assert module.wo[...].sharding.spec == P("model", None, "data")
    with jax.set_mesh(mesh):  # a mesh without rules: logical names mean nothing yet
        nnx_mla.MLA(config, rngs=nnx.Rngs(0))


def test_bad_input_is_named():
    key, (x, _) = jax.random.key(5), x_and_cotangent()
    module, params = nnx_mla.MLA(CONFIG, rngs=key), init(key, CONFIG)
    with pytest.raises(ValueError, match=r"x: found float32\[2, 9, 40\], wanted an array \[B, T, M=48\]"):
        module(x[..., :40])
    with pytest.raises(ValueError, match=r"x: found float32\[9, 48\]"):
        linen_mla.MLA(CONFIG).init(key, x[0])
    for option in ("recipe", "remat", "implementation"):  # as it is made, not as it is called
        with pytest.raises(ValueError, match=f"{option}: found 'no_such'"):
            nnx_mla.MLA(CONFIG, rngs=key, **{option: "no_such"})
    with pytest.raises(ValueError, match=r"positions: found int32\[8\], wanted shape \[9\] or \[2, 9\]"):
        module(x, positions=jnp.arange(8))
    with pytest.raises(TypeError, match="positions: found dtype float32"):
        module(x, positions=jnp.arange(9.0))
    with pytest.raises(ValueError, match=r"segment_ids: found int32\[2, 8\], wanted an array \[B=2, T=9\]"):
        module(x, segment_ids=IDS[:, :8])
    with pytest.raises(TypeError, match="segment_ids: found dtype bool"):
        module(x, segment_ids=IDS > 0)
    with pytest.raises(TypeError, match="config: found {}, wanted an MLAConfig"):
        init(key, {})
    with pytest.raises(TypeError, match="param_dtype: found int32"):
        init(key, CONFIG, jnp.int32)
    with pytest.raises(ValueError, match=r"params: found \['extra'\] not in the config's, wanted \['wo'\] besides"):
        mla({n: v for n, v in params.items() if n != "wo"} | {"extra": x}, x, CONFIG)
    with pytest.raises(ValueError, match=r"params\['wq_b'\]: found float32\[32, 24, 3\], wanted shape \[32, 3, 24\]"):
        mla(params | {"wq_b": jnp.zeros((32, 24, 3))}, x, CONFIG)
    with pytest.raises(TypeError, match=r"params\['wo'\]: found dtype int32"):
        mla(params | {"wo": params["wo"].astype(jnp.int32)}, x, CONFIG)
    with pytest.raises(TypeError, match="params: found list"):
        mla([], x, CONFIG)
    with pytest.raises(TypeError, match="x: found dtype int32"):
        mla(params, x.astype(jnp.int32), CONFIG)
