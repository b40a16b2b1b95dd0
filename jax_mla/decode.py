"""Generation: a cache of latents, the prompt's pass that fills it, and steps that attend to latents directly.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C: of every token only the normalised KV latent and the
rotated shared key are kept, C + P numbers, and the up-projections of keys and values are absorbed into the query and
into the output:

    q_nope . (c W_k) = (q_nope W_k^T) . c        sum_s p_s (c_s W_v) = (sum_s p_s c_s) W_v
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jax_mla import checks, dispatch, layer, operands, sharding
from jax_mla import params as parameters
from jax_mla.config import MLAConfig
from jax_mla.linear import linear
from jax_mla.rope import rope_tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentCache:
    """What a layer keeps of the tokens it has seen: a pytree, immutable.

    latents [B, S, C]: normalised; keys [B, S, P]: the shared rotary key, rotated; of one floating dtype. lengths: int32
    [B], how many of the S each row has. What lies behind them is zero.
    """

    latents: jax.Array
    keys: jax.Array
    lengths: jax.Array

    @property
    def capacity(self) -> int:
        """S, the tokens that a row has room for."""
        return self.latents.shape[1]


def init_cache(config: MLAConfig, batch: int, capacity: int, dtype=jnp.bfloat16) -> LatentCache:
    """An empty cache for `batch` rows of up to `capacity` tokens: (C + P) * itemsize bytes a token."""
    batch, capacity = checks.static_int("batch", batch, 0), checks.static_int("capacity", capacity, 1)
    dtype = checks.dtype("dtype", dtype)
    checks.floating("dtype", jax.ShapeDtypeStruct((), dtype))
    parameters.specs(config)  # that it is a config
    widths = config.kv_lora_rank, config.qk_rope_head_dim
    arrays = (jnp.zeros((batch, capacity, width), dtype) for width in widths)
    return LatentCache(*arrays, jnp.zeros(batch, jnp.int32))


def prefill(
    params: Mapping[str, operands.Operand],
    x: jax.Array,
    config: MLAConfig,
    cache: LatentCache,
    *,
    lengths: jax.Array | None = None,
    implementation: dispatch.Choice = None,
) -> tuple[jax.Array, LatentCache]:
    """y = MLA(x) of prompts, and a cache that holds them and nothing else.

    x: floating [B, T, M], T at most the cache's capacity. lengths: integers [B], how many of a row's T tokens are its
    prompt; the rest is padding behind it, gives 0 and reaches nothing. None: all are. Otherwise as `jax_mla.mla`, whose
    y this is; weights are as given (an `MXFP8Tensor` stands for its values).

    Raises ValueError or TypeError naming the argument. Traced lengths that are not within 0 .. T are the caller's
    promise.
    """
    batch, tokens, lengths, implementation = _check(params, x, config, cache, lengths, implementation)
    if tokens > cache.capacity:
        raise checks.found("x", x, f"at most {cache.capacity} tokens, the cache's capacity")
    valid = None if lengths is None else jnp.arange(tokens) < lengths[:, None]
    segment_ids = None if valid is None else valid.astype(jnp.int32)
    y, latents, keys = layer.with_latents(params, x, config, segment_ids, implementation)

    def kept(new, old):
        new = new if valid is None else jnp.where(valid[..., None], new, 0)
        return jnp.pad(new.astype(old.dtype), ((0, 0), (0, cache.capacity - tokens), (0, 0)))

    if lengths is None:
        lengths = jnp.full(batch, tokens, jnp.int32)
    return y, LatentCache(kept(latents, cache.latents), kept(keys, cache.keys), lengths)


def decode(
    params: Mapping[str, operands.Operand],
    x: jax.Array,
    config: MLAConfig,
    cache: LatentCache,
    *,
    lengths: jax.Array | None = None,
    implementation: dispatch.Choice = None,
) -> tuple[jax.Array, LatentCache]:
    """y [B, T, M] of the next T tokens of every row (one, or a few), and the cache with them behind what it had.

    x: floating [B, T, M]. Each token sees its row's cache and the new tokens up to itself. lengths: integers [B], how
    many of a row's T are there, in front; the rest gives 0 and is not kept (0: the row waits). None: all.
    implementation: of the projections; attention to latents is jnp, [B, H, T, S] of logits in float32.

    Equal to the last rows of `mla` on the whole sequence, up to rounding: queries and probabilities are rounded to x's
    dtype where they meet latents, the cache to its own. Donate the cache under jit: it is then written in place.

    Raises ValueError or TypeError naming the argument, and ValueError where a row has no room for its tokens. Under
    jit, where lengths are not known, such a row's y is NaN, its tokens are not kept, its length in the cache is beyond
    the capacity from then on, and `jax.experimental.checkify` reports it.
    """
    batch, tokens, lengths, implementation = _check(params, x, config, cache, lengths, implementation)
    count = jnp.full(batch, tokens, jnp.int32) if lengths is None else lengths
    ends = cache.lengths + count
    if not any(isinstance(a, jax.core.Tracer) for a in (cache.lengths, count)) and batch:
        row = int(np.argmax(ends))
        if int(ends[row]) > cache.capacity:
            raise ValueError(
                f"cache: found {int(cache.lengths[row])} of {cache.capacity} tokens in row {row}, wanted room for "
                f"{int(count[row])} more"
            )
    full = ends > cache.capacity
    checkify.debug_check(~jnp.any(full), "cache: found no room for a row's tokens, wanted lengths up to its capacity")

    positions = cache.lengths[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    valid = jnp.arange(tokens) < count[:, None]
    x = jnp.where(valid[..., None], x, 0)
    cos, sin = rope_tables(positions, config.rope, config.qk_rope_head_dim)
    q = layer.queries(params, x, config, cos, sin, None, implementation)
    latents, keys = layer.latents(params, x, config, cos, sin, implementation)

    at = jnp.where(valid & ~full[:, None], positions, cache.capacity)  # what is not kept lies outside, and is dropped

    def write(old, new):
        def row(old, new, at):
            return old.at[at].set(new.astype(old.dtype), mode="drop")

        return sharding.local("decode", "b S C, b T C, b T -> b S C", jax.vmap(row), old, new, at)

    cache = LatentCache(write(cache.latents, latents), write(cache.keys, keys), ends.astype(jnp.int32))

    seen = jnp.arange(cache.capacity) <= positions[..., None]
    o = _attend(params, config, q, cache, seen)
    y = linear(o, params["wo"], params.get("wo_bias"), contract=2, implementation=implementation)
    y = jnp.where(valid[..., None], y, 0)
    return jnp.where(full[:, None, None], np.asarray(np.nan, y.dtype), y), cache


def _attend(params, config: MLAConfig, q: jax.Array, cache: LatentCache, seen: jax.Array) -> jax.Array:
    """o [B, T, H, V] of q [B, T, H, N + P]; seen [B, T, S]: what of the cache a query may see."""
    N, dtype, wide = config.qk_nope_head_dim, q.dtype, jnp.promote_types(q.dtype, jnp.float32)
    w = operands.read(params["wkv_b"], dtype)
    latents, keys = cache.latents.astype(dtype), cache.keys.astype(dtype)
    absorbed = sharding.einsum("bthn,chn->bthc", q[..., :N], w[..., :N], dtype)
    logits = sharding.einsum("bthc,bsc->bths", absorbed, latents, wide)
    logits += sharding.einsum("bthp,bsp->bths", q[..., N:], keys, wide)
    logits = jnp.where(seen[:, :, None], logits * config.softmax_scale, np.asarray(-np.inf, wide))
    weights = jax.nn.softmax(logits, axis=-1).astype(dtype)
    mixed = sharding.einsum("bths,bsc->bthc", weights, latents, dtype)
    return sharding.einsum("bthc,chv->bthv", mixed, w[..., N:], dtype)


def _check(params, x, config, cache, lengths, implementation):
    """Batch, tokens, lengths as int32 or None, and the choice."""
    parameters.check(params, config)
    batch, tokens = (checks.dims("x", x, "B T M", M=config.hidden_size)[n] for n in "BT")
    checks.floating("x", x)
    if not isinstance(cache, LatentCache):
        raise TypeError(f"cache: found {checks.show(cache)}, wanted a LatentCache (`init_cache` makes one)")
    sizes = checks.dims("cache.latents", cache.latents, "B S C", B=batch, C=config.kv_lora_rank)
    checks.dims("cache.keys", cache.keys, "B S P", B=batch, S=sizes["S"], P=config.qk_rope_head_dim)
    checks.dims("cache.lengths", cache.lengths, "B", B=batch)
    checks.floating("cache.latents", cache.latents)
    if cache.keys.dtype != cache.latents.dtype:
        raise TypeError(f"cache.keys: found dtype {cache.keys.dtype}, wanted that of latents, {cache.latents.dtype}")
    checks.integer("cache.lengths", cache.lengths)
    if not isinstance(cache.lengths, jax.core.Tracer) and batch and int(jnp.min(cache.lengths)) < 0:
        raise checks.found("cache.lengths", f"{int(jnp.min(cache.lengths))}", "at least 0")
    if lengths is not None:
        lengths = checks.integers("lengths", lengths)
        checks.dims("lengths", lengths, "B", B=batch)
        if not isinstance(lengths, jax.core.Tracer) and batch:
            low, high = int(jnp.min(lengths)), int(jnp.max(lengths))
            if low < 0 or high > tokens:
                raise checks.found("lengths", f"{low} to {high}", f"0 to {tokens}, the tokens of a row of x")
        lengths = lengths.astype(jnp.int32)
    return batch, tokens, lengths, dispatch.check(implementation)
