"""What `--json` prints has the keys that docs/reference/json.md names, and no others."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.factories.documented_json import blocks, compare, documented, parsed
from tests.sources.studio.writer import DATA


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
