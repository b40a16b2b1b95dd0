"""The example's data: which files are taken and held out, which windows a step sees, and the order-2 yardstick."""

import collections
import os

import numpy as np
import pytest

from flax_examples import data, ngram


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [str(folder)]


MANY = {f"part{i % 7}/file{i}.txt": f"this is file number {i}\n" * (1 + i % 5) for i in range(300)}


def test_every_byte_of_every_file_is_on_exactly_one_side(tmp_path):
    corpus = data.load_corpus(write(tmp_path, MANY | {"empty.txt": ""}))
    sides = [bytes(side).split(b"\0")[:-1] for side in (corpus.train, corpus.heldout)]
    assert sorted(sides[0] + sides[1]) == sorted(text.encode() for text in MANY.values())
    assert not set(sides[0]) & set(sides[1])  # each file names itself: no file is cut in two
    summary = corpus.summary
    assert (summary["train_files"], summary["heldout_files"], summary["empty_files"]) == (*map(len, sides), 1)
    assert 0.02 * len(MANY) <= len(sides[1]) <= 0.1 * len(MANY)


def test_split_depends_on_names_alone_and_fingerprint_on_everything(tmp_path):
    first = data.load_corpus(write(tmp_path / "a", MANY))
    again = data.load_corpus(write(tmp_path / "elsewhere" / "b", MANY))
    assert bytes(first.heldout) == bytes(again.heldout)
    assert first.summary["fingerprint"] == again.summary["fingerprint"]
    some = next(name for name, text in MANY.items() if text.encode() in bytes(first.train))
    changed = data.load_corpus(write(tmp_path / "c", MANY | {some: MANY[some].replace("this", "That")}))
    assert bytes(changed.heldout) == bytes(first.heldout)
    assert changed.summary["fingerprint"] != first.summary["fingerprint"]


@pytest.mark.parametrize("count", range(2, 9))
def test_few_files_still_give_both_sides(tmp_path, count):
    corpus = data.load_corpus(write(tmp_path, {f"{i}.txt": "text " * 50 for i in range(count)}))
    assert corpus.summary["heldout_files"] >= 1 and corpus.summary["train_files"] >= 1


def test_a_tiny_file_alone_is_not_enough_to_hold_out(tmp_path):
    names = sorted((f"{i}.txt" for i in range(12)), key=data._position)
    sizes = {name: 1 if name == names[0] else 1000 for name in names}
    assert len(data._hold_out(sizes)) > 1


def test_what_is_taken_from_folders(tmp_path):
    write(tmp_path, {"a.py": "1" * 9, "sub/b.py": "2" * 9, "sub/c.md": "3" * 9, ".hidden/d.py": "4", ".e.py": "5"})

    def taken(*arguments):
        corpus = data.load_corpus(*arguments)
        return sorted(text[:1] for text in (bytes(corpus.train) + bytes(corpus.heldout)).split(b"\0")[:-1])

    root = str(tmp_path)
    assert taken([root]) == [b"1", b"2", b"3"]
    assert taken([root], ["*.py"]) == [b"1", b"2"]
    assert taken([root], ["sub/*"]) == [b"2", b"3"]
    assert taken([root], ["*.md", "a.*"]) == [b"1", b"3"]
    # A file named is taken whatever it is called, and once however often it is reached.
    assert taken([root, root + "/a.py", root + "/.e.py"], ["*.py"]) == [b"1", b"2", b"5"]


def test_the_default_is_the_standard_library():
    files = dict(data._find([os.path.dirname(os.__file__)], ["*.py"], skip=("site-packages", "dist-packages")))
    assert {"os.py", "json/decoder.py"} <= set(files)
    assert not any("site-packages" in name for name in files)


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "found 0 non-empty files"),
        ({"a.txt": "alone"}, "found 1 non-empty file in"),
        ({"a.txt": "text", "b.txt": ""}, "found 1 non-empty file in"),
        ({"a.txt": "text", "b.bin": b"ab\0cd"}, r"b\.bin is binary \(NUL at byte 2\), wanted text; .*--glob"),
    ],
)
def test_folders_that_will_not_do(tmp_path, files, message):
    write(tmp_path, files)
    with pytest.raises(data.InputError, match=f"^--data: .*{message}"):
        data.load_corpus([str(tmp_path)])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(data.InputError, match="found nothing at .*nowhere"):
        data.load_corpus([str(tmp_path / "nowhere")])
    write(tmp_path, {"a.txt": "text", "b.txt": "text"})
    os.symlink("gone", tmp_path / "link.txt")
    with pytest.raises(data.InputError, match=r"cannot read .*link\.txt: No such file.*--glob"):
        data.load_corpus([str(tmp_path)])
    os.remove(tmp_path / "link.txt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(data.InputError, match="pipe is not a regular file; .*--glob"):
        data.load_corpus([str(tmp_path)])
    assert data.load_corpus([str(tmp_path)], ["*.txt"]).train.size


TEXT = np.frombuffer(np.random.default_rng(0).bytes(1001), np.uint8)


def test_an_epoch_sees_every_byte_once_and_the_next_in_another_order():
    windows = data.Windows(TEXT, window=10, seed=3)
    assert windows.per_epoch == 100
    first, second = windows.starts(0, 100), windows.starts(100, 100)
    assert sorted(first) == list(range(0, 1000, 10))
    assert list(first) != sorted(first) and list(first) != list(second)
    assert len(set(second)) == 100 and 0 <= min(second) and max(second) + 10 < TEXT.size
    assert list(windows.starts(0, 100)) == list(first)  # going back is no trouble
    assert list(data.Windows(TEXT, 10, seed=4).starts(0, 100)) != list(first)


def test_a_batch_is_a_function_of_seed_and_step_also_across_epochs():
    straight = [data.Windows(TEXT, 10, seed=3).batch(step, 7) for step in range(40)]  # 280 samples of 100 an epoch
    windows = data.Windows(TEXT, 10, seed=3)
    for step in (39, 14, 0, 15, 28):
        np.testing.assert_array_equal(windows.batch(step, 7), straight[step])
    samples = np.concatenate(straight)
    assert samples.shape == (280, 11) and samples.dtype == np.int32
    starts = windows.starts(0, 280)
    np.testing.assert_array_equal(samples[:, 0], TEXT[starts])
    np.testing.assert_array_equal(samples[:, -1], TEXT[starts + 10])


@pytest.mark.parametrize("samples", [1, 37, 100, 150, 1000])
def test_bytes_seen_are_those_the_samples_predict(samples):
    windows = data.Windows(TEXT, window=10, seed=3)
    predicted = {start + i for start in windows.starts(0, min(samples, 200)) for i in range(1, 11)}
    assert predicted <= set(windows.seen(samples))
    assert len(windows.seen(samples)) == (min(samples, 100) * 10)


def test_heldout_windows_are_spread_and_do_not_overlap():
    starts = data.heldout_starts(TEXT, window=10, max_bytes=400)
    assert len(starts) == 40 and starts[0] == 0 and starts[-1] > 900
    assert min(np.diff(starts)) >= 10 and starts[-1] + 10 < TEXT.size
    assert len(data.heldout_starts(TEXT, window=10, max_bytes=10**9)) == 100


def test_text_shorter_than_a_window():
    assert data.Windows(TEXT, window=1000, seed=0).per_epoch == 1
    with pytest.raises(data.InputError, match="training text has 1001 bytes, wanted at least window . 1 = 1002"):
        data.Windows(TEXT, window=1001, seed=0)
    with pytest.raises(data.InputError, match="held-out text has 1001 bytes"):
        data.heldout_starts(TEXT, window=1001, max_bytes=1)


# The order-2 model ------------------------------------------------------------------------------------------------


def by_hand(text, positions, a, b, c):
    """Interpolated Kneser-Ney written with dicts, from the formula."""
    trigrams = collections.Counter()
    for i in positions:
        trigrams[(text[i - 2] if i >= 2 else 0, text[i - 1] if i >= 1 else 0, text[i])] += 1
    orders = [collections.Counter(), collections.Counter(), trigrams]
    for _, y, z in trigrams:
        orders[1][y, z] += 1
    for _, z in orders[1]:
        orders[0][(z,)] += 1
    p = 1 / 256
    for k, gram in enumerate(((c,), (b, c), (a, b, c))):
        counts = orders[k]
        once, twice = (sum(n == times for n in counts.values()) for times in (1, 2))
        discount = once / (once + 2 * twice) if once else 0.5
        followers = [n for other, n in counts.items() if other[:-1] == gram[:-1]]
        if followers:
            kept = max(counts[gram] - discount, 0)
            p = (kept + discount * len(followers) * p) / sum(followers)
    return p


SMALL = np.frombuffer(b"the cat sat on the mat; the rat ate the cat that sat", np.uint8)


@pytest.mark.parametrize("positions", [range(SMALL.size), range(5, 31, 2)], ids=["all", "some"])
def test_order_two_is_the_formula(positions):
    fitted = ngram.OrderTwo(SMALL, None if len(positions) == SMALL.size else np.array(positions))
    for context in (b"th", b"at", b"a?", b"??", b"\0\0"):
        for c in b"ea t?":
            expected = by_hand(SMALL, positions, *context, c)
            assert fitted.probability(*context, c) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("text", [SMALL, TEXT, np.zeros(50, np.uint8), SMALL[:1]], ids=["small", "noise", "nul", "one"])
def test_order_two_is_normalised_and_leaves_nothing_impossible(text):
    fitted = ngram.OrderTwo(text)
    contexts = np.random.default_rng(1).integers(0, 256, (50, 2))  # hardly any is in the text
    contexts[:25] = np.resize(text, 26)[np.arange(25)[:, None] + np.arange(2)]  # these are
    p = fitted.probability(contexts[:, :1], contexts[:, 1:], np.arange(256)[None])
    assert p.min() > 0
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-9)


def test_order_two_bits_per_byte():
    everywhere = np.arange(TEXT.size)
    noise = np.frombuffer(np.random.default_rng(5).bytes(4000), np.uint8)
    assert 7.5 < ngram.OrderTwo(noise[:2000]).bits_per_byte(noise, np.arange(2000, 4000)) < 9
    cycle = np.resize(SMALL[:3], 3000)
    assert ngram.OrderTwo(cycle).bits_per_byte(cycle, np.arange(2, 3000)) < 0.01
    # More of the same text fits better than less, and the mean is over the positions asked for.
    fitted = ngram.OrderTwo(TEXT, everywhere[:500])
    assert fitted.bits_per_byte(TEXT, everywhere[:500]) < fitted.bits_per_byte(TEXT, everywhere[500:])
    a, b, c = TEXT[8], TEXT[9], TEXT[10]
    assert fitted.bits_per_byte(TEXT, np.array([10])) == pytest.approx(-np.log2(fitted.probability(a, b, c)))
