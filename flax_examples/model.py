"""A decoder-only language model in DeepSeek's shape (RMSNorm, MLA, SwiGLU), once in linen and once in nnx.

Both hold the same parameters by the same names, so everything else here and in train.py works on one nested dict of
arrays and pure functions of it, a `Model`. Every parameter carries its dims' logical axes, in either API, by which
`mesh.Layout` spreads it over devices.

Shapes: B batch, T tokens, M hidden size, F ffn_dim; a token is a byte, so logits are [B, T, 256].
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import jax_mla
import jax_mla.linen
import jax_mla.nnx
from flax_examples import processes
from flax_examples.data import InputError
from flax_examples.mesh import Layout
from flax_examples.packing import NOTHING, Rows

VOCABULARY = 256
EPS = 1e-6
# The logical axes of what is not MLA's, whose own its modules carry.
EMBED, LOGITS, NORM = ("vocab", "embed"), ("embed", "vocab"), ("norm",)
UP, DOWN = ("embed", "mlp"), ("mlp", "embed")
HIDDEN = ("batch", None, None)  # activations between the layers: whole rows,
CONTEXT = ("batch", "tokens", None)  # or, where the layer has a context axis, parts of them
normal = nn.initializers.normal(1.0)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    attention: jax_mla.MLAConfig
    layers: int
    ffn_dim: int


def _spread(x, layout: Layout | None, axes=HIDDEN):
    return x if layout is None else layout.spread(x, *axes)


def _look_up(table, tokens, dtype, layout: Layout | None, axes):  # [V, M], [B, T] -> [B, T, M]
    # The width of the table that FSDP has spread is gathered: left to itself, XLA gathers the batch instead.
    table = _spread(jnp.asarray(table, dtype), layout, ("vocab", None))
    return _spread(jnp.take(table, tokens, axis=0), layout, axes)


class LinenBlock(nn.Module):
    config: ModelConfig
    dtype: jnp.dtype
    recipe: str | None

    @nn.compact
    def __call__(self, x, attend):  # [B, T, M] -> [B, T, M]; attend(the attention module, its input) -> its output
        M, F = self.config.attention.hidden_size, self.config.ffn_dim
        norms = {name: _linen_norm(self, name, M) for name in ("attention_norm", "ffn_norm")}
        attention = jax_mla.linen.MLA(self.config.attention, self.dtype, recipe=self.recipe, name="attention")
        x = x + attend(attention, jax_mla.rms_norm(x, norms["attention_norm"], EPS))
        h = jax_mla.rms_norm(x, norms["ffn_norm"], EPS)
        gate, up = (_linen_dense(F, self.dtype, UP, name)(h) for name in ("gate", "up"))
        return x + _linen_dense(M, self.dtype, DOWN, "down")(nn.silu(gate) * up)


def _linen_dense(features: int, dtype, axes: tuple[str, ...], name: str) -> nn.Dense:
    drawn = nn.with_logical_partitioning(nn.linear.default_kernel_init, axes)
    return nn.Dense(features, use_bias=False, dtype=dtype, kernel_init=drawn, name=name)


def _linen_norm(module: nn.Module, name: str, features: int) -> jax.Array:
    return module.param(name, nn.with_logical_partitioning(nn.initializers.ones, NORM), (features,))


class LinenLM(nn.Module):
    config: ModelConfig
    dtype: jnp.dtype = jnp.float32  # what the blocks compute in; parameters and logits are float32
    layout: Layout | None = None  # how activations lie on several devices
    recipe: str | None = None  # MLA's

    def __call__(self, tokens, segment_ids=None, context_axis=None):  # [B, T] int, or None -> [B, T, 256] float32
        return self._run(tokens, *_on_rows(segment_ids, context_axis))

    def extend(self, tokens, caches, fresh: bool):  # and a cache a layer -> logits of these tokens, caches with them
        attend, caches = _with_caches(caches, fresh)
        return self._run(tokens, attend, HIDDEN), caches

    @nn.compact
    def _run(self, tokens, attend, axes):
        M = self.config.attention.hidden_size
        drawn = nn.with_logical_partitioning(normal, EMBED)
        table = nn.Embed(VOCABULARY, M, embedding_init=drawn, name="embed").embedding
        x = _look_up(table, tokens, self.dtype, self.layout, axes)
        for i in range(self.config.layers):
            x = LinenBlock(self.config, self.dtype, self.recipe, name=f"block_{i}")(x, functools.partial(attend, i))
            x = _spread(x, self.layout, axes)
        x = jax_mla.rms_norm(x, _linen_norm(self, "norm", M), EPS)
        return _linen_dense(VOCABULARY, jnp.float32, LOGITS, "logits")(x)


def _metadata(axes: tuple[str, ...]) -> dict:
    """Of an nnx parameter. Not sharded as it is made: a run's programs say where what they make goes."""
    return dict(out_sharding=axes, eager_sharding=False)


def _nnx_linear(M: int, N: int, dtype, axes: tuple[str, ...], rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(M, N, use_bias=False, dtype=dtype, kernel_metadata=_metadata(axes), rngs=rngs)


def _nnx_norm(features: int) -> nnx.Param:
    return nnx.Param(jnp.ones(features), **_metadata(NORM))


class NnxBlock(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: jnp.dtype, recipe: str | None, *, rngs: nnx.Rngs):
        M, F = config.attention.hidden_size, config.ffn_dim
        self.attention_norm, self.ffn_norm = _nnx_norm(M), _nnx_norm(M)
        self.attention = jax_mla.nnx.MLA(config.attention, dtype=dtype, recipe=recipe, rngs=rngs)
        self.gate, self.up = _nnx_linear(M, F, dtype, UP, rngs), _nnx_linear(M, F, dtype, UP, rngs)
        self.down = _nnx_linear(F, M, dtype, DOWN, rngs)

    def __call__(self, x, attend):
        x = x + attend(self.attention, jax_mla.rms_norm(x, self.attention_norm[...], EPS))
        h = jax_mla.rms_norm(x, self.ffn_norm[...], EPS)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class NnxLM(nnx.Module):
    def __init__(self, config: ModelConfig, dtype=jnp.float32, layout=None, recipe=None, *, rngs: nnx.Rngs):
        M = config.attention.hidden_size
        self.layers, self.dtype, self.layout = config.layers, dtype, layout
        axes = _metadata(EMBED)
        self.embed = nnx.Embed(VOCABULARY, M, embedding_init=normal, embedding_metadata=axes, rngs=rngs)
        for i in range(config.layers):  # attributes rather than a list, so that names are linen's
            setattr(self, f"block_{i}", NnxBlock(config, dtype, recipe, rngs=rngs))
        self.norm = _nnx_norm(M)
        self.logits = _nnx_linear(M, VOCABULARY, jnp.float32, LOGITS, rngs)

    def __call__(self, tokens, segment_ids=None, context_axis=None):
        return self._run(tokens, *_on_rows(segment_ids, context_axis))

    def extend(self, tokens, caches, fresh: bool):
        attend, caches = _with_caches(caches, fresh)
        return self._run(tokens, attend, HIDDEN), caches

    def _run(self, tokens, attend, axes):
        x = _look_up(self.embed.embedding[...], tokens, self.dtype, self.layout, axes)
        for i in range(self.layers):
            x = _spread(getattr(self, f"block_{i}")(x, functools.partial(attend, i)), self.layout, axes)
        return self.logits(jax_mla.rms_norm(x, self.norm[...], EPS))


def _on_rows(segment_ids, context_axis: str | None):
    """What a layer calls to attend, and how activations lie."""

    def attend(i, attention, x):
        return attention(x, segment_ids=segment_ids, context_axis=context_axis)

    return attend, HIDDEN if context_axis is None else CONTEXT


def _with_caches(caches: list[jax_mla.LatentCache], fresh: bool):
    """What a layer calls to attend, and the list that then has the caches after it: filled anew or extended."""
    caches = list(caches)

    def attend(i, attention, x):
        y, caches[i] = (attention.prefill if fresh else attention.decode)(x, caches[i])
        return y

    return attend, caches


@dataclasses.dataclass(frozen=True)
class Model:
    """The model as pure functions of its parameters.

    Called: params, tokens [B, T], segment_ids [B, T] or None (the default), the axis of the mesh over which both are
    spread in zig-zag order, or None (the default) -> logits. extend: params, tokens, caches, fresh -> logits of these
    tokens, and the caches with them behind what they had, or alone if `fresh`.
    """

    config: ModelConfig
    apply: Callable[..., jax.Array]
    extend: Callable[..., tuple[jax.Array, list[jax_mla.LatentCache]]]
    dtype: str
    layout: Layout | None

    def __call__(self, params, tokens, segment_ids=None, context_axis=None) -> jax.Array:
        return self.apply(params, tokens, segment_ids, context_axis)

    def caches(self, batch: int, capacity: int) -> list[jax_mla.LatentCache]:
        """Empty, one a layer."""
        attention = self.config.attention
        return [jax_mla.init_cache(attention, batch, capacity, self.dtype) for _ in range(self.config.layers)]


def init_params(key: jax.Array, config: ModelConfig) -> dict:
    """Initial values for either module, float32: those nnx draws. One source, so that a seed gives one loss curve."""
    return nnx.to_pure_dict(nnx.state(NnxLM(config, rngs=nnx.Rngs(params=key)), nnx.Param))


def logical_axes(config: ModelConfig) -> dict:
    """The logical axes of every parameter's dims, in the tree of `init_params`: from the metadata they carry."""
    abstract = nnx.eval_shape(lambda: NnxLM(config, rngs=nnx.Rngs(0)))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(abstract, nnx.Param)))
    return jax.tree.map(tuple, specs, is_leaf=lambda node: isinstance(node, PartitionSpec))


def check_recipe(config: jax_mla.MLAConfig, recipe: str, window: int) -> None:
    """InputError unless the layer's dims and the window are such that the recipe can be followed."""

    def attend(x):
        return jax_mla.mla(jax_mla.init(jax.random.key(0), config), x, config, recipe=recipe)

    try:
        jax.eval_shape(attend, jax.ShapeDtypeStruct((1, window, config.hidden_size), jnp.float32))
    except ValueError as error:
        raise InputError(f"--recipe: {error}") from error


@functools.cache
def linen_model(config: ModelConfig, dtype: str, layout: Layout | None = None, recipe: str | None = None) -> Model:
    model = LinenLM(config, jnp.dtype(dtype), layout, recipe)

    def run(params, *args, method=None):
        return model.apply({"params": params}, *args, method=method)

    return Model(config, run, functools.partial(run, method="extend"), dtype, layout)


@functools.cache
def nnx_model(config: ModelConfig, dtype: str, layout: Layout | None = None, recipe: str | None = None) -> Model:
    # Only the structure is made here, no arrays; `params` fills it at each call (that is: at each trace).
    made = functools.partial(NnxLM, config, jnp.dtype(dtype), layout, recipe)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: made(rngs=nnx.Rngs(0))))

    def filled(params) -> NnxLM:
        state = jax.tree.map(lambda leaf: leaf, abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    return Model(config, lambda p, *args: filled(p)(*args), lambda p, *args: filled(p).extend(*args), dtype, layout)


MODULES = {"linen": linen_model, "nnx": nnx_model}


def losses(apply: Model, params: dict, windows: jax.Array) -> jax.Array:
    """Nats for each predicted byte of windows [B, T + 1] (all but a window's first, given those before it): [B, T], in
    the order in which the tokens lie on devices."""
    (tokens, targets), axis = _as_they_lie(apply.layout, windows[:, :-1], windows[:, 1:])
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, tokens, None, axis), targets)


def packed_loss(apply: Model, params: dict, rows: Rows) -> jax.Array:
    """Mean nats over all the bytes that the rows predict."""
    (tokens, targets, segment_ids), axis = _as_they_lie(apply.layout, *rows)
    logits = apply(params, tokens, segment_ids, axis)
    scored = targets != NOTHING
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(scored, targets, 0))
    return jnp.sum(jnp.where(scored, nats, 0)) / jnp.sum(scored)


def _as_they_lie(layout: Layout | None, *arrays: jax.Array) -> tuple[list[jax.Array], str | None]:
    """Arrays [B, T] in the order in which tokens lie on devices, one for all that is a token's, and the axis for the
    layer."""
    if layout is None:
        return list(arrays), None
    return [layout.zigzag(a) for a in arrays], layout.context_axis


@functools.partial(jax.jit, static_argnums=(0, 3))
def _continue(model: Model, params: dict, text: jax.Array, count: int, key: jax.Array, temperature: jax.Array):
    """`count` bytes behind `text` [T], from caches with room for both."""
    logits, caches = model.extend(params, text[None], model.caches(1, text.size + count), True)

    def step(carry, key):
        logits, caches = carry
        byte = jax.random.categorical(key, logits / temperature, axis=-1)
        logits, caches = model.extend(params, byte[:, None], caches, False)
        return (logits[:, -1], caches), byte[0]

    return jax.lax.scan(step, (logits[:, -1], caches), jax.random.split(key, count))[1]


@functools.partial(jax.jit, static_argnums=(0, 3))
def _recompute(model: Model, params: dict, text: jax.Array, count: int, key: jax.Array, temperature: jax.Array):
    """The same without caches: all of the text is read again for every byte."""

    def step(window, n_and_key):
        n, key = n_and_key
        logits = jax.lax.dynamic_index_in_dim(model(params, window[None])[0], n - 1, keepdims=False)
        byte = jax.random.categorical(key, logits / temperature)
        return window.at[n].set(byte.astype(window.dtype)), byte

    window = jnp.pad(text, (0, count))
    return jax.lax.scan(step, window, (text.size + jnp.arange(count), jax.random.split(key, count)))[1]


class Sample(NamedTuple):
    """text: what was drawn; bytes a second, with the caches and reading all again: both without compiling."""

    text: bytes
    cached: float
    recomputed: float


def generate(model: Model, params: dict, window: np.ndarray, count: int, seed: int, temperature: float = 0.8) -> Sample:
    """Draws `count` bytes to follow `window` ([T] bytes, the length the model was trained on).

    No byte is further from the start than training went: the last T / 2 bytes are read, as many drawn behind them, and
    then again. What a byte is drawn from has between T / 2 and T bytes.
    """
    half = max(len(window) // 2, 1)
    text, key, temperature = np.asarray(window, np.int32)[-half:], jax.random.key(seed), np.float32(temperature)
    drawn = []
    for i in range(-(-count // half)):
        text = _continue(model, params, text, half, jax.random.fold_in(key, i), temperature)
        text = processes.whole(text)
        drawn.append(text.astype(np.uint8))

    def speed(function):
        arguments = model, params, np.asarray(window, np.int32)[-half:], half, key, temperature
        jax.block_until_ready(function(*arguments))
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        return half / (time.perf_counter() - began)

    return Sample(bytes(np.concatenate(drawn)[:count]), speed(_continue), speed(_recompute))
