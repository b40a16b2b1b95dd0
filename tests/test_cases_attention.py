"""Public reports of attention and RoPE kernels: head tiles, tails, very negative logits, single tokens."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from judge import assert_close, assert_same, draw

from jax_mla import (
    MLAConfig,
    apply_rope,
    apply_rope_kv,
    attention,
    blockwise,
    dequantize,
    init,
    mla,
    quantize_mxfp8,
    rope_tables,
)

CONFIG = MLAConfig(48, 1, 32, 32, 32, 32, 32, norm_eps=1e-3)


def test_a_head_tile_that_does_not_divide_the_heads_rotates_some_twice():
    """Case 30 of public reports: every head, of each count and for several splits of nope and rope, is the rotation of
    that head alone, bit for bit, and fp64's."""
    heads, dims = (1, 3, 5, 6, 40, 96), ((128, 64), (96, 32), (64, 48))
    rng = np.random.default_rng(0)
    tables = {p: rope_tables(jnp.arange(9, 12), CONFIG.rope, p) for _, p in dims}
    cases = {
        (h, n, p): draw(rng, 3, h, n + p) for h, (n, p) in itertools.product(heads, dims) if h in (5, 96) or p == 48
    }
    cotangents = {case: draw(rng, *x.shape) for case, x in cases.items()}

    @jax.jit
    def run(cases, cotangents):
        results = {}
        for (h, n, p), x in cases.items():
            y, pullback = jax.vjp(lambda x, p=p: apply_rope(x, *tables[p], rotary_dim=p), x)
            results[h, n, p] = y, pullback(cotangents[h, n, p])[0]
        return results

    found = run(cases, cotangents)
    alone = {
        p: jax.jit(lambda x, c, p=p: (apply_rope(x, *tables[p], rotary_dim=p),
                                      apply_rope(c, *tables[p], rotary_dim=p, inverse=True)))
        for _, p in dims
    }  # fmt: skip
    for (h, n, p), x in cases.items():
        y, dx = found[h, n, p]
        last = x[:, h - 1 :], cotangents[h, n, p][:, h - 1 :]
        assert_same((y[:, h - 1 :], dx[:, h - 1 :]), alone[p](*last))
        assert_close(y, reference.apply_rope(x, *tables[p], p))
        assert_close(dx, reference.apply_rope(cotangents[h, n, p], *tables[p], p, inverse=True))
    for h in heads:
        x = cases[h, 64, 48]
        k_v = apply_rope_kv(x[None], x[None, :, 0, 64:], *tables[48], nope_dim=64)
        assert_close(k_v, reference.apply_rope_kv(x[None], x[None, :, 0, 64:], *tables[48], 64))


def exact(q, k, v, do, scale, mask):
    """o, dq, dk, dv of attention in fp64, [1, tokens, H, .]; mask [T, S]."""
    q, k, v, do = (reference.f64(a)[0].swapaxes(0, 1) for a in (q, k, v, do))
    logits = np.where(mask, q @ k.swapaxes(1, 2) * scale, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o, dp = p @ v, do @ v.swapaxes(1, 2)
    ds = p * (dp - (do * o).sum(-1, keepdims=True)) * scale
    results = o, ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ do
    return [a.swapaxes(0, 1)[None] for a in results]


# kind, T, S, causal, tokens a tile: one tile, or tiles of unequal or padded size.
TAILS = [
    ("bfloat16", s, s, causal, 512) for s, causal in ((64, True), (192, False), (320, True), (100, True), (100, False))
]
TAILS += [("bfloat16", 1, 128, "bottom_right", 512), ("mxfp8", 1, 128, "bottom_right", 72)]
TAILS += [("mxfp8", 64, 64, False, 512), ("mxfp8", 192, 192, True, 72), ("float32", 101, 101, True, 72)]


@pytest.mark.parametrize("kind,T,S,causal,tile", TAILS)
def test_a_tail_tile_of_very_negative_logits_gives_nan(monkeypatch, kind, T, S, causal, tile):
    """Case 33 of public reports: every logit is about -120, beneath what exp holds. (MXFP8 has no 100 keys.)"""
    monkeypatch.setattr(blockwise, "BLOCK", tile)
    rng = np.random.default_rng(S)
    q, k, v, do = (draw(rng, 1, n, 3, d) for n, d in ((T, 64), (S, 64), (S, 32), (T, 32)))
    q, k = q.at[..., -1].set(8.0), (k / 4).at[..., -1].set(-15.0)  # times scale 1
    dtype = jnp.float32 if kind == "float32" else jnp.bfloat16
    args = [a.astype(dtype) for a in (q, k, v)]
    usages = ("rowwise", "rowwise", "columnwise")
    quantised = lambda *a: [quantize_mxfp8(x, usage=u, token_axis=-3) for x, u in zip(a, usages, strict=True)]  # noqa: E731
    given = quantised if kind == "mxfp8" else lambda *a: a

    @jax.jit
    def run(args, do):
        (o, lse), pullback = jax.vjp(lambda *a: attention(*given(*a), scale=1.0, causal=causal, return_lse=True), *args)
        return o, lse, *pullback((do, jnp.zeros_like(lse)))

    o, lse, *gradients = run(args, do.astype(dtype))
    assert lse.max() < -88.7
    read = [dequantize(t) for t in given(*args)] if kind == "mxfp8" else args
    mask = np.arange(S) <= np.arange(T)[:, None] + S - T if causal else np.ones((T, S), bool)
    wanted = exact(*read, do.astype(dtype), 1.0, mask)
    assert all(np.isfinite(g).all() for g in gradients)
    # dq's last dim is -15 times the sum of a row of dS, which is 0 but for rounding.
    gradients[0], wanted[1] = gradients[0][..., :-1], wanted[1][..., :-1]
    # In float32 logits of -120 are good to 2^-17, so their exponentials are; bfloat16 rounds P and dS, as the ops say.
    assert_close((o, *gradients), tuple(wanted), 1e-4 if kind == "float32" else 3e-2)


def test_the_only_token_attends_to_anything_but_itself():
    """Case 49 of public reports: B = S = H = 1 at position 0: RoPE is the identity, o is v, dv is do, dq and dk are 0
    (but for the order in which the same products are summed)."""
    rng = np.random.default_rng(1)
    cos, sin = rope_tables(jnp.zeros(1, jnp.int32), CONFIG.rope, 32)
    q, k, v, c = draw(rng, 1, 1, 1, 64), draw(rng, 1, 1, 1, 64), draw(rng, 1, 1, 1, 48), draw(rng, 1, 1, 1, 48)
    options = dict(rotary_dim=32, input_layout="halves")
    assert_same([apply_rope(a, cos, sin, **options) for a in (q, k)], [q, k])

    @functools.partial(jax.jit, static_argnums=0)
    def run(causal, c, *args):
        o, pullback = jax.vjp(functools.partial(attention, causal=causal), *args)
        return o, *pullback(c)

    for causal in (True, False, "bottom_right"):
        o, dq, dk, dv = run(causal, c, q, k, v)
        assert_same((o, dv), (v, c))
        assert max(np.abs(dq).max(), np.abs(dk).max()) < 1e-6


def test_a_layer_of_one_token_reads_more_than_its_value():
    """Case 49 of public reports: with one token the query and the key are for nothing, and get no gradient."""
    params = init(jax.random.key(0), CONFIG)
    x = draw(np.random.default_rng(2), 1, 1, 48)
    y, gradients = jax.jit(jax.value_and_grad(lambda p: jnp.sum(mla(p, x, CONFIG, positions=jnp.asarray([7])) ** 3)))(
        params
    )
    latent = reference.rms_norm(reference.f64(x) @ reference.f64(params["wkv_a"])[:, :32], params["kv_norm"], 1e-3)
    v = np.einsum("bsc,chv->bshv", latent, reference.f64(params["wkv_b"])[..., 32:])
    assert_close(y, (np.einsum("bshv,hvm->bsm", v, reference.f64(params["wo"])) ** 3).sum(), 1e-5)
    largest = {name: float(np.abs(g).max()) for name, g in gradients.items()}
    assert (
        max(largest[n] for n in ("wq_a", "q_norm", "wq_b")) < 1e-5 < min(largest[n] for n in ("wkv_a", "wkv_b", "wo"))
    )
    with pytest.raises(ValueError, match="x: found axis -2 of size 1, wanted a multiple of 32"):
        quantize_mxfp8(x[..., :32], usage="columnwise")
