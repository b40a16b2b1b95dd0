"""The example over several devices: its loss curves are one device's, its runs go on over other meshes.

Two runs of the smallest preset with one layer, each from mesh to mesh, held step by step against a run on one device.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import re
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from flax_examples import checkpoint, data, loop, mesh, model, options, presets, processes, report, train

TINY = presets.PRESETS["tiny"]
SMALL = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, layers=1), eval_bytes=1024, steps=8)
STEPS = 7  # that runs are compared over; none but one goes to the end, where a sample is written
# By the options: where each step up to which number runs, None on one device. Programs are compiled once a leg.
RUNS = {
    "linen": ([], {2: "dp=2,fsdp=2,tp=2", 3: None, 5: "cp=8", 7: "dp=2,cp=2,tp=2"}),
    # On one device nnx is bit for bit linen; the mean is over the bytes that all parts predict, however many each does.
    "nnx, packed": (["--module", "nnx", "--pack"], {3: "fsdp=8", 8: "tp=2,fsdp=2,cp=2"}),
}
BITS = 2e-4  # bits per byte: sums of float32 in another order, through the steps' updates; measured: below 3e-5
# Of the norm of a parameter's first moment, which shows what Adam's step does not: a gradient's size; measured: 1e-6.
MOMENTS = 1e-4
# MXFP8's blocks are of 32, along every dim that is contracted.
ATTENTION = dataclasses.replace(
    TINY.model.attention, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32
)
BLOCKS = dataclasses.replace(SMALL, model=dataclasses.replace(SMALL.model, attention=ATTENTION), window=128)


@pytest.fixture(scope="module", autouse=True)
def small_presets():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "tiny", SMALL)
        patch.setitem(presets.PRESETS, "blocks", BLOCKS)
        patch.setattr(loop, "LOG_EVERY", 1)
        yield


@pytest.fixture(scope="module", autouse=True)
def whole_copies_saved():
    """By default orbax has devices that hold the same write a part of it each, and compiles a program for each part."""
    handler = ocp.type_handlers.get_type_handler(jax.Array)
    ocp.type_handlers.register_type_handler(
        jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False), override=True
    )
    yield
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for name in ("calendar", "copy", "csv", "glob"):
        (folder / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    return folder


def start(text, out, *more):
    """Exit status of a run whose history has the loss of every step, before and after."""
    return train.main(
        ["--preset", "tiny", "--data", str(text), "--out", str(out), "--eval-every", "1", "--checkpoint-every", "10"]
        + list(map(str, more))
    )


def history(out):
    checkpoints = checkpoint.Checkpoints(out / "checkpoints")
    return checkpoints.read_run(checkpoints.latest())["history"]


def layout(text):
    return mesh.make(mesh.parse(text))


def settled(*more):
    return options.settle(options.parse(["--preset", "tiny", *more]), None)


@dataclasses.dataclass
class Watched:
    """What runs have done: their steps' programs by mesh, first moments by step, checkpoints."""

    programs: dict = dataclasses.field(default_factory=dict)
    moments: dict = dataclasses.field(default_factory=dict)
    saved: dict = dataclasses.field(default_factory=dict)
    restored: dict = dataclasses.field(default_factory=dict)


@pytest.fixture
def watched(monkeypatch):
    """Runs, watched: every step leaves parameters and state as they lay, and frees those that it was given; what is
    restored lies where it is wanted."""
    seen = Watched()
    programs, save, restore = loop.programs, checkpoint.Checkpoints.save, checkpoint.Checkpoints.restore
    lie = functools.partial(jax.tree.map, lambda leaf: leaf.sharding)

    @functools.cache
    def watched_programs(*settings):
        made = programs(*settings)
        compiled = []

        def train_step(params, state, batch):
            if not compiled:
                compiled.append(made.train_step.lower(params, state, batch).compile())
                seen.programs[str(made.layout.sizes)] = compiled[0].as_text()
            after, state_after, numbers = compiled[0](params, state, batch)
            assert lie((params, state)) == lie((after, state_after)) == lie(made.wanted)
            # What was saved or restored is held here too; otherwise the old parameters' memory is the new ones'.
            assert params["norm"].is_deleted() or len(seen.moments) in seen.saved
            seen.moments[len(seen.moments) + 1] = jax.device_get(state_after[1][0].mu)
            return after, state_after, numbers

        return dataclasses.replace(made, train_step=train_step)

    def spy_save(self, step, params, optimizer, run):
        seen.saved[step] = jax.device_get((params, optimizer))
        save(self, step, params, optimizer, run)

    def spy_restore(self, step, *wanted):
        arrays = restore(self, step, *wanted)
        assert lie(arrays) == lie(wanted)
        seen.restored[step] = jax.device_get(arrays)
        return arrays

    monkeypatch.setattr(loop, "programs", watched_programs)
    monkeypatch.setattr(checkpoint.Checkpoints, "save", spy_save)
    monkeypatch.setattr(checkpoint.Checkpoints, "restore", spy_restore)
    return seen


# What is spread where ---------------------------------------------------------------------------------------------


def test_both_modules_carry_the_same_logical_axes():
    tokens = jnp.zeros((1, 4), jnp.int32)
    boxed = jax.eval_shape(model.LinenLM(SMALL.model).init, jax.random.key(0), tokens)["params"]
    of_linen = jax.tree.map(tuple, nn.get_partition_spec(boxed), is_leaf=lambda leaf: isinstance(leaf, P))
    axes = model.logical_axes(SMALL.model)
    assert axes == of_linen
    assert axes["embed"]["embedding"] == ("vocab", "embed") and axes["block_0"]["down"]["kernel"] == ("mlp", "embed")
    assert axes["block_0"]["attention"]["wq_b"] == ("q_lora", "q_heads", "kv")


def test_state_lies_as_the_rules_say():
    """And stays so: that is seen at every step of the runs below."""
    compiled = loop.programs(settled(), layout("dp=2,fsdp=2,tp=2"))
    params, state = compiled.wanted
    for tree in (params, state[1][0].mu, state[1][0].nu):
        block = tree["block_0"]
        assert block["attention"]["wq_a"].sharding.spec == P("fsdp", None)
        assert block["attention"]["wkv_b"].sharding.spec == P("fsdp", "tp", None)
        assert block["attention"]["wo"].sharding.spec == P("tp", None, "fsdp")
        assert block["up"]["kernel"].sharding.spec == P("fsdp", "tp") and block["ffn_norm"].sharding.spec == P(None)
        assert tree["embed"]["embedding"].sharding.spec == P("tp", "fsdp")
        assert block["up"]["kernel"].sharding.shard_shape((32, 64)) == (16, 32)
    made = []
    batch = compiled.layout.batch(lambda part: made.append(part) or np.full((2, 33), part, np.int32))
    assert made == [0, 1, 2, 3] and [int(row[0]) for row in batch] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_tokens_lie_in_the_layers_order():
    spread = layout("dp=2,cp=2,tp=2")
    rows = np.arange(32, dtype=np.int32) + 100 * np.arange(4, dtype=np.int32)[:, None]
    found = jax.jit(spread.zigzag)(rows)
    assert found.sharding.spec == P("dp", "cp")
    shards = {tuple(cut.start for cut in s.index): np.asarray(s.data) for s in found.addressable_shards}
    own = np.r_[0:8, 24:32]  # the first and the last of four chunks are one device's
    np.testing.assert_array_equal(shards[0, 0], rows[:2, own])
    np.testing.assert_array_equal(shards[2, 16], rows[2:, 8:24])
    assert layout("dp=4,tp=2").zigzag(rows) is rows


# Runs -------------------------------------------------------------------------------------------------------------


def gathered(program):
    """The shapes of what devices are sent whole."""
    return {
        tuple(map(int, dims.split(",")))
        for shapes in re.findall(r"= (.*?) all-gather(?:-start)?\(", program)
        for dims in re.findall(r"\w+\[([\d,]+)\]", shapes)
    }


@pytest.mark.parametrize("more, legs", RUNS.values(), ids=RUNS)
def test_a_run_has_one_devices_curve_over_every_mesh(more, legs, watched, text, tmp_path, capfd):
    """Restored bit for bit what was saved, wherever it lay, and going on as if nothing had been."""
    assert start(text, tmp_path / "alone", "--stop-after", STEPS, *more) == 0
    alone, wanted = history(tmp_path / "alone"), watched.moments
    assert [step for step, _ in alone["loss"]] == list(range(1, STEPS + 1))
    # Not a curve that stands still, which everything would match.
    assert abs(alone["loss"][0][1] - alone["loss"][-1][1]) > 100 * BITS
    out, last = tmp_path / "out", 0
    watched.moments, watched.saved = {}, {}
    for step, sizes in legs.items():
        where = ["--mesh", sizes] if sizes else []
        new = ["--resume"] if last else more
        capfd.readouterr()
        assert start(text, out, *new, *where, "--stop-after", step, "--sample-bytes", 16) == 0
        asked = mesh.parse(sizes) if sizes else {}
        said = ", ".join(f"{axis}={asked[axis]}" for axis in mesh.AXES if axis in asked)
        assert (f"mesh {said}\n" if asked else "(cpu)\n") in capfd.readouterr().out
        found = history(out)
        for part, names in (("loss", (0, 1)), ("evals", ("step", "bits_per_byte"))):
            a, b = ([[entry[name] for name in names] for entry in run[part]] for run in (found, alone))
            until = min(step, STEPS) + (part == "evals")
            assert len(a) == step + (part == "evals")
            np.testing.assert_allclose(a[:until], b[:until], rtol=0, atol=BITS, err_msg=f"{part}, {sizes}")
        for number in range(last + 1, min(step, STEPS) + 1):
            for (path, a), b in zip(
                jax.tree.leaves_with_path(watched.moments[number]), jax.tree.leaves(wanted[number]), strict=True
            ):
                worst = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
                assert worst < MOMENTS, (sizes, number, jax.tree_util.keystr(path), worst)
        last = step
    assert list(watched.saved) == [0, *legs] and list(watched.restored) == list(legs)[:-1]
    for step, arrays in watched.restored.items():
        jax.tree.map(np.testing.assert_array_equal, arrays, watched.saved[step])
    whole = {sizes: gathered(watched.programs[str(layout(sizes).sizes)]) for sizes in legs.values() if sizes}
    if "fsdp=8" in whole:
        parameters = {leaf.shape for leaf in jax.tree.leaves(watched.saved[last][0])}
        assert whole["fsdp=8"] and whole["fsdp=8"] <= parameters  # and no activation
        check_the_end(out, settled(*more), text, legs[last])
    else:
        # What travels over cp are latents, 16 + 8 numbers a token.
        assert whole["cp=8"] == {(8, 32, 24)} and whole["dp=2,cp=2,tp=2"] == {(4, 32, 24)}


def check_the_end(out, settings, text, sizes):
    """The record, and the sample, which one device's parameters would have drawn too."""
    run = json.loads((out / "run.json").read_text())
    assert run["mesh"] == layout(sizes).sizes and run["settings"]["batch"] == 8
    compiled = loop.programs(settings, mesh.make(None))
    params, _ = checkpoint.Checkpoints(out / "checkpoints").restore(SMALL.steps, *compiled.wanted)
    heldout = loop.Heldout(data.load_corpus([str(text)]).heldout, settings)
    prompt = heldout.windows[len(heldout.windows) // 2, 1:]
    key = jax.random.fold_in(jax.random.key(settings.seed), 0)
    drawn = model._continue(compiled.apply, params, prompt[-16:], 16, key, np.float32(0.8))
    assert run["sample"]["text"] == report.printable(bytes(np.asarray(drawn, np.uint8)))


def test_tokens_spread_in_mxfp8():
    """Codes are one device's, of either module: no block has tokens of two chunks. (Gradients: test_context.py.)"""
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 256, (4, 129)).astype(np.int32)
    shapes = jax.eval_shape(lambda: model.init_params(jax.random.key(0), BLOCKS.model))
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), shapes)
    found = []
    for module, spread in (("linen", mesh.make(None)), ("nnx", layout("dp=2,cp=2,tp=2"))):
        compiled = loop.programs(settled("--preset", "blocks", "--recipe", "mxfp8", "--module", module), spread)
        placed = jax.tree.map(lambda leaf, wanted: jax.device_put(leaf, wanted.sharding), params, compiled.wanted[0])
        rows = spread.batch(lambda part, size=4 // spread.parts: windows[part * size :][:size])
        lowered = compiled.losses.lower(placed, rows)
        assert "f8E4M3FN" in lowered.as_text()
        found.append(lowered.compile()(placed, rows))
    np.testing.assert_allclose(*found, rtol=1e-5)


# Trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more, parts",
    [
        (["--mesh", "dp=2,tp=2"], ["--mesh: found dp=2 x tp=2 = 4", "number of devices, 8"]),
        (["--mesh", "dp=4,pp=2"], ["--mesh", "found axis 'pp'", "wanted one of dp, fsdp, cp, tp"]),
        (["--mesh", "dp"], ["--mesh", "found 'dp'", "whole number"]),
        (["--mesh", "dp=0"], ["--mesh", "found 'dp=0'", "at least 1"]),
        (["--mesh", "dp=2,dp=4"], ["--mesh", "axis dp twice"]),
        (["--mesh", "cp=4,tp=2", "--window", "36"], ["--window: found 36 over cp=4", "a multiple of 8"]),
        (
            ["--mesh", "cp=4,tp=2", "--preset", "blocks", "--recipe", "mxfp8"],
            ["--window: found 128 over cp=4", "a multiple of 256", "blocks of 32"],
        ),
        (["--recipe", "mxfp8"], ["--recipe: ", "'wq_a']: found float32[32, 24]", "a multiple of 32"]),
        (["--recipe", "mxfp8", "--pack"], ["--pack-multiple: found 1 with --recipe mxfp8", "a multiple of 32"]),
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
