"""docs/cases.md: every test that it names exists, and every test of `test_cases_*.py` is named there."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
TEXT = (TESTS.parent / "docs" / "cases.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and "went wrong elsewhere" not in line]


def functions(file):
    return re.findall(r"^def (test_\w+)", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split(" | ")[0].strip("| "))
def test_every_row_names_tests_that_exist_or_says_why_not(row):
    _, title, here, tests, _ = row.split("|")
    named = re.findall(r"`(\w+\.py)::(\w+)`", tests)
    assert title.strip() and here.strip() and len(named) == tests.count("::")
    assert named or "needs a GPU: not run here" in here
    for file, name in named:
        assert name in functions(file), f"{file}::{name}"


def test_every_test_of_a_case_is_in_the_table():
    for path in TESTS.glob("test_cases_*.py"):
        for name in functions(path.name) if path.name != Path(__file__).name else ():
            assert f"`{path.name}::{name}`" in TEXT, name
            assert re.search(rf'def {name}\(.*?\).*?:\n    """Cases? ', path.read_text(encoding="utf-8")), name


def test_the_table_is_of_every_report():
    assert len(ROWS) == 12 + 36
