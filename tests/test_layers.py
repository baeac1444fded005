"""Rooms import only from rooms above them, in one order."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.cases import for_each

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flywheel"

ROOMS: tuple[set[str], ...] = (
    {"errors", "secrets", "conversations"},
    {"system"},
    {"records"},
    {"config"},
    {"judge"},
    {"store", "serving"},
    {"sources", "training"},
    {"daemon", "retrieval"},
    {"web"},
    {"cli"},
    {"tuner"},
    {"notebook"},
)
"""A room imports from earlier lines only; those of one line do not import each other, but for the first."""
INSIDE: dict[str, tuple[set[str], ...]] = {
    "store": ({"kernel"}, {""}, {"views"}),
    "training": ({"data"}, {"gate"}, {"recorded", "program"}, {"engine"}, {"optim"}, {"worker"}),
}
"""The same for the folders of a room; "" are the modules that lie in the room itself."""
READERS = {"studio", "spans", "otlp", "calls", "jsonl"}
"""Folders of `sources/` that know neither the store nor a server, only the call log's format: connectors do."""
HEAVY = {"sentence_transformers", "torch", "transformers", "trl", "peft", "vllm", "ray"}
MAY_BE_HEAVY = {
    "retrieval/encoder", "retrieval/trained_encoder",
    "serving/base_layers", "training/data", "training/engine", "training/optim", "training/worker",
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem not in TOP)


TOP = {"__init__", "__main__"}


def parts_of(path: Path) -> list[str]:
    """The names below `flywheel`, without `__init__`."""
    return [each for each in path.relative_to(PACKAGE).with_suffix("").parts if each != "__init__"]


def imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def line_of(name: str, order: tuple[set[str], ...]) -> int:
    lines = [number for number, names in enumerate(order) if name in names]
    assert lines, f"{name} has no place in the order: name it in tests/test_layers.py and on the architecture page"
    return lines[0]


def folder_in(parts: list[str]) -> str:
    """The folder of a room in which a module lies; empty if it lies in the room itself."""
    return parts[1] if (PACKAGE / parts[0] / parts[1]).is_dir() else ""


def violations(path: Path) -> list[str]:
    here, found = parts_of(path), []
    for line, name in imports(path):
        there = name.split(".")[1:]
        problem = ""
        if name.split(".")[0] in HEAVY:
            problem = "" if "/".join(here[:2]) in MAY_BE_HEAVY else "a heavy package"
        elif name.split(".")[0] != "flywheel" or not there or there[0] == "__version__":
            continue
        elif there[0] != here[0]:
            ours, theirs = line_of(here[0], ROOMS), line_of(there[0], ROOMS)
            problem = "" if theirs < ours or theirs == ours == 0 else "a room that is not above it"
            if (
                here[0] == "sources"
                and len(here) > 1
                and here[1] in READERS
                and (there[0] == "store" or (there[0] == "serving" and there[1] != "calls"))
            ):
                problem = "what only connectors may use"
        elif here[0] in INSIDE and len(here) > 1 and len(there) > 1:
            ours, theirs = folder_in(here), folder_in(there)
            if ours != theirs and line_of(theirs, INSIDE[here[0]]) >= line_of(ours, INSIDE[here[0]]):
                problem = "a folder that is not above its own"
        if problem:
            found.append(f"{'/'.join(here)}.py:{line} imports {name}: {problem}")
    return found


@for_each("path", modules())
def test_rooms_import_from_rooms_above(path: Path) -> None:
    assert violations(path) == []


def test_an_upward_and_a_sideways_import_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_layers.PACKAGE", tmp_path)
    for room in ("store/kernel", "store/views", "sources/studio", "training/gate", "training/optim"):
        (tmp_path / room).mkdir(parents=True)

    def wrong(file: str, *lines: str) -> int:
        (tmp_path / file).write_text("\n".join(lines))
        return len(violations(tmp_path / file))

    many = "from flywheel import cli", "from flywheel.serving.routes import X", "import torch"
    assert wrong("store/x.py", *many, "import flywheel.config") == 3
    assert wrong("store/kernel/x.py", "from flywheel.store import tasks", "from flywheel.store.kernel import y") == 1
    assert wrong("store/y.py", "from flywheel.store.views.z import Z") == 1
    assert wrong("sources/studio/x.py", "from flywheel.store.tasks import X", "import flywheel.errors") == 1
    assert wrong("sources/connector.py", "from flywheel.store.tasks import X") == 0
    assert wrong("training/gate/x.py", "import scipy", "import ray", "from flywheel.training.optim.a import b") == 2
    assert wrong("training/optim/x.py", "import ray", "from flywheel.training.gate.a import b") == 0
