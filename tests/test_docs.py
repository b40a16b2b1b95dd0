"""The README's code runs as it stands, its links lead somewhere, and docs quote only committed results."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.table import attentions, layers, table

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
