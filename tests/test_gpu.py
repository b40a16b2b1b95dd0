"""On an NVIDIA GPU: the layer at DeepSeek-V3's dims in bfloat16, and against the CPU in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from judge import assert_close, draw

from jax_mla import MLAConfig, init, mla

pytestmark = pytest.mark.gpu


def step(config, **options):
    def run(params, x, c):
        y, pullback = jax.vjp(lambda p, x: mla(p, x, config, **options), params, x)
        return y, pullback(c)

    return jax.jit(run)


def test_float32_equals_the_cpu():
    config = dataclasses.replace(MLAConfig(192, 5, 96, 64, 48, 32, 40, norm_eps=1e-3), attention_bias=True)
    rng = np.random.default_rng(0)
    with jax.default_device(jax.devices("cpu")[0]):
        params = {n: v + 0.1 * draw(rng, *v.shape) for n, v in init(jax.random.key(0), config).items()}
        ids = jnp.asarray(np.repeat([[1, 2, 0], [4, 4, 7]], 300, axis=1), jnp.int32)
        args = (params, draw(rng, 2, 900, 192), draw(rng, 2, 900, 192))
        wanted = step(config, segment_ids=ids)(*args)
    gpu = jax.devices("gpu")[0]
    found = step(config, segment_ids=jax.device_put(ids, gpu))(*jax.device_put(args, gpu))
    assert {d.platform for d in found[0].devices()} == {"gpu"}
    assert_close(jax.device_get(found), jax.device_get(wanted), 2e-5)


@pytest.mark.parametrize("remat", [None, "latents"])
def test_bfloat16_at_deepseek_v3_dims(remat):
    """Forward and every gradient within bfloat16's rounding of the same layer in float32."""
    config = MLAConfig.deepseek_v3()
    keys = jax.random.split(jax.random.key(1), 3)
    params = jax.jit(init, static_argnums=1)(keys[0], config)
    x, c = (jax.random.normal(k, (1, 1536, config.hidden_size)) for k in keys[1:])
    narrow = jax.device_get(step(config, remat=remat)(params, x.astype(jnp.bfloat16), c.astype(jnp.bfloat16)))
    assert narrow[0].dtype == jnp.bfloat16 and all(g.dtype == jnp.float32 for g in narrow[1][0].values())
    wide = jax.device_get(step(config)(params, x, c))
    assert_close(narrow, wide, 4e-2)
