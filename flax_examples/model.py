"""A decoder-only language model in DeepSeek's shape (RMSNorm, MLA, SwiGLU), once in linen and once in nnx.

Both hold the same parameters by the same names, so everything else here and in train.py works on one nested dict of
arrays and one pure function, `apply(params, tokens, segment_ids=None) -> logits`.

Shapes: B batch, T tokens, M hidden size, F ffn_dim; a token is a byte, so logits are [B, T, 256].
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_mla
import jax_mla.linen
import jax_mla.nnx
from flax_examples.packing import NOTHING, Rows

VOCABULARY = 256
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    attention: jax_mla.MLAConfig
    layers: int
    ffn_dim: int


class LinenBlock(nn.Module):
    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, segment_ids):  # [B, T, M], [B, T] int or None -> [B, T, M]
        M, F = self.config.attention.hidden_size, self.config.ffn_dim
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        norms = {name: self.param(name, nn.initializers.ones, (M,)) for name in ("attention_norm", "ffn_norm")}
        attention = jax_mla.linen.MLA(self.config.attention, dtype=self.dtype, name="attention")
        x = x + attention(jax_mla.rms_norm(x, norms["attention_norm"], EPS), segment_ids=segment_ids)
        h = jax_mla.rms_norm(x, norms["ffn_norm"], EPS)
        return x + dense(M, name="down")(nn.silu(dense(F, name="gate")(h)) * dense(F, name="up")(h))


class LinenLM(nn.Module):
    config: ModelConfig
    dtype: jnp.dtype = jnp.float32  # what the blocks compute in; parameters and logits are float32

    @nn.compact
    def __call__(self, tokens, segment_ids=None):  # [B, T] int, the same or None -> [B, T, 256] float32
        M = self.config.attention.hidden_size
        x = nn.Embed(VOCABULARY, M, embedding_init=nn.initializers.normal(1.0), dtype=self.dtype, name="embed")(tokens)
        for i in range(self.config.layers):
            x = LinenBlock(self.config, self.dtype, name=f"block_{i}")(x, segment_ids)
        x = jax_mla.rms_norm(x, self.param("norm", nn.initializers.ones, (M,)), EPS)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=jnp.float32, name="logits")(x)


class NnxBlock(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        M, F = config.attention.hidden_size, config.ffn_dim
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.attention_norm, self.ffn_norm = nnx.Param(jnp.ones(M)), nnx.Param(jnp.ones(M))
        self.attention = jax_mla.nnx.MLA(config.attention, dtype=dtype, rngs=rngs)
        self.gate, self.up, self.down = linear(M, F), linear(M, F), linear(F, M)

    def __call__(self, x, segment_ids):
        x = x + self.attention(jax_mla.rms_norm(x, self.attention_norm[...], EPS), segment_ids=segment_ids)
        h = jax_mla.rms_norm(x, self.ffn_norm[...], EPS)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class NnxLM(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: jnp.dtype = jnp.float32, *, rngs: nnx.Rngs):
        M = config.attention.hidden_size
        self.layers = config.layers
        self.embed = nnx.Embed(VOCABULARY, M, embedding_init=nnx.initializers.normal(1.0), dtype=dtype, rngs=rngs)
        for i in range(config.layers):  # attributes rather than a list, so that names are linen's
            setattr(self, f"block_{i}", NnxBlock(config, dtype, rngs=rngs))
        self.norm = nnx.Param(jnp.ones(M))
        self.logits = nnx.Linear(M, VOCABULARY, use_bias=False, dtype=jnp.float32, rngs=rngs)

    def __call__(self, tokens, segment_ids=None):
        x = self.embed(tokens)
        for i in range(self.layers):
            x = getattr(self, f"block_{i}")(x, segment_ids)
        return self.logits(jax_mla.rms_norm(x, self.norm[...], EPS))


Apply = Callable[..., jax.Array]  # params, tokens [B, T], segment_ids [B, T] or None (the default)


def init_params(key: jax.Array, config: ModelConfig) -> dict:
    """Initial values for either module, float32: those nnx draws. One source, so that a seed gives one loss curve."""
    return nnx.to_pure_dict(nnx.state(NnxLM(config, rngs=nnx.Rngs(params=key)), nnx.Param))


@functools.cache
def linen_apply(config: ModelConfig, dtype: str) -> Apply:
    model = LinenLM(config, jnp.dtype(dtype))
    return lambda params, tokens, segment_ids=None: model.apply({"params": params}, tokens, segment_ids)


@functools.cache
def nnx_apply(config: ModelConfig, dtype: str) -> Apply:
    # Only the structure is made here, no arrays; `params` fills it at each call (that is: at each trace).
    graph, abstract = nnx.split(nnx.eval_shape(lambda: NnxLM(config, jnp.dtype(dtype), rngs=nnx.Rngs(0))))

    def apply(params, tokens, segment_ids=None):
        state = jax.tree.map(lambda leaf: leaf, abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(tokens, segment_ids)

    return apply


MODULES = {"linen": linen_apply, "nnx": nnx_apply}


def losses(apply: Apply, params: dict, windows: jax.Array) -> jax.Array:
    """Nats for each predicted byte of windows [B, T + 1] (all but a window's first, given those before it): [B, T]."""
    logits = apply(params, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])


def packed_loss(apply: Apply, params: dict, rows: Rows) -> jax.Array:
    """Mean nats over all the bytes that the rows predict."""
    logits = apply(params, rows.tokens, rows.segment_ids)
    scored = rows.targets != NOTHING
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(scored, rows.targets, 0))
    return jnp.sum(jnp.where(scored, nats, 0)) / jnp.sum(scored)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _continue(apply: Apply, params: dict, window: jax.Array, count: int, key: jax.Array, temperature: jax.Array):
    def step(window, key):
        logits = apply(params, window[None])[0, -1]
        byte = jax.random.categorical(key, logits / temperature)
        # There is no cache of keys and values yet: the window slides and is read again whole for every byte.
        return jnp.append(window[1:], byte.astype(window.dtype)), byte

    return jax.lax.scan(step, window, jax.random.split(key, count))[1]


def generate(apply: Apply, params: dict, window: np.ndarray, count: int, seed: int, temperature: float = 0.8) -> bytes:
    """Draws `count` bytes to follow `window` ([T] bytes, the length the model was trained on)."""
    drawn = _continue(apply, params, jnp.asarray(window, jnp.int32), count, jax.random.key(seed), temperature)
    return bytes(np.asarray(drawn, np.uint8))
