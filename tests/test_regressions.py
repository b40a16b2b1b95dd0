"""Faults found by people who set out to break the layer: each stays found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from judge import assert_close, draw

from jax_mla import MLAConfig, apply_rope, apply_rope_kv, attention, init, mla, rope_tables

CONFIG = MLAConfig(16, 2, 12, 12, 6, 8, 10)
COS, SIN = rope_tables(jnp.arange(3), CONFIG.rope, 8)


def put(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("name", ["wq_a", "wkv_a"])
def test_a_diverged_model_does_not_show_a_finite_loss(name):
    params = init(jax.random.key(0), CONFIG)
    y = jax.jit(lambda p: mla(p, jnp.ones((1, 4, 16)), CONFIG))(params | {name: params[name] * jnp.nan})
    assert np.all(np.isnan(y))


def test_nan_and_overflow_in_logits_come_out_as_nan():
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 1, 5, 1, 4), draw(rng, 1, 5, 1, 4), draw(rng, 1, 5, 1, 3)
    run = jax.jit(lambda q, k, v: attention(q, k, v, return_lse=True))
    o, lse = run(q, k.at[0, 2].set(jnp.nan), v)
    assert np.all(np.isnan(o[:, 2:])) and np.all(np.isnan(lse[:, 2:])) and np.all(np.isfinite(o[:, :2]))
    huge = jnp.full((1, 5, 1, 4), 3e38)
    assert np.all(np.isnan(run(huge, huge, v)[0]))


def test_a_row_that_sees_nothing_passes_no_nan_on():
    """The loss squares lse, -inf there: its cotangent is 0 * -inf."""
    rng = np.random.default_rng(1)
    q, k, v = draw(rng, 1, 5, 1, 4), draw(rng, 1, 2, 1, 4), draw(rng, 1, 2, 1, 4)

    def loss(q, k, v):
        o, lse = attention(q, k, v, causal="bottom_right", return_lse=True)
        return jnp.sum(jnp.where(jnp.isfinite(lse), lse**2, 0.0)) + jnp.sum(o)

    dq, dk, dv = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    assert all(np.all(np.isfinite(g)) for g in (dq, dk, dv)) and not np.any(dq[:, :3])
    clean = jax.jit(jax.grad(lambda *a: loss(*a), argnums=(0, 1, 2)))(q[:, 3:], k, v)
    assert_close((dq[:, 3:], dk, dv), clean, 1e-6)


def test_gradients_keep_the_type_of_what_is_replicated_beside_sharded_tables():
    rng = np.random.default_rng(2)
    x, c, s = draw(rng, 2, 3, 4, 8), draw(rng, 2, 3, 4), draw(rng, 2, 3, 4)
    kv, k_pe = draw(rng, 2, 3, 4, 9), draw(rng, 2, 3, 8)
    rope = jax.grad(lambda x, c, s: jnp.sum(jnp.sin(apply_rope(x, c, s))))
    keys = jax.grad(lambda kv, k_pe: jnp.sum(jnp.sin(apply_rope_kv(kv, k_pe, c, s, nope_dim=6)[0])), argnums=(0, 1))
    wanted = jax.jit(rope)(x, c, s), jax.jit(keys)(kv, k_pe)
    mesh = jax.make_mesh((2, 4), ("d", "t"))
    found = (
        jax.jit(rope)(put(mesh, x), put(mesh, c, "d"), put(mesh, s, "d")),
        jax.jit(keys)(put(mesh, kv), put(mesh, k_pe, "d")),
    )
    assert_close(found, wanted)
    auto = jax.make_mesh((2, 4), ("d", "t"), axis_types=(AxisType.Auto,) * 2)

    def local(x, c, s):
        return jax.lax.psum(jnp.sum(jnp.sin(apply_rope(x, c, s))), "d")

    for checked in (True, False):
        mapped = jax.shard_map(local, mesh=auto, in_specs=(P(), P("d"), P("d")), out_specs=P(), check_vma=checked)
        # Every device rotates the whole first row by its own row of tables.
        one = jax.jit(jax.grad(mapped))(x[:1], c, s)
        both = jax.grad(lambda x: sum(jnp.sum(jnp.sin(apply_rope(x, c[i : i + 1], s[i : i + 1]))) for i in (0, 1)))
        assert_close(one, jax.jit(both)(x[:1]))


def test_vmap_over_a_sharded_axis_beside_another_one():
    rng = np.random.default_rng(3)
    x, mesh = draw(rng, 2, 3, 4, 8), jax.make_mesh((2, 4), ("d", "t"))
    rotate = jax.jit(jax.vmap(lambda x: apply_rope(x, COS, SIN)))
    found = rotate(put(mesh, x, "d", None, "t"))
    assert_close(found, rotate(x))
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, P("d", None, "t")), 4)


def test_a_mesh_axis_of_one_device_shards_nothing():
    rng = np.random.default_rng(4)
    mesh = jax.make_mesh((4, 1), ("d", "s"), devices=jax.devices()[:4])
    args = [draw(rng, 4, 8, 2, 4) for _ in range(3)]
    step = jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(attention(*a))), argnums=(0, 1, 2)))
    assert_close(step(*(put(mesh, a, "d", "s") for a in args)), step(*args))


def test_results_are_never_views_of_the_callers_memory():
    kv, k_pe = np.ones((1, 3, 2, 9), np.float32), np.ones((1, 3, 8), np.float32)
    k, v = apply_rope_kv(kv, k_pe, np.asarray(COS), np.asarray(SIN), nope_dim=4)
    kv[:] = 7
    assert isinstance(v, jax.Array) and np.all(np.asarray(v) == 1) and isinstance(k, jax.Array)


def test_integers_that_32_bits_cannot_hold_are_named():
    q = jnp.ones((1, 3, 1, 4))
    with pytest.raises(ValueError, match="segment_ids: found int64 values up to 4294967297, wanted what int32 holds"):
        attention(q, q, q, segment_ids=np.array([[1, 1, 2**32 + 1]]))
    with pytest.raises(ValueError, match="positions: found int64 values up to 2147483653"):
        rope_tables(np.array([2**31 + 5]), CONFIG.rope, 8)
    with jax.enable_x64(True):
        ids = np.array([[1, 1, 2**32 + 1]])
        run = jax.jit(lambda q, v: attention(q, q, v, segment_ids=ids))
        o = run(q, jnp.arange(3.0, dtype=jnp.float32)[None, :, None, None])
        assert o[0, 2, 0, 0] == 2


def test_nnx_parameters_given_to_the_function_are_named():
    from flax import nnx

    from jax_mla.nnx import MLA

    module = MLA(CONFIG, rngs=jax.random.key(0))
    with pytest.raises(TypeError, match=r"params\['\w+'\]: found Param, wanted an array \(nnx: param\[...\]\)"):
        mla({n: getattr(module, n) for n in init(jax.random.key(0), CONFIG)}, jnp.ones((1, 2, 16)), CONFIG)
    assert nnx.state(module)
