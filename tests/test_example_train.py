"""The example end to end, with its smallest preset: learning, exact continuation, every kind of trouble in one line."""

import dataclasses
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from flax_examples import checkpoint, data, loop, model, options, presets, report, train

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = presets.PRESETS["tiny"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with some of Python's own sources."""
    folder = tmp_path_factory.mktemp("text")
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for name in ("argparse", "ast", "calendar", "copy", "csv", "dis", "glob", "heapq", "inspect", "pprint", "shutil"):
        (folder / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    return folder


def start(text, out, *more):
    """Exit status of a tiny run."""
    return train.main(["--preset", "tiny", "--data", str(text), "--out", str(out), *map(str, more)])


def record(out):
    return json.loads((out / "run.json").read_text())


def saved(out):
    """The newest checkpoint: step, its arrays, what its JSON says."""
    checkpoints = checkpoint.Checkpoints(out / "checkpoints")
    step = checkpoints.latest()
    run = checkpoints.read_run(step)
    fields = {field.name: getattr(TINY, field.name) for field in dataclasses.fields(TINY)}
    optimizer = loop.programs(options.Settings(**fields)).optimizer
    params = jax.eval_shape(lambda: model.init_params(jax.random.key(0), TINY.model))
    return step, checkpoints.restore(step, params, jax.eval_shape(optimizer.init, params)), run


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_one_line(capfd, *parts, start="error: "):
    error = capfd.readouterr().err
    assert error.startswith(start) and error.count("\n") == 1 and error.endswith("\n"), error
    for part in parts:
        assert part in error, error


@pytest.fixture(scope="module", params=["linen", "nnx"])
def straight(request, text, tmp_path_factory):
    """(module, folder of a tiny run without interruption)."""
    out = tmp_path_factory.mktemp(f"straight-{request.param}")
    assert start(text, out, "--module", request.param) == 0
    return request.param, out


# The model --------------------------------------------------------------------------------------------------------

TOKENS = jax.random.randint(jax.random.key(1), (2, 17), 0, 256)


def test_both_modules_hold_the_same_parameters():
    params = model.init_params(jax.random.key(0), TINY.model)
    of_linen = nn.unbox(jax.jit(model.LinenLM(TINY.model).init)(jax.random.key(0), TOKENS)["params"])

    def look(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    assert look(params) == look(of_linen)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    for leaf, other in zip(jax.tree.leaves(params), jax.tree.leaves(of_linen), strict=True):
        # Linen's own draws are other values of the same spread.
        assert float(leaf.std()) == pytest.approx(float(other.std()), rel=0.15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_modules_compute_the_same(dtype):
    params = model.init_params(jax.random.key(0), TINY.model)

    def value_and_grad(name):
        apply = model.MODULES[name](TINY.model, dtype)
        assert jax.eval_shape(apply, params, TOKENS).dtype == jnp.float32
        return jax.jit(jax.value_and_grad(lambda params: model.losses(apply, params, TOKENS).mean()))(params)

    (loss, gradient), other = value_and_grad("linen"), value_and_grad("nnx")
    assert_same((loss, gradient), other)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    assert np.log(256) - 0.5 < loss < np.log(256) + 1.5  # untrained: near a uniform guess


def test_no_byte_sees_those_after_it():
    params = model.init_params(jax.random.key(0), TINY.model)
    apply = jax.jit(model.linen_model(TINY.model, "float32"))
    before, after = apply(params, TOKENS), apply(params, TOKENS.at[:, 9].add(1) % 256)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.all(np.any(before[:, 9:] != after[:, 9:], axis=-1))


@pytest.mark.parametrize("name", model.MODULES)
def test_generation_from_caches_is_generation_by_reading_all_again(name):
    """The same bytes, prompt after prompt: a layer's latents say as much as its keys and values."""
    own, params = model.MODULES[name](TINY.model, "float32"), model.init_params(jax.random.key(0), TINY.model)
    arguments = own, params, TOKENS[0, :7], 9, jax.random.key(1), jnp.float32(0.8)
    np.testing.assert_array_equal(model._continue(*arguments), model._recompute(*arguments))
    sample = model.generate(own, params, np.asarray(TOKENS[0, :8]), 10, seed=3)
    assert len(sample.text) == 10 and sample.cached > 0 and sample.recomputed > 0
    assert sample.text == model.generate(own, params, np.asarray(TOKENS[0, :8]), 10, seed=3).text
    extend = jax.jit(own.extend, static_argnums=3)
    logits, caches = extend(params, TOKENS[:, :5], own.caches(len(TOKENS), 16), True)
    more, caches = extend(params, TOKENS[:, 5:8], caches, False)
    wanted = jax.jit(own)(params, TOKENS[:, :8])
    np.testing.assert_allclose(jnp.concatenate([logits, more], axis=1), wanted, rtol=0, atol=2e-5)
    assert all(cache.lengths.tolist() == [8] * len(TOKENS) for cache in caches)


# A whole run ------------------------------------------------------------------------------------------------------


def test_it_learns_and_leaves_its_record(straight, text):
    module, out = straight
    run = record(out)
    bits = run["bits_per_byte"]
    assert 7.5 < bits["before"] < 10
    assert bits["after"] < bits["before"] - 3
    assert bits["order2_whole"] < bits["order2_seen"] < 8
    assert run["settings"] | {"preset": "tiny", "module": module, "seed": 0, "steps": 40} == run["settings"]
    assert [entry["step"] for entry in run["evals"]] == [0, 10, 20, 30, 40]
    assert run["evals"][-1]["bits_per_byte"] == bits["after"]
    assert [step for step, _ in run["loss"]] == [10, 20, 30, 40] and run["loss"][-1][1] < run["loss"][0][1]
    assert run["tokens"] == run["distinct_bytes_seen"] == 40 * TINY.batch * TINY.window
    assert run["data"]["train_bytes"] + run["data"]["heldout_bytes"] == sum(
        path.stat().st_size + 1 for path in text.iterdir()
    )
    assert run["scored"]["heldout_bytes"] == TINY.eval_bytes
    assert min(run["sample_bytes_per_second"].values()) > 0
    assert len(run["sample"]["text"]) <= 400 and run["tokens_per_second"] > 0 and run["seconds"] > 0
    assert run["versions"]["jax"] == jax.__version__
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.glob(".*")), "temporary files are left"


def test_the_figure_is_the_models_own(straight, text):
    """Held-out bits per byte, from the checkpoint and the text, without the code that computed them."""
    module, out = straight
    _, (params, _), _ = saved(out)
    heldout = data.load_corpus([str(text)]).heldout.astype(np.int32)
    count = (heldout.size - 1) // TINY.window
    starts = TINY.window * (np.arange(128) * count // 128)
    apply = jax.jit(model.MODULES[module](TINY.model, "float32"))
    logits = apply(params, np.stack([heldout[s : s + 32] for s in starts]))
    picked = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits)), np.stack([heldout[s + 1 : s + 33] for s in starts])[..., None], -1
    )
    assert -picked.mean() / np.log(2) == pytest.approx(record(out)["bits_per_byte"]["after"], abs=2e-5)


def test_linen_and_nnx_train_alike(straight, text, tmp_path):
    module, out = straight
    other = "nnx" if module == "linen" else "linen"
    assert start(text, tmp_path, "--module", other, "--stop-after", 20) == 0
    _, _, run = saved(tmp_path)
    assert run["history"]["loss"] == record(out)["loss"][:2]


def test_stopping_and_resuming_changes_no_bit(straight, text, tmp_path, capfd):
    module, out = straight
    assert start(text, tmp_path, "--module", module, "--stop-after", 17) == 0
    assert_one_line(capfd, "at step 17 of 40, saved; continue with --resume --out", start="stopped")
    assert saved(tmp_path)[0] == 17 and not (tmp_path / "run.json").exists()
    # Everything the run needs to know is in its checkpoint.
    assert train.main(["--resume", "--out", str(tmp_path)]) == 0
    (step, state, _), (wanted_step, wanted, _) = saved(tmp_path), saved(out)
    assert step == wanted_step == 40
    assert_same(state, wanted)
    resumed, run = record(tmp_path), record(out)
    assert [e["bits_per_byte"] for e in resumed["evals"]] == [e["bits_per_byte"] for e in run["evals"]]
    assert resumed["sample"] == run["sample"] and resumed["loss"][-1] == run["loss"][-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_says_how_to_go_on(number, text, tmp_path, capfd, monkeypatch):
    batch = data.Windows.batch

    def interrupting(self, step, size):
        if step == 13:
            os.kill(os.getpid(), number)
        return batch(self, step, size)

    handler = signal.getsignal(number)
    monkeypatch.setattr(data.Windows, "batch", interrupting)
    assert start(text, tmp_path) == 128 + number
    assert_one_line(capfd, "at step 14 of 40, saved; continue with --resume --out", start="interrupted")
    assert saved(tmp_path)[0] == 14
    assert signal.getsignal(number) is handler


def test_packed_rows_train_and_leave_their_record(text, tmp_path, capfd):
    """Neither stopping and resuming nor the other module changes a bit."""
    packed = ("--pack", "--pack-multiple", 5)
    assert start(text, tmp_path / "straight", *packed) == 0
    run = record(tmp_path / "straight")
    assert run["bits_per_byte"]["after"] < run["bits_per_byte"]["before"] - 2.5
    assert run["settings"] | {"pack": True, "pack_multiple": 5} == run["settings"]
    rows = run["packed"]
    assert rows["rows"] == 40 * TINY.batch < rows["sequences"] / 2
    assert run["tokens"] == rows["tokens"] and rows["fill"] == round(rows["tokens"] / (320 * TINY.window), 4)
    assert 0.8 < rows["fill"] < 1 and run["distinct_bytes_seen"] == rows["predicted_bytes"] <= rows["tokens"]
    assert f"{rows['sequences']:,} sequences in 320 rows" in capfd.readouterr().out

    out = tmp_path / "resumed"
    assert start(text, out, *packed, "--module", "nnx", "--stop-after", 17) == 0
    assert train.main(["--resume", "--out", str(out), "--pack-multiple", "8"]) == 2
    assert "--pack-multiple: found 5 in the checkpoint, wanted 8" in capfd.readouterr().err
    assert train.main(["--resume", "--out", str(out)]) == 0
    assert_same(saved(out)[1], saved(tmp_path / "straight")[1])
    assert record(out)["packed"] == rows and record(out)["sample"] == run["sample"]


# Trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more, parts",
    [
        (["--data", "nowhere"], ["--data", "nowhere"]),
        (["--glob", "*.md"], ["--data", "found 0 non-empty files", "*.md"]),
        (["--window", "10000000"], ["--data", "training text has", "wanted at least window + 1 = 10000001"]),
        (["--module", "keras"], ["--module", "keras", "linen"]),
        (["--preset", "huge"], ["--preset", "huge", "tiny"]),
        (["--steps", "0"], ["--steps", "found '0'", "at least 1"]),
        (["--steps", "many"], ["--steps", "found 'many'"]),
        (["--seed", "-1"], ["--seed", "found '-1'", "at least 0"]),
        (["--learning-rate", "nan"], ["--learning-rate", "found 'nan'"]),
        (["--no-such-option"], ["--no-such-option"]),
        (["--resume"], ["--resume", "found no checkpoint in"]),
        (["--pack-multiple", "8"], ["--pack-multiple", "found 8 without --pack"]),
        (["--pack", "--pack-multiple", "33"], ["--pack-multiple", "found 33", "at most window = 32"]),
        (["--pack", "--pack-multiple", "0"], ["--pack-multiple", "found '0'", "at least 1"]),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(more, parts, text, tmp_path, capfd):
    out = tmp_path / "out"
    assert start(text, out, *more) == 2
    assert_one_line(capfd, *parts)
    assert not out.exists()


def test_binary_and_unreadable_files(text, tmp_path, capfd):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    assert start(folder, tmp_path / "out") == 2
    assert_one_line(capfd, "picture.png is binary", "--glob")
    (folder / "picture.png").unlink()
    (folder / "link.txt").symlink_to("nothing")
    assert start(folder, tmp_path / "out") == 2
    assert_one_line(capfd, "cannot read", "link.txt", "--glob")


def test_a_run_is_never_overwritten(straight, text, capfd):
    module, out = straight
    content = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert start(text, out, "--module", module) == 2
    assert_one_line(capfd, "already holds a run", "--resume", "another --out")
    assert content == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "more, parts",
    [
        (["--preset", "small"], ["--preset", "found tiny", "wanted small"]),
        (["--module", "nnx"], ["--module", "found linen", "wanted nnx"]),
        (["--dtype", "bfloat16"], ["--dtype", "found float32", "wanted bfloat16"]),
        (["--seed", "1"], ["--seed", "found 0", "wanted 1"]),
        (["--steps", "50"], ["--steps", "found 40", "wanted 50"]),
        (["--batch", "4"], ["--batch", "found 8", "wanted 4"]),
        (["--window", "16"], ["--window", "found 32", "wanted 16"]),
        (["--learning-rate", "0.1"], ["--learning-rate", "found 0.01", "wanted 0.1"]),
        (["--pack"], ["--pack", "found False", "wanted True"]),
        (["--pack-multiple", "8"], ["--pack-multiple", "found 1", "wanted 8"]),
        (["--glob", "[a-d]*.py"], ["--data: fingerprint", "bytes)"]),
    ],
)
def test_resuming_as_another_run_is_refused(more, parts, text, tmp_path_factory, capfd):
    out = tmp_path_factory.getbasetemp() / "resumed-as-another"
    if not out.exists():
        assert start(text, out, "--stop-after", 1) == 0
        capfd.readouterr()
    assert train.main(["--resume", "--out", str(out), *more]) == 2
    assert_one_line(capfd, *parts)
    assert saved(out)[0] == 1


def test_resuming_after_the_preset_was_edited_is_refused(text, tmp_path, capfd, monkeypatch):
    assert start(text, tmp_path, "--stop-after", 1) == 0
    capfd.readouterr()
    edited = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, ffn_dim=96))
    monkeypatch.setitem(presets.PRESETS, "tiny", edited)
    assert train.main(["--resume", "--out", str(tmp_path)]) == 2
    assert_one_line(capfd, "preset tiny, model.ffn_dim: found 64", "wanted 96")
    monkeypatch.delitem(presets.PRESETS, "tiny")
    assert train.main(["--resume", "--out", str(tmp_path)]) == 2
    assert_one_line(capfd, "--preset: found tiny", "wanted one of small")


def test_a_damaged_checkpoint(text, tmp_path, capfd):
    assert start(text, tmp_path, "--stop-after", 1) == 0
    capfd.readouterr()
    for path in (tmp_path / "checkpoints" / "1" / "state").rglob("*"):
        if path.is_file() and "d" in path.parts:
            path.write_bytes(b"")
    assert train.main(["--resume", "--out", str(tmp_path)]) == 2
    assert_one_line(capfd, "--resume: cannot read checkpoint", "checkpoints/1")


def test_a_loss_that_is_not_finite_ends_the_run(text, tmp_path, capfd):
    assert start(text, tmp_path, "--learning-rate", "1e30") == 1
    assert_one_line(capfd, "not finite at step", "--learning-rate than 1e+30", "checkpoint of step 0 is intact")
    assert saved(tmp_path)[0] == 0 and not (tmp_path / "run.json").exists()


@pytest.fixture
def file_limit():
    """Limits the size of a file, which the kernel then refuses to exceed as it would on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_that_does_not_fit(straight, text, tmp_path, capfd, file_limit):
    module, out = straight
    assert start(text, tmp_path, "--module", module, "--stop-after", 7) == 0
    capfd.readouterr()
    file_limit(10_000)
    assert train.main(["--resume", "--out", str(tmp_path)]) == 1
    file_limit(None)
    assert_one_line(capfd, "checkpoint of step 10 could not be written", ": File too large;", "step 7 is intact")
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"0", "7"}
    assert train.main(["--resume", "--out", str(tmp_path)]) == 0
    assert_same(saved(tmp_path)[1], saved(out)[1])


def test_a_report_that_does_not_fit(text, tmp_path, capfd, file_limit):
    out = tmp_path / "out"
    (out / "loss.png").mkdir(parents=True)  # what is in the way of the last file
    assert start(text, out) == 1
    assert_one_line(capfd, "loss.png could not be written: Is a directory", "--resume --out")
    (out / "loss.png").rmdir()
    file_limit(5_000)
    assert train.main(["--resume", "--out", str(out)]) == 1
    file_limit(None)
    assert_one_line(capfd, "loss.png could not be written: File too large", "--resume --out")
    assert {path.name for path in out.iterdir()} == {"checkpoints"}
    assert train.main(["--resume", "--out", str(out)]) == 0
    assert record(out)["bits_per_byte"]["after"] < 6


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_while_a_file_is_written(tmp_path):
    (tmp_path / ".run.json.tmp").symlink_to("/dev/full")
    (tmp_path / "run.json").write_text("what was there")
    with pytest.raises(OSError, match=r"No space left on device: .*run\.json"):
        report.write(tmp_path / "run.json", b"new")
    assert (tmp_path / "run.json").read_text() == "what was there"


def test_an_out_that_is_no_folder(text, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    assert start(text, tmp_path / "file" / "run") == 2
    assert_one_line(capfd, "--out: cannot make the folder", "Not a directory")


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "flax_examples.train", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        timeout=300,
    )


def test_as_a_command(text, tmp_path):
    """Also where the terminal has nothing but ASCII."""
    short = ["--preset", "tiny", "--data", text, "--steps", 2, "--sample-bytes", 50, "--out", tmp_path / "out"]
    done = command(*short, "--dtype", "bfloat16", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"order-2 model fitted on" in done.stdout and done.stdout.isascii()


def test_a_run_without_a_place_finds_a_free_one(tmp_path, monkeypatch):
    """The same command twice trains twice; --resume without --out continues the newest."""
    monkeypatch.chdir(tmp_path)
    out = lambda *argv: str(options.parse(list(argv)).out)  # noqa: E731
    assert out() == "runs/small-linen" and out("--resume") == "runs/small-linen"
    (tmp_path / "runs" / "small-linen").mkdir(parents=True)
    assert out() == "runs/small-linen-2" and out("--resume") == "runs/small-linen"
    (tmp_path / "runs" / "small-linen-2").mkdir()
    assert out() == "runs/small-linen-3" and out("--resume") == "runs/small-linen-2"
    assert out("--module", "nnx", "--preset", "tiny") == "runs/tiny-nnx" and out("--out", "x") == "x"


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--sample-bytes", "1000000000000"], "at least 1 and at most 1000000"),
        (["--steps", "1" + "0" * 30], "at least 1 and at most 2147483647"),
        (["--glob", ""], "found ''"),
        (["--out", ""], "found ''"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(argv, message):
    with pytest.raises(data.InputError, match=message):
        options.parse(argv)


def test_metadata_of_something_else_is_refused():
    with pytest.raises(data.InputError, match="--resume: found no module, dtype"):
        options.settle(options.parse(["--resume"]), {"preset": "tiny"})
