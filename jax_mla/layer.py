"""The whole flow of Multi-head Latent Attention, in reading order."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_mla import checks, context, dispatch, fp8, fp8_block, mxfp8, operands, recipes, segments, sharding
from jax_mla import params as parameters
from jax_mla import remat as policies
from jax_mla.attention import attention
from jax_mla.config import MLAConfig
from jax_mla.fp8_tensor import FP8Tensor
from jax_mla.kv_up import kv_up_proj_rope
from jax_mla.linear import linear
from jax_mla.mxfp8_bits import BLOCK
from jax_mla.norm import rms_norm
from jax_mla.q_up import q_up_proj_rope
from jax_mla.recipes import FP8BlockRecipe, FP8Recipe, Recipe
from jax_mla.rope import apply_rope, rope_tables


def mla(
    params: Mapping[str, operands.Operand],
    x: jax.Array,
    config: MLAConfig,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    context_axis: str | None = None,
    recipe: Recipe = None,
    remat: str | None = None,
    return_max_logit: bool = False,
    implementation: dispatch.Choice = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """y = MLA(x): causal self-attention through low-rank latents (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    params: the flat dict of `init`, floating arrays of any mix of dtypes, or what `quantize_params` makes of it.
    x: floating [B, T, M]. Its tokens may be spread over the mesh axis of heads: docs/sharding.md.
    positions: integers [T] or [B, T], tokens; by default 0 .. T - 1, restarting with every segment.
    segment_ids: integers [B, T] for packed rows; 0 is padding: its rows give 0, and nothing in them (NaN too) reaches
    an output or a gradient.
    context_axis: the name of a mesh axis of cp devices over which tokens (of x, and of positions and segment_ids where
    given) are spread in zig-zag order: `zigzag`; y's are too. Under a mesh whose axis is Auto or Explicit, or inside
    `shard_map` over it, where T here is a device's share. Every device is sent the latents of all tokens, C + P numbers
    each, and makes keys and values from them; gradients are summed over the axis once. T is a multiple of 2 cp, with
    "mxfp8" of 64 cp, with "fp8_block" of 128 cp. Default positions are those of the tokens in their natural order.
    recipe: None computes in x's dtype. "fp8", or an `FP8Recipe` with its options, quantises every GEMM's operands to
    FP8 in both passes, one scale a tensor; attention stays in x's dtype. "mxfp8" quantises them to MXFP8, and q, k, v
    for attention (`operands.py`): T and every dim that is contracted are multiples of 32, and so is, where it is known
    at trace time, the first token of every segment; traced segment_ids are the caller's promise. "fp8_block", or an
    `FP8BlockRecipe`, is DeepSeek-V3's: FP8 with a scale for every 128 values, or 128 x 128 of a weight, of any T, dims
    and segments; attention stays in x's dtype. A block of 128 tokens, which only dW reads, may hold several segments.
    remat: what the backward pass keeps: None or "everything" (every residual), "qkv", "latents", "nothing".
    return_max_logit: also return what `attention` does under that name, for `qk_clip`.
    implementation: of every op; see `implementations()`.

    Returns y [B, T, M] in x's dtype (then, if asked, max_logit, float32 [H]), computed in it; weights are cast to it
    inside the ops, so a float32 parameter's gradient is never rounded to bfloat16. Checkpoint names: mla_x (x's codes
    under a recipe), query_wa_proj, mla_q, kv_wa_proj, mla_kv, query_proj, key_proj, value_proj, attention_out,
    attention_lse, out_proj.

    Raises ValueError or TypeError naming the argument; NotImplementedError if no implementation fits.
    """
    recipe = recipes.check(recipe)
    parameters.check(params, config, recipe)
    checks.dims("x", x, "B T M", M=config.hidden_size)
    checks.floating("x", x)
    policies.check(remat)
    implementation = dispatch.check(implementation)
    batch, length, _ = x.shape
    spread = None if context_axis is None else context.find(context_axis, x, params)
    if spread is not None:
        context.check(spread, x, recipe)
    if segment_ids is not None:
        given = segment_ids
        segment_ids = segments.check_ids("segment_ids", segment_ids, B=batch, T=length)
        if recipe == "mxfp8":  # as given: under jit what `check_ids` returns is traced
            segments.check_blocks("segment_ids", given, BLOCK)
        if spread is None:
            segment_ids = sharding.whole_tokens(segment_ids)
    if positions is None and spread is None:
        positions = (
            jnp.arange(length, dtype=jnp.int32) if segment_ids is None else segments.positions_within(segment_ids)
        )
    elif positions is not None:
        positions = checks.integers("positions", positions)
        if positions.shape not in ((length,), (batch, length)):
            raise checks.found("positions", positions, f"shape [{length}] or [{batch}, {length}]")
    if positions is not None and positions.ndim == 1:
        positions = positions[None]  # the tables are saved once, in the rank that every op wants
    return_max_logit = checks.static_bool("return_max_logit", return_max_logit)
    if spread is None:
        positions = sharding.whole_tokens(positions)
    settings = config, recipe, implementation, return_max_logit

    def flow(spread, *arrays):
        return policies.apply(functools.partial(_flow, *settings, spread), remat)(*arrays)

    arrays = dict(params), x, positions, segment_ids
    y, *largest = flow(None, *arrays) if spread is None else context.run(spread, flow, 1 + return_max_logit, *arrays)
    return (y, *largest) if return_max_logit else y


def _flow(
    config: MLAConfig,
    recipe,
    implementation: dispatch.Choice,
    max_logit: bool,
    spread: context.Context | None,
    p: dict,
    x,
    positions,
    segment_ids,
    keys: context.Keys | None = None,
):
    given = x = segments.zero_padding(x, segment_ids)
    whole = _whole if spread is None else lambda array: array
    cos, sin = rope_tables(positions, config.rope, config.qk_rope_head_dim)
    x = _quantized(x, recipe, implementation)
    q = queries(p, x, config, cos, sin, recipe, implementation, whole)
    latent = whole(_latent(p, x, recipe, implementation))
    if keys is not None:
        cos, sin = rope_tables(keys.positions, config.rope, config.qk_rope_head_dim)

    def heads(q, latent, last_key, segment_ids):
        """Attention of queries to all that there are latents of."""
        c, k_pe = _parts(latent, config)
        k, v = kv_up_proj_rope(
            c, p["wkv_b"], k_pe, cos, sin, norm_scale=p["kv_norm"], **_up(config, recipe, implementation)
        )
        kv_ids = None if keys is None else keys.segment_ids
        sees = dict(segment_ids=segment_ids, kv_segment_ids=kv_ids, last_key=last_key)
        return _attend(q, k, v, config, recipe, implementation, max_logit, **sees)

    if spread is None:
        o, *largest = heads(q, latent, None, whole(segment_ids))
    else:
        o, *largest = spread.attend(heads, q, latent, keys, segment_ids)
    y = whole(_out(p, whole(o), segment_ids, recipe, implementation))
    return y if spread is not None else sharding.tokens_as(y, given), *largest


def _quantized(x: jax.Array, recipe: Recipe, implementation: dispatch.Choice) -> operands.Operand:
    """x as both down-projections multiply it, quantised once, and as bytes: what both keep of it is one array. Its name
    lets a remat policy keep codes in x's place."""
    if recipe is None:
        return x
    both = dict(usage="both", implementation=implementation)
    if isinstance(recipe, FP8Recipe):
        t = fp8.quantize_fp8(x, power_of_two=recipe.power_of_two, **both)
    elif isinstance(recipe, FP8BlockRecipe):
        t = fp8_block.quantize_fp8_block(x, usage="both", power_of_two=recipe.power_of_two)
    else:
        t = mxfp8.quantize_mxfp8(x, **both)
    return operands.named(t.bytes(), "mla_x")


def _whole(operand: operands.Operand | None) -> operands.Operand | None:
    """Sequence parallelism: where x's tokens are spread, over the axis of heads say, what is gathered are latents on
    their way up and y's cotangent on its way down, which are small; between them only heads are spread."""
    if isinstance(operand, FP8Tensor):  # its scale has no tokens, and transposed they come last
        axes = {"rowwise_codes": 1, "columnwise_codes": -1, "proxy": 1}
        arrays = {name: getattr(operand, name) for name in axes}
        arrays = {n: None if a is None else sharding.whole_tokens(a, axes[n]) for n, a in arrays.items()}
        return dataclasses.replace(operand, **arrays)
    return jax.tree.map(sharding.whole_tokens, operand)


def queries(
    p, x, config: MLAConfig, cos, sin, recipe, implementation: dispatch.Choice, whole: Callable = _whole
) -> operands.Operand:
    """[B, T, H, N + P]: down to the latent, normalise, up to heads, rotate."""
    up = _up(config, recipe, implementation)
    if config.q_lora_rank is None:
        return q_up_proj_rope(whole(x), p["wq"], cos, sin, **up)
    down = dict(recipe=recipe, implementation=implementation)
    q_latent = checkpoint_name(linear(x, p["wq_a"], p.get("wq_a_bias"), **down), "query_wa_proj")
    return q_up_proj_rope(whole(q_latent), p["wq_b"], cos, sin, norm_scale=p["q_norm"], **up)


def _latent(p, x, recipe, implementation: dispatch.Choice) -> jax.Array:
    """Down to what is left of keys and values, [B, T, C + P]."""
    down = dict(recipe=recipe, implementation=implementation)
    return checkpoint_name(linear(x, p["wkv_a"], p.get("wkv_a_bias"), **down), "kv_wa_proj")


def _parts(latent: jax.Array, config: MLAConfig) -> tuple[jax.Array, jax.Array]:
    """The latent [B, T, C] before its norm, the rotary key [B, T, P] before its rotation."""
    return latent[..., : config.kv_lora_rank], latent[..., config.kv_lora_rank :]


def latents(p, x, config: MLAConfig, cos, sin, implementation: dispatch.Choice) -> tuple[jax.Array, jax.Array]:
    """What generation keeps of a token: the normalised latent [B, T, C], the rotated shared key [B, T, P]."""
    c, k_pe = _parts(_whole(_latent(p, x, None, implementation)), config)
    c = rms_norm(c, p["kv_norm"], config.norm_eps, implementation=implementation)
    layout = dict(input_layout=config.rope.input_layout, implementation=implementation)
    return c, apply_rope(k_pe[..., None, :], cos, sin, **layout)[..., 0, :]


def _attend(q, k, v, config: MLAConfig, recipe: Recipe, implementation: dispatch.Choice, max_logit: bool, **sees):
    """o [B, T, H, V], and with `max_logit` [H]. sees: which keys a query does, beside those before it."""
    if isinstance(recipe, FP8Recipe) and recipe.quantize_attention:
        how = dict(token_axis=-3, power_of_two=recipe.power_of_two, implementation=implementation)
        q, k, v = (fp8.quantize_fp8(a, **how) for a in (q, k, v))
        # o as a tensor too, which no sum over devices can be made of.
        sees["out"] = recipe if sees["last_key"] is None else None
    q, k, v = (operands.named(*pair) for pair in ((q, "query_proj"), (k, "key_proj"), (v, "value_proj")))
    options = dict(scale=config.softmax_scale, causal=True, implementation=implementation) | sees
    o = attention(q, k, v, return_max_logit=max_logit, **options)
    return o if max_logit else (o,)


def _out(p, o, segment_ids, recipe, implementation: dispatch.Choice) -> jax.Array:
    """y [B, T, M]."""
    down = dict(contract=2, recipe=recipe, implementation=implementation)
    y = checkpoint_name(linear(o, p["wo"], p.get("wo_bias"), **down), "out_proj")
    return segments.zero_padding(y, segment_ids)


def with_latents(p, x, config: MLAConfig, segment_ids, implementation: dispatch.Choice):
    """`mla`'s y from the start of every row, and `latents`."""
    x = segments.zero_padding(x, segment_ids)
    cos, sin = rope_tables(jnp.arange(x.shape[1], dtype=jnp.int32)[None], config.rope, config.qk_rope_head_dim)
    q = queries(p, x, config, cos, sin, None, implementation)
    c, k_pe = latents(p, x, config, cos, sin, implementation)
    # The key is rotated already: by no angle here.
    still = jnp.ones_like(cos), jnp.zeros_like(sin)
    up = _up(config, None, implementation) | dict(input_layout="halves")
    k, v = kv_up_proj_rope(c, p["wkv_b"], k_pe, *still, **up)
    (o,) = _attend(q, k, v, config, None, implementation, False, segment_ids=segment_ids)
    y = _whole(_out(p, _whole(o), segment_ids, None, implementation))
    return sharding.tokens_as(y, x), c, k_pe


def _up(config: MLAConfig, recipe, implementation: dispatch.Choice) -> dict:
    up = dict(nope_dim=config.qk_nope_head_dim, norm_eps=config.norm_eps, input_layout=config.rope.input_layout)
    # q, k and v are quantised too where attention takes blocks of them.
    return up | dict(recipe=recipe, out="mxfp8" if recipe == "mxfp8" else None, implementation=implementation)
