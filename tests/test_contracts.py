"""What moving a module can break without notice: names in strings, public names, and what may be imported."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flywheel

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flywheel"
HEAVY = {"torch", "transformers", "trl", "peft", "vllm", "ray"}
NAME = re.compile(r"(?<![\w./@-])flywheel((?:\.[A-Za-z_]\w*)+)(?![\w/@-]|\.\w)")
ROOMS = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
FOLDERS = ("flywheel", "tests", "benchmarks", "demo", "scripts", "examples", "filters")
FROM = re.compile(r"\bfrom (flywheel(?:\.\w+)*) import (\w+)")
MOVED = {"worker", "filtering", "formats", "evaluation", "diagnostics", "rubric", "trace", "states", "files"}
"""Rooms and modules that were directly in `flywheel/` once."""


INVENTED = {Path(__file__), ROOT / "tests" / "test_layers.py"}
"""Tests that name modules which do not exist."""


def texts() -> Iterator[tuple[Path, str]]:
    """Pages as they are; of Python files, all strings."""
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "pyproject.toml"):
        yield page, page.read_text()
    for folder in FOLDERS:
        for path in sorted({*(ROOT / folder).rglob("*.py")} - INVENTED):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield path, node.value


def module_file(parts: list[str]) -> Path | None:
    """The file of a module below `flywheel`."""
    path = PACKAGE.joinpath(*parts)
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.exists()), None)


def resolves(name: str) -> bool:
    """Whether `flywheel.…` names a module, or something that a module defines or imports."""
    parts = name.split(".")[1:]
    for count in range(len(parts), -1, -1):
        file = module_file(parts[:count])
        if file is None:
            continue
        return count == len(parts) or parts[count] in defined_in(file)
    return False


def defined_in(file: Path) -> set[str]:
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


@pytest.mark.slow
def test_every_module_that_a_string_or_page_names_exists() -> None:
    named = [(path, f"flywheel{match[1]}") for path, text in texts() for match in NAME.finditer(text)]
    of_modules = [(path, name) for path, name in named if name.split(".")[1] in ROOMS | MOVED]
    assert len(of_modules) > 50
    wrong = {f"{path.relative_to(ROOT)}: {name}" for path, name in of_modules if not resolves(name)}
    assert wrong == set()


@pytest.mark.slow
def test_every_import_that_a_string_or_page_shows_finds_its_name() -> None:
    shown = [(path, f"{match[1]}.{match[2]}") for path, text in texts() for match in FROM.finditer(text)]
    assert len(shown) > 20
    assert {f"{path.relative_to(ROOT)}: {name}" for path, name in shown if not resolves(name)} == set()


def test_a_name_that_does_not_exist_is_noticed() -> None:
    assert resolves("flywheel.records.trace.Cursor") and resolves("flywheel.daemon.service")
    assert not resolves("flywheel.trace.Cursor")
    assert not resolves("flywheel.records.trace.NoSuchName")


def test_every_file_that_the_pages_on_the_program_name_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    pages = (text, (ROOT / "decisions" / "promises.md").read_text())
    named = {name for page in pages for name in re.findall(r"`([\w.-]+/[\w./-]*\.py|flywheel/[\w./-]+)`", page)}
    places = (ROOT, PACKAGE, PACKAGE / "training")
    assert len(named) > 80
    assert {name for name in named if not any((place / name).exists() for place in places)} == set()
    assert len(text.split()) <= 3500
    _, _, questions = text.partition("## Where is …?")
    assert len(re.findall(r"^\| … .+ \| `flywheel/", questions, re.MULTILINE)) >= 30


@pytest.mark.slow
def test_no_public_name_is_that_of_a_module() -> None:
    """The import of a module would replace the function of its name."""
    assert ROOMS.isdisjoint(flywheel._PLACES)
    code = (
        "import flywheel, importlib, pkgutil\n"
        "for found in pkgutil.walk_packages(flywheel.__path__, 'flywheel.'):\n"
        "    if not found.name.startswith(('flywheel.training.', 'flywheel.__main__')):\n"
        "        importlib.import_module(found.name)\n"
        "assert all(callable(getattr(flywheel, name)) for name in flywheel._PLACES)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=ROOT)
    assert callable(flywheel.tune)


@pytest.mark.slow
def test_the_daemon_loads_no_training_library() -> None:
    code = f"import sys, flywheel.daemon.service; print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "[]\n"


def imported(node: ast.AST) -> set[str]:
    """What a statement imports, or a string names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {f"{node.module}.{alias.name}" for alias in node.names}
    is_name = isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value)
    return {node.value} if is_name else set()  # type: ignore[attr-defined]


NEEDS_MORE = "flywheel.judge.rubric.checks.math_equal"
"""What `MathBoxedRewardFn` loads when it is called, and says so where its packages are missing."""


def reached_by(first: str) -> dict[Path, set[str]]:
    """The files of Flywheel that a module can load, and the other packages that each imports when it is loaded."""
    reached, waiting = dict[Path, set[str]](), {first}
    while waiting:
        parts = waiting.pop().split(".")[1:]
        for count in range(1, len(parts) + 1):
            file = module_file(parts[:count])
            if file is None or file in reached:
                continue
            tree = ast.parse(file.read_text())
            waiting |= {n for node in ast.walk(tree) for n in imported(node) if n.startswith("flywheel.")}
            waiting -= {n for n in waiting if n.startswith(NEEDS_MORE)}
            loaded = {name.partition(".")[0] for node in tree.body for name in imported(node)}
            reached[file] = loaded - {"flywheel"}
    return reached


def test_the_child_of_a_users_interpreter_needs_only_its_standard_library() -> None:
    """And the syntax of Python 3.10, the lowest that may run a workflow."""
    reached = reached_by("flywheel.training.program.program_child")
    assert PACKAGE / "training" / "program" / "agentjet.py" in reached
    for file, packages in reached.items():
        ast.parse(file.read_text(), feature_version=(3, 10))
        assert packages <= sys.stdlib_module_names, f"{file} imports {packages - sys.stdlib_module_names}"


def test_what_runs_inside_vllm_imports_few_packages() -> None:
    """vLLM itself needs both, so none of Flywheel's other packages can keep a server from its start."""
    reached = reached_by("flywheel.serving.server.middleware")
    assert PACKAGE / "system" / "server_limits.py" in reached
    for file, packages in reached.items():
        others = packages - sys.stdlib_module_names - {"starlette", "msgspec"}
        assert not others, f"{file} imports {others}"
