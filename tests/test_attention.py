"""attention against the fp64 reference; small blocks make every path run at lengths a test can afford."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from judge import assert_close, assert_same, check, draw

from jax_mla import attention, blockwise


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", 4)


def inputs(rng, B, T, S, H, D, V, dtype=jnp.float32):
    return draw(rng, B, T, H, D, dtype=dtype), draw(rng, B, S, H, D, dtype=dtype), draw(rng, B, S, H, V, dtype=dtype)


def both(options):
    """o and lse from ours and from the reference."""
    ours = lambda q, k, v: attention(q, k, v, **options, return_lse=True)  # noqa: E731
    theirs = lambda q, k, v: reference.attention(q, k, v, **options)[:2]  # noqa: E731
    return ours, theirs


@pytest.mark.parametrize("causal", [True, False, "bottom_right"])
@pytest.mark.parametrize("T,S", [(1, 1), (3, 3), (9, 9), (5, 13), (13, 5), (1, 11), (8, 4)])
def test_values_lse_and_gradients(small_blocks, T, S, causal):
    rng = np.random.default_rng(T * 20 + S)
    args, options = inputs(rng, 2, T, S, 3, 6, 5), dict(causal=causal, scale=0.7)
    ours, theirs = both(options)
    check(ours, theirs, args, rng)


@pytest.mark.parametrize("S", [1, 64, 100, 192, 320, 1024])
@pytest.mark.parametrize("D,V", [(192, 128)])
def test_lengths_at_deepseek_head_dims(S, D, V):
    rng = np.random.default_rng(S)
    args = inputs(rng, 1, S, S, 1, D, V)
    ours, theirs = both(dict(causal=True))
    assert_close(jax.jit(ours)(*args), theirs(*args), 1e-5)


@pytest.mark.parametrize("D,V", [(192, 128), (96, 64), (64, 64), (576, 512), (256, 256), (8, 24)])
def test_unequal_head_dims_and_their_gradients(D, V):
    """Case 35 of public reports."""
    rng = np.random.default_rng(D)
    args = inputs(rng, 1, 6, 9, 2, D, V)
    ours, theirs = both(dict(causal="bottom_right"))
    check(ours, theirs, args, rng, gradient_tolerance=1e-4)


PACKED = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 0, 0], [7, 3, 3, 3, 3, 3, 3, 9, 9, 9]])
KEYS = np.array([[1, 1, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0], [3, 3, 3, 9, 9, 9, 9, 9, 9, 9, 9, 9]])


@pytest.mark.parametrize("causal", [True, False, "bottom_right"])
@pytest.mark.parametrize("keys", [None, KEYS], ids=["self", "cross"])
@pytest.mark.parametrize("block", [3, 512])
def test_packed_sequences(monkeypatch, block, keys, causal):
    monkeypatch.setattr(blockwise, "BLOCK", block)
    rng = np.random.default_rng(1)
    options = dict(causal=causal, segment_ids=PACKED) | ({} if keys is None else dict(kv_segment_ids=keys))
    args = inputs(rng, 2, 10, 10 if keys is None else 12, 2, 6, 5)
    ours, theirs = both(options)
    o, _ = check(ours, theirs, args, rng)
    assert np.all(np.asarray(o)[PACKED == 0] == 0)


@pytest.mark.parametrize("block", [4, 512])
def test_nan_in_padding_reaches_nothing(monkeypatch, block):
    """Case 11 of public reports: rows past the last sequence, in inputs and cotangents, forward and backward."""
    monkeypatch.setattr(blockwise, "BLOCK", block)
    rng = np.random.default_rng(2)
    ids = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0, 0]])
    args, cotangent = inputs(rng, 1, 10, 10, 2, 6, 5), draw(rng, 1, 10, 2, 5)

    @jax.jit
    def run(*args, ids):
        o, pullback = jax.vjp(lambda *a: attention(*a, segment_ids=ids), *args[:3])
        return o, *pullback(args[3])

    poisoned = [a.at[:, 7:].set(jnp.nan) for a in (*args, cotangent)]
    found = run(*poisoned, ids=ids)
    clean = run(*(a.at[:, 7:].set(0.0) for a in (*args, cotangent)), ids=ids)
    assert_same(found, clean)
    assert all(np.all(np.asarray(f)[:, 7:] == 0) for f in found)
    short = run(*(a[:, :7] for a in (*args, cotangent)), ids=ids[:, :7])
    assert_close([f[:, :7] for f in found], short, 1e-6)


def test_fully_masked_rows_give_zero_and_no_gradient(small_blocks):
    rng = np.random.default_rng(3)
    args = inputs(rng, 1, 13, 5, 2, 6, 5)  # bottom-right with more queries than keys: the first 8 see nothing

    @jax.jit
    def run(c, *args):
        outputs, pullback = jax.vjp(lambda *a: attention(*a, causal="bottom_right", return_lse=True), *args)
        return outputs, pullback((c, jnp.zeros_like(outputs[1])))

    (o, lse), (dq, dk, dv) = run(draw(rng, 1, 13, 2, 5), *args)
    assert np.all(np.asarray(o)[:, :8] == 0) and np.all(np.asarray(lse)[:, :8] == -np.inf)
    assert np.all(np.isfinite(np.asarray(lse)[:, 8:]))
    assert np.all(np.asarray(dq)[:, :8] == 0) and all(np.all(np.isfinite(np.asarray(g))) for g in (dq, dk, dv))


@pytest.mark.parametrize("shift", [-120.0, 3000.0])
@pytest.mark.parametrize("S", [64, 100, 192, 320])
def test_shifting_all_logits_of_a_row_changes_nothing(S, shift):
    """Case 33 of public reports: very negative (and very large) logits. q's last dim is 1, k's is the shift."""
    rng = np.random.default_rng(4)
    q, k, v = inputs(rng, 1, S, S, 2, 8, 5)
    q, k = q.at[..., -1].set(1.0), k.at[..., -1].set(0.0)
    moved = k.at[..., -1].set(shift)
    c = draw(rng, 1, S, 2, 5)

    @jax.jit
    def run(k):
        o, pullback = jax.vjp(lambda *a: attention(*a, scale=1.0), q, k, v)
        dq, dk, dv = pullback(c)
        return o, dq[..., :-1], dk, dv  # dq's last dim multiplies the shift

    assert_close(run(moved), run(k), 3e-3 if shift > 0 else 1e-4)


def test_max_logit():
    rng = np.random.default_rng(5)
    args = inputs(rng, 2, 10, 12, 3, 6, 5)
    options = dict(scale=0.3, segment_ids=PACKED, kv_segment_ids=KEYS)
    run = functools.partial(attention, **options, return_lse=True, return_max_logit=True)
    o, lse, largest = jax.jit(run)(*args)
    assert_close((o, lse, largest), reference.attention(*args, **options))
    assert largest.dtype == jnp.float32
    o, largest = jax.eval_shape(functools.partial(attention, return_max_logit=True), *args)
    assert largest.shape == (3,)


@pytest.mark.parametrize("dtype,tolerance", [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_narrow_dtypes(small_blocks, dtype, tolerance):
    rng = np.random.default_rng(6)
    args = inputs(rng, 2, 9, 13, 3, 16, 8, dtype)
    ours, theirs = both(dict(causal="bottom_right"))
    o, lse = check(ours, theirs, args, rng, tolerance, 5 * tolerance)
    assert o.dtype == args[0].dtype and lse.dtype == jnp.float32


def test_scale():
    rng = np.random.default_rng(7)
    q, k, v = inputs(rng, 1, 4, 4, 2, 16, 5)
    assert_same(attention(q, k, v), attention(q, k, v, scale=0.25))
    mean = attention(q, k, v, scale=0.0, causal=False)  # an explicit 0.0 is honoured: plain averages
    assert_close(mean, np.broadcast_to(np.asarray(v).mean(1, keepdims=True), mean.shape), 1e-6)


def test_one_token():
    """Case 49 of public reports."""
    rng = np.random.default_rng(8)
    q, k, v = inputs(rng, 1, 1, 1, 1, 6, 5)
    o, pullback = jax.vjp(attention, q, k, v)
    c = draw(rng, *o.shape)
    dq, dk, dv = pullback(c)
    assert_same((o, dv), (v, c))
    assert np.abs(dq).max() < 1e-6 and np.abs(dk).max() < 1e-6  # two sums of the same numbers, in different orders


@pytest.mark.parametrize("B,T,S", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
def test_empty(B, T, S):
    q, k, v = jnp.ones((B, T, 2, 6)), jnp.ones((B, S, 2, 6)), jnp.ones((B, S, 2, 5))
    o, lse, largest = attention(q, k, v, return_lse=True, return_max_logit=True)
    assert o.shape == (B, T, 2, 5) and np.all(np.asarray(o) == 0)
    assert np.all(np.asarray(lse) == -np.inf) and largest.tolist() == [-np.inf] * 2
    gradients = jax.grad(lambda *a: jnp.sum(attention(*a)), argnums=(0, 1, 2))(q, k, v)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape] and not any(np.any(g) for g in gradients)


def biggest_array(function, *args):
    """The most elements of any value in the jaxpr of function, inner jaxprs included."""
    biggest = 0

    def walk(jaxpr):
        nonlocal biggest
        for eqn in jaxpr.eqns:
            biggest = max(biggest, *(int(np.prod(v.aval.shape)) for v in eqn.outvars if hasattr(v.aval, "shape")), 0)
            for param in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "jaxpr") or hasattr(p, "eqns")):
                inner = getattr(param, "jaxpr", param)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return biggest


def test_never_a_matrix_of_all_logits():
    """T = S = 8192: forward and backward hold no array of T x S, nor one that grows faster than T."""
    q, v = jax.ShapeDtypeStruct((1, 8192, 1, 12), jnp.float32), jax.ShapeDtypeStruct((1, 8192, 1, 8), jnp.float32)
    step = jax.grad(lambda *a: jnp.sum(attention(*a)), argnums=(0, 1, 2))
    assert biggest_array(step, q, q, v) <= max(blockwise.BLOCK**2, 8192 * 12)


Q, K, V = jnp.zeros((2, 4, 3, 6)), jnp.zeros((2, 5, 3, 6)), jnp.zeros((2, 5, 3, 7))
IDS, KV_IDS = jnp.ones((2, 4), jnp.int32), jnp.ones((2, 5), jnp.int32)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(q=jnp.zeros((4, 3, 6))), "q: found"),
        (dict(q=Q.astype(jnp.int32)), "q: found dtype int32"),
        (dict(k=jnp.zeros((2, 5, 2, 6))), r"k: found float32\[2, 5, 2, 6\], wanted an array \[B=2, S, H=3, D=6\]"),
        (dict(k=jnp.zeros((2, 5, 3, 8))), "k: found"),
        (dict(v=jnp.zeros((2, 6, 3, 7))), r"v: found float32\[2, 6, 3, 7\], wanted an array \[B=2, S=5, H=3, V\]"),
        (dict(v=V.astype(jnp.bfloat16)), "v: found dtype bfloat16, wanted q's"),
        (dict(scale=float("inf")), "scale: found inf"),
        (dict(scale="1"), "scale: found '1'"),
        (dict(causal="top_left"), "causal: found 'top_left', wanted True, False or 'bottom_right'"),
        (dict(causal=None), "causal: found None"),
        (dict(causal=jnp.ones(2)), "causal: found"),
        (dict(segment_ids=IDS), "kv_segment_ids: found None"),
        (dict(kv_segment_ids=KV_IDS), "segment_ids: found None"),
        (dict(segment_ids=IDS[:1], kv_segment_ids=KV_IDS), "segment_ids: found"),
        (dict(segment_ids=IDS.astype(float), kv_segment_ids=KV_IDS), "segment_ids: found dtype float32"),
        (
            dict(segment_ids=IDS, kv_segment_ids=IDS),
            r"kv_segment_ids: found int32\[2, 4\], wanted an array \[B=2, S=5\]",
        ),
        (dict(return_lse=1), "return_lse: found 1"),
        (dict(return_max_logit="yes"), "return_max_logit: found 'yes'"),
        (dict(implementation="cudnn"), "attention: found no implementation.*'cudnn'"),
    ],
)
def test_bad_input_is_named(change, message):
    given = dict(q=Q, k=K, v=V) | change
    q, k, v = (given.pop(name) for name in "qkv")
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        attention(q, k, v, **given)


def test_traced_settings_are_named():
    with pytest.raises(TypeError, match="scale: found a traced value"):
        jax.jit(lambda s: attention(Q, K, V, scale=s))(0.3)
    with pytest.raises(ValueError, match="causal: found"):
        jax.jit(lambda c: attention(Q, K, V, causal=c))(True)
