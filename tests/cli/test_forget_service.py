"""`flywheel forget --service`, and of runs with the same ids: nobody loses what is another one's."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flywheel.records.request_id import new_request_id
from flywheel.serving.calls.call_log import CallLog, call_log_copy_path
from flywheel.sources.otlp.inbox import COLUMNS, Inbox, inbox_path
from flywheel.store import erasures
from tests.cli.conftest import Run
from tests.factories.config import write_config
from tests.factories.documented_json import compare, documented
from tests.factories.model_call import marked
from tests.factories.planted import planted_in
from tests.factories.state import write_state
from tests.factories.trace import write_lines
from tests.sources.calls.recorded import assistant, chat, completion, recorded, user
from tests.sources.studio.writer import agent, message, part
from tests.sources.studio.writer import chat as model_call

SHARED = "7"
LISTEN = "127.0.0.1:4399"
BILLING, SUPPORT = "plum billing text", "pear support text"
CALLS = [new_request_id("0" * 16, "my-agent@r0001") for _ in range(3)]


def line(text: str, number: int, service: str = "", conversation: str = SHARED) -> dict[str, Any]:
    metadata = {"conversation_id": conversation, **({"service": service} if service else {})}
    return {"main_query": f"{text} {number}?", "answer": f"{text} {number}.", "metadata": metadata}


LINES = [
    line(BILLING, 1, "billing"),
    line(BILLING, 2, "billing"),
    line(BILLING, 3),
    line(SUPPORT, 4, "support"),
    line(SUPPORT, 5, "billing", "8"),
]


def spans(number: int, text: str, service: str, call: str) -> list[list[Any]]:
    """A trace that is in the inbox, with one recorded call."""
    about = {"trace": str(number) * 32, "conversation": SHARED}
    asked = [message("user", part(f"{text} {number}?"))]
    rows = [
        marked(model_call(str(number) * 15 + "c", asked, text, parent=str(number) * 16, **about), call),
        agent(str(number) * 16, f"{text} {number}?", text, **about),
    ]
    return [[{**row, "serviceName": service}.get(column) for column in COLUMNS] for row in rows]


@pytest.fixture
def config(flywheel: Run, tmp_path: Path) -> Path:
    """Two services with conversations of the same id: lines that are tasks, spans, and recorded calls."""
    write_lines(tmp_path / "lines.jsonl", *LINES)
    sources = [{"type": "jsonl", "path": "lines.jsonl"}, {"type": "otlp", "listen": LISTEN}]
    config = write_config(tmp_path, sources=sources)

    async def fill() -> None:
        inbox = Inbox(inbox_path(tmp_path / "state", LISTEN))
        await inbox.store([*spans(1, BILLING, "billing", CALLS[0]), *spans(2, SUPPORT, "support", CALLS[1])])
        await inbox.close()

    asyncio.run(fill())
    with CallLog(call_log_copy_path(tmp_path / "state")) as log:
        for request_id, text in zip(CALLS, (BILLING, SUPPORT, BILLING), strict=True):
            body = chat([user(f"{text} in a call?")])
            told = recorded(body, completion(assistant(text)), request_id=request_id)
            now = time.time_ns()
            log.append([replace(told, conversation=SHARED, started_ns=now, ended_ns=now)])
    return config


def left(folder: Path, word: str) -> set[str]:
    return {name.removesuffix("-wal") for name in planted_in(folder, [word]).get(word, ())}


@pytest.mark.slow
def test_a_service_is_erased_and_another_one_with_the_same_id_is_left(
    flywheel: Run, config: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    assert flywheel("ingest", "-c", config).code == 0
    support = left(state, "pear")
    of_service = ("forget", "--conversation", SHARED, "--service", "billing", "-c", config)
    shown = flywheel("forget", "--conversation", SHARED, "--dry-run", "-c", config).out
    assert "not known (1 trace), billing (3 traces), support (2 traces); --service NAME selects one service" in shown
    assert "several services" not in flywheel("forget", "--conversation", "8", "--dry-run", "-c", config).out
    wrong = flywheel("forget", "--conversation", SHARED, "--service", "biling", "-c", config)
    assert wrong.code == 2 and "billing (3 traces)" in wrong.err
    assert flywheel("forget", "--user", "u", "--service", "billing", "-c", config).code == 2
    dry = flywheel(*of_service, "--dry-run", "--json").json
    compare(dry, documented("forget"), "forget")
    assert (dry["kind"], dry["service"], dry["calls"]) == ("conversation", "billing", 2)
    assert dry["services"] == {"": 1, "billing": 3, "support": 2}
    ran = flywheel(*of_service)
    assert ran.code == 0, ran.err
    assert "several services have conversations with this id: not known (1 trace), billing" in ran.out
    assert left(state, "plum") == set()
    assert (
        left(state, "pear") == support >= {"state.db", "tasks.jsonl", "calls/calls.db", "otlp/127.0.0.1-4399.sqlite"}
    )
    assert flywheel(*of_service).out.startswith("nothing of it is stored")

    write_lines(
        tmp_path / "lines.jsonl", *LINES, line(BILLING, 6, "billing"), line(SUPPORT, 7, "support"), line(SUPPORT, 8)
    )
    flywheel("ingest", "--sweep", "-c", config)
    assert left(state, "plum") == set(), "what the service brings later is not stored"
    assert f"{SUPPORT} 7" in (state / "tasks.jsonl").read_text()
    assert flywheel("audit", "--deep", "-c", config).code == 0

    assert flywheel("forget", "--conversation", SHARED, "-c", config).code == 0
    assert f"{SUPPORT} 5" in (state / "tasks.jsonl").read_text(), "that is another conversation"
    assert f"{SUPPORT} 7" not in (state / "tasks.jsonl").read_text()


@pytest.mark.slow
def test_a_restored_backup_has_nothing_of_the_service(flywheel: Run, config: Path, tmp_path: Path) -> None:
    flywheel("ingest", "-c", config)
    assert flywheel("backup", tmp_path / "backup", "-c", config).code == 0
    assert flywheel("forget", "--conversation", SHARED, "--service", "billing", "-c", config).code == 0
    shutil.rmtree(tmp_path / "state")
    assert flywheel("restore", tmp_path / "backup", "-c", config).code == 0
    assert left(tmp_path / "state", "plum") == set(), "what the backup had is erased again"
    assert "state.db" in left(tmp_path / "state", "pear")


@pytest.mark.slow
def test_spans_that_are_not_read_yet_are_told_apart_by_their_service(
    flywheel: Run, config: Path, tmp_path: Path
) -> None:
    lines = "sources=[{type: jsonl, path: lines.jsonl}]"
    assert flywheel("ingest", "--set", lines, "-c", config).code == 0
    of_service = ("forget", "--conversation", SHARED, "--service", "billing", "-c", config)
    assert flywheel(*of_service, "--json").json["services"] == {"": 1, "billing": 3, "support": 2}
    inbox = f"otlp/{LISTEN.replace(':', '-')}.sqlite"
    assert left(tmp_path / "state", "plum") == set()
    assert left(tmp_path / "state", "pear") >= {inbox, "calls/calls.db"}


@pytest.mark.slow
def test_what_a_killed_process_has_begun_is_finished(flywheel: Run, config: Path, tmp_path: Path) -> None:
    flywheel("ingest", "-c", config)
    subject = erasures.in_service(SHARED, "billing")
    write_state(tmp_path / "state", erasures.begin, erasures.Kind.SERVICE, subject, set(), blocks=False)
    assert flywheel("forget", "--conversation", "another", "-c", config).code == 0
    assert left(tmp_path / "state", "plum") == set()
    assert left(tmp_path / "state", "pear") >= {"state.db", "tasks.jsonl"}


TRACE, SPAN = "8" * 32, "7" * 16
HOUR = 3600


@pytest.mark.slow
def test_other_runs_of_its_traces_are_named_before_they_are_erased(flywheel: Run, tmp_path: Path) -> None:
    config = write_config(tmp_path, sources=[{"type": "otlp", "listen": LISTEN}])

    async def fill() -> None:
        inbox = Inbox(inbox_path(tmp_path / "state", LISTEN))
        for number, conversation in enumerate(("c0", "c1", "unknown", "c0")):
            run = agent(
                SPAN, f"plum {number}?", f"plum {number}", trace=TRACE, conversation=conversation,
                began=number * HOUR, ended=number * HOUR + 1,
            )  # fmt: skip
            await inbox.store([[run.get(column) for column in COLUMNS]])
        await inbox.close()

    asyncio.run(fill())
    assert flywheel("ingest", "-c", config).code == 0
    dry = flywheel("forget", "--conversation", "c0", "--dry-run", "--json", "-c", config).json
    compare(dry, documented("forget"), "forget")
    assert dry["replies"] == 4
    assert [(each["trace"], each["span"], each["conversation"]) for each in dry["other_runs"]] == [
        (TRACE, SPAN, "c1"),
        (TRACE, SPAN, "unknown"),
    ]
    ran = flywheel("forget", "--conversation", "c0", "-c", config)
    assert ran.code == 0, ran.err
    named, other, *_, last = ran.out.splitlines()
    assert named == f"its trace {TRACE} also has conversation c1 of 2026-11-21T06:23:20: it is erased as well"
    assert f"also has span {SPAN} of 2026-11-21T07:23:20" in other
    assert last.startswith("Flywheel cannot erase")
    assert planted_in(tmp_path / "state", ["plum"]).get("plum", ()) == ()
    assert flywheel("audit", "--deep", "-c", config).code == 0
