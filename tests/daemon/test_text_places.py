"""The list of places that have texts: what the code writes to a state, copies elsewhere or sends is in it."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from flywheel.daemon.erasure import PLACES, SENDERS, WITHOUT_TEXTS
from flywheel.daemon.notifier import Target

ROOT: Final = Path(__file__).parents[2]
STATE: Final = frozenset({"state_dir", "_state_dir", "state"})
"""Names of variables with the directory of the state."""
TEMPORARY: Final = {
    "flywheel/system/process_folder.py": "folders that are removed by the next process, and by `forget`",
    "flywheel/sources/ingestion.py": "where these are looked for",
    "flywheel/training/engine/ray_cluster.py": "where Ray's is made, one of these",
    "flywheel/training/engine/policy.py": "weights",
    "flywheel/training/optim/policy_step.py": "weights",
    "flywheel/training/optim/losses.py": "where TRL's own files would be, which has none",
    "flywheel/retrieval/encoder.py": "weights",
    "flywheel/retrieval/trained_encoder.py": "weights",
    "flywheel/cli/demo/command.py": "the state of a demo, with scripted conversations",
    "flywheel/daemon/migration.py": "settings of another program, without keys, in the folder where they will be",
}
"""What uses `tempfile`, and what is in those files."""


GIVEN: Final = {
    "flywheel/system/lock.py": "a lock",
    "flywheel/cli/app.py": "the database, whose name is imported by a function",
    "flywheel/store/backup.py": "what a backup has, which is copied from a state",
    "flywheel/daemon/rounds/removal.py": "the folders of a place",
}
"""Where the name of a file in a state is an argument, and what it is of."""


def modules(*having: str) -> Iterator[tuple[str, ast.Module]]:
    """The modules that have one of some texts."""
    for path in sorted((ROOT / "flywheel").rglob("*.py")):
        if any(each in (text := path.read_text()) for each in having):
            yield path.relative_to(ROOT).as_posix(), ast.parse(text)


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def part_of(node: ast.expr, module: Any) -> str:
    """A part of a path as a pattern: `*` stands for what is not known before the program runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part_of(each, module) for each in node.values)
    try:
        value = eval(ast.unparse(node), vars(module))
    except Exception:
        return "*"
    return value if isinstance(value, str) else "*"


def paths_in_states(file: str, tree: ast.Module) -> Iterator[str]:
    """The paths below the directory of a state that a module names, as patterns."""
    module = importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    inner = set[ast.expr]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div) or node in inner:
            continue
        parts: list[str] = []
        left: ast.expr = node
        while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Div):
            inner.add(left)
            parts.insert(0, part_of(left.right, module))
            left = left.left
        if name_of(left) in STATE:
            yield "/".join(parts)


def is_listed(path: str) -> bool:
    """Whether a path, or what is below it, is in a place."""
    patterns = [*(pattern for place in PLACES for pattern in place.files), *WITHOUT_TEXTS]
    for pattern in patterns:
        whole = "".join(
            {"**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in re.split(r"(\*\*?)", pattern)
        )
        if re.fullmatch(whole, path) or pattern.startswith(f"{path}/"):
            return True
    return False


def test_each_path_in_a_state_is_in_a_place() -> None:
    found = {
        (path, file)
        for file, tree in modules(*(f"{name} /" for name in STATE))
        # A round's worker knows the directory of its round alone.
        if not file.startswith("flywheel/training/")
        for path in paths_in_states(file, tree)
    }
    assert {"rounds/debug", "calls/calls.db", "otlp/*-*.sqlite", "tasks.jsonl"} <= {path for path, _ in found}
    assert {(path, file) for path, file in found if path != "*" and not is_listed(path)} == set()
    assert {file for path, file in found if path == "*"} == GIVEN.keys()


def test_each_temporary_folder_is_known() -> None:
    using = {
        file
        for file, tree in modules("tempfile")
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and any(each.name == "tempfile" for each in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "tempfile")
    }
    assert using == TEMPORARY.keys()


def test_what_sends_texts_again_is_listed() -> None:
    assert set(Target.__subclasses__()) == set(SENDERS)
