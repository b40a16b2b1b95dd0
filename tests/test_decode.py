"""Generation from a cache of latents against the layer on the whole sequence, and QK-clip."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from judge import assert_close, assert_same, draw

import jax_mla.linen
import jax_mla.nnx
from jax_mla import (
    LatentCache,
    MLAConfig,
    YarnScaling,
    decode,
    init,
    init_cache,
    mla,
    prefill,
    qk_clip,
    quantize_params,
)

YARN = YarnScaling(4.0, 8, mscale=0.7, mscale_all_dim=1.3)
CONFIG = MLAConfig(48, 3, 24, 16, 12, 8, 20, norm_eps=1e-3, attention_bias=True)
CONFIGS = {
    "q lora, bias": CONFIG,
    "no q lora, YaRN, halves": dataclasses.replace(
        CONFIG,
        q_lora_rank=None,
        attention_bias=False,
        rope=dataclasses.replace(CONFIG.rope, scaling=YARN, interleave=False),
    ),
}
B, T, S = 3, 12, 14
PROMPTS = np.array([5, 8, 1])


def case(config=CONFIG, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    params = {n: v + 0.1 * draw(rng, *v.shape) for n, v in init(jax.random.key(seed), config).items()}
    return params, draw(rng, B, T, config.hidden_size, dtype=dtype)


def jitted(function, config, **options):
    """Of (params, x, cache), compiled whole: outside of jit every operation would be, one by one."""
    return jax.jit(lambda params, x, cache: function(params, x, config, cache, **options))


whole = jax.jit(mla, static_argnums=2)


def rows(x, starts, count):
    return jnp.stack([x[r, s : s + count] for r, s in enumerate(starts)])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 3e-6), (jnp.bfloat16, 2e-2)])
def test_prompts_of_different_lengths_and_steps(name, dtype, tolerance):
    """Prefill, single steps under jit, then a step of several tokens: the rows of the layer on all of it."""
    config = CONFIGS[name]
    params, x = case(config, dtype)
    wanted = whole(params, x, config)
    noisy = jnp.where(jnp.arange(8)[:, None] < PROMPTS[:, None, None], x[:, :8], jnp.nan)  # padding reaches nothing
    y, cache = jitted(prefill, config, lengths=PROMPTS)(params, noisy, init_cache(config, B, S, dtype))
    for r, count in enumerate(PROMPTS):
        assert_close(y[r, :count], wanted[r, :count], tolerance)
        assert not np.any(np.asarray(y[r, count:], np.float32)) and not np.any(
            np.asarray(cache.latents[r, count:], np.float32)
        )
    step = jitted(decode, config)
    at = PROMPTS.copy()
    for _ in range(2):
        y, cache = step(params, rows(x, at, 1), cache)
        assert_close(y, rows(wanted, at, 1), tolerance)
        at += 1
    # The first row has two of three tokens, the second waits, the third has all.
    counts = np.array([2, 0, 3])
    given = jnp.where(
        jnp.arange(3)[:, None] < counts[:, None, None], rows(jnp.pad(x, ((0, 0), (0, 3), (0, 0))), at, 3), jnp.nan
    )
    y, cache = jitted(decode, config, lengths=counts)(params, given, cache)
    for r, count in enumerate(counts):
        assert_close(y[r, :count], wanted[r, at[r] : at[r] + count], tolerance)
        assert not np.any(np.asarray(y[r, count:], np.float32))
    assert cache.lengths.tolist() == (at + counts).tolist() and cache.lengths.dtype == jnp.int32
    assert cache.latents.dtype == cache.keys.dtype == dtype and cache.capacity == S


def test_a_token_costs_its_latent_and_key():
    cache = init_cache(MLAConfig.deepseek_v3(), 2, 64)
    assert sum(a.nbytes for a in (cache.latents, cache.keys)) == 2 * 64 * 576 * 2


def test_a_full_cache_is_an_error():
    params, x = case()
    _, cache = prefill(params, x, CONFIG, init_cache(CONFIG, B, T, jnp.float32), lengths=[T, 4, 5])
    with pytest.raises(ValueError, match=r"cache: found 12 of 12 tokens in row 0, wanted room for 1 more"):
        decode(params, x[:, :1], CONFIG, cache)
    with pytest.raises(ValueError, match=r"x: found .*12, 48.*wanted at most 8 tokens, the cache's capacity"):
        prefill(params, x, CONFIG, init_cache(CONFIG, B, 8, jnp.float32))
    # Not known when traced: that row alone is NaN, the others and what the cache holds are as they should be.
    step = jax.jit(lambda cache, x: decode(params, x, CONFIG, cache))
    y, after = step(cache, x[:, :2])
    assert np.isnan(y[0]).all() and np.isfinite(y[1:]).all() and after.lengths.tolist() == [14, 6, 7]
    assert_same(after.latents[0], cache.latents[0])
    y, _ = step(after, x[:, :1])
    assert np.isnan(y[0]).all()
    error, _ = checkify.checkify(step)(cache, x[:, :2])
    with pytest.raises(checkify.JaxRuntimeError, match="cache: found no room"):
        error.throw()


def test_prefill_starts_anew_and_waiting_rows_stay():
    params, x = case()
    fill = jitted(prefill, CONFIG)
    _, used = fill(params, x, init_cache(CONFIG, B, S, jnp.float32))
    _, again = fill(params, x[:, :4], used)
    _, fresh = fill(params, x[:, :4], init_cache(CONFIG, B, S, jnp.float32))
    assert_same(again, fresh)
    _, same = jitted(decode, CONFIG, lengths=[0, 0, 0])(params, x[:, :1], fresh)
    assert_same(same, fresh)


def test_transformations():
    """scan over steps, with a donated cache; vmap over caches; MXFP8 weights stand for their values."""
    params, x = case()

    def run(cache, x):
        def step(cache, x):
            y, cache = decode(params, x[:, None], CONFIG, cache)
            return cache, y[:, 0]

        return jax.lax.scan(step, cache, x.swapaxes(0, 1))

    cache, ys = jax.jit(run, donate_argnums=0)(init_cache(CONFIG, B, S, jnp.float32), x)
    assert_close(ys.swapaxes(0, 1), whole(params, x, CONFIG))
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), init_cache(CONFIG, B, S, jnp.float32))
    both = jnp.stack([x, x[::-1]])
    y, _ = jax.jit(jax.vmap(lambda cache, x: decode(params, x, CONFIG, cache)))(stacked, both)
    assert_close(y[1], whole(params, both[1], CONFIG))
    config = MLAConfig(64, 2, 32, 32, 32, 32, 32)
    weights = quantize_params(init(jax.random.key(0), config), config, usage="columnwise")
    x = draw(np.random.default_rng(0), 1, 4, 64)
    y, _ = jitted(decode, config)(weights, x, init_cache(config, 1, 4, jnp.float32))
    assert_close(y, whole(weights, x, config))


def test_modules():
    _, x = case()
    linen, key = jax_mla.linen.MLA(CONFIG), jax.random.key(3)
    variables, other = linen.init(key, x), jax_mla.nnx.MLA(CONFIG, rngs=key)
    params, empty = init(key, CONFIG), init_cache(CONFIG, B, S, jnp.float32)
    wanted, cache = prefill(params, x[:, :6], CONFIG, empty)
    wanted_next, _ = decode(params, x[:, 6:7], CONFIG, cache)
    y, cache = linen.apply(variables, x[:, :6], empty, method="prefill")
    assert_same((y, linen.apply(variables, x[:, 6:7], cache, method="decode")[0]), (wanted, wanted_next))
    y, cache = other.prefill(x[:, :6], empty)
    assert_same((y, other.decode(x[:, 6:7], cache)[0]), (wanted, wanted_next))
    y, largest = mla(params, x, CONFIG, return_max_logit=True)
    assert_same(linen.apply(variables, x, return_max_logit=True), (y, largest))
    assert_same(other(x, return_max_logit=True), (y, largest))
    assert_same(y, mla(params, x, CONFIG))


@pytest.mark.parametrize(
    "change, error",
    [
        (dict(cache=None), "cache: found None, wanted a LatentCache"),
        (dict(x=jnp.ones((B, 1, 47))), r"x: found .*wanted an array \[B, T, M=48\]"),
        (dict(x=jnp.ones((2, 1, 48))), r"cache.latents: found .*B=2"),
        (dict(lengths=[0, 1, 2]), "lengths: found '0 to 2', wanted 0 to 1, the tokens"),
        (dict(lengths=[0.5, 1, 1]), "lengths: found"),
        (dict(lengths=[1, 1]), "lengths: found"),
        (dict(cache=init_cache(dataclasses.replace(CONFIG, kv_lora_rank=8), B, S)), "cache.latents: found .*C=16"),
    ],
)
def test_bad_input_is_named(change, error):
    params, x = case()
    given = dict(x=x[:, :1], cache=init_cache(CONFIG, B, S, jnp.float32), lengths=None) | change
    for function in (prefill, decode):
        with pytest.raises((ValueError, TypeError), match=error):
            function(params, given["x"], CONFIG, given["cache"], lengths=given["lengths"])
    for arguments in ((CONFIG, -1, 4), (CONFIG, 1, 0), (CONFIG, 1, 4, jnp.int8), (None, 1, 4)):
        with pytest.raises((ValueError, TypeError), match="found"):
            init_cache(*arguments)


@pytest.mark.parametrize("name", CONFIGS)
def test_qk_clip_scales_logits_of_heads_above(name):
    """Every logit of a head above the threshold times threshold / largest; values, the other heads, the shared rotary
    key, dtypes and what stands in params beside stay as they are."""
    config = CONFIGS[name]
    params, x = case(config)
    _, largest = mla(params, x, config, return_max_logit=True)
    threshold = float(jnp.sort(largest)[1]) - 1e-3  # two of three heads
    clipped = jax.jit(qk_clip, static_argnums=2)(params, largest, threshold)
    _, after = mla(clipped, x, config, return_max_logit=True)
    assert_close(after, jnp.minimum(largest, threshold), 1e-5)
    head = int(jnp.argmin(largest))
    query = "wq_b" if "wq_b" in params else "wq"
    for name in params:
        untouched = [n for n in range(3) if n == head] if name in (query, "wkv_b") else slice(None)
        axis = params[name][:, untouched] if name in (query, "wkv_b") else params[name]
        assert_same(clipped[name][:, untouched] if name in (query, "wkv_b") else clipped[name], axis)
    assert_same(clipped["wkv_b"][..., 12:], params["wkv_b"][..., 12:])
    gamma = threshold / largest
    above = [n for n in range(3) if n != head]
    for part, power in ((slice(0, 12), 0.5), (slice(12, None), 1.0)):
        assert_close(
            clipped[query][:, above, part], params[query][:, above, part] * (gamma[jnp.array(above)] ** power)[:, None]
        )


def test_qk_clip_leaves_what_it_cannot_mend_and_names_bad_input():
    params, _ = case()
    narrow = {n: v.astype(jnp.bfloat16) for n, v in params.items()}
    assert_same(qk_clip(narrow, jnp.array([jnp.nan, -jnp.inf, jnp.inf]), 1.0), narrow)
    assert qk_clip(narrow, jnp.array([4.0, 1.0, 1.0]), 1.0)["wq_b"].dtype == jnp.bfloat16
    config = MLAConfig(64, 3, 32, 32, 32, 32, 32)
    tensors = quantize_params(init(jax.random.key(0), config), config)
    for arguments, error in [
        ((params, jnp.ones(2), 1.0), r"max_logits: found .*H=3"),
        ((params, jnp.ones(3, jnp.int32), 1.0), "max_logits: found dtype int32"),
        ((params, jnp.ones(3), 0.0), "threshold: found 0.0"),
        (([], jnp.ones(3), 1.0), "params: found"),
        ((tensors, jnp.ones(3), 1.0), r"params\['wq_b'\]: found MXFP8Tensor"),
    ]:
        with pytest.raises((ValueError, TypeError), match=error):
            qk_clip(*arguments)


def test_a_cache_is_a_pytree_of_arrays():
    cache = init_cache(CONFIG, B, S)
    assert len(jax.tree.leaves(cache)) == 3 and isinstance(jax.tree.map(lambda a: a, cache), LatentCache)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, None])
def test_over_devices(kind):
    """Batch over two, heads over two devices; None: batch, inside `shard_map`. Nothing is gathered, and what is summed
    is y over heads."""
    config = dataclasses.replace(CONFIG, num_heads=4)
    rng = np.random.default_rng(1)
    params, x = init(jax.random.key(1), config), draw(rng, 4, 8, config.hidden_size)
    wanted = whole(params, x, config)[:, 5:7]
    _, cache = jitted(prefill, config)(params, x[:, :5], init_cache(config, 4, S, jnp.float32))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind or AxisType.Auto,) * 2)
    step = lambda params, cache, x: decode(params, x, config, cache)  # noqa: E731
    if kind is None:
        specs = P(), P("data"), P("data")
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P("data"), P("data")))
    else:
        heads = {"wq_b": P(None, "model"), "wkv_b": P(None, "model"), "wo": P("model")}
        params = {n: jax.device_put(v, NamedSharding(mesh, heads.get(n, P()))) for n, v in params.items()}
        cache, x = jax.device_put((cache, x), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        program = jax.jit(step).lower(params, cache, x[:, 5:7]).compile()
        y, cache = program(params, cache, x[:, 5:7])
    assert_close(y, wanted, 1e-5)
    text = program.as_text()
    found = {
        name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in ("all-gather", "all-reduce", "all-to-all")
    }
    assert found == {"all-gather": 0, "all-reduce": 0 if kind is None else 1, "all-to-all": 0}
    assert cache.lengths.tolist() == [7] * 4 and cache.latents.sharding.spec[0] == "data"
