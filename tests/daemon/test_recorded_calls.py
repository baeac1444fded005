"""Tasks with exact prompts: traces are joined to the calls that the servers have recorded."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, select

from flywheel.config.file import Config
from flywheel.records import exclusion
from flywheel.records.request_id import request_id_in
from flywheel.serving.calls.call_log import call_log_copy_path
from flywheel.serving.calls.call_log_page import CallPage
from flywheel.serving.environment_variables import ADMIN_KEY_VARIABLE
from flywheel.sources.call_puller import CallLogCopy
from flywheel.store.kernel.schema import replies, sources, tasks
from flywheel.store.views.balance import balance
from flywheel.system.server_limits import Receive, Scope, Send
from tests.daemon.following import Following, killed_at, status
from tests.factories import state
from tests.factories.call_log import numbered
from tests.factories.config import write_chain
from tests.factories.recorded_reply import asked, call, config_of, mark_of, trace
from tests.factories.state import deep_audited, open_state
from tests.serving.fake_vllm import running, with_middleware
from tests.sources.calls.log_server import LogServer
from tests.sources.calls.recorded import assistant, chat, completion, recorded, user
from tests.sources.studio.writer import Studio, agent, message, part
from tests.sources.studio.writer import chat as model_call
from tests.waiting import until


def exported(config: Config) -> dict[str, Any]:
    """The lines of the task file by span. The last line may just be being written."""
    if not config.task_file.exists():
        return {}
    whole, _, _ = config.task_file.read_bytes().rpartition(b"\n")
    lines = [json.loads(line) for line in whole.splitlines()]
    found = {line["metadata"]["span_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def is_exact(line: dict[str, Any], number: int) -> bool:
    about = line["metadata"]
    assert (about["adapter_source"], line["main_query"]) == ("id", f"What is {number} + 1?")
    if about["prompt_source"] != "calls":
        return False
    assert line["prompt"] == asked(number)
    assert (about["prompt_exact"], about["parameters_json"]) == (True, '{"temperature":0.5}')
    return True


def payloads(conn: Connection) -> dict[str, Any]:
    found = conn.execute(select(tasks.c.payload, tasks.c.excluded)).all()
    return {row.payload["metadata"]["span_id"]: (row.payload, row.excluded) for row in found}


async def stored(config: Config) -> dict[str, Any]:
    async with open_state(config.state_dir) as store:
        return await store.read(payloads)


async def ingest(config: Config) -> None:
    assert [report.error for report in await state.ingest(config) if report.error] == []


@pytest.mark.slow
async def test_every_prompt_is_exact_and_every_adapter_certain_across_a_swap(tmp_path: Path) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    with LogServer(tmp_path / "a.db") as a, LogServer(tmp_path / "b.db") as b:
        config = config_of(tmp_path, a, b)
        versions = [f"my-agent@r000{1 + (number >= 10)}" for number in range(20)]
        async with Following(config):
            for number, version in enumerate(versions):
                mark = mark_of(version)
                # Now the trace comes first, and now the call.
                if number % 3:
                    (a, b)[number % 2].log.append([call(number, mark)])
                studio.write(*trace(number, mark))
                await asyncio.sleep(0.05)
                if not number % 3:
                    (a, b)[number % 2].log.append([call(number, mark)])
            await until(lambda: len(exported(config)) == 20, "all tasks")
    lines = exported(config)
    for number, version in enumerate(versions):
        assert is_exact(lines[f"a{number}"], number)
        assert lines[f"a{number}"]["metadata"]["adapter"] == version
    assert {excluded for _, excluded in (await stored(config)).values()} == {""}
    assert (await deep_audited(config)).problems == []


class Model:
    """Answers sums, with the ids that vLLM makes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = json.loads((await receive())["body"])
        number = int(asked["messages"][1]["content"].split()[2])
        request_id = dict(scope["headers"])[b"x-request-id"].decode()
        body = completion(assistant(str(number + 1))) | {"id": f"chatcmpl-{request_id}"}
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
        )
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def test_what_the_middleware_records_is_what_the_tasks_hold(tmp_path: Path) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    log = {"path": str(tmp_path / "serving" / "calls.db"), "keep_days": 14, "max_bytes": 10**9}
    middleware = with_middleware(Model(), FLYWHEEL_ALIAS="my-agent", call_log=log, **{ADMIN_KEY_VARIABLE: "secret"})
    with running(middleware) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADMIN", "secret")
        config = config_of(tmp_path, serving={"urls": [url], "admin_key_env": "ADMIN"})
        async with Following(config), httpx2.AsyncClient(headers={"authorization": "Bearer secret"}) as client:
            for number in range(5):
                request = {"model": "my-agent", "messages": asked(number), "temperature": 0.5}
                answer = await client.post(f"{url}/v1/chat/completions", json=request)
                mark = request_id_in(answer.json()["id"])
                assert mark is not None
                studio.write(*trace(number, mark))
            await until(lambda: len(exported(config)) == 5, "all tasks")
    middleware._recorder.close()
    assert all(is_exact(exported(config)[f"a{number}"], number) for number in range(5))
    (found,) = (await status(config))["replicas"]
    counts = {"calls": 5, "missed": 0, "dropped": 0, "refused": 0, "to_erase": 0}
    assert found["calls"] == {"condition": "ok", "error": "", **counts}


async def is_included(following: Following) -> bool:
    """Whether rounds may use the task."""
    return not (await following._store.read(payloads))["a1"][1]


@pytest.mark.slow
async def test_a_call_that_comes_too_late_changes_the_state_and_not_the_line(tmp_path: Path) -> None:
    studio, mark = Studio(tmp_path / "studio.sqlite"), mark_of()
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server, ingest={"calls_wait_seconds": 1})
        async with Following(config) as following:
            began = time.monotonic()
            studio.write(*trace(1, mark))
            await until(lambda: exported(config), "the task")
            assert time.monotonic() - began >= 1
            assert not is_exact(exported(config)["a1"], 1)
            assert (await following._store.read(payloads))["a1"][1] == "hidden"
            server.log.append([call(1, mark)])
            await until(lambda: is_included(following), "the call to be found")
            assert is_exact((await following._store.read(payloads))["a1"][0], 1)
        assert not is_exact(exported(config)["a1"], 1)
        assert len(exported(config)) == 1


async def test_a_late_call_that_came_while_no_process_ran_is_found_at_the_next_start(tmp_path: Path) -> None:
    studio, mark = Studio(tmp_path / "studio.sqlite"), mark_of()
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        studio.write(*trace(1, mark, ago=60))
        await ingest(config)
        assert (await stored(config))["a1"][1] == "hidden"
        server.log.append([call(1, mark)])
        # Another process has pulled it, and died before it told the ledger.
        with CallLogCopy(call_log_copy_path(config.state_dir)) as call_log_copy:
            call_log_copy.store_page(server.url, CallPage(server.log.state(), numbered(server.log)))
        async with Following(config) as following:
            await until(lambda: is_included(following), "the call to be found")
        assert is_exact((await stored(config))["a1"][0], 1)


async def test_a_daemon_that_was_away_for_an_hour_misses_nothing(tmp_path: Path) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    with LogServer(tmp_path / "a.db", page_calls=10) as server:
        for number in range(60):
            mark = mark_of()
            server.log.append([call(number, mark)])
            studio.write(*trace(number, mark, ago=3600 - number))
        config = config_of(tmp_path, server)
        await ingest(config)
        lines = exported(config)
        assert len(lines) == 60
        assert all(is_exact(lines[f"a{number}"], number) for number in range(60))


@pytest.mark.slow
async def test_one_pass_waits_for_a_server_that_is_away_no_longer_than_for_a_call(tmp_path: Path) -> None:
    studio, mark = Studio(tmp_path / "studio.sqlite"), mark_of()
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server, ingest={"calls_wait_seconds": 2})
        server.stop()
        studio.write(*trace(1, mark), *trace(2, mark_of(), ago=60))
        await ingest(config)
        lines = exported(config)
        assert [is_exact(lines[f"a{number}"], number) for number in (1, 2)] == [False, False]
        assert lines["a1"]["metadata"]["prompt_reason"] == exclusion.HIDDEN_MESSAGE
        server.start()
        server.log.append([call(1, mark)])
        studio.write(*trace(3, mark_of(), ago=60))
        await ingest(config)
        assert is_exact((await stored(config))["a1"][0], 1)
        assert len(exported(config)) == 3


async def test_a_damaged_copy_of_the_calls_stops_nothing_but_what_needs_it(tmp_path: Path) -> None:
    studio, mark = Studio(tmp_path / "studio.sqlite"), mark_of()
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        server.log.append([call(1, mark)])
        call_log_copy_path(config.state_dir).parent.mkdir(parents=True)
        call_log_copy_path(config.state_dir).write_bytes(b"no database" * 1000)
        plain = agent("a2", "What is 2 + 1?", "3", trace="trace-2")
        studio.write(*trace(1, mark, ago=60))
        Studio(tmp_path / "other.sqlite").write(plain)
        both = [{"path": str(studio.path)}, {"path": str(tmp_path / "other.sqlite")}]
        config = config_of(tmp_path, server, sources=both)
        async with Following(config):
            await until(lambda: exported(config), "the task of the other source")

            async def is_reported() -> bool:
                errors = [source["error"] for source in (await status(config))["sources"]]
                return any("calls.db" in error and "Move the file away" in error for error in errors)

            await until(is_reported, "the error")
            assert list(exported(config)) == ["a2"]
            call_log_copy_path(config.state_dir).unlink()
            await until(lambda: len(exported(config)) == 2, "the other task")
        assert is_exact(exported(config)["a1"], 1)


async def test_without_a_call_log_nothing_is_pulled_and_nothing_waits(tmp_path: Path) -> None:
    studio, mark = Studio(tmp_path / "studio.sqlite"), mark_of()
    with LogServer(tmp_path / "a.db") as server:
        server.log.append([call(1, mark)])
        config = config_of(tmp_path, server, serving={"urls": [server.url], "call_log": False})
        studio.write(*trace(1, mark))
        await ingest(config)
        assert not is_exact(exported(config)["a1"], 1)
        assert server.requests == 0
    assert not call_log_copy_path(config.state_dir).exists()


async def test_what_was_pruned_since_keeps_its_exact_prompt(tmp_path: Path) -> None:
    studio, mark = Studio(tmp_path / "studio.sqlite"), mark_of()
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        server.log.append([call(1, mark)])
        studio.write(*trace(1, mark, ago=60))
        await ingest(config)
        for log in (server.log, CallLogCopy(call_log_copy_path(config.state_dir))):
            assert log.prune(9 * 10**18, 10**12) == 1
        # One more span of the trace arrives.
        about = {"trace": "trace-1", "conversation": "conversation-1"}
        studio.write(model_call("c9", [message("user", part("?"))], "!", parent="a1", **about))
        await ingest(config)
        assert is_exact((await stored(config))["a1"][0], 1)
        audit = await deep_audited(config)
        assert audit.problems == []
        assert [(each.in_ledger, each.extracted_differently) for each in audit.sources] == [(1, 0)]


async def test_personal_data_in_calls_is_redacted_before_it_is_stored(tmp_path: Path) -> None:
    studio, mark = Studio(tmp_path / "studio.sqlite"), mark_of()
    write_chain(tmp_path, {"type": "pii"})
    with LogServer(tmp_path / "a.db") as server:
        secret = "jane.doe@example.org"
        sent = [*asked(1)[:2], user(f"<system-reminder>{secret}</system-reminder>")]
        server.log.append([recorded(chat(sent, stop=[secret]), completion(assistant("2")), request_id=mark)])
        config = config_of(tmp_path, server, filter={"chain": "chain.yaml"})
        studio.write(*trace(1, mark, ago=60))
        await ingest(config)
        line = exported(config)["a1"]
        assert line["metadata"]["prompt_source"] == "calls"
        assert secret not in json.dumps(line)
        assert line["prompt"][2]["content"] == "<system-reminder>[EMAIL_1]</system-reminder>"
        assert line["metadata"]["parameters_json"] == '{"stop":["[EMAIL_1]"]}'


def outcomes(conn: Connection) -> Counter[tuple[str, str | None]]:
    found = conn.execute(select(replies.c.state, replies.c.skip_reason, sources.c.type).join(sources))
    return Counter((row.type, row.skip_reason) for row in found)


@pytest.mark.slow
async def test_traces_and_calls_together_make_every_task_once(tmp_path: Path) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    with LogServer(tmp_path / "a.db") as server:
        both = [{"path": str(studio.path)}, {"type": "calls"}]
        config = config_of(tmp_path, server, sources=both, ingest={"calls_wait_seconds": 3})
        async with Following(config) as following:
            for number in range(12):
                mark = mark_of()
                now = {"started_ns": time.time_ns() - 10**6, "ended_ns": time.time_ns()}
                server.log.append([replace(call(number, mark), **now)])
                # Some are not traced, and of some the trace comes when the calls are a task already.
                if number % 3 == 0:
                    studio.write(*trace(number, mark))
                elif number % 3 == 1:
                    late = (number, mark)
            await until(lambda: len(exported(config)) == 12, "all tasks")
            studio.write(*trace(*late))

            async def is_late_one_stored() -> bool:
                return ("studio", "recorded") in await following._store.read(outcomes)

            await until(is_late_one_stored, "the reply of the late trace")
        await ingest(config)
        lines = exported(config)
        assert sorted(line["main_query"] for line in lines.values()) == sorted(f"What is {n} + 1?" for n in range(12))
        assert {line["metadata"]["prompt_source"] for line in lines.values()} == {"calls"}
        assert (await deep_audited(config)).problems == []
        async with open_state(config.state_dir) as store:
            found = await store.read(outcomes)
            assert (await store.read(balance)).balanced
        assert found["studio", "recorded"] == 1
        assert found["studio", None] + found["calls", None] == 12
        assert found["calls", "recorded"] == found["studio", None]
        assert found["studio", None] >= 1, "a trace that comes in time wins"


async def test_a_deep_audit_reads_calls_and_inboxes_as_they_are(tmp_path: Path) -> None:
    """It pulls nothing, erases nothing and writes nothing."""
    studio, marks = Studio(tmp_path / "studio.sqlite"), [mark_of() for _ in range(4)]
    with LogServer(tmp_path / "a.db") as server:
        both = [{"path": str(studio.path)}, {"type": "calls"}]
        config = config_of(tmp_path, server, sources=both, ingest={"calls_wait_seconds": 0.1})
        server.log.append([call(number, mark) for number, mark in enumerate(marks[:3])])
        studio.write(*trace(0, marks[0], ago=60), *trace(1, marks[1], ago=60))
        await ingest(config)
        server.log.append([call(3, marks[3])])
        private = trace(3, marks[3], ago=60)
        studio.write(private[0], private[1] | {"attributes": '{"flywheel": {"record": false}}'})
        files = [path for path in sorted(config.state_dir.rglob("*")) if path.is_file() and "-shm" not in path.name]
        before = [path.read_bytes() for path in files]
        audit = await deep_audited(config)
        assert [(each.type, each.in_ledger, each.not_read_yet) for each in audit.sources] == [
            ("studio", 2, 1), ("calls", 3, 0),
        ]  # fmt: skip
        assert audit.problems == []
        assert [path.read_bytes() for path in files] == before
        assert len(server.log.find(marks)) == 4
        with CallLogCopy(call_log_copy_path(config.state_dir)) as copy:
            assert (copy.find(marks).keys(), copy.pending()) == (set(marks[:3]), {})


@pytest.mark.parametrize("follows", [False, True])
async def test_calls_that_a_trace_names_no_more_become_the_reply_that_was_skipped_for_it(
    tmp_path: Path, follows: bool
) -> None:
    studio, mark = Studio(tmp_path / "studio.sqlite"), mark_of()
    model, whole = trace(1, mark, ago=60)
    about = {"trace": "trace-1", "conversation": "conversation-1"}
    silent = {
        **agent("a1", "What is 1 + 1?", None, **about),
        **{name: whole[name] for name in whole if "Time" in name},
    }
    with LogServer(tmp_path / "a.db") as server:
        both = [{"path": str(studio.path)}, {"type": "calls"}]
        config = config_of(tmp_path, server, sources=both, ingest={"calls_wait_seconds": 0.1})
        server.log.append([call(1, mark)])
        studio.write(model)
        await ingest(config)
        async with open_state(config.state_dir) as store:
            assert await store.read(outcomes) == {("studio", "unfinished"): 1, ("calls", "recorded"): 1}
        studio.write(silent)
        if follows:
            async with Following(config):
                await until(lambda: exported(config), "the task")
        else:
            await ingest(config)
        async with open_state(config.state_dir) as store:
            assert await store.read(outcomes) == {("studio", "no_answer"): 1, ("calls", None): 1}
            assert (await store.read(balance)).balanced
        assert [line["main_query"] for line in exported(config).values()] == ["What is 1 + 1?"]
        assert (await deep_audited(config)).problems == []


@pytest.mark.parametrize("arrival", [1, 3, 4, 6])
@pytest.mark.parametrize("point", ["before commit", "after commit"])
async def test_a_kill_between_mirror_and_ledger_loses_and_doubles_nothing(
    tmp_path: Path, point: str, arrival: int
) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    with LogServer(tmp_path / "a.db", page_calls=5) as server:
        for number in range(40):
            mark = mark_of()
            server.log.append([call(number, mark)])
            studio.write(*trace(number, mark, ago=60))
        config = config_of(tmp_path, server)
        await asyncio.to_thread(killed_at, tmp_path / "flywheel.yaml", point, arrival)
        await ingest(config)
        lines = exported(config)
        assert len(lines) == 40
        assert all(is_exact(lines[f"a{number}"], number) for number in range(40))
        with CallLogCopy(call_log_copy_path(config.state_dir)) as call_log_copy:
            (found,) = call_log_copy.servers().values()
            assert (found.calls, found.missed, call_log_copy.state().newest) == (40, 0, 40)
