"""The benchmark command: it runs, checks what it times, and writes the JSON it documents."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla
from benchmarks import __main__ as benchmarks
from benchmarks import cases, layers, ops, peers, timing
from jax_mla import MLAConfig

ROOT = Path(__file__).resolve().parent.parent
KEYS = {"op", "pass", "implementation", "preset", "tokens", "ms", "spread", "tflops", "gbps", "error", "peak_bytes"}
MORE = {"variant", "ceiling", "fraction"}


def rows_of(path, *arguments):
    benchmarks.main([*arguments, "--preset", "small-cpu", "--repeats", "2", "--json", str(path)])
    report = json.loads(path.read_text())
    assert set(report) == {"device", "versions", "command", "xla_flags", "date", "rows"}
    for row in report["rows"]:
        assert set(row) == KEYS | MORE and row["peak_bytes"] >= 0
        assert row["pass"] in ("fwd", "bwd", "fwd_bwd")
    return report


def test_layer_rows(tmp_path, capsys):
    report = rows_of(tmp_path / "layer.json", "layer", "--tokens", "96")
    assert report["command"].startswith("python -m benchmarks layer --tokens 96 --preset small-cpu")
    seen = {(row["op"], row["pass"], row["implementation"]) for row in report["rows"]}
    assert seen == {("layer", p, i) for p in ("fwd", "fwd_bwd") for i in ("xla", "jnp_usual")}
    assert all(row["ms"] > 0 and row["error"] < 1e-4 and row["fraction"] is None for row in report["rows"])
    assert {"jax", "jaxlib", "numpy", "python", "jax_mla"} <= set(report["versions"])
    assert "fwd_bwd" in capsys.readouterr().out


def test_op_rows_after_their_ceilings(tmp_path):
    """The ceilings are measured first, wherever they are named."""
    rows = rows_of(tmp_path / "ops.json", "dequantize", "gemm", "copy", "--tokens", "32")["rows"]
    assert [row["op"] for row in rows[:2]] == ["copy", "gemm"] and len(rows) == 8
    assert {row["variant"] for row in rows[2:]} == {"rowwise", "columnwise"}
    for row in rows:
        assert row["error"] < 1e-6, row
        assert row["ceiling"] == ("gemm" if row["op"] == "gemm" else "copy")
        assert np.isclose(row["fraction"], row["gbps"] / rows[0]["gbps"] if row["gbps"] else 1.0)


def test_a_fraction_is_of_the_ceiling_that_is_nearest():
    def row(op, gbps, tflops, tokens=8):
        return dict(op=op, gbps=gbps, tflops=tflops, tokens=tokens)

    measured = [row("copy", 30.0, None), row("copy", 40.0, None), row("gemm", None, 500.0), row("copy", 9.0, None, 2)]
    for found, wanted in [
        (row("q_up", 4.0, 400.0), ("gemm", 0.8)),
        (row("q_up", 20.0, 100.0), ("copy", 0.5)),
        (row("rope_q", 20.0, None), ("copy", 0.5)),
        (row("q_up", 20.0, 100.0, tokens=2), (None, None)),  # no GEMM of as many tokens
        (row("layer", None, None), (None, None)),
    ]:
        assert benchmarks._ceiling(found, [*measured, found]) == wanted


@pytest.mark.parametrize("op", sorted(ops.OPS))
def test_every_op_has_peers_and_a_reference_of_its_form(op):
    """Traced at odd dims, in bfloat16: candidates give what the reference gives."""
    preset = benchmarks.Preset(benchmarks.PRESETS["small-cpu"].config, 2, 64, "bfloat16")

    def shapes(function, args):
        return [a.shape for a in jax.tree.leaves(jax.eval_shape(function, *args))]

    def trace():
        for case in ops.OPS[op](cases.Inputs(preset, 64, 0)):
            if op not in benchmarks.CEILINGS:
                wanted = {"xla", "jnp_usual"} if op.startswith("attention") else {"xla", "jnp_usual", "jnp_best"}
                assert set(case.candidates) == wanted
            assert case.bytes or case.flops
            form = shapes(case.reference, case.args)
            assert all(shapes(function, case.args) == form for function in case.candidates.values())

    jax.eval_shape(trace)


@pytest.mark.parametrize("op, at", [("kv_up", 1), ("q_up_mxfp8", 0)])
def test_candidates_agree_with_the_reference(op, at):
    """Passes that no command here runs, in one program each."""
    case = ops.OPS[op](cases.Inputs(benchmarks.PRESETS["small-cpu"], 32, 0))[at]

    @jax.jit
    def everything(*args):
        return case.reference(*args), {name: function(*args) for name, function in case.candidates.items()}

    wanted, found = everything(*case.args)
    for name, results in found.items():
        assert cases.error(results, wanted) < 1e-5, name


def test_every_peer_of_the_layer_is_one():
    """With and without a low rank of queries; in MXFP8 but for its rounding."""

    def errors(config):
        x = jax.random.normal(jax.random.key(1), (1, 32, config.hidden_size))
        made = {False: layers.PARTS} | ({True: layers.PARTS_MXFP8} if config.q_lora_rank else {})

        @jax.jit
        def everything(params, x):
            found = {
                (name, mxfp8): layers.jnp_layer(parts[name], peers.attention_usual, config, params, x)
                for mxfp8, parts in made.items()
                for name in parts
            }
            return jax_mla.mla(params, x, config), found

        wanted, found = everything(jax_mla.init(jax.random.key(0), config), x)
        return {key: cases.rms_error(y, wanted) for key, y in found.items()}

    tiny = MLAConfig.tiny()
    for config in (tiny, dataclasses.replace(tiny, q_lora_rank=None)):
        for (_, mxfp8), error in errors(config).items():
            assert 1e-3 < error < 0.1 if mxfp8 else error < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_gpu_peers_of_attention(width):
    """Of packed sequences, one of which is none, too."""
    shapes = [(2, 128, 3, d) for d in (128, 128, width)]
    q, k, v = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(shapes))
    for at in (None, jnp.array([[0, 50, 50, 128], [0, 1, 90, 128]])):
        wanted = peers.attention_exact(q, k, v, at)
        for name, function in peers.attentions(jnp.bfloat16).items():
            assert cases.error(jax.jit(function)(q, k, v, at), wanted) < 2e-2, name


def wave(x, y):
    return jnp.sin(x) + y, jnp.cos(x) @ y


def counts(text):
    return [len(re.findall(rf" {op}\(", text)) for op in ("sine", "cosine", "dot")]


def test_a_program_holds_the_op_as_often_as_it_says():
    """Neither merged nor dropped, not in part either. The control: with one input for all turns, or results that only
    barriers read, it is less."""
    sets = [(jnp.full((8, 8), float(i)), jnp.ones((8, 8))) for i in range(5)]

    def compiled(function, *args):
        return counts(jax.jit(function).lower(*args).compile().as_text())

    def last(*sets):
        return timing.repeated(wave)(*sets)[-1]

    assert compiled(timing.repeated(wave), *sets) == [5, 5, 5]
    assert sum(compiled(last, *sets)) < 15
    assert sum(compiled(lambda args: timing.repeated(wave)(*[args] * 5), sets[0])) < 15
    assert compiled(timing.chained(lambda x: jnp.sin(x) + 1, 5), sets[0][0])[0] == 5
    found = timing.repeated(wave)(*sets)
    for results, args in zip(found, sets, strict=True):
        for a, b in zip(results, wave(*args), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.gpu
def test_a_gpus_program_holds_the_op_as_often_too():
    sets = [(jnp.full((8, 8), float(i)), jnp.ones((8, 8))) for i in range(5)]
    assert counts(jax.jit(timing.repeated(wave)).lower(*sets).compile().as_text())[:2] == [5, 5]
    chain = jax.jit(timing.chained(lambda x: jnp.sin(x) + 1, 5), donate_argnums=0)
    assert counts(chain.lower(jnp.ones((8, 8))).compile().as_text())[0] == 5


@pytest.mark.parametrize("op, taken_off", [("rope_q", False), ("q_up", True)])
def test_programs_that_repeat_give_the_same_rows(op, taken_off, monkeypatch):
    """A GPU's way of timing, on a CPU: an op in place, which is chained, and one whose producer is taken off."""
    timed = {}
    side_by_side = timing.side_by_side
    monkeypatch.setattr(timing, "repeats_in_program", lambda: True)
    monkeypatch.setattr(timing, "plan", lambda ms, turn_bytes: (3, 2))
    monkeypatch.setattr(timing, "side_by_side", lambda found, n: timed.update(found) or side_by_side(found, n))
    case = ops.OPS[op](cases.Inputs(benchmarks.PRESETS["small-cpu"], 32, 0))[-1]
    case = dataclasses.replace(case, candidates={"xla": case.candidates["xla"]})
    rows = benchmarks._case_rows(op, case, 2)
    assert [row["implementation"] for row in rows] == ["xla"] and rows[0]["error"] < 1e-4
    assert ("producer" in timed) == taken_off and case.donate != taken_off
    assert all(t.count == 3 and t.calls == 2 for t in timed.values())


def test_how_often_a_program_holds_an_op():
    assert timing.plan(1e-3, 1) == (20, 20)  # never more
    assert timing.plan(0.3, 100) == (7, 5)
    assert timing.plan(0.3, int(4e9)) == (3, 12)  # by memory
    assert timing.plan(50.0, int(1e12)) == (1, 1)


def test_a_sample_is_shared_by_all_that_it_ran():
    clock = timing.side_by_side({"x": timing.Timed(lambda: timing.time.sleep(0.01), count=5, calls=2)}, 1)
    assert 2 <= clock["x"][0] < 9


def test_the_recorded_command_names_no_place():
    for json_arguments in (["--json", "/some/where.json"], ["--json=/some/where.json"]):
        assert (
            benchmarks._command(["layer", *json_arguments, "--repeats", "3"])
            == "python -m benchmarks layer --repeats 3"
        )


def test_a_wrong_result_shows_as_wrong():
    assert cases.error([1.0, 2.0], [1.0, 1.0]) == 1.0
    x = jnp.arange(4.0)
    candidates = {"xla": jnp.negative, "triton": jnp.abs}
    rows = benchmarks._case_rows("copy", cases.Case("fwd", candidates, (x,), jnp.negative), 1)
    assert {row["implementation"]: row["error"] for row in rows} == {"xla": 0.0, "triton": 2.0}
    codes = jnp.array([1, 2, 3, 4], jnp.uint8)
    assert cases.error((x, codes), (x, codes.at[0].set(9))) == 0.25


def test_what_cannot_run_is_left_out_and_said(capsys):
    def refuse(error):
        def run(x):
            raise error

        return run

    def rows(**candidates):
        case = cases.Case("fwd", {"xla": jnp.negative, **candidates}, (jnp.ones(3),), jnp.negative)
        return [row["implementation"] for row in benchmarks._case_rows("copy", case, 1)]

    assert rows(jnp_best=refuse(ValueError("too wide")), mosaic=refuse(NotImplementedError("no such dim"))) == ["xla"]
    told = capsys.readouterr().err
    assert "jnp_best: ValueError: too wide" in told and "mosaic: NotImplementedError: no such dim" in told
    with pytest.raises(ValueError, match="a bug"):
        rows(triton=refuse(ValueError("a bug")))


def test_a_failure_keeps_what_was_measured_before(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setitem(benchmarks.OPS, "q_up", fail)
    path = tmp_path / "ops.json"
    with pytest.raises(RuntimeError, match="luck"):
        benchmarks.main(["copy", "q_up", "--tokens", "32", "--repeats", "1", "--json", str(path)])
    assert not path.exists()
    report = json.loads((tmp_path / "ops.json.partial").read_text())
    assert [row["op"] for row in report["rows"]] == ["copy"]


def test_unknown_ops_and_presets(capsys):
    bad = [["no_such_op"], ["layer", "--preset", "huge"], [], ["layer", "--repeats", "0"], ["layer", "--tokens", "-5"]]
    for arguments in (*bad, ["layer", "--json", "/no/such/folder/x.json"]):
        with pytest.raises(SystemExit):
            benchmarks.main(arguments)


# `test_scaling.py` has those that are compiled, not timed, `test_docs.py` those of training.
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
TIMED = [path for path in RESULTS if not path.name.startswith(("scaling", "convergence"))]


@pytest.mark.parametrize("path", TIMED, ids=lambda p: p.name)
def test_committed_results_have_the_documented_form(path):
    report = json.loads(path.read_text(encoding="utf-8"))
    assert set(report) >= {"device", "versions", "command", "date", "rows"}
    assert all(set(row) >= KEYS for row in report["rows"])
