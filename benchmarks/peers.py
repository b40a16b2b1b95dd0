"""The layer as JAX users write it: what ours is measured against. It shares no code with the library."""

import jax
import jax.numpy as jnp


def jnp_usual_layer(params, x, config):
    """An MLA layer in plain jnp: rotary pairs by strided slices, softmax over all of T x S, default derivatives."""
    H, N, P, C = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    length = x.shape[1]
    frequencies = 1.0 / config.rope.theta ** (jnp.arange(0, P, 2) / P)
    angles = jnp.arange(length)[:, None] * frequencies[None]
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]

    def norm(x, scale):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + config.norm_eps) * scale).astype(x.dtype)

    def rope(x):
        even, odd = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
        return jnp.concatenate([even * cos - odd * sin, odd * cos + even * sin], axis=-1).astype(x.dtype)

    def weight(name):
        return params[name].astype(x.dtype)

    if config.q_lora_rank is None:
        q = jnp.einsum("btm,mhd->bthd", x, weight("wq"))
    else:
        q = jnp.einsum("btr,rhd->bthd", norm(x @ weight("wq_a"), params["q_norm"]), weight("wq_b"))
    q = jnp.concatenate([q[..., :N], rope(q[..., N:])], axis=-1)
    latent = x @ weight("wkv_a")
    kv = jnp.einsum("btc,chd->bthd", norm(latent[..., :C], params["kv_norm"]), weight("wkv_b"))
    shared = jnp.broadcast_to(rope(latent[..., None, C:]), (*x.shape[:2], H, P))
    k, v = jnp.concatenate([kv[..., :N], shared], axis=-1), kv[..., N:]
    logits = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * config.softmax_scale
    logits = jnp.where(jnp.tril(jnp.ones((length, length), bool)), logits, -jnp.inf)
    o = jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(logits, axis=-1).astype(x.dtype), v)
    return jnp.einsum("bthv,hvm->btm", o, weight("wo"))


# --- Ops, as they are written by hand -------------------------------------------------------------------------------


def _turn(first, second, cos, sin, dtype):
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, P/2], the same for every head
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(dtype)


def rope_usual(x, cos, sin, nope):
    """Rotary pairs by strided slices, as most people write it. x [B, T, H, D]."""
    rotary = x[..., nope:]
    return jnp.concatenate([x[..., :nope], _turn(rotary[..., 0::2], rotary[..., 1::2], cos, sin, x.dtype)], axis=-1)


def rope_best(x, cos, sin, nope):
    """The same on rotary dims that lie as halves: nothing strided."""
    first, second = jnp.split(x[..., nope:], 2, axis=-1)
    return jnp.concatenate([x[..., :nope], _turn(first, second, cos, sin, x.dtype)], axis=-1)


def split_usual(kv, k_pe, cos, sin, nope):
    shared = rope_usual(k_pe[:, :, None], cos, sin, 0)
    shared = jnp.broadcast_to(shared, (*kv.shape[:-1], k_pe.shape[-1]))
    return jnp.concatenate([kv[..., :nope], shared], axis=-1), kv[..., nope:]


def norm_usual(x, scale, eps):
    """RMSNorm in float32, left in it."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps) * scale


def quantize_usual(x, *axes):
    """Codes and scales, uint8, in blocks of 32 along each axis, by log2 and exp2 (which are not exact)."""
    results = ()
    for axis in axes:
        axis %= x.ndim
        blocks = x.reshape(*x.shape[:axis], x.shape[axis] // 32, 32, *x.shape[axis + 1 :])
        amax = jnp.max(jnp.abs(blocks), axis=axis + 1, keepdims=True)
        exponent = jnp.clip(jnp.ceil(jnp.log2(amax / 448.0)), -127, 127)
        codes = jnp.clip(blocks * jnp.exp2(-exponent), -448, 448).astype(jnp.float8_e4m3fn).reshape(x.shape)
        scales = (exponent + 127).astype(jnp.uint8).squeeze(axis + 1)
        results += (jax.lax.bitcast_convert_type(codes, jnp.uint8), scales)
    return results


def q_up_usual(x, w, scale, cos, sin, nope):
    normalised = norm_usual(x, scale, 1e-6).astype(x.dtype)
    return rope_usual(jnp.einsum("btr,rhd->bthd", normalised, w), cos, sin, nope)


def q_up_best(x, w, scale, cos, sin, nope):
    """The weight's rotary columns in the order of halves, so that nothing long is strided."""
    kept, rotary = w[..., :nope], w[..., nope:]
    w = jnp.concatenate([kept, rotary[..., 0::2], rotary[..., 1::2]], axis=-1)
    normalised = norm_usual(x, scale, 1e-6).astype(x.dtype)
    return rope_best(jnp.einsum("btr,rhd->bthd", normalised, w), cos, sin, nope)
