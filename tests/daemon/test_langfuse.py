"""Scores reach Langfuse once, whatever it does, and without delaying the daemon."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.daemon.langfuse import LangfuseExport
from flywheel.daemon.status import snapshot
from flywheel.errors import NotifyError
from flywheel.records.task import task_id
from flywheel.records.trace import Reply
from flywheel.records.verdict import CriterionResult, Outcome, Verdict
from flywheel.store import claims, verdicts
from flywheel.store.erasures import Kind
from flywheel.store.kernel.database import Store
from tests import warm
from tests.cli.conftest import Run
from tests.factories.config import make_config
from tests.factories.erased import erase_rows
from tests.factories.judge_server import JudgeServer
from tests.factories.local_server import JsonHandler, LocalServer
from tests.factories.state import open_state
from tests.factories.trace import put_replies, reply
from tests.factories.verdict import judge_all, rejected, settle, undecided
from tests.waiting import until

SECONDS = 120.0
PUBLIC, SECRET = "pk-lf-1234567890", "sk-lf-0987654321"
FIELDS = {"id", "traceId", "observationId", "name", "value", "dataType", "timestamp", "metadata", "comment"}
"""Those of `CreateScoreRequest` in Langfuse's OpenAPI file that we use."""


class Langfuse(LocalServer):
    """`POST /api/public/scores`. It answers with `statuses` in turn, then with 200; 0 closes the connection, and 207
    is an error inside. Each answer waits for `go_on`. `scores` are stored as Langfuse stores them: by id, name and
    day."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.requests: list[dict[str, Any]] = []
        self.scores: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.retry_after: dict[str, str] = {}
        self.go_on = threading.Event()
        self.go_on.set()
        outer = self

        class Handler(JsonHandler):
            def post(self, request: Any) -> None:
                outer.requests.append(request)
                outer.go_on.wait(SECONDS)
                expected = "Basic " + base64.b64encode(f"{PUBLIC}:{SECRET}".encode()).decode()
                status = outer.statuses.pop(0) if outer.statuses else 200
                if self.path != "/api/public/scores" or self.headers["authorization"] != expected:
                    status = 401
                if status == 0:
                    self.close_connection = True
                    self.connection.close()
                elif status == 200:
                    outer.scores[request["id"], request["name"], request["timestamp"][:10]] = request
                    self.send(200, {"id": request["id"]})
                else:
                    self.send(status, {"message": f"wrong {SECRET}", "errors": ["x"]}, outer.retry_after)

        super().__init__(Handler)

    @property
    def host(self) -> str:
        return self.base_url.removesuffix("/v1")

    def values(self, number: int = 1) -> dict[str, float]:
        """What is stored of a reply, by name."""
        return {score["name"]: score["value"] for score in self.scores.values() if score["traceId"] == trace(number)}

    def __exit__(self, *error: Any) -> None:
        self.go_on.set()
        super().__exit__(*error)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Langfuse]:
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", PUBLIC)
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", SECRET)
    with Langfuse() as server:
        yield server


def trace(number: int) -> str:
    return f"{number:032x}"


def traced(number: int, **values: Any) -> Reply:
    return reply(number, **{"trace_id": trace(number), "span_id": f"{number:016x}", **values})


def configured(folder: Path, server: Langfuse, export: dict[str, Any] | None = None, **sections: Any) -> Config:
    defaults = {
        "sources": [],
        "serving": {"urls": ["http://127.0.0.1:9"]},
        "daemon": {"metrics": None, "drain_seconds": 30},
        "ingest": {"settle_seconds": 0, "poll_seconds": 0.2},
    }
    settings = {"host": server.host, "timeout_seconds": SECONDS, **(export or {})}
    return make_config(folder, **{**defaults, "export": {"langfuse": settings}, **sections})


async def begun(store: Store, config: Config) -> LangfuseExport:
    assert config.export.langfuse is not None
    export = LangfuseExport(store, config.export.langfuse)
    await export.begin()
    return export


def put(conn: Connection, *numbers: int) -> None:
    put_replies(conn, *(traced(number) for number in numbers), rowid=max(numbers))
    judge_all(conn)


def again(conn: Connection, rubric: str, verdict: Verdict) -> None:
    """What a run with `rejudge` stores."""
    [task] = claims.decided(conn, 1, 0, rubric, "j", claims.ALL, every=False)
    verdicts.store(conn, task.id, verdict, rubric, "j")
    claims.apply_again(conn, task.id, task.was, verdict)


async def noted(store: Store, config: Config) -> tuple[int, int, int]:
    status = (await store.read(snapshot, config))["langfuse"]
    assert status is not None
    return status["sent"], status["refused"], status["untraced"]


async def test_each_verdict_is_a_score_for_the_reply_and_each_criterion(
    store: Store, tmp_path: Path, server: Langfuse
) -> None:
    config = configured(tmp_path, server)
    export = await begun(store, config)
    await store.write(put, 1)
    await export.deliver()
    assert server.values() == {"flywheel.accepted": 1, "flywheel.score": 1.0, "flywheel.criteria.correct": 1.0}
    for score in server.requests:
        assert set(score) == FIELDS - {"comment"}
        assert score["observationId"] == f"{1:016x}"
        assert score["dataType"] == ("BOOLEAN" if score["name"] == "flywheel.accepted" else "NUMERIC")
        assert score["timestamp"] == "2026-01-02T03:04:06+00:00"  # the reply's, which no new verdict changes
        assert score["id"].startswith("flywheel-")
        assert score["metadata"] == {"task": task_id(trace(1), f"{1:016x}"), "rubric": "r", "judge": "j"}
    sent = json.dumps(server.requests)
    for text in ("What is 1 plus 1?", "boxed", "it is right", "good"):
        assert text not in sent  # neither the reply nor the judge's reasons
    assert await noted(store, config) == (3, 0, 0)
    with_reasons = await begun(store, configured(tmp_path, server, {"comments": True}))
    await store.write(put, 2)
    await with_reasons.deliver()
    comments = {score["name"]: score.get("comment") for score in server.requests[3:]}
    assert comments == {
        "flywheel.accepted": "good",
        "flywheel.score": None,
        "flywheel.criteria.correct": "it is right",
    }


async def test_a_new_verdict_replaces_the_last_one(store: Store, tmp_path: Path, server: Langfuse) -> None:
    export = await begun(store, configured(tmp_path, server))
    await store.write(put, 1)
    await export.deliver()
    # With the same outcome, and then with another one.
    result = CriterionResult("correct", "half", 0.5, True)
    await store.write(again, "r2", Verdict(Outcome.ACCEPTED, 0.5, (result,)))
    await export.deliver()
    assert server.values() == {"flywheel.accepted": 1, "flywheel.score": 0.5, "flywheel.criteria.correct": 0.5}
    await store.write(again, "r3", rejected())
    await export.deliver()
    assert server.values() == {"flywheel.accepted": 0, "flywheel.score": 0.0, "flywheel.criteria.correct": 0.0}
    assert (len(server.scores), len(server.requests)) == (3, 9)


async def test_a_verdict_that_takes_the_place_of_an_undecided_one_is_sent(
    store: Store, tmp_path: Path, server: Langfuse
) -> None:
    export = await begun(store, configured(tmp_path, server))
    await store.write(put_replies, traced(1), traced(2))
    await store.write(judge_all, lambda _: undecided())
    await export.deliver()
    assert server.requests == []
    await store.write(judge_all)
    await export.deliver()
    assert len(server.scores) == 6


async def test_what_was_judged_before_is_not_sent_and_other_traces_are_counted(
    store: Store, tmp_path: Path, server: Langfuse
) -> None:
    config = configured(tmp_path, server)
    await store.write(put, 1)
    export = await begun(store, config)
    await store.write(put_replies, reply(2), rowid=2)
    await store.write(judge_all)
    await export.deliver()
    assert await noted(store, config) == (0, 0, 1)
    await store.write(put_replies, reply(4), traced(3, span_id="a-span-of-another-kind"), rowid=3)
    await store.write(judge_all)
    await export.deliver()
    assert {score["traceId"] for score in server.requests} == {trace(3)}
    assert not any("observationId" in score for score in server.requests)
    assert await noted(store, config) == (3, 0, 2)


async def test_what_a_filter_or_nobody_decided_is_no_score(store: Store, tmp_path: Path, server: Langfuse) -> None:
    export = await begun(store, configured(tmp_path, server))
    await store.write(put_replies, traced(1), traced(2))

    def decide(conn: Connection) -> None:
        first, second = claims.claim(conn, 10, "r", "j")
        settle(conn, first.id, rejected(), f"{verdicts.CHAIN}c", "j", 0.0)
        claims.dead_letter_task(conn, second.id, second.key, "it was asked three times")

    await store.write(decide)
    await export.deliver()
    assert server.requests == []


@pytest.mark.parametrize("status", [0, 302, 404, 408, 429, 500, 503])
async def test_what_does_not_arrive_is_sent_later_and_nothing_twice_in_the_store(
    store: Store, tmp_path: Path, server: Langfuse, status: int
) -> None:
    config = configured(tmp_path, server)
    export = await begun(store, config)
    await store.write(put, 1, 2)
    server.statuses = [200, status]
    with pytest.raises(NotifyError, match=r"send scores to Langfuse at 127\.0\.0\.1:\d+") as caught:
        await export.deliver()
    assert SECRET not in str(caught.value)
    assert len(server.requests) == 2
    # What arrived before is not sent again by this process.
    await export.deliver()
    assert len(server.requests) == 2 + 5
    assert (len(server.scores), await noted(store, config)) == (6, (6, 0, 0))


async def test_a_verdict_that_changes_between_two_attempts_is_sent_again(
    store: Store, tmp_path: Path, server: Langfuse
) -> None:
    export = await begun(store, configured(tmp_path, server))
    await store.write(put, 1, 2)
    server.statuses = [200] * 3 + [503]
    with pytest.raises(NotifyError):
        await export.deliver()
    assert server.values() == {"flywheel.accepted": 1, "flywheel.score": 1.0, "flywheel.criteria.correct": 1.0}
    await store.write(again, "r2", rejected())
    await export.deliver()
    assert server.values() == {"flywheel.accepted": 0, "flywheel.score": 0.0, "flywheel.criteria.correct": 0.0}
    assert (len(server.scores), len(server.requests)) == (6, 4 + 6)


async def test_what_was_erased_since_an_attempt_is_not_sent(
    store: Store, tmp_path: Path, server: Langfuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, server, {"comments": True})
    export = await begun(store, config)
    await store.write(put, 1, 2)
    server.statuses = [200, 500]
    with pytest.raises(NotifyError):
        await export.deliver()
    assert [request["traceId"] for request in server.requests] == [trace(1), trace(1)]
    assert "it is right" not in repr(vars(export)), "the texts are in the state alone"
    await store.write(erase_rows, Kind.CONVERSATION, "conversation-1")
    # The next one is erased while the first of its scores is sent.
    server.go_on.clear()
    sending = asyncio.create_task(export.deliver())
    await until(lambda: len(server.requests) == 3, "the first score of the second reply")
    await store.write(erase_rows, Kind.CONVERSATION, "conversation-2")
    server.go_on.set()
    await sending
    assert [request["traceId"] for request in server.requests[2:]] == [trace(2)]
    assert await noted(store, config) == (2, 0, 0)


async def test_it_says_how_long_it_is_asked_to_wait(store: Store, tmp_path: Path, server: Langfuse) -> None:
    export = await begun(store, configured(tmp_path, server))
    await store.write(put, 1)
    for answer, expected in (({"retry-after": "60"}, 60.0), ({}, 0.0), ({"retry-after": "1e9"}, 3600.0)):
        server.statuses, server.retry_after = [429], answer
        with pytest.raises(NotifyError) as caught:
            await export.deliver()
        assert caught.value.retry_after == expected


@pytest.mark.parametrize("status", [207, 400, 413, 422])
async def test_a_score_that_is_refused_is_counted_and_not_sent_again(
    store: Store, tmp_path: Path, server: Langfuse, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    config = configured(tmp_path, server)
    export = await begun(store, config)
    await store.write(put, 1)
    server.statuses = [200, status]
    await export.deliver()
    await export.deliver()
    assert (len(server.requests), len(server.scores), await noted(store, config)) == (3, 2, (2, 1, 0))
    [warning] = caplog.messages
    assert warning.startswith(f"Langfuse refused flywheel.score of trace {trace(1)}: ")
    assert SECRET not in warning and "[secret]" in warning


async def test_wrong_or_missing_keys_are_named_with_what_to_do(
    store: Store, tmp_path: Path, server: Langfuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, server)
    export = await begun(store, config)
    await store.write(put, 1)
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-lf-of-another-project")
    with pytest.raises(NotifyError) as caught:
        await export.deliver()
    assert str(caught.value).endswith(
        ": it refuses the keys (401). Check the keys of the project in $LANGFUSE_PUBLIC_KEY and $LANGFUSE_SECRET_KEY."
    )
    monkeypatch.delenv("LANGFUSE_SECRET_KEY")
    with pytest.raises(NotifyError, match="the variable LANGFUSE_SECRET_KEY with the key is not set"):
        await export.deliver()
    assert len(server.requests) == 1


def test_doctor_checks_the_keys(
    flywheel: Run, tmp_path: Path, server: Langfuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LANGFUSE_SECRET_KEY")
    (tmp_path / "flywheel.yaml").write_text(f"sources: []\nexport: {{langfuse: {{host: '{server.host}'}}}}\n")
    finding = {each["name"]: each for each in flywheel("doctor", "--json").json["checks"]}["langfuse"]
    assert (finding["result"], finding["found"]) == (
        "failed",
        "cannot send scores to Langfuse: the variable LANGFUSE_SECRET_KEY is not set",
    )
    assert server.requests == []


async def test_nothing_is_sent_without_the_setting(tmp_path: Path) -> None:
    config = make_config(tmp_path, sources=[])
    async with open_state(tmp_path / "state") as store:
        assert (await store.read(snapshot, config))["langfuse"] is None


def line(number: int) -> str:
    metadata = {"trace_id": trace(number), "span_id": f"{number:016x}"}
    task = {"question": f"{number}+1?", "answer": f"\\boxed{{{number + 1}}}", "metadata": metadata}
    return json.dumps(task) + "\n"


KILLED = """
import asyncio, sys
from pathlib import Path
from flywheel.config.export import LangfuseSettings
from flywheel.daemon.langfuse import LangfuseExport
from flywheel.store.kernel.database import Store

async def main():
    export = LangfuseExport(await Store.open(Path(sys.argv[1])), LangfuseSettings(host=sys.argv[2]))
    await export.begin()
    await export.deliver()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_kill_9_loses_no_score_and_doubles_none(store: Store, tmp_path: Path, server: Langfuse) -> None:
    config = configured(tmp_path, server)
    await begun(store, config)
    await store.write(put, *range(1, 31))
    for wanted in (7, 40):
        server.go_on.set()
        process = warm.Popen([sys.executable, "-c", KILLED, str(config.state_dir), server.host])
        await until(lambda wanted=wanted: len(server.requests) >= wanted, "scores", seconds=SECONDS)
        server.go_on.clear()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    server.go_on.set()
    export = await begun(store, config)
    await export.deliver()
    assert {(score["traceId"], score["name"]) for score in server.scores.values()} == {
        (trace(number), f"flywheel.{name}")
        for number in range(1, 31)
        for name in ("accepted", "score", "criteria.correct")
    }
    assert len(server.scores) == 90
    before = len(server.requests)
    await (await begun(store, config)).deliver()
    assert len(server.requests) == before


@pytest.mark.slow
def test_run_once_sends_the_scores_and_status_tells(flywheel: Run, tmp_path: Path, server: Langfuse) -> None:
    (tmp_path / "lines.jsonl").write_text(line(1) + '{"question": "2+1?", "answer": "\\\\boxed{3}"}\n')
    with JudgeServer() as judge:
        (tmp_path / "flywheel.yaml").write_text(
            f"""
sources: [{{type: jsonl, path: lines.jsonl}}]
judge: {{base_url: "{judge.base_url}", model: j}}
serving: {{urls: ["http://127.0.0.1:9"]}}
export: {{langfuse: {{host: "{server.host}"}}}}
"""
        )
        flywheel("run", "--once")
    assert server.values()["flywheel.accepted"] == 1
    status = flywheel("status", "--json").json["langfuse"]
    sent = len(server.requests)
    assert status == {"server": server.host[7:], "sent": sent, "refused": 0, "untraced": 1, "error": ""}
    text = f"{server.host[7:]}: {sent} scores sent, 0 refused, 1 reply without a trace of OpenTelemetry"
    assert re.search(rf"langfuse +{re.escape(text)}", flywheel("status").out)
    assert {each["name"]: each["result"] for each in flywheel("doctor", "--json").json["checks"]}["langfuse"] == "ok"
