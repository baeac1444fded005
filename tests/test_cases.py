"""What runs the tests: `for_each` hides no failure of a case, and what modules share is in none of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import repeat_tests
from tests.cases import for_each

ROOT = Path(__file__).parent.parent
SHARING = "tests", "benchmarks", "demo", "scripts"
"""Folders whose files may use what is for tests."""


def test_every_case_that_fails_is_reported() -> None:
    @for_each("number, name", [(1, "one"), (2, "two"), (3, "three")])
    def loop(number: int, name: str, wanted: str) -> None:
        assert name == wanted
        if number == 1:
            pytest.fail("never one")

    with pytest.raises(BaseExceptionGroup, match="3 of 3 cases fail") as failed:
        loop(wanted="one")
    assert ["'name': 'one'" in failed.value.exceptions[0].__notes__[0], len(failed.value.exceptions)] == [True, 3]
    with pytest.raises(BaseExceptionGroup, match="2 of 3 cases fail"):
        loop(wanted="three")


@for_each("number", [1, 2])
def test_fixtures_are_given_once(number: int, tmp_path: object) -> None:
    assert tmp_path


def test_no_case_is_no_test() -> None:
    with pytest.raises(ValueError, match="no case"):
        for_each("number", [])(lambda number: None)


def imported(text: str) -> Iterator[str]:
    """What a file imports anywhere, and what programs that it starts are or import, by their names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^tests\.[\w.]+$|(?<=-m )tests\.[\w.]+|(?<=import )tests\.[\w.]+", node.value)
            for module, names in re.findall(r"from (tests[\w.]*) import ([\w, ]+)", node.value):
                yield from (module, *(f"{module}.{name}" for name in re.split(", *", names)))


def test_no_module_imports_from_a_module_of_tests() -> None:
    """What several need is in `tests/factories/`, or a folder's `conftest.py`."""
    files = [path for folder in SHARING for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 500
    assert [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in imported(path.read_text())
        if name.rpartition(".")[2].startswith("test_")
    ] == []


def test_every_test_that_is_to_be_repeated_exists() -> None:
    def functions(file: str) -> set[str]:
        return {each.name for each in ast.parse((ROOT / file).read_text()).body if hasattr(each, "decorator_list")}

    nodes = [node.split("::") for node in repeat_tests.listed()]
    assert [f"{file}::{name}" for file, name in nodes if name not in functions(file)] == []
    assert set(repeat_tests.listed().values()) <= {3, 10, 100}
