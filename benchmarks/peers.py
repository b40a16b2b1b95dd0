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
