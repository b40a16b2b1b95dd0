"""The example over several devices: its loss curves are one device's, its runs go on over other meshes.

One run a mesh, of the smallest preset with one layer; every curve is held against the run on one device.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from flax_examples import checkpoint, data, loop, mesh, model, options, presets, processes, report, train

TINY = presets.PRESETS["tiny"]
SMALL = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, layers=1), eval_bytes=1024, steps=7)
STEPS = 6  # after which most runs stop, so that they need not write a sample
# Programs are compiled once for all tests that want them: each mesh has one kind of run.
MESHES = {
    "dp=8": [],
    "dp=2,fsdp=2,tp=2": [],
    "fsdp=8": ["--module", "nnx"],  # on one device bit for bit linen's
    "tp=2,dp=4": ["--pack"],  # the mean is over the bytes that all parts predict, however many each does
}
BITS = 2e-4  # bits per byte: sums of float32 in another order, through the steps' updates; measured: below 3e-5


@pytest.fixture(scope="module", autouse=True)
def small_preset():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "tiny", SMALL)
        patch.setattr(loop, "LOG_EVERY", 1)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for name in ("calendar", "copy", "csv", "glob"):
        (folder / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    return folder


def start(text, out, *more):
    """Exit status of a run whose history has the loss of every step."""
    return train.main(
        ["--preset", "tiny", "--data", str(text), "--out", str(out), "--eval-every", "3", "--checkpoint-every", "10"]
        + list(map(str, more))
    )


def history(out):
    checkpoints = checkpoint.Checkpoints(out / "checkpoints")
    return checkpoints.read_run(checkpoints.latest())["history"]


def assert_same_curve(found, wanted, steps=STEPS):
    for part, names in (("loss", (0, 1)), ("evals", ("step", "bits_per_byte"))):
        a, b = ([[entry[name] for name in names] for entry in run[part]] for run in (found, wanted))
        b = [entry for entry in b if entry[0] <= steps]
        np.testing.assert_allclose(a, b, rtol=0, atol=BITS, err_msg=part)
    assert len(found["loss"]) == steps
    # Not a curve that stands still, which everything would match.
    assert abs(found["loss"][0][1] - found["loss"][-1][1]) > 100 * BITS


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """The history of a run on one device; by the options besides."""
    runs = {}

    def get(*more):
        if more not in runs:
            out = tmp_path_factory.mktemp("alone")
            assert start(text, out, "--stop-after", STEPS, *more) == 0
            runs[more] = history(out)
        return runs[more]

    return get


def layout(text):
    return mesh.make(mesh.parse(text))


# What is spread where ---------------------------------------------------------------------------------------------


def test_both_modules_carry_the_same_logical_axes():
    tokens = jnp.zeros((1, 4), jnp.int32)
    boxed = jax.eval_shape(model.LinenLM(SMALL.model).init, jax.random.key(0), tokens)["params"]
    of_linen = jax.tree.map(tuple, nn.get_partition_spec(boxed), is_leaf=lambda leaf: isinstance(leaf, P))
    axes = model.logical_axes(SMALL.model)
    assert axes == of_linen
    assert axes["embed"]["embedding"] == ("vocab", "embed") and axes["block_0"]["down"]["kernel"] == ("mlp", "embed")
    assert axes["block_0"]["attention"]["wq_b"] == ("q_lora", "q_heads", "kv")


def test_state_lies_as_the_rules_say_and_stays_so():
    settings = options.settle(options.parse(["--preset", "tiny"]), None)
    compiled = loop.programs(settings, layout("dp=2,fsdp=2,tp=2"))
    params, state = compiled.init(jax.random.key(0))
    attention, adam = params["block_0"]["attention"], state[1][0]
    for tree in (params, adam.mu, adam.nu):
        block = tree["block_0"]
        assert block["attention"]["wq_a"].sharding.spec == P("fsdp", None)
        assert block["attention"]["wkv_b"].sharding.spec == P("fsdp", "tp", None)
        assert block["attention"]["wo"].sharding.spec == P("tp", None, "fsdp")
        assert block["up"]["kernel"].sharding.spec == P("fsdp", "tp") and block["ffn_norm"].sharding.spec == P(None)
        assert tree["embed"]["embedding"].sharding.spec == P("tp", "fsdp")
        assert block["up"]["kernel"].addressable_shards[0].data.shape == (16, 32)  # of [32, 64]
    before = np.asarray(attention["wq_a"])
    made = []
    batch = compiled.layout.batch(lambda part: made.append(part) or np.full((2, 33), part, np.int32))
    assert made == [0, 1, 2, 3] and [int(row[0]) for row in batch] == [0, 0, 1, 1, 2, 2, 3, 3]
    after, state, _ = compiled.train_step(params, state, batch)
    assert jax.tree.map(lambda leaf: leaf.sharding, (after, state)) == jax.tree.map(
        lambda leaf: leaf.sharding, compiled.wanted
    )
    assert params["norm"].is_deleted()  # donated: laid out alike
    assert not np.array_equal(before, after["block_0"]["attention"]["wq_a"]) or float(state[1][2].count) == 1


def test_fsdp_gathers_parameters_and_no_activation():
    settings = options.settle(options.parse(["--preset", "tiny"]), None)
    compiled = loop.programs(settings, layout("fsdp=8"))
    windows = jax.ShapeDtypeStruct((8, 33), np.int32, sharding=compiled.layout.sharding("batch", None))
    program = compiled.train_step.lower(*compiled.wanted, windows).compile().as_text()
    gathered = {
        tuple(map(int, dims.split(",")))
        for shapes in re.findall(r"= (.*?) all-gather(?:-start)?\(", program)
        for dims in re.findall(r"\w+\[([\d,]+)\]", shapes)
    }
    assert gathered and gathered <= {leaf.shape for leaf in jax.tree.leaves(compiled.wanted[0])}


# Runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes, more", MESHES.items(), ids=MESHES)
def test_a_mesh_has_one_devices_curve(sizes, more, alone, text, tmp_path, capfd):
    assert start(text, tmp_path, "--mesh", sizes, "--stop-after", STEPS, *more) == 0
    assert_same_curve(history(tmp_path), alone(*(option for option in more if option == "--pack")))
    sizes = mesh.parse(sizes)
    said = ", ".join(f"{axis}={sizes[axis]}" for axis in mesh.AXES if axis in sizes)
    assert f"mesh {said}\n" in capfd.readouterr().out


def test_a_run_goes_on_over_other_meshes_and_on_one_device(alone, text, tmp_path, monkeypatch):
    """Restored bit for bit what was saved, wherever it lay, and the curve goes on to the end."""
    saved, restored = {}, {}
    save, restore = checkpoint.Checkpoints.save, checkpoint.Checkpoints.restore

    def spy_save(self, step, params, optimizer, run):
        saved[step] = jax.device_get((params, optimizer))
        save(self, step, params, optimizer, run)

    def spy_restore(self, step, *wanted):
        arrays = restore(self, step, *wanted)
        assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, arrays, wanted))
        restored[step] = jax.device_get(arrays)
        return arrays

    monkeypatch.setattr(checkpoint.Checkpoints, "save", spy_save)
    monkeypatch.setattr(checkpoint.Checkpoints, "restore", spy_restore)
    assert start(text, tmp_path, "--mesh", "dp=8", "--stop-after", 2) == 0
    for step, where in ((3, ["--mesh", "dp=2,fsdp=2,tp=2"]), (5, []), (6, ["--mesh", "dp=8"])):
        assert start(text, tmp_path, "--resume", *where, "--stop-after", step) == 0
    assert list(restored) == [2, 3, 5] and list(saved) == [0, 2, 3, 5, 6]
    for step, arrays in restored.items():
        jax.tree.map(np.testing.assert_array_equal, arrays, saved[step])
    assert_same_curve(history(tmp_path), alone())


def test_a_whole_run_over_a_mesh(text, tmp_path):
    """To the record and the sample, which one device's parameters would have drawn too."""
    assert start(text, tmp_path, "--mesh", "fsdp=2,tp=2,dp=2", "--sample-bytes", 16) == 0
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["mesh"] == {"dp": 2, "fsdp": 2, "tp": 2} and run["settings"]["batch"] == 8
    settings = options.settle(options.parse(["--preset", "tiny"]), None)
    compiled = loop.programs(settings, mesh.make(None))
    params, _ = checkpoint.Checkpoints(tmp_path / "checkpoints").restore(SMALL.steps, *compiled.wanted)
    heldout = loop.Heldout(data.load_corpus([str(text)]).heldout, settings)
    prompt = heldout.windows[len(heldout.windows) // 2, 1:]
    key = jax.random.fold_in(jax.random.key(settings.seed), 0)
    drawn = model._continue(compiled.apply, params, prompt[-16:], 16, key, np.float32(0.8))
    assert run["sample"]["text"] == report.printable(bytes(np.asarray(drawn, np.uint8)))


# Trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more, parts",
    [
        (["--mesh", "dp=2,tp=2"], ["--mesh: found dp=2 x tp=2 = 4", "number of devices, 8"]),
        (["--mesh", "dp=4,pp=2"], ["--mesh", "found axis 'pp'", "wanted one of dp, fsdp, tp"]),
        (["--mesh", "dp"], ["--mesh", "found 'dp'", "whole number"]),
        (["--mesh", "dp=0"], ["--mesh", "found 'dp=0'", "at least 1"]),
        (["--mesh", "dp=2,dp=4"], ["--mesh", "axis dp twice"]),
        (["--mesh", "cp=8"], ["--mesh", "found 'cp=8'", "context parallelism"]),
        (["--mesh", "dp=4,fsdp=2", "--batch", "12"], ["--batch: found 12 over dp=4 x fsdp=2", "a multiple of 8"]),
        (["--mesh", "tp=8"], ["--mesh: found tp=8 and kv_heads of 2", "tp to divide it"]),
        (["--cpu-devices", "4"], ["--cpu-devices", "already started", "wanted 4"]),
        (["--processes", "2"], ["--processes: found no --coordinator and no --process-id"]),
        (["--coordinator", "here"], ["--coordinator", "found 'here'", "a host and a port"]),
        (["--coordinator", "a:1", "--distributed"], ["--distributed: found --coordinator besides"]),
        (
            ["--coordinator", "a:1", "--processes", "2", "--process-id", "2"],
            ["--process-id: found 2", "less than --processes = 2"],
        ),
    ],
)
def test_what_no_mesh_can_do_is_one_line_and_writes_nothing(more, parts, text, tmp_path, capfd):
    out = tmp_path / "out"
    assert start(text, out, *more) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for part in parts:
        assert part in error, error
    assert not out.exists()


def test_several_processes_want_a_place_by_name():
    with pytest.raises(data.InputError, match="--out: found none for several processes"):
        options.parse(["--distributed"])


def test_what_processes_may_be_given_differently():
    first, second = (
        options.parse(["--out", out, "--data", out, "--coordinator", "a:1", "--processes", "2", "--process-id", number])
        for out, number in (("here", "0"), ("there", "1"))
    )
    assert options.shared(first) == options.shared(second) == "--sample-bytes 400 --coordinator a:1 --processes 2"
    first.seed, first.mesh = 3, {"dp": 2}
    assert "--seed 3" in options.shared(first) and "--mesh {'dp': 2}" in options.shared(first)


def test_processes_agree_or_all_say_who_does_not(monkeypatch):
    said = []
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(processes, "_gather", lambda text: said.append(text) or [text, "it is gone"])
    processes.same("--seed", "it is gone")
    with pytest.raises(processes.TogetherError, match="--seed: found it is gone in process 1 and 3 in process 0"):
        processes.same("--seed", "3")
    with pytest.raises(processes.TogetherError, match="^process 1: it is gone$"):
        processes.together(lambda: 5)

    def broken():
        raise data.InputError("it is gone")

    with pytest.raises(processes.TogetherError, match="^it is gone$"):
        processes.together(broken)
    monkeypatch.setattr(processes, "_gather", lambda text: [text, text])
    assert processes.together(lambda: 5) == 5 and said[-1] == "it is gone"


def test_processes_that_share_parts_by_halves_are_refused(monkeypatch):
    class Device:
        def __init__(self, process_index):
            self.process_index = process_index

    monkeypatch.setattr(jax, "devices", lambda: [Device(i // 3) for i in range(6)])
    with pytest.raises(data.InputError, match="shared by 2 devices, and processes of .3. devices"):
        mesh.make({"dp": 3, "tp": 2})


@pytest.mark.parametrize("text, sizes", [("tp=2,dp=4", {"tp": 2, "dp": 4}), ("fsdp=1", {"fsdp": 1})])
def test_a_mesh_is_read(text, sizes):
    assert mesh.parse(text) == sizes
    with pytest.raises(argparse.ArgumentTypeError):
        mesh.parse(text + ",")
