"""What `--json` prints has the keys that docs/reference/json.md names, and no others."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.sources.studio.writer import DATA

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text()


def blocks(command: str) -> list[str]:
    """The shapes in the section of a command."""
    section = re.search(rf"^## `{command} --json`\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None, command
    return re.findall(r"```\n(.*?)```", section[1], re.DOTALL)


def documented(command: str) -> Any:
    """The shape that `COMMAND --json` prints, with every key that stands alone leading to null."""
    return parsed(blocks(command)[0])


def parsed(text: str) -> Any:
    text = " ".join(text.split())
    # `"key": "one" | "other"` names the values, `{"name": n}` any name: neither has keys of its own.
    text = re.sub(r"\{\w+: n\}|(?<=: )\"[\w -]+\"(?: \| \"[\w -]+\")*", "null", text).replace(" or null", "")
    text = re.sub(r"(\"\w+\")(?=\s*[,}\]])", r"\1: null", text)
    return json.loads(text)


def compare(told: Any, shape: Any, where: str, may_lack: frozenset[str] = frozenset()) -> None:
    if isinstance(shape, list) and told:
        for each in told:
            compare(each, shape[0], f"{where}[]", may_lack)
    elif isinstance(shape, dict) and told is not None:
        assert set(told) - set(shape) == set(), f"{where} has keys that the page does not name"
        assert set(shape) - set(told) <= may_lack, f"{where} lacks keys that the page names"
        for key, value in shape.items():
            if key in told:
                compare(told[key], value, f"{where}.{key}", may_lack)


@pytest.fixture
def config(flywheel: Run, tmp_path: Path) -> Path:
    database = shutil.copy(DATA / "new_v2.sqlite", tmp_path)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"question": "1+1?", "answer": "2"}\nno JSON\n')
    config = tmp_path / "flywheel.yaml"
    sources = [{"path": database}, {"type": "jsonl", "path": str(lines)}]
    judge = {"base_url": "http://127.0.0.1:1/v1", "max_attempts": 1}
    config.write_text(json.dumps({"state": {"dir": "home"}, "sources": sources, "judge": judge}))
    assert flywheel("ingest").code == 0
    return config


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("status", ["status"]),
        ("ingest", ["ingest"]),
        ("audit", ["audit"]),
        ("dead-letters", ["dead-letters"]),
        ("tasks", ["tasks", "--state", "pending", "--limit", "2"]),
        ("show", ["show", "{task}"]),
        ("label", ["label", "{task}", "accept"]),
        ("labels", ["labels"]),
        ("doctor", ["doctor"]),
        ("backup", ["backup", "copy"]),
        ("filter", ["filter", "--dry-run", "--limit", "1"]),
    ],
)
def test_the_keys_are_those_of_the_page(flywheel: Run, config: Path, name: str, arguments: list[str]) -> None:
    task = flywheel("tasks", "--limit", "1", "--json").json["tasks"][0]["task_id"]
    told = flywheel(*(each.format(task=task) for each in arguments), "--json", "-c", config).json
    compare(told, documented(name), name)


def test_the_keys_of_a_deep_audit(flywheel: Run, config: Path) -> None:
    _, sources, task_file = blocks("audit")
    told = flywheel("audit", "--deep", "--json", "-c", config).json
    compare(told, documented("audit") | parsed(f"{{{sources}, {task_file}}}"), "audit --deep")


def test_the_keys_of_why(flywheel: Run, config: Path) -> None:
    task = flywheel("tasks", "--state", "pending", "--limit", "1", "--json").json["tasks"][0]["task_id"]
    _, of_trace = blocks("why")
    told = flywheel("why", task, "--json").json
    assert set(re.findall(r'"(\w+)"', of_trace)) == {*told, *told["replies"][0], "trace"}
