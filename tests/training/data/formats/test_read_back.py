"""What is exported for another program is a task file like others, and real traces go through every format."""

from __future__ import annotations

import json
import shutil
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flywheel.records.states import SkipReason
from flywheel.records.task import Entry
from flywheel.sources.jsonl.record import entry_of_line
from tests.cli.conftest import Run
from tests.conftest import ROOT
from tests.training.data.formats.conftest import Exported, Load
from tests.training.data.formats.filling import after_tools, bad, every_kind, good, line, lines, reply

STUDIO = ROOT / "tests" / "data" / "studio"
NOW = datetime(2026, 5, 6, tzinfo=UTC)


def read(path: Path) -> list[Entry]:
    return [entry_of_line(text, path, NOW) for text in path.read_bytes().splitlines()]


@pytest.mark.parametrize("name", ["agentjet", "trinity", "trl-grpo", "trl-sft"])
def test_a_task_comes_back_as_it_was(exported: Exported, name: str) -> None:
    told = [*every_kind(), after_tools(50)]
    entries = read(exported(name, [good(each) for each in told]))
    assert entries
    before = {each["task_id"]: each for each in map(line, told)}
    for entry in entries:
        was = before[entry.key]
        if not entry.line:
            assert (entry.skip, was["answer"].strip()) == (SkipReason.NO_ANSWER, "")
            continue
        task = json.loads(entry.line)
        assert task["answer"].encode("utf-8", "replace") == was["answer"].encode("utf-8", "replace")
        assert spoken(task["init_messages"]) == spoken(was["init_messages"])
        if name != "agentjet":
            tools = task["metadata"]["tools_json"]
            assert json.loads(tools) == json.loads(was["metadata"]["tools_json"])


def spoken(history: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(m["role"], m["content"].encode("utf-8", "replace").decode(), m.get("tool_call_id", "")) for m in history]


def test_a_pair_of_replies_is_no_task(exported: Exported) -> None:
    entries = read(exported("trl-dpo", [good(reply(1, query="q?")), bad(reply(2, query="q?", answer="other"))]))
    assert [entry.skip for entry in entries] == [SkipReason.NO_ANSWER]


@pytest.mark.parametrize("database", ["new_v2", "old"])
def test_traces_go_through_every_format(flywheel: Run, load: Load, tmp_path: Path, database: str) -> None:
    source = shutil.copy(STUDIO / f"{database}.sqlite", tmp_path / "studio.sqlite")
    assert flywheel("ingest", "--source", source).code == 0
    with sqlite3.connect(tmp_path / "home" / "state.db") as conn:
        conn.execute("UPDATE tasks SET state = 'accepted', split = 'train'")
        [there] = conn.execute("SELECT count(*) FROM tasks").fetchone()
    conn.close()
    assert there > 50
    for name in ("agentjet", "trinity", "trl-grpo", "trl-sft", "verl"):
        ran = flywheel("export", "--format", name, "--json")
        assert ran.code == 0, ran.err
        assert ran.json["lines"] + sum(ran.json["left_out"].values()) == there
        assert ran.json["lines"] > there * 0.7
        rows = list(load(tmp_path / ran.json["out"]))
        assert len(rows) == ran.json["lines"]
        if name.startswith("trl") or name == "trinity":
            assert rows == lines(tmp_path / ran.json["out"])
        if name == "trl-sft":
            assert any(message["role"] == "tool" for row in rows for message in row["completion"])
