"""Attention's Triton kernels against float64, as they are launched from JAX: in Triton's interpreter on the CPU,
compiled on a GPU."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (extra `golden`): kernels run on torch tensors here")
from torch_launch import GPU, run, to_numpy, to_torch  # noqa: E402  (before triton: it chooses the interpreter)

pytest.importorskip("triton", reason="needs triton (extra `test`)")
from jax_mla.kernels import attention, attention_backward, blocks  # noqa: E402

from jax_mla.attention_triton import bounds, bounds_by_last_key, bounds_of_runs, runs  # noqa: E402

pytestmark = [pytest.mark.golden, *([pytest.mark.gpu] if GPU else [])]

# A GPU multiplies float32 as TF32; the interpreter multiplies bfloat16 wrongly.
DTYPES = ("bfloat16", "float16") if GPU else ("float32", "float16")
TOLERANCES = {"float32": 1e-5, "float16": 2.0**-9, "bfloat16": 2.0**-6}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that there are many of them, and last ones that stick out; queries and keys in blocks of other sizes."""
    if not GPU:
        for op, tile in (("forward", (32, 16)), ("dq", (32, 16)), ("dkv", (16, 32))):
            for name in (f"attention {op}", f"attention {op}, short", f"attention {op}, packed"):
                monkeypatch.setitem(blocks.TABLES[90], name, ((blocks.ANY, blocks.Tile(*tile, 4, 1)),))


def reference(q, k, v, do, dlse, scale, seen):
    """o, lse, the largest logits, dq, dk, dv in float64; seen [B, T, S]."""
    logits = np.where(seen[:, None], np.einsum("bthd,bshd->bhts", q, k) * scale, -np.inf)
    largest = logits.max(-1, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isfinite(largest), largest, 0)[..., None])
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.where(np.isfinite(largest), largest, 0) + np.log(total)
    p = weights / np.where(total == 0, 1, total)[..., None]
    o = np.einsum("bhts,bshv->bthv", p, v)
    rest = (o * do).sum(-1) - dlse
    ds = p * (np.einsum("bthv,bshv->bhts", do, v) - np.moveaxis(rest, 2, 1)[..., None]) * scale
    gradients = np.einsum("bhts,bshd->bthd", ds, k), np.einsum("bhts,bthd->bshd", ds, q)
    return o, np.moveaxis(lse, 1, 2), np.moveaxis(largest, 1, 2), *gradients, np.einsum("bhts,bthv->bshv", p, do)


def every_kernel(shape, q, k, v, do, dlse, ids=None, dtype=None, ordered=None):
    """ordered: ids of queries and of keys, or None twice, and every query's last key."""

    def packing(op):
        nonlocal ids
        if ids is None and ordered is None:
            return q, q
        tile = attention.tile_of(op, shape, None)
        sizes = (tile.keys, tile.queries) if op == "dkv" else (tile.queries, tile.keys)
        if ordered is None:
            table = (bounds_of_runs if shape.runs else bounds)(ids, *sizes, shape.causal, op != "dkv")
        else:
            table = bounds_by_last_key(*ordered, shape.keys, *sizes, op != "dkv")
            q_ids, k_ids, last = ordered
            unread = np.full((shape.batch, shape.keys + shape.queries), 77)  # without ids
            ids = np.concatenate([unread, last] if q_ids is None else [k_ids, q_ids, last], axis=1)
        return (torch.from_numpy(np.array(a, np.int32)).to(q.device) for a in (ids, table))

    o, lse, largest = run(attention.forward(shape, dtype), q, k, v, *packing("forward"))
    dq, *of_queries = run(attention_backward.dq(shape, dtype), q, k, v, o, do, lse, dlse, *packing("dq"))
    return o, lse, largest, dq, *run(attention_backward.dkv(shape, dtype), q, k, v, do, *of_queries, *packing("dkv"))


def agree(found, wanted, dtype, slack=1):
    for name, f, w in zip(("o", "lse", "largest", "dq", "dk", "dv"), map(to_numpy, found), wanted, strict=True):
        blind = ~np.isfinite(w)
        assert np.array_equal(f[blind], w[blind]), name
        error = np.abs(f[~blind] - w[~blind]).max(initial=0)
        assert error <= slack * TOLERANCES[dtype] * np.abs(w[~blind]).max(initial=1), (name, error)


def draw(rng, queries, keys, width, value, heads=3 if GPU else 2, batch=2):
    shapes = [(queries, width), (keys, width), (keys, value), (queries, value)]
    return *(rng.normal(size=(batch, n, heads, d)) for n, d in shapes), rng.normal(size=(batch, queries, heads))


HEADS = [(192, 128), (96, 64), (64, 96), (256, 256)]
LENGTHS = [(33, 70), (70, 33), (1, 1), (1, 70), (64, 64)]


# Every width in the first dtype, in the other one.
@pytest.mark.parametrize("dtype,width,value", [(DTYPES[0], *heads) for heads in HEADS] + [(DTYPES[1], *HEADS[1])])
def test_every_mask(dtype, width, value):
    """More queries than keys, so that some see none, and fewer; blocks that stick out; widths in one part and two."""
    rng, scale = np.random.default_rng(width), 1.3 * width**-0.5
    batch = 2 if GPU or (width, dtype) == (96, DTYPES[0]) else 1
    lengths = LENGTHS if GPU else LENGTHS[:4] if (width, dtype) == (64, DTYPES[0]) else LENGTHS[:1]
    for (queries, keys), causal in itertools.product(lengths, (False, True, "bottom_right")):
        offset = keys - queries if causal == "bottom_right" else 0
        arrays = [to_torch(a, dtype) for a in draw(rng, queries, keys, width, value, batch=batch)]
        arrays[4] = arrays[4].float()
        seen = np.arange(keys) <= np.arange(queries)[:, None] + offset if causal else np.ones((queries, keys), bool)
        shape = attention.Shape(batch, queries, keys, arrays[0].shape[2], width, value, scale, bool(causal), offset)
        exact = [to_numpy(a).astype(float) for a in arrays]
        wanted = reference(*exact, scale, np.broadcast_to(seen, (batch, queries, keys)))
        agree(every_kernel(shape, *arrays, dtype=dtype), wanted, dtype)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(causal):
    """Padding in front, in the middle and at the end, with NaN in all arrays; sequences of one token, and across
    blocks, of which one is all of an id; a row of padding; an id in two pieces, around another's. Nothing
    is read but what `bounds` says."""
    rng, length, dtype = np.random.default_rng(1), 150 if GPU else 110, DTYPES[0]
    ids = np.zeros((3, length), np.int32)
    ids[0, 2:31], ids[0, 31], ids[0, 32:90], ids[0, 95:103] = 3, 1, 2, 7
    ids[2, :40], ids[2, 40:80], ids[2, 80:] = 5, 6, 5
    arrays = draw(rng, length, length, 96, 64, batch=3)
    seen = (ids[:, :, None] == ids[:, None]) & (ids != 0)[:, None]
    if causal:
        seen = seen & np.tril(np.ones((length, length), bool))
    arrays = [to_numpy(to_torch(a, dtype)).astype(float) for a in arrays]
    wanted = reference(*(np.where((ids != 0)[..., *[None] * (a.ndim - 2)], a, 0) for a in arrays), 0.2, seen)
    for array in arrays:
        array[ids == 0] = np.nan
    given = [to_torch(a, dtype) for a in arrays[:4]] + [to_torch(arrays[4])]
    shape = attention.Shape(3, length, length, arrays[0].shape[2], 96, 64, 0.2, causal, packed=True)
    # Rows of padding are what they are without a key: 0, or -inf.
    agree(every_kernel(shape, *given, ids, dtype=dtype), wanted, dtype)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_that_lie_together(causal):
    """By where they begin and end: sequences of one token, of a block, of parts of many; NaN in the padding, which is
    last."""
    rng, length, dtype = np.random.default_rng(2), 110, DTYPES[0]
    ends = np.array([[3, 32, 33, 96, 101], [32, 64, 110, 110, 110]])
    ids = np.array([np.searchsorted(row, np.arange(length), side="right") + 1 for row in ends], np.int32)
    ids[0, 101:] = 0
    arrays = draw(rng, length, length, 96, 64)
    seen = (ids[:, :, None] == ids[:, None]) & (ids != 0)[:, None]
    if causal:
        seen = seen & np.tril(np.ones((length, length), bool))
    arrays = [to_numpy(to_torch(a, dtype)).astype(float) for a in arrays]
    wanted = reference(*(np.where((ids != 0)[..., *[None] * (a.ndim - 2)], a, 0) for a in arrays), 0.2, seen)
    for array in arrays:
        array[ids == 0] = np.nan
    given = [to_torch(a, dtype) for a in arrays[:4]] + [to_torch(arrays[4])]
    shape = attention.Shape(2, length, length, arrays[0].shape[2], 96, 64, 0.2, causal, packed=True, runs=True)
    agree(every_kernel(shape, *given, np.asarray(runs(ids)), dtype=dtype), wanted, dtype)


def last_keys(rng, queries, keys):
    """Of three rows: two chunks, as of a device in context parallelism; anything, none and more than there are too;
    rising."""
    half = queries // 2
    zigzag = np.concatenate([np.arange(half) + half, np.arange(queries - half) + keys - queries + half])
    anything = rng.integers(-3, keys + 3, queries)
    return np.stack([zigzag, anything, np.sort(anything)]).astype(np.int32)


@pytest.mark.parametrize("queries, keys, packed", [(80, 160, True), (70, 41, False)])
def test_every_query_has_its_last_key(queries, keys, packed):
    """Packed: queries of ids that no key has, and the other way; ids in pieces; padding, with NaN in it."""
    rng, dtype = np.random.default_rng(5), DTYPES[0]
    last, q_ids, k_ids = last_keys(rng, queries, keys), None, None
    seen = np.arange(keys) <= last[:, :, None]
    arrays = draw(rng, queries, keys, 96, 64, batch=3)
    exact = arrays = [to_numpy(to_torch(a, dtype)).astype(float) for a in arrays]
    if packed:
        q_ids, k_ids = (np.sort(rng.integers(0, 4, (3, n))).astype(np.int32) for n in (queries, keys))
        q_ids[0], q_ids[1, 5:30] = 3, 9
        k_ids[0, 30:], k_ids[1] = 3, rng.integers(0, 3, keys)  # queries of one id, that most keys have too
        seen = seen & (q_ids[:, :, None] == k_ids[:, None]) & (q_ids != 0)[:, :, None]
        dead = [q_ids == 0, k_ids == 0, k_ids == 0, q_ids == 0, q_ids == 0]
        exact, arrays = ([np.where(d[..., *[None] * (a.ndim - 2)], fill, a) for a, d in zip(arrays, dead, strict=True)]
                         for fill in (0, np.nan))  # fmt: skip
    wanted = reference(*exact, 0.2, seen)
    given = [to_torch(a, dtype) for a in arrays[:4]] + [to_torch(arrays[4])]
    shape = attention.Shape(3, queries, keys, arrays[0].shape[2], 96, 64, 0.2, True, packed=packed, ordered=True)
    agree(every_kernel(shape, *given, dtype=dtype, ordered=(q_ids, k_ids, last)), wanted, dtype)


@pytest.mark.parametrize("packed", [False, True])
def test_bounds_by_last_key(packed):
    """As `test_bounds`."""
    rng, inner = np.random.default_rng(6), 0
    for queries, keys in ((80, 160), (70, 41)):
        last, q_ids, k_ids = last_keys(rng, queries, keys), None, None
        seen = np.arange(keys) <= last[:, :, None]
        if packed:
            q_ids, k_ids = (np.sort(rng.integers(0, 3, (3, n))).astype(np.int32) for n in (queries, keys))
            q_ids[0], k_ids[0, 30:], k_ids[1] = 2, 2, rng.integers(0, 3, keys)
            seen = seen & (q_ids[:, :, None] == k_ids[:, None]) & (q_ids != 0)[:, :, None]
        for (own, other), of_queries in itertools.product([(16, 8), (8, 16), (32, 32)], (True, False)):
            found = np.asarray(bounds_by_last_key(q_ids, k_ids, last, keys, own, other, of_queries))
            pairs = seen if of_queries else np.swapaxes(seen, 1, 2)
            assert found.shape == (3, -(-pairs.shape[1] // own), 5)
            for row, block in itertools.product(range(3), range(found.shape[1])):
                first, begin, end, high, one = found[row, block]
                mine = pairs[row, block * own : (block + 1) * own]
                asked = np.arange(first, high)
                assert not np.delete(mine, asked, axis=1).any() and begin % other == end % other == 0 and begin <= end
                if np.all(np.diff(last[row]) >= 0) and not packed:  # nothing is asked that nobody sees
                    assert mine[:, first:high].any(0).all()
                if one:
                    assert mine[:, begin:end].all() and end <= max(high, begin) <= pairs.shape[2] + other - 1
                    inner += end - begin
    assert inner > 0


def test_nan_is_seen_and_very_negative_logits_are_none():
    """Case 33 of public reports; NaN reaches what sees it and nothing else."""
    dtype, length = DTYPES[0], 100 if GPU else 70
    seen = np.tril(np.ones((2, length, length), bool))
    q, k, v, do, dlse = draw(np.random.default_rng(3), length, length, 64, 64)
    q[..., 63], k[..., 63] = 12.0, -10.0  # every logit about -120, of which float32 has so many digits fewer
    arrays = [to_torch(a, dtype) for a in (q, k, v, do)] + [to_torch(dlse)]
    shape = attention.Shape(2, length, length, q.shape[2], 64, 64, 1.0, True)
    exact = [to_numpy(a).astype(float) for a in arrays]
    agree(every_kernel(shape, *arrays, dtype=dtype), reference(*exact, 1.0, seen), dtype, slack=8)
    arrays[1][0, 40, 1, 3] = float("nan")
    found = [to_numpy(a) for a in every_kernel(shape, *arrays, dtype=dtype)]
    for array in found[:3]:
        assert np.isnan(array[0, 40:, 1]).all() and np.isfinite(array[0, :40]).all()
    for array in found:
        assert np.isfinite(array[1]).all() and np.isfinite(array[0, :, 0]).all()


def test_what_no_kernel_takes():
    assert "found heads of 576 and 512 dims, wants 64 to 256, multiples of 32" in attention.supports(576, 512)
    shape = attention.Shape(1, 32, 32, 1, 64, 64, 1.0, True)
    for changed, message in (
        (dict(scale=0.0), "scale: found 0.0, wanted one above 0"),
        (dict(width=512), "width, value: found .512, 64., wanted 64 to 256"),
        (dict(queries=16, packed=True), "queries, keys: found .16, 32., wanted as many, where packed"),
        (dict(causal=False, ordered=True), "causal, offset: found .False, 0., wanted True and 0, where ordered"),
        (dict(runs=True), "packed, ordered: found .False, False., wanted True and False, of runs"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.forward(shape._replace(**changed), "bfloat16")


@pytest.mark.parametrize("causal", [False, True])
def test_bounds(causal):
    """Against every pair of tokens: nothing that is seen lies outside, and in between all is."""
    rng, length = np.random.default_rng(4), 90
    rows = [np.sort(rng.integers(0, 5, length)), rng.integers(0, 3, length), np.repeat([2, 0, 1], 30), np.zeros(length)]
    rows += [np.ones(length), np.repeat([4, 4, 9, 4, 4, 0], 15)]
    ids = np.array(rows, np.int32)
    seen = (ids[:, :, None] == ids[:, None]) & (ids != 0)[:, None]
    if causal:
        seen = seen & np.tril(np.ones((length, length), bool))
    inner = 0
    for (own, other), of_queries in itertools.product([(16, 8), (8, 16), (32, 32)], (True, False)):
        found = np.asarray(bounds(ids, own, other, causal, of_queries))
        pairs = seen if of_queries else np.swapaxes(seen, 1, 2)
        for row, block in itertools.product(range(len(ids)), range(found.shape[1])):
            first, begin, end, high, one = found[row, block]
            mine = pairs[row, block * own : (block + 1) * own]
            asked = np.arange(first, high)
            assert not np.delete(mine, asked, axis=1).any() and begin % other == end % other == 0 and begin <= end
            if one:
                # Without a look at ids: causality apart, all that is asked is seen.
                assert len(set(ids[row, block * own : (block + 1) * own]) | set(ids[row, asked])) <= 1
                assert 0 not in ids[row, asked] and mine[:, begin:end].all() and end <= max(high, begin)
                inner += end - begin
    assert inner > 0  # there is something that needs no mask
    together = ids[[2, 3, 4]]
    for size, of_queries in itertools.product((16, 64), (True, False)):
        known = bounds_of_runs(runs(together), size, 16, causal, of_queries)
        assert np.array_equal(known, bounds(together, size, 16, causal, of_queries))
