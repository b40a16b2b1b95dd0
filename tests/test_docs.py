"""The README's code runs as it stands, its links lead somewhere, and docs quote only committed results."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import convergence
from benchmarks.table import attentions, fp8, layers, table

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readmes_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["y"].shape == names["packed"].shape == (2, 128, 128)
    assert set(names["gradients"]["params"]) == set(names["variables"]["params"])
    body = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(body) <= 15


def test_the_first_block_is_the_two_commands():
    first = re.search(r"```sh\n(.*?)```", README, re.DOTALL)
    assert README.index("```") == first.start()
    commands = [line.split("#")[0].strip() for line in first[1].splitlines()]
    assert commands == ["bash flax_examples/run", "bash tests/run"]
    for command in commands:
        assert (ROOT / command.split()[1]).exists()
    assert "tests/run" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_speed_table_is_the_committed_result():
    rows = json.loads((ROOT / "benchmarks" / "results" / "layer-small-cpu.json").read_text())["rows"]
    found = {(row["tokens"], row["implementation"]): row for row in rows if row["pass"] == "fwd_bwd"}
    for tokens in (1024, 4096):
        ours, usual = found[tokens, "xla"], found[tokens, "jnp_usual"]
        mib = 2**20
        row = (
            f"| {tokens:,} | {ours['ms']:,.0f} ms, {ours['peak_bytes'] / mib:,.0f} MiB |"
            f" {usual['ms']:,.0f} ms, {usual['peak_bytes'] / mib:,.0f} MiB |"
        )
        assert row in README, row
        assert ours["ms"] <= usual["ms"]
    assert found[4096, "jnp_usual"]["peak_bytes"] >= 3 * found[4096, "xla"]["peak_bytes"]


def test_the_performance_tables_are_the_committed_results():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")

    def reports(*names):
        return [json.loads((ROOT / "benchmarks" / "results" / f"{name}-h200.json").read_text()) for name in names]

    ops, whole = reports("ops", "up"), reports("layer", "layer-tokens", "layer-16k", "layer-lite")
    (attention,) = reports("attention")
    assert table(*ops) in page and layers(*whole) in page and attentions(attention) in page
    for report in [*ops, *whole, attention, *reports("attention-in-kernel")]:
        assert report["command"] in page, report["command"]
    both = {
        r["op"]: r["ms"]
        for report in whole[:1]
        for r in report["rows"]
        if (r["pass"], r["implementation"]) == ("fwd_bwd", "best")
    }
    assert f"costs {100 * (both['layer_mxfp8'] / both['layer'] - 1):.0f} % of bfloat16's time" in page


def committed(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_the_fp8_tables_are_the_committed_results():
    page = (ROOT / "docs" / "fp8.md").read_text(encoding="utf-8")
    reports = committed("fp8-h200"), committed("fp8-xla-transposes-h200")
    for report in reports:
        assert fp8(report) in page and report["command"] in page
    layer = [
        {r["implementation"]: r for r in report["rows"] if (r["op"], r["pass"]) == ("layer_fp8", "fwd_bwd")}
        for report in reports
    ]
    forward = {r["implementation"]: r for r in reports[0]["rows"] if (r["op"], r["pass"]) == ("layer_fp8", "fwd")}
    assert f"{layer[0]['own']['ms'] / layer[0]['best']['ms']:.2f} times as fast as ours in bfloat16" in page
    errors = [f"{forward[name]['error']:.3f} | {layer[0][name]['error']:.3f}" for name in ("own", "best")]
    trained = committed("convergence-cpu")["runs"]
    bits = [f"{trained[name]['bits_per_byte']['after']:.3f}" for name in ("none", "fp8", "fp8_block")]
    times = [f"{layer[i][n]['ms'] / layer[i]['own']['ms']:.2f}" for i, n in ((0, "best"), (1, "codes"))]
    assert f"| {errors[0]} | 1 | 183 kB | {bits[0]} |" in page
    assert f"| {errors[1]} | {times[0]} | 194 kB (96 with `quantize_attention`, {times[1]}) | {bits[1]} |" in page
    assert f"| 194 kB | {bits[2]} |" in page


def test_every_recipe_learns_as_much():
    """Held-out bits per byte, within 1 %; from committed runs of a whole training."""
    report, page = committed("convergence-cpu"), (ROOT / "docs" / "fp8.md").read_text(encoding="utf-8")
    runs = report["runs"]
    assert report["date"] and all({"device", "versions"} <= set(run) for run in runs.values())
    assert convergence.table(report) in page and report["command"] in page
    plain = runs["none"]["bits_per_byte"]["after"]
    for recipe in ("fp8", "fp8_block"):
        run = runs[recipe]
        assert run["settings"] == runs["none"]["settings"] | {"recipe": recipe}
        assert run["bits_per_byte"]["after"] != plain and abs(run["bits_per_byte"]["after"] / plain - 1) < 0.01
    assert convergence.picture(report).startswith(b"\x89PNG")
