"""Each test is in one circle and one shard, and the commands of the Makefile select what the circles say."""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import tomllib
from collections import Counter
from collections.abc import Iterable

import pytest
from _pytest.mark.expression import Expression

from tests import circles
from tests.cases import for_each
from tests.conftest import IMPORTED, shard

MARKERS = ("slow", "e2e", "extended", "long", "gpu", "training", "hypothesis")
CIRCLES_OF = {
    "test-quick": {"quick"},
    "test": {"quick", "test"},
    "test-extended": {"extended"},
    "test-all": {"quick", "test", "extended", "long"},
}


def recipe(target: str) -> str:
    """The commands of a target of the Makefile."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (circles.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    return found[1]


def expression(target: str) -> Expression:
    """What the target passes to pytest as `-m`."""
    selection = re.search(r'-m "([^"]*)"', recipe(target))
    assert selection
    return Expression.compile(selection[1])


@pytest.mark.parametrize("target", CIRCLES_OF)
def test_a_target_selects_its_circles(target: str) -> None:
    selected = expression(target)
    for count in range(len(MARKERS) + 1):
        for markers in itertools.combinations(MARKERS, count):
            chosen = selected.evaluate(lambda name, markers=markers: name in markers)
            assert chosen == (circles.circle_of(markers) in CIRCLES_OF[target]), markers


def test_pytest_alone_runs_what_make_test_runs() -> None:
    options = tomllib.loads((circles.ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    selection = re.search(r"-m '([^']*)'", options)
    assert selection
    assert f'-m "{selection[1]}"' in recipe("test")


def test_every_module_is_in_one_shard_and_groups_are_whole() -> None:
    modules, seconds = circles.all_modules(), circles.seconds_of_modules()
    for count in range(1, 6):
        parts = circles.shards(modules, seconds, count)
        assert Counter(unit for part in parts for unit in part) == Counter(
            {circles.unit_of(each) for each in modules}
        )
        total = circles.seconds_of_units(modules, seconds)
        times = [sum(total[unit] for unit in part) for part in parts]
        assert max(times) - min(times) <= max(total.values())
    assert circles.shards(modules, seconds, 3) == circles.shards(reversed(modules), seconds, 3)


def test_the_table_of_seconds_and_the_groups_name_modules_that_exist() -> None:
    modules = set(circles.all_modules())
    assert set(circles.seconds_of_modules()) - modules == set()
    assert set(circles.GROUP_OF) - modules == set()


def test_a_shard_is_read() -> None:
    assert [shard("1/3"), shard("3/3")] == [(0, 3), (2, 3)]


@for_each("text", ["", "1", "0/3", "4/3", "a/b", "1/0", "-1/3"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no shard"):
        shard(text)


def test_collecting_the_tests_imports_no_heavy_package(pytestconfig: pytest.Config) -> None:
    """Each takes seconds, which every run would wait for."""
    heavy = {"agentscope", "peft", "sentence_transformers", "torch", "transformers"}
    assert pytestconfig.stash[IMPORTED] & heavy == set()


def promises() -> dict[str, list[str]]:
    """The tests that `decisions/promises.md` names for each promise."""
    page = (circles.ROOT / "decisions" / "promises.md").read_text()
    _, _, *rows = page.partition("| promise |")[2].partition("\n\n")[0].splitlines()
    columns = (row.strip("| ").split(" | ") for row in rows)
    return {promise: re.findall(r"`([^`]+::[^`]+)`", tests) for promise, _, tests in columns}


def markers_in(expressions: Iterable[ast.expr]) -> set[str]:
    """The markers that decorators give a whole test. Those of single parameters are inside `parametrize`."""
    written = (ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in expressions)
    return {each.removeprefix("pytest.mark.") for each in written if each.startswith("pytest.mark.")}


def circle_in_source(node: str) -> str | None:
    """The circle of the test with this id, or nothing if there is no such test."""
    module, *names = node.split("::")
    path = circles.ROOT / module
    scope: ast.AST = ast.parse(path.read_text() if path.is_file() else "")
    markers: set[str] = set()
    for name in names:
        statements = getattr(scope, "body", [])
        for each in statements:
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "pytestmark":
                markers |= markers_in(each.value.elts if isinstance(each.value, ast.List) else [each.value])
        functions = (each for each in statements if getattr(each, "name", "") == name)
        if (found := next(functions, None)) is None:
            return None
        scope, markers = found, markers | markers_in(found.decorator_list)
    return circles.circle_of(markers)


def test_make_test_runs_a_test_of_each_promise() -> None:
    named = promises()
    assert len(named) > 40
    assert [promise for promise, nodes in named.items() if not nodes] == [], "without the id of a test"
    found = {node: circle_in_source(node) for nodes in named.values() for node in nodes}
    assert {node: circle for node, circle in found.items() if circle not in ("quick", "test")} == {}
