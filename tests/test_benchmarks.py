"""The benchmark command: it runs, checks what it times, and writes the JSON it documents."""

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import timing

ROOT = Path(__file__).resolve().parent.parent
KEYS = {"op", "pass", "implementation", "preset", "tokens", "ms", "spread", "tflops", "gbps", "error", "peak_bytes"}


def test_layer_rows(tmp_path, capsys):
    path = tmp_path / "layer.json"
    benchmarks.main(["layer", "--preset", "small-cpu", "--tokens", "96", "--repeats", "2", "--json", str(path)])
    report = json.loads(path.read_text())
    assert set(report) == {"device", "versions", "command", "date", "rows"}
    assert report["command"].startswith("python -m benchmarks layer --preset small-cpu")
    seen = {(row["op"], row["pass"], row["implementation"]) for row in report["rows"]}
    assert seen == {("layer", p, i) for p in ("fwd", "fwd_bwd") for i in ("xla", "jnp_usual")}
    for row in report["rows"]:
        assert set(row) == KEYS and row["ms"] > 0 and row["error"] < 1e-4 and row["peak_bytes"] > 0
    assert "fwd_bwd" in capsys.readouterr().out


def test_the_recorded_command_names_no_place():
    for json_arguments in (["--json", "/some/where.json"], ["--json=/some/where.json"]):
        assert (
            benchmarks._command(["layer", *json_arguments, "--repeats", "3"])
            == "python -m benchmarks layer --repeats 3"
        )


def test_a_wrong_result_shows_as_wrong():
    assert timing.worst_error([1.0, 2.0], [1.0, 1.0]) == 1.0


def test_unknown_ops_and_presets(capsys):
    bad = [["no_such_op"], ["layer", "--preset", "huge"], [], ["layer", "--repeats", "0"], ["layer", "--tokens", "-5"]]
    for arguments in (*bad, ["layer", "--json", "/no/such/folder/x.json"]):
        with pytest.raises(SystemExit):
            benchmarks.main(arguments)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda p: p.name)
def test_committed_results_have_the_documented_form(path):
    report = json.loads(path.read_text(encoding="utf-8"))
    assert set(report) >= {"device", "versions", "command", "date", "rows"}
    assert all(set(row) >= KEYS for row in report["rows"])
