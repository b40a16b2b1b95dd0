"""Faults found by people who set out to break the layer: each stays found."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from judge import assert_close, draw

from jax_mla import (
    MLAConfig,
    apply_rope,
    apply_rope_kv,
    attention,
    compile_for,
    decode,
    init,
    init_cache,
    mla,
    prefill,
    rope_tables,
)

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


def test_a_spoilt_cache_is_named():
    """Not written to with numbers cut to integers, nor from behind."""
    params, x, cache = init(jax.random.key(0), CONFIG), jnp.ones((2, 1, 16)), init_cache(CONFIG, 2, 4, jnp.float32)
    cut = {name: getattr(cache, name).astype(jnp.int32) for name in ("latents", "keys")}
    for changes, error, message in (
        (cut, TypeError, "cache.latents: found dtype int32, wanted bfloat16"),
        (dict(keys=cache.keys.astype(jnp.bfloat16)), TypeError, "cache.keys: found dtype bfloat16, wanted that of lat"),
        (dict(lengths=jnp.zeros(2)), TypeError, "cache.lengths: found dtype float32, wanted an integer dtype"),
        (dict(lengths=jnp.array([-3, 0])), ValueError, "cache.lengths: found '-3', wanted at least 0"),
    ):
        with pytest.raises(error, match=message):
            decode(params, x, CONFIG, dataclasses.replace(cache, **changes))


def test_generation_has_no_float64_in_x64_mode():
    params, x, cache = init(jax.random.key(0), CONFIG), jnp.ones((2, 1, 16)), init_cache(CONFIG, 2, 4, jnp.float32)
    with jax.enable_x64(True):
        for function in (decode, prefill):
            assert "f64[" not in str(jax.make_jaxpr(lambda x, c, f=function: f(params, x, CONFIG, c))(x, cache))


@pytest.mark.parametrize("name", ["cudnn", "triton"])
def test_what_the_backward_pass_cannot_run_is_refused_before_the_forward_one(name):
    pytest.importorskip("triton", reason="needs triton (extra `test`)")
    q, v = jnp.ones((1, 4, 2, 192), jnp.bfloat16), jnp.ones((1, 4, 2, 128), jnp.bfloat16)
    attend = functools.partial(attention, grad_dtype=jnp.float32, implementation=name)
    with compile_for(90), pytest.raises(NotImplementedError, match=r"in float32.*backward pass, by grad_dtype=float32"):
        jax.eval_shape(lambda q, v: jax.vjp(attend, q, q, v)[0], q, v)


def test_heads_without_dims_are_refused():
    """A softmax over them there would be: lse is not -inf."""
    q = jnp.ones((1, 3, 2, 4))
    with pytest.raises(ValueError, match=r"v: found float32\[1, 3, 2, 0\], wanted heads of at least one dim V"):
        attention(q, q, q[..., :0], return_lse=True)
    with pytest.raises(ValueError, match=r"q: found float32\[1, 3, 2, 0\], wanted heads of at least one dim D"):
        attention(q[..., :0], q[..., :0], q, scale=1.0)


@pytest.mark.parametrize("at", [[0, 3], (0, 3), np.int32(3)])
def test_boundaries_that_are_no_array_are_named(at):
    q = jnp.ones((3, 2, 4))
    with pytest.raises((TypeError, ValueError), match="cu_seqlens: found"):
        attention(q, q, q, cu_seqlens=at)


def test_numpys_float64_is_jaxs_float32():
    q = np.random.default_rng(0).normal(size=(1, 3, 2, 4))
    gradient = jax.grad(lambda q: jnp.sum(attention(q, q.astype(np.float32), q)))(q)
    assert gradient.dtype == jnp.float32
    assert attention(q, jnp.asarray(q), q).dtype == jnp.float32


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_modules_name_what_is_no_array_and_no_dtype(api):
    from flax import nnx

    import jax_mla.linen
    import jax_mla.nnx

    params = init(jax.random.key(0), CONFIG)

    def run(dtype, x):
        if api == "nnx":
            return jax_mla.nnx.MLA(CONFIG, dtype=dtype, rngs=nnx.Rngs(0))(x)
        return jax_mla.linen.MLA(CONFIG, dtype=dtype).apply({"params": params}, x)

    with pytest.raises(TypeError, match="x: found list, wanted an array"):
        run(jnp.bfloat16, [1.0])
    with pytest.raises(TypeError, match="dtype: found 'junk', wanted a dtype"):
        run("junk", jnp.ones((1, 2, 16)))
    with pytest.raises(ValueError, match=r"remat: found float64\[2\], wanted one of"):
        mla(params, jnp.ones((1, 2, 16)), CONFIG, remat=np.ones(2))
