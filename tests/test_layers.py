"""Imports go only downwards, never sideways between the packages of one layer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.cases import for_each

PACKAGE = Path(__file__).parent.parent / "flywheel"

LAYERS: dict[str, int] = {
    "errors": 0,
    "states": 0,
    "known_secrets": 0,
    "trace": 1,
    "exclusion": 1,
    "tool_calls": 1,
    "tool_exclusion": 1,
    "finish_functions": 1,
    "model_call": 1,
    "task": 1,
    "batch": 1,
    "similarity": 1,
    "rubric": 1,
    "verdict": 1,
    "request_id": 1,
    "request_parts": 1,
    "call_log": 1,
    "call_log_page": 1,
    "tool_results": 1,
    "round": 1,
    "round_progress": 1,
    "rollout_file": 1,
    "rollout_index": 1,
    "evaluation_file": 1,
    "gpu_placement": 1,
    "judge_usage": 1,
    "files": 1,
    "adapter_files": 1,
    "model_parsers": 1,
    "log": 1,
    "terminal": 1,
    "yaml_file": 1,
    "model_http_client": 1,
    "user_code": 1,
    "json_schema": 1,
    "process_tuning": 1,
    "system": 1,
    "config": 2,
    "sources.studio": 3,
    "sources.jsonl": 3,
    "sources.otlp": 3,
    "formats": 3,
    "store": 3,
    "judge": 3,
    "filtering": 3,
    "training": 3,
    "serving": 3,
    "evaluation": 3,
    "sources": 4,
    "worker": 4,
    "daemon": 5,
    "diagnostics": 6,
    "web": 6,
    "cli": 7,
    "demo": 6,
    "tuner": 6,
    "__init__": 7,
    "__main__": 7,
}
WITHIN_A_LAYER = {0, 1}
"""Words and nouns may use each other; parts, wiring and faces may not."""
HEAVY = {"torch", "transformers", "trl", "peft", "vllm", "ray"}
MAY_BE_HEAVY = {"worker", "training"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(dotted: str) -> str:
    """The package or module of LAYERS that a name below `flywheel` belongs to: the longest that matches."""
    first, _, rest = dotted.partition(".")
    nested = f"{first}.{rest.partition('.')[0]}"
    return nested if nested in LAYERS else first


def room_of(path: Path) -> str:
    return room(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "flywheel":
                found += [(node.lineno, f"flywheel.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module))
    return found


def violations(path: Path) -> list[str]:
    here = room_of(path)
    found = []
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] in HEAVY and here not in MAY_BE_HEAVY:
            found.append(f"{path.name}:{line}: {here} imports {name}")
        if parts[0] != "flywheel" or len(parts) == 1 or parts[1] == "__version__":
            continue
        there = room(".".join(parts[1:]))
        if there == here:
            continue
        down = LAYERS[there] < LAYERS[here]
        same = LAYERS[there] == LAYERS[here] and LAYERS[here] in WITHIN_A_LAYER
        if not (down or same):
            found.append(f"{path.name}:{line}: {here} (layer {LAYERS[here]}) imports {there} (layer {LAYERS[there]})")
    return found


@for_each("path", modules())
def test_imports_go_down(path: Path) -> None:
    if path.name in ("__init__.py", "__main__.py") and path.parent == PACKAGE:
        return
    assert room_of(path) in LAYERS, f"{path} is in no layer: name its place in LAYERS and on the architecture page"
    assert violations(path) == []


def test_an_upward_and_a_sideways_import_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_layers.PACKAGE", tmp_path)
    (tmp_path / "store").mkdir()
    bad = tmp_path / "store" / "x.py"
    bad.write_text(
        "import torch\nfrom flywheel import cli\nfrom flywheel.judge.client import X\nimport flywheel.config\n"
    )
    assert len(violations(bad)) == 3
