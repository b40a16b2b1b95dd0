"""docs/parity.md, which the parity tests write.

Each case checks itself and leaves its figures in the run's temporary folder; the case that completes the set writes the
document (so this works under pytest-xdist too, and a partial or failing run leaves the file alone).
"""

import dataclasses
import importlib
import json
import math
import os
import textwrap
from collections.abc import Callable
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "parity.md"
# Their SECTIONS make the document, in this order.
MODULES = ("test_parity_hf", "test_parity_bf16", "test_parity_packing", "test_parity_model", "test_convergence")
HEADER = """\
# Parity with PyTorch

`jax_mla` against Hugging Face's `DeepseekV3Attention` (eager attention) in torch on the CPU, with the same weights
through `convert.from_hf` and `to_hf`: the output ("forward"), then the gradient of every input and parameter for a
random cotangent. Errors are max |ours - golden| / max |golden| of their tensor, and the tests fail above what each
section says.

Written by tests/test_parity_\\*.py and tests/test_convergence.py together, with the versions installed where they ran.
A float32 error is a bound: it stays while it holds and is within ten times of what is measured, so that another machine
does not change this file. A bfloat16 error stays while it is within a third of what is measured, a loss within 0.01.
"""


def bound(error, old=None):
    """`old` if it is still a fair bound, else the error rounded up to 1, 2 or 5 times a power of ten."""
    if old and error <= float(old) <= 10 * max(error, 1e-8):
        return old
    exponent = math.floor(math.log10(max(error, 1e-8)))
    digits = next(d for d in (1, 2, 5, 10) if error <= d * 10.0**exponent)
    return f"{digits * 10.0**exponent:.0e}".replace("e-0", "e-")


def figure(value, old=None):
    """`old` if it is within a third of the value, else the value to two digits."""
    if value == 0:
        return "0"
    if old and value / 1.33 <= float(old) <= 1.33 * value:
        return old
    return f"{value:.1e}".replace("e-0", "e-")


@dataclasses.dataclass(frozen=True)
class Section:
    title: str
    text: str
    rows: list[str]
    columns: list[str]
    cell: Callable = bound  # from a number and the cell's old text


def sections():
    return [section for name in MODULES for section in importlib.import_module(name).SECTIONS]


def report(tmp_path_factory, title, row, figures):
    """Keeps a row's numbers by column; whoever completes the set writes the document."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the one that all workers share
    folder = folder / "parity"
    folder.mkdir(exist_ok=True)
    files = {
        (section.title, row): folder / f"{i}-{j}.json"
        for i, section in enumerate(sections())
        for j, row in enumerate(section.rows)
    }
    replace(files[title, row], json.dumps(figures))
    if all(file.exists() for file in files.values()):
        old = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
        text = document(sections(), {key: json.loads(file.read_text()) for key, file in files.items()}, old)
        if text != old:
            replace(DOCUMENT, text)


def replace(path, text):
    """In one step, so that no other worker reads half a file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def document(sections, measured, old):
    cells, parts = read_cells(old), [HEADER]
    for s in sections:
        lines = ["| | " + " | ".join(s.columns) + " |", "|---" * (len(s.columns) + 1) + "|"]
        for row in s.rows:
            found = measured[s.title, row]
            assert found.keys() <= set(s.columns), (row, found.keys())
            texts = [s.cell(found[c], cells.get((s.title, row, c))) if c in found else "" for c in s.columns]
            lines.append(f"| {row} | " + " | ".join(texts) + " |")
        text = textwrap.fill(" ".join(s.text.split()), 120, break_long_words=False, break_on_hyphens=False)
        parts.append(f"## {s.title}\n\n{text}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def read_cells(text):
    """{(section, row, column): text} of a document."""
    found = {}
    for part in text.split("\n## ")[1:]:
        lines = part.splitlines()
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
        for row in rows[2:]:
            found |= {(lines[0], row[0], name): cell for name, cell in zip(rows[0][1:], row[1:], strict=False)}
    return found


def test_bounds_round_up_and_stay():
    assert [bound(e) for e in (0.0, 1e-6, 1.01e-6, 2.3e-6, 6e-7)] == ["1e-8", "1e-6", "2e-6", "5e-6", "1e-6"]
    assert bound(9e-7, "5e-6") == "5e-6" and bound(4e-7, "5e-6") == "5e-7" and bound(6e-6, "5e-6") == "1e-5"
    assert bound(0.0, "1e-8") == "1e-8"


def test_figures_round_and_stay():
    assert [figure(v) for v in (0.0, 6.44e-3, 0.0123)] == ["0", "6.4e-3", "1.2e-2"]
    assert figure(8e-3, "6.4e-3") == "6.4e-3" and figure(5e-3, "6.4e-3") == "6.4e-3"
    assert figure(9e-3, "6.4e-3") == "9.0e-3" and figure(4e-3, "6.4e-3") == "4.0e-3"
    assert figure(1e-3, "0") == "1.0e-3"


def test_the_document_reads_back():
    """What was written is found again by section, row and column; a cell changes only where it must."""
    two = [Section("One", "text", ["a", "b"], ["x", "y"]), Section("Two", "", ["a"], ["x"], figure)]
    measured = {("One", "a"): dict(x=4e-7, y=3e-6), ("One", "b"): dict(y=1e-6), ("Two", "a"): dict(x=6e-3)}
    text = document(two, measured, "")
    wanted = {("One", "a", "x"): "5e-7", ("One", "a", "y"): "5e-6", ("One", "b", "x"): "", ("One", "b", "y"): "1e-6"}
    assert read_cells(text) == wanted | {("Two", "a", "x"): "6.0e-3"}
    assert document(two, {key: {c: 0.9 * v for c, v in row.items()} for key, row in measured.items()}, text) == text
    changed = document(two, measured | {("One", "a"): dict(x=6e-7, y=3e-6)}, text)
    assert read_cells(changed) == read_cells(text) | {("One", "a", "x"): "1e-6"}
