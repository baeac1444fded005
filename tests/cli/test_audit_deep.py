"""`flywheel audit --deep`: what is broken between sources, ledger and task file is told, and nothing else is."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Run
from tests.factories.config import write_config
from tests.factories.state import execute
from tests.factories.trace import write_lines
from tests.sources.studio.writer import DATA, NAMES, Studio, agent, labels, renamed

LINES = [{"task_id": f"line-{n}", "main_query": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(5)]


@pytest.fixture
def studio(tmp_path: Path) -> Path:
    return Path(shutil.copy(DATA / "new_v2.sqlite", tmp_path / "database.sqlite"))


@pytest.fixture
def ingested(flywheel: Run, studio: Path, tmp_path: Path) -> Path:
    """A configuration with a database and a file of lines, both read."""
    lines = write_lines(tmp_path / "lines.jsonl", *LINES)
    sources = [{"path": str(studio)}, {"type": "jsonl", "path": str(lines)}]
    config = write_config(tmp_path, state={"dir": "home"}, sources=sources)
    assert flywheel("ingest", "-c", config).code == 0
    return config


def deep(flywheel: Run, config: Path, *, code: int) -> Any:
    ran = flywheel("audit", "--deep", "--json", "-c", config)
    assert ran.code == code, ran.out + ran.err
    assert bool(ran.json["problems"]) == bool(code)
    return ran.json


@pytest.mark.parametrize("name", NAMES)
def test_what_was_just_read_agrees(flywheel: Run, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copy(DATA / f"{name}.sqlite", tmp_path))
    config = tmp_path / "flywheel.yaml"
    config.write_text(json.dumps({"state": {"dir": "home"}, "sources": [{"path": str(path)}]}))
    read = flywheel("ingest", "--json", "-c", config).json["sources"][0]
    before = sorted(tmp_path.rglob("*")), path.read_bytes()
    found = deep(flywheel, config, code=0)
    (source,) = found["sources"]
    assert source["agent_spans"] == source["in_ledger"] == read["replies"] >= len(labels(name)) > 0
    assert {
        key: source[key] for key in ("missing", "changed", "gone", "not_read_yet", "extracted_differently")
    } == dict.fromkeys(("missing", "changed", "gone", "not_read_yet", "extracted_differently"), 0)
    assert source["condition"] == "ok"
    assert found["task_file"]["lines"] == found["task_file"]["exported"] == read["tasks"]
    assert (sorted(tmp_path.rglob("*")), path.read_bytes()) == before


def test_a_reply_that_the_ledger_has_lost_is_missing(flywheel: Run, ingested: Path, tmp_path: Path) -> None:
    state = tmp_path / "home" / "state.db"
    converted = "SELECT span_id, task_id FROM replies WHERE state = 'converted' AND source_id = 1"
    span, task = execute(state, converted)[0]
    execute(state, "DELETE FROM replies WHERE span_id = ?", span)
    execute(state, "DELETE FROM tasks WHERE id = ?", task)
    execute(state, "DELETE FROM replies WHERE task_id = (SELECT id FROM tasks WHERE key = 'line-3')")
    found = deep(flywheel, ingested, code=1)
    assert [source["missing"] for source in found["sources"]] == [1, 1]
    assert any(span in problem for problem in found["problems"])
    assert any("line-3" in problem for problem in found["problems"])


def test_lines_that_share_an_id_are_all_in_the_ledger_and_an_edited_one_has_changed(
    flywheel: Run, ingested: Path, tmp_path: Path
) -> None:
    path = tmp_path / "lines.jsonl"
    same = [{"task_id": "line-1", "main_query": f"Another {n}?", "answer": "x"} for n in range(3)]
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in same)
    found = deep(flywheel, ingested, code=0)["sources"][1]
    assert (found["in_ledger"], found["not_read_yet"]) == (len(LINES), 3)
    assert flywheel("ingest", "-c", ingested).code == 0
    found = deep(flywheel, ingested, code=0)["sources"][1]
    assert (found["in_ledger"], found["not_read_yet"], found["changed"]) == (len(LINES) + 3, 0, 0)
    text, before = path.read_text(), path.stat()

    def edit(old: str, new: str) -> None:
        # With another time, the next pass would read the file again.
        path.write_text(text.replace(old, new))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    edit("What is 2 + 1?", "What is 9 + 1?")
    found = deep(flywheel, ingested, code=1)["sources"][1]
    assert (found["in_ledger"], found["changed"], found["missing"], found["gone"]) == (len(LINES) + 3, 1, 0, 0)
    edit("Another 1?", "Another 9?")
    found = deep(flywheel, ingested, code=1)["sources"][1]
    assert (found["missing"], found["gone"]) == (1, 1)


def test_a_reply_that_was_changed_in_place_reads_otherwise_until_it_is_swept(
    flywheel: Run, ingested: Path, studio: Path
) -> None:
    span = next(entry["span_id"] for entry in labels("new_v2") if entry["answer"] and len(entry["answer"]) > 8)
    [(attributes,)] = execute(studio, "SELECT attributes FROM span_table WHERE spanId = ?", span)
    answer = next(entry["answer"] for entry in labels("new_v2") if entry["span_id"] == span)
    spelled = json.dumps(answer)[1:-1]
    changed = attributes.replace(spelled, "Something else.").replace(json.dumps(spelled)[1:-1], "Something else.")
    assert changed != attributes
    execute(studio, "UPDATE span_table SET attributes = ? WHERE spanId = ?", changed, span)
    found = deep(flywheel, ingested, code=1)
    assert found["sources"][0]["changed"] == 1
    assert any(span in problem for problem in found["problems"])
    assert flywheel("ingest", "--sweep", "-c", ingested).code == 0
    assert deep(flywheel, ingested, code=0)["sources"][0]["changed"] == 0


def test_a_deleted_conversation_is_told_and_is_no_problem(flywheel: Run, ingested: Path, studio: Path) -> None:
    entry = next(entry for entry in labels("new_v2") if entry["answer"])
    [(conversation,)] = execute(studio, "SELECT conversationId FROM span_table WHERE spanId = ?", entry["span_id"])
    [(spans,)] = execute(
        studio,
        "SELECT count(*) FROM span_table WHERE operationName = 'invoke_agent' AND traceId IN "
        "(SELECT traceId FROM span_table WHERE conversationId = ?)",
        conversation,
    )
    execute(
        studio,
        "DELETE FROM span_table WHERE traceId IN (SELECT traceId FROM span_table WHERE conversationId = ?)",
        conversation,
    )
    found = deep(flywheel, ingested, code=0)
    assert found["sources"][0]["gone"] == spans > 0


def test_rows_that_no_pass_has_seen_are_not_read_yet(
    flywheel: Run, ingested: Path, studio: Path, tmp_path: Path
) -> None:
    Studio(studio).write(agent("fresh", trace="fresh"))
    with (tmp_path / "lines.jsonl").open("a") as file:
        file.write(json.dumps({"task_id": "fresh", "main_query": "?", "answer": "!"}) + "\n")
    found = deep(flywheel, ingested, code=0)
    assert [source["not_read_yet"] for source in found["sources"]] == [1, 1]
    assert flywheel("ingest", "-c", ingested).code == 0
    found = deep(flywheel, ingested, code=0)
    assert [source["not_read_yet"] for source in found["sources"]] == [0, 0]


def test_an_open_trace_and_a_replaced_file_are_waited_for(flywheel: Run, ingested: Path, studio: Path) -> None:
    ended = {"endTimeUnixNano": str(time.time_ns())}
    Studio(studio).write(agent("child", parent="not-there-yet", trace="open") | ended)
    assert flywheel("ingest", "-c", ingested).code == 0
    execute(studio, "UPDATE span_table SET attributes = '{}' WHERE id = 'child'")
    deep(flywheel, ingested, code=0)
    # A copy that was put back is read as a whole by the next pass, which finds what was changed in it.
    studio.rename(studio.with_name("older"))
    shutil.copy(studio.with_name("older"), studio)
    execute(studio, "UPDATE span_table SET attributes = '{}'")
    found = deep(flywheel, ingested, code=0)["sources"][0]
    assert found["in_ledger"] > 0
    studio.unlink()
    shutil.copy(DATA / "old.sqlite", studio)
    found = deep(flywheel, ingested, code=0)["sources"][0]
    assert found["not_read_yet"] == found["agent_spans"] > 0
    assert found["gone"] > 0


def test_other_settings_are_no_change_of_the_source(flywheel: Run, ingested: Path, tmp_path: Path) -> None:
    name = next(entry["agent"] for entry in labels("new_v2") if entry["answer"])
    settings = yaml.safe_load(ingested.read_text())
    write_config(tmp_path, **settings, ingest={"agents": {"exclude": [name]}})
    found = deep(flywheel, ingested, code=0)["sources"][0]
    assert found["extracted_differently"] > 0
    assert found["changed"] == 0


def test_a_source_that_cannot_be_read_is_a_problem_with_its_reason(
    flywheel: Run, ingested: Path, studio: Path, tmp_path: Path
) -> None:
    (tmp_path / "lines.jsonl").unlink()
    for trouble in ("not Studio's", "missing"):
        studio.unlink() if trouble == "missing" else studio.write_text("not a database " * 100)
        found = deep(flywheel, ingested, code=1)
        assert [source["condition"] for source in found["sources"]] == [trouble, "missing"]
        assert [source["error"] for source in found["sources"]] == found["problems"]
    # A copy of a data set that is not there is not made.
    write_lines(tmp_path / "given.jsonl", *LINES)
    source = {"type": "jsonl", "path": "copy.jsonl", "dataset": {"path": str(tmp_path / "given.jsonl")}}
    config = write_config(tmp_path, state={"dir": "home"}, sources=[source])
    found = deep(flywheel, config, code=1)
    assert "there is no copy of the data set yet" in found["sources"][0]["error"]
    assert not (tmp_path / "copy.jsonl").exists()


@pytest.mark.slow
def test_the_task_file_has_each_task_once_and_whole(flywheel: Run, ingested: Path, tmp_path: Path) -> None:
    file = tmp_path / "home" / "tasks.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)

    def found(*content: bytes, code: int = 1) -> dict[str, Any]:
        file.write_bytes(b"".join(content))
        return {key: value for key, value in deep(flywheel, ingested, code=code)["task_file"].items() if value}

    assert found(*lines, lines[4])["twice"] == 1
    assert found(*lines[:4], *lines[5:])["lost"] == 1
    assert found(*lines, lines[4][:40])["torn"] == 1
    assert found(*lines[:-1], lines[-1][:-1])["torn"] == 1
    assert found(*lines[6:], code=0)["moved_away"] == 6
    assert found(*lines, b'{"task_id": "of-another"}\n', code=0)["unknown"] == 1
    file.unlink()
    report = deep(flywheel, ingested, code=0)["task_file"]
    assert report["moved_away"] == report["exported"] == len(lines)


@pytest.mark.slow
def test_it_is_told_in_words_too(flywheel: Run, ingested: Path, studio: Path, tmp_path: Path) -> None:
    told = flywheel("audit", "--deep", "-c", ingested)
    assert told.code == 0
    assert f"{studio} (ok): " in told.out
    with (tmp_path / "home" / "tasks.jsonl").open("a") as file:
        file.write("{")
    told = flywheel("audit", "--deep", "-c", ingested)
    assert told.code == 1
    assert "problem: 1 line of" in told.out
    assert "move it away: the next task starts a new one" in told.out
    assert told.out.endswith("\nLedger: balanced; the problems above are outside the ledger\n")
    # The balance itself is right.
    assert flywheel("audit", "-c", ingested).code == 0
    assert flywheel("audit", "--source", studio).code == 2


@pytest.mark.slow
def test_a_long_database_is_compared_in_pages(flywheel: Run, studio: Path, tmp_path: Path) -> None:
    database = sqlite3.connect(studio)
    for cycle in range(12):
        rows = renamed("new_v2", cycle)
        database.executemany(f"INSERT INTO span_table VALUES ({','.join('?' * len(rows[0]))})", rows)
    database.commit()
    database.close()
    read = flywheel("ingest", "--source", studio, "--json").json["sources"][0]
    ran = flywheel("audit", "--deep", "--source", studio, "--json")
    assert ran.code == 0, ran.out
    assert ran.json["sources"][0]["in_ledger"] == read["replies"]


def test_rows_that_cannot_be_read_agree_whatever_their_trace_is_called(flywheel: Run, studio: Path) -> None:
    """Two of them have names too long to be shown, and differ at their ends alone."""
    ids = [row[0] for row in execute(studio, "SELECT id FROM span_table ORDER BY rowid LIMIT 3")]
    for end, span in zip(("", "x" * 3000 + "1", "x" * 3000 + "2"), ids, strict=True):
        execute(studio, "UPDATE span_table SET attributes = '{', traceId = ? WHERE id = ?", f"{span}{end}", span)
    read = flywheel("ingest", "--source", studio, "--json").json["sources"][0]
    assert read["dead"] == 3
    ran = flywheel("audit", "--deep", "--source", studio, "--json")
    assert ran.code == 0, ran.out
    assert ran.json["sources"][0]["in_ledger"] == read["replies"]
