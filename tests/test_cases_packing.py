"""Public reports of packed batches: tails that were never written, sequences of no tokens, malformed boundaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from judge import assert_close, assert_same, draw

from jax_mla import (
    MLAConfig,
    apply_rope,
    attention,
    init,
    mla,
    quantize_mxfp8,
    rope_tables,
    segment_ids_from_cu_seqlens,
)
from jax_mla.linear import linear
from jax_mla.segments import zero_padding

H, D, V, P, M = 3, 64, 32, 16, 32
CONFIG = MLAConfig(M, H, None, 32, 32, 32, 32, norm_eps=1e-3)
RECIPES = (None, "mxfp8")


def heads(recipe, *arrays):
    return arrays if recipe is None else [quantize_mxfp8(a, usage="both", token_axis=-3) for a in arrays]


def arrays(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [draw(rng, *s) for s in shapes]


def vjp(function):
    """Outputs and gradients; the cotangents come last."""

    def run(args, cotangents):
        outputs, pullback = jax.vjp(function, *args)
        return outputs, pullback(cotangents)

    return jax.jit(run)


def test_rows_past_the_last_sequence_poison_what_follows():
    """Case 11 of public reports: RoPE, attention and the next projection's dW; rows 7 to 9 of 10 are NaN, in cotangents
    too. All bits are those of a tail of zeros; the values those of 7 rows, whose sums XLA may order otherwise."""
    q, k, v, do, dy, w = arrays(0, (10, H, D), (10, H, D), (10, H, V), (10, H, V), (10, M), (H, V, M))
    boundaries = np.asarray([0, 3, 7])

    def flow(q, k, v, w):
        cos, sin = rope_tables(jnp.arange(5, 5 + len(q)), CONFIG.rope, P)
        q, k = (apply_rope(a, cos, sin, rotary_dim=P) for a in (q, k))
        o = attention(q, k, v, cu_seqlens=boundaries)
        y = linear(o, w, contract=2)[None]
        return o, zero_padding(y, segment_ids_from_cu_seqlens(boundaries, len(q))[None])[0]

    run = vjp(flow)

    def with_tail(value):
        q_, k_, v_, do_, dy_ = (a.at[7:].set(value) for a in (q, k, v, do, dy))
        return run((q_, k_, v_, w), (do_, dy_))

    (o, y), gradients = found = with_tail(jnp.nan)
    assert_same(found, with_tail(0.0))
    tails = [a[7:] for a in (o, y, *gradients[:3])]
    assert not any(np.any(a) for a in tails) and all(np.isfinite(g).all() for g in gradients)
    found = (o[:7], y[:7]), (*(g[:7] for g in gradients[:3]), gradients[3])
    assert_close(found, run((q[:7], k[:7], v[:7], w), (do[:7], dy[:7])), 1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_padding_poisons_the_layer(recipe):
    """Case 11 of public reports: NaN in x and in y's cotangent, at the end of a row and within one, changes no bit,
    with MXFP8 too, where padding shares blocks with tokens."""
    params = init(jax.random.key(0), CONFIG)
    ids = np.repeat([[1, 0, 2, 0], [3, 3, 0, 0]], [20, 12, 13, 19], axis=1)
    ids[1, 20:32] = 3
    x, dy = arrays(2, (2, 64, M), (2, 64, M))
    run = jax.jit(
        lambda p, x, dy, ids: (
            (r := jax.vjp(lambda p, x: mla(p, x, CONFIG, segment_ids=ids, recipe=recipe), p, x))[1](dy) + (r[0],)
        )
    )
    bad = jnp.asarray(ids == 0)[..., None]
    found = run(params, jnp.where(bad, jnp.nan, x), jnp.where(bad, jnp.nan, dy), jnp.asarray(ids))
    assert_same(found, run(params, jnp.where(bad, 0.0, x), jnp.where(bad, 0.0, dy), jnp.asarray(ids)))
    dp, dx, y = found
    assert not np.any(np.asarray(y)[ids == 0]) and not np.any(np.asarray(dx)[ids == 0])
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves((dp, dx, y)))


def test_mxfp8_hides_nan_in_the_padding_of_a_block():
    """Case 11 of public reports: NaN in whole blocks of padding reaches nothing; in a block shared with v's tokens it
    has reached them already, when v was quantised, and it shows, in that sequence only."""
    args = arrays(3, (1, 64, H, D), (1, 64, H, D), (1, 64, H, V))
    ids = np.repeat([[1, 2, 0]], [32, 14, 18], axis=1)
    run = jax.jit(lambda q, k, v, ids: attention(*heads("mxfp8", q, k, v), segment_ids=ids))
    poisoned = [a.at[:, 46:].set(jnp.nan) for a in args]
    wanted, found = run(*args, ids), run(*poisoned, ids)
    assert_same(found[:, :32], wanted[:, :32])
    assert np.isnan(found[:, 32:46]).all() and not np.any(found[:, 46:])
    ids[:, 32:] = 0
    assert_same(run(*poisoned, ids)[:, :32], wanted[:, :32])


@pytest.mark.parametrize("recipe", RECIPES)
def test_sequences_of_no_tokens_change_the_others(recipe):
    """Case 25 of public reports: boundaries with empties, as padding too, give the bits of the list without them,
    forward and backward."""
    T, unit = (7, 1) if recipe is None else (57, 32)
    args = arrays(4, (64, H, D), (64, H, D), (64, H, V))
    if recipe is None:
        args = [a[:7] for a in args]
    (c,) = arrays(5, args[2].shape)
    run = vjp(lambda q, k, v, ids: attention(*heads(recipe, q[None], k[None], v[None]), segment_ids=ids[None])[0])
    first = 3 * unit if recipe is None else unit
    cases = [[0, first, first, T], [0, first, T]], [[0, 0, T], [0, T]], [[0, T, T, T, T], [0, T]]
    for empties, plain in cases:
        found, wanted = (run((*args, segment_ids_from_cu_seqlens(np.asarray(b), len(c))), c) for b in (empties, plain))
        gradients = found[1][:3]
        assert_same((found[0], gradients), (wanted[0], wanted[1][:3]))
        assert all(np.isfinite(a).all() and np.any(a) for a in (found[0], *gradients))
    assert run._cache_size() == 1


def test_boundaries_of_another_integer_dtype_give_other_sequences():
    """Case 43 of public reports: numpy and jax arrays of any width are the same boundaries."""
    args = arrays(6, (64, H, D), (64, H, D), (64, H, V))
    run = jax.jit(lambda b: attention(*args, cu_seqlens=b))
    wanted = run(np.asarray([0, 32, 50], np.int32))
    for boundaries in (np.asarray([0, 32, 50]), np.asarray([0, 32, 50], np.uint8), jnp.asarray([0, 32, 50], jnp.int16)):
        assert_same(run(boundaries), wanted)
    with jax.enable_x64(True):
        wide = jnp.asarray([0, 32, 50])
        assert wide.dtype == jnp.int64
        assert_same(run(wide), wanted)
    assert np.all(np.any(wanted[:50], axis=(1, 2))) and not np.any(wanted[50:])


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    "boundaries,error,message",
    [
        ([1, 3, 7], ValueError, r"cu_seqlens: found \[1, 3, 7\], wanted 0 first"),
        ([0, 7, 3], ValueError, r"cu_seqlens: found \[0, 7, 3\], wanted .* ends that never fall"),
        ([0, 3, 65], ValueError, r"cu_seqlens: found \[0, 3, 65\], wanted .* at most 64"),
        ([0.0, 3.0, 7.0], TypeError, "cu_seqlens: found dtype float(32|64), wanted an integer dtype"),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_malformed_boundaries_give_zeros_for_later_sequences(recipe, boundaries, error, message, make):
    """Case 43 of public reports: by attention itself, also under a jit that closes over them."""
    args = heads(recipe, *(jnp.ones((64, H, n)) for n in (D, D, V)))
    if recipe is not None:  # multiples of 32 are checked first; these are
        boundaries = [32 * b if b < 60 else b for b in boundaries]
        message = (
            message.replace("1, 3, 7", "32, 96, 224").replace("0, 7, 3", "0, 224, 96").replace("0, 3, 65", "0, 96, 65")
        )
    given = make(boundaries)
    run = lambda *a: attention(*a, cu_seqlens=given)  # noqa: E731
    for call in (run, jax.jit(run)):
        with pytest.raises(error, match=message):
            call(*args)
