"""cu_seqlens: what they mean, that they equal the ids and the list of sequences one by one, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from judge import assert_close, assert_same, draw

from jax_mla import attention, segment_ids_from_cu_seqlens
from jax_mla.segments import positions_within


@pytest.mark.parametrize(
    "boundaries,length,ids,positions",
    [
        ([0, 3, 3, 7], 7, [1, 1, 1, 3, 3, 3, 3], [0, 1, 2, 0, 1, 2, 3]),
        ([0, 0, 7], 7, [2] * 7, list(range(7))),
        ([0, 7, 7, 7, 7], 7, [1] * 7, list(range(7))),
        ([0, 3, 7], 10, [1, 1, 1, 2, 2, 2, 2, 0, 0, 0], [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]),
        ([0], 3, [0, 0, 0], [0, 1, 2]),
        ([[0, 2, 3], [0, 0, 1]], 3, [[1, 1, 2], [2, 0, 0]], [[0, 1, 0], [0, 0, 1]]),
    ],
)
def test_ids_and_positions(boundaries, length, ids, positions):
    """Case 25 of public reports: sequences of no tokens, anywhere."""
    found = segment_ids_from_cu_seqlens(np.asarray(boundaries), length)
    assert found.tolist() == ids and found.dtype == jnp.int32
    assert positions_within(found).tolist() == positions
    traced = jax.jit(segment_ids_from_cu_seqlens, static_argnums=1)(jnp.asarray(boundaries), length)
    assert_same(traced, found)


def qkv(T):
    rng = np.random.default_rng(T)
    return draw(rng, T, 2, 6), draw(rng, T, 2, 6), draw(rng, T, 2, 5), draw(rng, T, 2, 5)


@jax.jit
def run(q, k, v, c, cu_seqlens):
    (o, lse), pullback = jax.vjp(lambda *a: attention(*a, cu_seqlens=cu_seqlens, return_lse=True), q, k, v)
    return o, lse, *pullback((c, jnp.zeros_like(lse)))


@jax.jit
def one_sequence(q, k, v, c):
    """Gradients, [T, H, .]."""
    _, pullback = jax.vjp(lambda *a: attention(*(x[None] for x in a))[0], q, k, v)
    return pullback(c)


def test_packed_tokens_equal_their_sequences_one_by_one():
    """Case 25: forward and backward, with and without empties, and no compile for other lengths."""
    args = qkv(10)
    before = run._cache_size()
    for boundaries in ([0, 3, 3, 7], [0, 0, 3, 7], [0, 7, 7, 7]):  # the same lengths again and again: few compiles
        found = run(*args, np.asarray(boundaries))
        ids = reference.segments_from(boundaries, 10)[None]
        wanted, lse, _ = reference.attention(*(a[None] for a in args[:3]), segment_ids=ids)
        assert_close(found[:2], (wanted[0], lse[0]))
        for start, end in zip(boundaries[:-1], boundaries[1:], strict=True):
            alone = one_sequence(*(a[start:end] for a in args))
            assert_close([g[start:end] for g in found[2:]], alone, 1e-5)
        assert all(not np.any(np.asarray(g)[boundaries[-1] :]) for g in (found[0], *found[2:]))
    assert run._cache_size() == before + 1


def test_nan_past_the_last_sequence_reaches_nothing():
    """Case 11 of public reports, T = 10 with boundaries [0, 3, 7]."""
    args = qkv(10)
    boundaries = np.asarray([0, 3, 7])
    clean = run(*(a.at[7:].set(0.0) for a in args), boundaries)
    assert_same(run(*(a.at[7:].set(jnp.nan) for a in args), boundaries), clean)


def test_rows_of_packed_tokens():
    q, k, v, _ = (a.reshape(2, 5, *a.shape[1:]) for a in qkv(10))
    boundaries = np.asarray([[0, 2, 5, 5], [0, 0, 1, 3]])
    ids = segment_ids_from_cu_seqlens(boundaries, 5)
    everything = functools.partial(attention, return_lse=True, return_max_logit=True)
    found = jax.jit(functools.partial(everything, cu_seqlens=boundaries))(q, k, v)
    assert_same(found, jax.jit(functools.partial(everything, segment_ids=ids))(q, k, v))
    row = functools.partial(attention, cu_seqlens=boundaries[0], return_max_logit=True)
    o, largest = jax.eval_shape(row, q[0], k[0], v[0])
    assert o.shape == (5, 2, 5) and largest.shape == (2,)


def test_int64_boundaries_change_nothing(x64):
    """Case 43 of public reports."""
    args = [a.astype(jnp.float32) for a in qkv(10)]
    wide, narrow = (run(*args, jnp.asarray([0, 3, 7], dtype)) for dtype in (jnp.int64, jnp.int32))
    assert_same(wide, narrow)


@pytest.mark.parametrize(
    "boundaries,error,message",
    [
        (np.asarray([0.0, 3.0]), TypeError, "cu_seqlens: found dtype float64"),
        ([0, 3], TypeError, "cu_seqlens: found list"),
        (np.asarray([1, 3, 7]), ValueError, r"cu_seqlens: found \[1, 3, 7\], wanted 0 first"),
        (np.asarray([0, 5, 3]), ValueError, r"cu_seqlens: found \[0, 5, 3\]"),
        (np.asarray([0, 3, 11]), ValueError, r"cu_seqlens: found \[0, 3, 11\].*at most 10"),
        (np.zeros((1, 1, 1), np.int32), ValueError, "cu_seqlens: found"),
        (np.zeros(0, np.int32), ValueError, "cu_seqlens: found"),
    ],
)
def test_malformed_boundaries_are_named(boundaries, error, message):
    """Case 43 of public reports: never zeros for later sequences."""
    with pytest.raises(error, match=message):
        segment_ids_from_cu_seqlens(boundaries, 10)


def test_what_does_not_go_together_is_named():
    q, k, v, _ = qkv(10)
    boundaries = np.asarray([0, 3, 7])
    with pytest.raises(ValueError, match="cu_seqlens: found segment ids besides"):
        attention(q, k, v, cu_seqlens=boundaries, segment_ids=jnp.ones((1, 10), jnp.int32))
    with pytest.raises(ValueError, match="q: found float32.*wanted an array .T, H, D."):
        attention(q[None], k[None], v[None], cu_seqlens=boundaries)
    with pytest.raises(ValueError, match="k: found .* wanted as many keys as queries, 10"):
        attention(q, k[:8], v[:8], cu_seqlens=boundaries)
    with pytest.raises(ValueError, match=r"cu_seqlens: found int64\[2, 3\], wanted a row for each of q's, \[B=1"):
        attention(q[None], k[None], v[None], cu_seqlens=np.stack([boundaries] * 2))
