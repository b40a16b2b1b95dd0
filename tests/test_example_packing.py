"""The example's packed rows: which bytes they hold and predict, and that packing changes no loss and no gradient."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_examples import data, model, packing, presets

WINDOW = 16
# Bytes in a file, its NUL included: empty, of one byte, short, about the window's length, long, and very long.
SIZES = [1, 2, 1, 3, 9, WINDOW - 1, WINDOW, WINDOW + 1, 40, 2, 1000, 7, 300]
STARTS = np.cumsum([0, *SIZES[:-1]])
ENDS = STARTS + np.array(SIZES) - 1
# Values tell where they are from (bytes would not): entry i holds i + 1, but for the files' ends.
TEXT = np.arange(1, sum(SIZES) + 1)
TEXT[ENDS] = data.END_OF_FILE
# What can be predicted: everything but the files' first.
PREDICTABLE = np.setdiff1d(np.arange(TEXT.size), STARTS)


def rows_of(count, multiple=1, seed=3):
    """The first `count` rows, and each as a list of (offset in the row, tokens, targets) of its sequences."""
    rows = packing.PackedRows(TEXT, WINDOW, seed, multiple).batch(0, count)
    split = []
    for tokens, targets, ids in zip(*rows, strict=True):
        numbers = [key for key, _ in itertools.groupby(ids) if key]
        assert numbers == list(range(1, len(numbers) + 1))  # each id is one run, in order
        split.append([(np.argmax(ids == n), tokens[ids == n], targets[ids == n]) for n in numbers])
    return rows, split


@pytest.mark.parametrize("multiple", [1, 4, 5, WINDOW])
def test_rows_hold_sequences_apart(multiple):
    rows, split = rows_of(600, multiple)
    for part in rows:
        assert part.shape == (600, WINDOW) and part.dtype == np.int32
    padding = rows.segment_ids == 0
    assert np.all(rows.tokens[padding] == 0) and np.all(rows.targets[padding] == packing.NOTHING)
    for row in split:
        assert row
        for offset, tokens, targets in row:
            assert offset % multiple == 0
            # Targets are the next bytes of the same file, past the sequence's end too where the file goes on.
            ends = tokens == data.END_OF_FILE
            assert np.all((targets == packing.NOTHING) == ends) and not ends[:-1].any()
            position = tokens[0] - 1  # a NUL alone would be a sequence that predicts nothing
            np.testing.assert_array_equal(tokens, TEXT[position : position + tokens.size])
            np.testing.assert_array_equal(targets[~ends], TEXT[position + 1 : position + 1 + np.sum(~ends)])
    if multiple == WINDOW:
        assert {len(row) for row in split} == {1}
    else:
        assert np.mean([len(row) for row in split]) > 1.5


def test_an_epoch_predicts_every_byte_but_the_files_first_once():
    packed = packing.PackedRows(TEXT, WINDOW, seed=3)
    epochs = [list(packed._sequences(epoch)) for epoch in range(3)]
    for sequences in epochs:
        predicted = [p + 1 for start, stop in sequences for p in range(start, stop) if p not in ENDS]
        assert sorted(predicted) == list(PREDICTABLE)
        assert max(stop - start for start, stop in sequences) <= WINDOW
        # What fits is never cut, and what predicts nothing is left out.
        for start, size in zip(STARTS, SIZES, strict=True):
            if size <= WINDOW:
                assert ((start, start + size) in sequences) == (size > 1)
    assert epochs[0] != epochs[1] and sorted(epochs[0]) != sorted(epochs[1])  # cut and ordered anew
    lengths = {stop - start for sequences in epochs for start, stop in sequences}
    assert lengths == set(range(1, WINDOW + 1))


def test_rows_hold_each_epochs_sequences():
    packed = packing.PackedRows(TEXT, WINDOW, seed=3)
    placed = [sequence for row in itertools.islice(packed._rows(), 2000) for sequence in row]
    drawn = itertools.chain.from_iterable(packed._sequences(epoch) for epoch in itertools.count())
    # All but the rows still open: what was drawn is placed once.
    missing = list(itertools.islice(drawn, len(placed) + packing.OPEN_ROWS * WINDOW))
    for sequence in placed:
        missing.remove(sequence)


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_batch_is_a_function_of_seed_and_step(multiple):
    straight = packing.PackedRows(TEXT, WINDOW, 3, multiple)
    wanted = [straight.batch(step, 7) for step in range(60)]  # some epochs
    packed = packing.PackedRows(TEXT, WINDOW, 3, multiple)
    for step in (59, 14, 0, 15, 28, 28):
        jax.tree.map(np.testing.assert_array_equal, packed.batch(step, 7), wanted[step])
    assert np.any(packing.PackedRows(TEXT, WINDOW, 4, multiple).batch(0, 7).tokens != wanted[0].tokens)


@pytest.mark.parametrize("samples", [1, 40, 500])
def test_what_is_said_of_rows_is_what_they_hold(samples):
    packed = packing.PackedRows(TEXT, WINDOW, 3, multiple=4)
    rows, split = rows_of(samples, multiple=4)
    predicted = {tokens[0] + i for row in split for _, tokens, targets in row for i in range(np.sum(targets >= 0))}
    np.testing.assert_array_equal(packed.seen(samples), sorted(predicted))
    tokens = np.count_nonzero(rows.segment_ids)
    assert packed.summary(samples) == {
        "rows": samples,
        "sequences": sum(map(len, split)),
        "tokens": tokens,
        "predicted_bytes": np.count_nonzero(rows.targets >= 0),
        "fill": round(tokens / (samples * WINDOW), 4),
    }


@pytest.mark.parametrize("multiple, fill", [(1, 0.97), (8, 0.97), (32, 0.97)])
def test_rows_are_well_filled(multiple, fill):
    text = np.full(400_000, 65, np.uint8)
    text[np.cumsum(np.random.default_rng(0).integers(1, 5000, 100))] = data.END_OF_FILE
    assert packing.PackedRows(text, 128, 0, multiple).summary(2000)["fill"] > fill


@pytest.mark.parametrize("text", [b"", b"\0", b"\0\0\0", b"a"])
def test_text_that_predicts_nothing(text):
    with pytest.raises(data.InputError, match="--data: the training text has no file of 2 bytes or more"):
        packing.PackedRows(np.frombuffer(text, np.uint8), 8, seed=0)


@pytest.mark.parametrize("text", [b"ab", b"\0ab", b"a\0", b"abcdefghijklm\0\0"])
@pytest.mark.parametrize("window", [1, 2, 100])
def test_little_text_and_any_window(text, window):
    """Also where the text's last file has no NUL; a window longer than the text is filled by several epochs."""
    rows = packing.PackedRows(np.frombuffer(text, np.uint8), window, seed=0).batch(3, 5)
    assert np.all(np.any(rows.targets >= 0, axis=-1))
    assert np.mean(rows.segment_ids != 0) > 0.9


# The loss ---------------------------------------------------------------------------------------------------------


def test_a_packed_row_is_its_sequences_weighted_by_targets():
    """Loss and gradients; nothing of what lies in the padding matters."""
    config = dataclasses.replace(presets.PRESETS["tiny"].model, layers=1)
    text = np.frombuffer(b"eight by\0" + bytes(range(128, 192)) + b"\0", np.uint8)
    packed = packing.PackedRows(text, 44, seed=52, multiple=8)
    rows, (row,) = packed.batch(0, 1), packed._take(0, 1)
    # With the byte that follows in the file: all are of 9 bytes, and their losses one computation.
    sequences = np.stack([text[start : stop + (text[stop - 1] != 0)] for start, stop in row]).astype(np.int32)
    assert sequences.shape == (4, 9) and np.sum(sequences[:, -1] == 0) == 1  # one whole file, three pieces
    apply = model.MODULES["linen"](config, "float32")  # nnx computes the same: test_example_train.py
    params = model.init_params(jax.random.key(0), config)
    step = jax.jit(jax.value_and_grad(lambda params, rows: model.packed_loss(apply, params, rows)))
    apart = jax.jit(jax.value_and_grad(lambda params: model.losses(apply, params, sequences).mean()))
    (loss, gradient), (wanted, wanted_gradient) = step(params, rows), apart(params)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    for leaf, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted_gradient), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=2e-5, atol=2e-6 * float(jnp.abs(other).max()))

    padding = rows.segment_ids == 0
    np.testing.assert_array_equal(np.flatnonzero(padding), [*range(25, 32), *range(40, 44)])  # a gap, and the end
    other = rows._replace(tokens=np.where(padding, 200, rows.tokens))
    jax.tree.map(np.testing.assert_array_equal, step(params, other), (loss, gradient))
