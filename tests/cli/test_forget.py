"""`flywheel forget`: nothing of a conversation is left anywhere, whenever the process dies, and beside a daemon."""

from __future__ import annotations

import itertools
import json
import shutil
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from flywheel.daemon.erasure import PLACES
from flywheel.serving.calls.call_log import CallLog, call_log_copy_path
from tests import warm
from tests.cli.conftest import Run
from tests.factories.documented_json import compare, documented
from tests.factories.forgettable import (
    CONVERSATION,
    LEFT,
    LEFT_BY_KILLED,
    OTHER,
    OTHER_UNREAD,
    USER,
    QuotingJudge,
    calls,
    data_set,
    finish,
    write_forgettable,
)
from tests.factories.planted import WORDS, planted_in
from tests.factories.state import execute
from tests.factories.text_places import place_of
from tests.factories.trace import write_lines
from tests.waiting import wait_for

STORES = {
    "state.db", "tasks.jsonl", "calls/calls.db", "serving/calls-8000.db", "otlp/127.0.0.1-4399.sqlite",
    "rounds/r0001/spec.json", "rounds/r0001/rollouts/0001.jsonl", "rounds/r0001/worker.log",
    "evaluations/e1/spec.json", "evaluations/e1/answers.jsonl", "evaluations/e1/worker.log",
    "datasets/sums.jsonl", "datasets/before.jsonl", *LEFT_BY_KILLED,
}  # fmt: skip


def spelled(tokens: Sequence[int]) -> str:
    """The text of token ids that are characters."""
    return "".join(map(chr, tokens)) if all(0 <= each < 0x110000 for each in tokens) else ""


def left_in(folder: Path) -> dict[str, set[str]]:
    return planted_in(folder, decode=spelled)


@pytest.fixture
def config(flywheel: Run, tmp_path: Path) -> Path:
    with QuotingJudge() as judge:
        config = write_forgettable(tmp_path, judge)
        for command in ("ingest", "filter"):
            assert flywheel(command, "-c", config).code == 0
    finish(tmp_path)
    return config


def stores_with(found: dict[str, set[str]], word: str) -> set[str]:
    return {name.removesuffix("-wal") for name in found.get(word, ())}


@pytest.mark.slow
def test_nothing_of_it_is_left_in_any_store(flywheel: Run, config: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    before = left_in(state)
    for word in WORDS:
        assert stores_with(before, word) >= STORES, "the search does not find what is there"
    of_places = {file: place_of(file) for file in set().union(*before.values())}
    assert {file: places for file, places in of_places.items() if len(places) != 1} == {}
    planted = {what for [what] in of_places.values()}
    assert planted == {place.what for place in PLACES if place.files}, "nothing shows that this place is emptied"
    dry = flywheel("forget", "--conversation", CONVERSATION, "-c", config, "--dry-run", "--json").json
    compare(dry, documented("forget"), "forget")
    assert (dry["replies"], dry["tasks"], dry["calls"], dry["rounds"]) == (8, 5, 2, ["r0001"])
    assert left_in(state) == before
    (adapter,) = dry["adapters"]
    assert (adapter["adapter"], adapter["samples"], adapter["erased"]) == ("r0001", 6, 5)

    ran = flywheel("forget", "--conversation", CONVERSATION, "-c", config)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("erased 8 replies, 5 tasks, 2 recorded calls, 1 span, 5 lines of the task file")
    assert "r0001: it was trained on texts that were erased since (5 of 6 samples, 83.3%)" in ran.out
    trained = flywheel("why", "r0001", "-c", config, "--json").json["erased"]
    assert (trained["samples"], trained["erased"]) == (6, 5), "it is known afterwards"
    assert "Studio's database" in ran.out and "weights" in ran.out
    assert left_in(state) == {}
    files = {path.relative_to(state).as_posix() for path in state.rglob("*") if path.is_file()}
    assert {file for file in files if len(place_of(file)) != 1} == set(), "it is in no place, or in two"
    there = planted_in(state, [OTHER, OTHER_UNREAD], decode=spelled)
    assert there[OTHER_UNREAD] >= {"state.db", "datasets/sums.jsonl", "datasets/before.jsonl"}
    assert there[OTHER] >= LEFT | {"state.db", "calls/calls.db", "serving/calls-8000.db"}, "others lost something"

    again = flywheel("forget", "--conversation", CONVERSATION, "-c", config, "--json").json
    assert (again["replies"], again["tasks"], again["calls"], again["state"]) == (0, 0, 0, "purged")
    audit = flywheel("audit", "--deep", "--json", "-c", config)
    assert audit.code == 0, audit.out
    assert audit.json["erased"] == 8


@pytest.mark.slow
def test_what_the_sources_still_have_is_not_read_again(flywheel: Run, config: Path, tmp_path: Path) -> None:
    assert flywheel("forget", "--user", USER, "-c", config).code == 0
    more = [*(tmp_path / "lines.jsonl").read_text().splitlines()]
    later = {"main_query": f"{WORDS[0]} later", "answer": "1", "metadata": {"conversation_id": CONVERSATION}}
    fresh = {"main_query": "another day", "answer": "1", "metadata": {"conversation_id": "new", "user_id": USER}}
    write_lines(tmp_path / "lines.jsonl", *more, later, fresh)
    report = flywheel("ingest", "--sweep", "-c", config, "--json").json
    assert report["new"] == 1, "a new conversation of the user is read, one of the erased is not"
    assert WORDS[0] not in left_in(tmp_path / "state")
    assert flywheel("forget", "--user", USER, "--block", "-c", config).code == 0
    write_lines(tmp_path / "lines.jsonl", *more, later, fresh, {**fresh, "main_query": f"{WORDS[0]} again"})
    assert flywheel("ingest", "--sweep", "-c", config, "--json").json["new"] == 0
    assert left_in(tmp_path / "state") == {}
    assert flywheel("audit", "--deep", "-c", config).code == 0


@pytest.mark.slow
def test_wrong_usage_and_a_server_that_cannot_be_asked_are_said(flywheel: Run, config: Path, tmp_path: Path) -> None:
    for arguments in (
        (),
        ("--conversation", "a", "--user", "b"),
        ("--conversation", "unknown"),
        ("--conversation", "a", "--block"),
    ):
        assert flywheel("forget", *arguments, "-c", config).code == 2
    away = "--set", "serving.urls=[http://127.0.0.1:1]"
    ran = flywheel("forget", "--conversation", CONVERSATION, "-c", config, *away)
    assert ran.code == 0, ran.err
    assert "http://127.0.0.1:1 did not answer: 2 calls there will be erased when it does" in ran.out
    assert left_in(tmp_path / "state") == {}


@pytest.mark.slow
def test_a_reader_of_an_older_state_delays_the_purge(
    flywheel: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.daemon.erasure.FORGET_SECONDS", 0.0)
    monkeypatch.setattr("flywheel.daemon.erasure.PURGE_SECONDS", 0.0)
    state = tmp_path / "state"
    with closing(sqlite3.connect(state / "state.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM tasks").fetchone()
        ran = flywheel("forget", "--conversation", CONVERSATION, "-c", config)
        assert (ran.code, "not yet purged" in ran.out) == (75, True)
        assert flywheel("status", "-c", config).code == 0
        reader.execute("COMMIT")
    ran = flywheel("forget", "--conversation", CONVERSATION, "-c", config)
    assert ran.code == 0, ran.out
    assert left_in(state) == {}


@pytest.mark.slow
def test_a_restore_applies_what_was_erased_since(flywheel: Run, config: Path, tmp_path: Path) -> None:
    assert flywheel("backup", tmp_path / "backup", "-c", config).code == 0
    assert flywheel("forget", "--conversation", CONVERSATION, "-c", config).code == 0
    assert "backup" not in json.dumps(flywheel("forget", "--user", USER, "-c", config, "--json").json["backups"])
    assert left_in(tmp_path / "backup") != {}
    shutil.rmtree(tmp_path / "state")
    restored = flywheel("restore", tmp_path / "backup", "-c", config)
    assert restored.code == 0, restored.err
    assert left_in(tmp_path / "state") == {}
    assert OTHER in planted_in(tmp_path / "state", [OTHER])
    # The copy of a data set is in no backup, and is written again with what was erased.
    (tmp_path / "state" / "datasets").mkdir()
    write_lines(tmp_path / "state" / "datasets" / "sums.jsonl", *data_set())
    assert flywheel("ingest", "--sweep", "-c", config, "--json").json["new"] == 0
    assert left_in(tmp_path / "state") == {}
    audit = flywheel("audit", "--deep", "--json", "-c", config)
    assert audit.code == 0, audit.out
    shutil.rmtree(tmp_path / "backup")
    gone = flywheel("forget", "--conversation", "another", "-c", config)
    assert gone.code == 0 and "the backup in" in gone.out


@pytest.mark.slow
def test_calls_that_go_on_with_it_are_erased_when_they_come(flywheel: Run, config: Path, tmp_path: Path) -> None:
    """By the header, by the user, and where neither is said, by the history that they send again."""
    own = f"sources=[{{type: jsonl, path: {tmp_path}/lines.jsonl}}, {{type: calls}}]"
    ingest = "ingest", "-c", config, "--set", own, "--set", "serving.urls=[http://127.0.0.1:1]"
    assert flywheel(*ingest).code == 0
    assert flywheel("forget", "--user", USER, "--block", "-c", config, "--set", own).code == 0
    with CallLog(call_log_copy_path(tmp_path / "state")) as log:
        first, second, _ = calls()
        more = replace(second, request_id="fw-4", user="")
        named = replace(first, request_id="fw-5", user="")
        of_user = replace(first, request_id="fw-6", conversation="")
        assert log.append([first, more, named, of_user]) == 3, "an erased call was stored again"
    assert left_in(tmp_path / "state") != {}
    for _ in range(2):  # The second one purges what the first has erased.
        assert flywheel(*ingest).code == 0
    assert left_in(tmp_path / "state") == {}
    with CallLog(call_log_copy_path(tmp_path / "state")) as log:
        assert list(log.sizes([f"fw-{number:032d}" for number in range(9)] + ["fw-4", "fw-5", "fw-6"])) == [
            f"fw-{3:032d}"
        ]


@pytest.mark.slow
def test_a_daemon_carries_it_out(flywheel: Run, config: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    run = [
        sys.executable,
        "-m",
        "flywheel",
        "run",
        "-c",
        str(config),
        "--set",
        "sources=[{type: jsonl, path: lines.jsonl}]",
    ]
    with (tmp_path / "daemon.log").open("wb") as log:
        daemon = warm.Popen(run, stderr=log, stdout=log)
    try:
        wait_for(lambda: "state in" in (tmp_path / "daemon.log").read_text(), "the daemon")
        ran = flywheel("forget", "--conversation", CONVERSATION, "-c", config)
        assert ran.code == 0, ran.out + (tmp_path / "daemon.log").read_text()
        assert ran.out.startswith("erased 8 replies")
        assert left_in(state) == {}
    finally:
        daemon.terminate()
        daemon.wait(timeout=300)
    assert left_in(state) == {}
    assert flywheel("audit", "-c", config).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.extended)])
def test_kill_9_at_every_step_and_run_again(flywheel: Run, config: Path, tmp_path: Path, stride: int) -> None:
    """Processes die at each step that changes something; the next `forget` finds the rest."""
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "state", kept)
    for step in itertools.count(1, stride):
        shutil.rmtree(tmp_path / "state")
        shutil.copytree(kept, tmp_path / "state")
        command = [sys.executable, "-m", "tests.cli.killed_forget", str(step), str(config), CONVERSATION]
        code = warm.run(command, timeout=300, capture_output=True).returncode
        if code == 0:
            break
        assert code == -9
        ran = flywheel("forget", "--conversation", CONVERSATION, "-c", config)
        assert ran.code == 0, f"step {step}: {ran.err}"
        assert left_in(tmp_path / "state") == {}, f"step {step}"
        books = execute(tmp_path / "state" / "state.db", "SELECT state, count(*) FROM replies GROUP BY state")
        assert dict(books) == {"converted": 1, "dead": 2, "erased": 8}
    assert step > 10, "it was killed nowhere"
