"""What a warpgroup does with a head's accumulators (kernels/mosaic_heads.py), on emulated threads: every shuffle, byte
and address, against the definitions."""

import emulated_threads
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from emulated_threads import accumulators
from jax_mla.kernels import mosaic_heads

BF16 = ml_dtypes.bfloat16


def drawn(rng, *shape):
    """Of every magnitude, with blocks of zeros, infinities and NaN."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, (shape[0], 1))
    x = (x * 2.0 ** rng.integers(-20, 20, (1, shape[1]))).astype(np.float32)
    x[:40, :40] = 0
    x[70, 3], x[100, 60], x[33, 90], x[5, 50] = np.inf, np.nan, -0.0, 1e-40
    return x


def rotated(x, nope, cos, sin, pairs):
    """The definition, in float32."""
    half = cos.shape[-1]
    rest = x[:, nope:]
    first, second = (rest[:, 0::2], rest[:, 1::2]) if pairs else (rest[:, :half], rest[:, half:])
    left, right = first * cos - second * sin, second * cos + first * sin
    return np.concatenate([x[:, :nope], left, right], axis=1)


def outputs(tokens, columns):
    shapes = (tokens, columns), (tokens // 32, columns // 32, 32), (tokens, columns), (tokens // 32, columns)
    return [np.full(shape, 0xEE, np.uint8) for shape in shapes]


def wanted(x):
    """Both copies, by the definition in float64."""
    return [array for axis in (1, 0) for array in reference.mxfp8(x, axis)]


def grouped(x, row):
    """A tile of 128 rows from `row` on, those that are not there zeros, in the kernel's order."""
    tile = np.zeros((128, x.shape[1]), np.float32)
    tile[: len(x) - row] = x[row : row + 128]
    return np.asarray(mosaic_heads.grouped(jnp.asarray(tile)))


def same(found, correct):
    found[1] = np.asarray(mosaic_heads.untiled(found[1]))
    for name, a, b in zip(("codes", "scales", "codes by columns", "scales by columns"), found, correct, strict=True):
        # NaN has a sign, which no one reads.
        a, b = (np.where(v & 0x7F == 0x7F, 0x7F, v) if name.startswith("codes") else v for v in (a, b))
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("pairs, biased", [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize("nope, rotary, heads", [(128, 64, 3), (32, 64, 2), (64, 128, 1)])
def test_queries_to_mxfp8(pairs, biased, nope, rotary, heads):
    rng, tokens, width = np.random.default_rng(0), 160, nope + rotary
    cos, sin = rng.standard_normal((2, 256, rotary // 2)).astype(np.float32)
    tables = np.array(mosaic_heads.table(jnp.asarray(cos), jnp.asarray(sin), pairs))
    out, correct, t = outputs(tokens, heads * width), [], emulated_threads.Threads()
    bias = rng.standard_normal((heads, width)).astype(np.float32) if biased else None
    for head in range(heads):
        x = drawn(rng, tokens, width)
        y = x if bias is None else x + bias[head]
        correct.append(wanted(rotated(y, nope, cos[:tokens], sin[:tokens], pairs)))
        for row in (0, 128):
            y = accumulators(grouped(x, row))
            sizes = dict(tokens=tokens, heads=heads, nope=nope, pairs=pairs, bias=bias)
            mosaic_heads.quantize_query(t, y, tables, out, row=t.constant(row), head=t.constant(head), **sizes)
    assert all(t.stored[id(o)].all() for o in out)
    same(out, [np.concatenate(parts, axis=1) for parts in zip(*correct, strict=True)])


@pytest.mark.parametrize("width, rotary, heads", [(192, 64, 2), (128, 0, 2), (96, 32, 3)])
def test_keys_and_values_to_mxfp8(width, rotary, heads):
    rng, tokens = np.random.default_rng(1), 160
    shared = drawn(rng, 256, 128)[:, : max(rotary, 1)]
    given = [np.ascontiguousarray(a) for a in wanted(shared)] if rotary else None
    if rotary:
        given[1] = np.ascontiguousarray(mosaic_heads.tiled(given[1]))
    out, correct, t = outputs(tokens, heads * width), [], emulated_threads.Threads()
    for head in range(heads):
        x = drawn(rng, tokens, 128)[:, : width - rotary]
        correct.append(wanted(np.concatenate([x, shared[:tokens, :rotary]], axis=1)))
        for row in (0, 128):
            sizes = dict(tokens=tokens, heads=heads, width=width, shared=given, rotary=rotary)
            y = accumulators(grouped(x, row))
            mosaic_heads.quantize(t, y, out, row=t.constant(row), head=t.constant(head), **sizes)
    assert all(t.stored[id(o)].all() for o in out)
    same(out, [np.concatenate(parts, axis=1) for parts in zip(*correct, strict=True)])


@pytest.mark.parametrize("rotary", [64, 32, 128])
def test_pairs_to_halves(rotary):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((128, rotary)).astype(np.float32)
    cos, sin = rng.standard_normal((2, 200, rotary // 2)).astype(np.float32)
    tables = np.array(mosaic_heads.table(jnp.asarray(cos), jnp.asarray(sin), True))
    t = emulated_threads.Threads()
    found = mosaic_heads.halves(t, accumulators(x), tables, t.constant(70))
    correct = np.split(rotated(x, 0, cos[70:198], sin[70:198], True).astype(BF16), 2, axis=1)
    for words, half in zip(found, correct, strict=True):
        pairs = accumulators(half.astype(np.float32))
        for at in np.ndindex(words.shape):
            values = words[at].copy().view(BF16).reshape(128, 2)
            np.testing.assert_array_equal(values, np.stack(list(pairs[at]), axis=1).astype(BF16))
