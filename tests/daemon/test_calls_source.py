"""Agents without any tracing: their replies are found in the calls that the servers have recorded."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select

from flywheel.config.file import Config, load, parse
from flywheel.daemon.backup import back_up, erase_again
from flywheel.daemon.checkup import Result, examine_source
from flywheel.daemon.erasure import Eraser
from flywheel.errors import ConfigError
from flywheel.records.request_id import mark_of
from flywheel.records.states import SkipReason
from flywheel.records.trace import Cursor
from flywheel.serving.calls.call_log import CallLog, RecordedCall, call_log_copy_path
from flywheel.sources import calls_connector
from flywheel.sources.ingestion import Ingestion
from flywheel.sources.otlp.inbox import own_file
from flywheel.store import erasures, ledger
from flywheel.store.backup import restore
from flywheel.store.checkpoints import reopen
from flywheel.store.erasures import Kind
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import replies, tasks
from flywheel.system.signals import Stop, StopReason
from tests.daemon.following import Following, killed_at, status
from tests.daemon.killed import CALLS_POINTS
from tests.factories.config import write_config
from tests.factories.state import copied_state, deep_audited, ingest, open_state
from tests.sources.calls.log_server import LogServer
from tests.sources.calls.recorded import assistant, chat, completion, recorded, sse, tool, tool_call, user
from tests.waiting import until

SYSTEM = {"role": "system", "content": "You do sums."}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
REMINDER = user("<system-reminder>\nIt is Monday.\n</system-reminder>")
ROOTS = 40


def config_of(folder: Path, *servers: LogServer, **more: Any) -> Config:
    defaults = {"model": {"alias": "my-agent"}, "sources": [{"type": "calls"}]}
    serving = {"urls": [server.url for server in servers], "call_log": {"keep_days": 10_000}}
    ingest = {"settle_seconds": 0, **more.pop("ingest", {})}
    return load(write_config(folder, **{**defaults, "serving": serving, "ingest": ingest, **more}))


async def read(config: Config, function: Any) -> Any:
    async with open_state(config.state_dir) as store:
        return await store.read(function)


def turn(number: int, began: float, *, version: str = "my-agent@r0001", **others: Any) -> list[RecordedCall]:
    """The two calls of a reply with a tool: a question, a reminder, a call of a tool and the answer."""
    sum_of = tool_call("add", f'{{"a": {number}, "b": 1}}', f"call-{number}")
    asked: list[dict[str, Any]] = [SYSTEM, user([{"type": "text", "text": f"What is {number} + 1?"}]), REMINDER]
    more = [*asked, {**assistant(None, sum_of), "name": "Friday"}, tool(str(number + 1), f"call-{number}")]
    answer = completion(assistant(f"It is {number + 1}."), usage={"prompt_tokens": 9, "completion_tokens": 2})
    given: dict[str, Any] = {"tools": [ADD], "temperature": 0.5}
    return [
        recorded(chat(asked, **given), completion(assistant(None, sum_of)), began=began, version=version, **others),
        recorded(chat(more, **given), answer, began=began + 5, version=version, **others),
    ]


def conversation_of(call: RecordedCall) -> str:
    mark = mark_of(call.request_id)
    return f"calls-{mark.random}"


def exported(config: Config) -> list[dict[str, Any]]:
    if not config.task_file.exists():
        return []
    whole, _, _ = config.task_file.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def outcomes(conn: Connection) -> Counter[tuple[str, str | None]]:
    return Counter(tuple(row) for row in conn.execute(select(replies.c.state, replies.c.skip_reason)))


async def test_replies_become_tasks_with_exact_prompts_and_certain_adapters(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as a, LogServer(tmp_path / "b.db") as b:
        config = config_of(tmp_path, a, b)
        for number in range(12):
            version = f"my-agent@r000{1 + number // 6}"
            for call, server in zip(turn(number, number / 2, version=version), (a, b), strict=True):
                server.log.append([call])
        (report,) = await ingest(config)
        assert (report.error, report.new, report.counts.replies) == (None, 12, 12)
        (again,) = await ingest(config)
        assert (again.new, again.counts.replies) == (0, 12)
    lines = {line["main_query"]: line for line in exported(config)}
    assert len(lines) == 12
    for number in range(12):
        line = lines[f"What is {number} + 1?"]
        told = line["metadata"]
        assert line["answer"] == f"It is {number + 1}."
        assert line["prompt"] == [SYSTEM, user(f"What is {number} + 1?"), REMINDER]
        assert json.loads(told["tools_json"]) == [ADD]
        assert [step["role"] for step in json.loads(told["trajectory_json"])] == ["assistant", "tool"]
        assert json.loads(told["parameters_json"]) == {"temperature": 0.5}
        assert (told["prompt_source"], told["prompt_exact"], told["adapter_source"]) == ("calls", True, "id")
        assert told["adapter"] == f"my-agent@r000{1 + number // 6}"
        assert (told["agent_name"], told["turn"], told["errors_json"]) == ("my-agent", 0, "[]")
    assert (await deep_audited(config)).problems == []
    (shown,) = (await status(config))["sources"]
    assert (shown["type"], shown["condition"], shown["tasks"], shown["configured"]) == ("calls", "ok", 12, True)


async def test_forks_are_in_the_split_of_their_root_and_turns_are_counted(tmp_path: Path) -> None:
    calls: list[RecordedCall] = []
    forks: dict[str, list[str]] = {}
    # Ids are random: with this many, both splits have some.
    for number in range(ROOTS):
        topic = f"{number}: {' '.join(f'w{number}x{n}' for n in range(30))}"
        opening = [SYSTEM, user(f"Tell me about {topic}.")]
        root = recorded(chat(opening), completion(assistant(f"About {topic}.")), began=100 * number)
        calls.append(root)
        for n in range(4):
            more = [*opening, assistant(f"About {topic}."), user(f"And {n}?")]
            calls.append(recorded(chat(more), completion(assistant(f"{n}!")), began=100 * number + 10 * (n + 1)))
        forks[conversation_of(root)] = [conversation_of(call) for call in calls[-3:]]
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server, ingest={"train_ratio": 0.5})
        server.log.append(calls)
        await ingest(config)
    found = [line["metadata"] for line in exported(config)]
    assert len(found) == len(calls)
    split = {each["conversation_id"]: each["split"] for each in found}
    assert set(split.values()) == {"train", "held-out"}
    for root_id, others in forks.items():
        assert {split[each] for each in others} == {split[root_id]}
    assert Counter(each["turn"] for each in found) == {0: ROOTS, 1: 4 * ROOTS}


async def test_what_becomes_no_task_is_counted_with_its_reason(tmp_path: Path) -> None:
    hello = chat([SYSTEM, user("hello")])
    cut = recorded(hello, sse({"choices": [{"index": 0, "delta": {"content": "Hi"}}]}, done=False), is_complete=False)
    failed = recorded(hello, {"error": {"message": "overloaded"}}, status=503, began=10)
    again = recorded(hello, completion(assistant("Hi")), began=20, retry=2)
    raw = recorded({"prompt": "The capital"}, {"choices": [{"text": " is"}]}, path="/v1/completions", began=30)
    pending = recorded(chat([user("What is 1 + 1?")]), completion(assistant(None, tool_call("add"))), began=40)
    gone = recorded(hello, b"", status=0, is_complete=False, began=50)
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        server.log.append([cut, failed, again, raw, pending, gone])
        (report,) = await ingest(config)
    assert report.error is None
    assert await read(config, outcomes) == {
        ("converted", None): 1,
        ("skipped", SkipReason.INTERRUPTED): 2,
        ("skipped", SkipReason.ERROR): 1,
        ("skipped", SkipReason.NO_QUERY): 1,
        ("skipped", SkipReason.UNFINISHED): 1,
    }
    details = set(await read(config, lambda conn: conn.execute(select(replies.c.detail)).scalars().all()))
    assert {
        "overloaded",
        "the client disconnected before the end of the answer",
        "the request has a prompt in place of messages",
        "no call followed the one that asked for add",
    } <= details
    assert [line["answer"] for line in exported(config)] == ["Hi"]


async def erase(config: Config, conversation: str) -> list[dict[str, Any]]:
    """What a backup learns of everything that is erased, when this conversation is."""
    async with open_state(config.state_dir) as store:
        ingestion = Ingestion(store, config)
        await store.write(erasures.begin, Kind.CONVERSATION, conversation, [conversation], blocks=True)
        assert await Eraser(store, config, ingestion).finish()
        await ingestion.close()
        return await store.read(erasures.everything_erased)


async def test_what_goes_on_from_an_erased_call_is_counted_and_not_stored(tmp_path: Path) -> None:
    opening = [SYSTEM, user("What is 1 + 1?")]
    first = recorded(chat(opening), completion(assistant("It is 2.")))
    begun = [*opening, assistant("It is 2."), user("And my secret?")]
    more = [*begun, assistant(None, tool_call("look")), tool("secret")]
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        server.log.append([first])
        await ingest(config)
        told = await erase(config, conversation_of(first))
        assert [each["kind"] for each in told] == ["conversation", "call"], "a backup learns of the call"
        for erased, is_removed in ((3, False), (5, True)):
            if is_removed:
                for each in (config.state_dir / "calls").glob("calls.db*"):
                    each.unlink()
            later = chat([*more, assistant("A secret."), user("Thanks")])
            calls = [
                recorded(chat(begun), completion(assistant(None, tool_call("look"))), began=100),
                recorded(chat(more), completion(assistant("A secret.")), began=110),
                recorded(later, completion(assistant("Bye.")), began=10**7),
            ]
            server.log.append(calls)
            (report,) = await ingest(config)
            assert (report.error, report.counts.erased, report.counts.replies) == (None, erased, erased)
            with CallLog(call_log_copy_path(config.state_dir)) as copy:
                ids = {call.request_id for call in calls}
                assert copy.erased(ids) == ids
                assert copy.purge()
            found = [path for path in config.state_dir.rglob("*") if path.is_file()]
            assert not [path for path in found if b"secret" in path.read_bytes()]
        assert exported(config) == []


async def test_a_restored_state_refuses_what_goes_on_from_a_call_that_was_erased_since(tmp_path: Path) -> None:
    opening = [user("What is 1 + 1?")]
    first = recorded(chat(opening), completion(assistant("It is 2.")))
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        await ingest(config)
        await back_up(config, tmp_path / "backup")
        # The backup has nothing of the call, and the server will not have it any more.
        server.log.append([first])
        await ingest(config)
        await erase(config, conversation_of(first))
        shutil.rmtree(config.state_dir)
        restore(tmp_path / "backup", config.state_dir)
        await erase_again(config, tmp_path / "backup")
        more = chat([*opening, assistant("It is 2."), user("And my secret?")])
        server.log.append([recorded(more, completion(assistant("A secret.")), began=100)])
        (report,) = await ingest(config)
    assert (report.error, report.counts.erased, report.counts.replies) == (None, 1, 1)
    assert not [path for path in config.state_dir.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


async def test_an_answer_by_a_finish_function_is_the_answer(tmp_path: Path) -> None:
    finish = tool_call("generate_response", '{"response": "It is 2."}')
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        server.log.append([recorded(chat([user("What is 1 + 1?")]), completion(assistant(None, finish)))])
        await ingest(config)
    assert [line["answer"] for line in exported(config)] == ["It is 2."]


async def test_a_daemon_goes_on_when_its_copy_of_the_calls_was_removed(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        server.log.append(turn(1, 0))
        async with Following(config):
            await until(lambda: len(exported(config)) == 1, "the task")
            for path in call_log_copy_path(config.state_dir).parent.glob("calls.db*"):
                path.unlink(missing_ok=True)
            server.log.append(turn(2, 100))
            await until(lambda: len(exported(config)) == 2, "the second task")
        assert [line["answer"] for line in exported(config)] == ["It is 2.", "It is 3."]
        assert await read(config, outcomes) == {("converted", None): 2}
        assert (await deep_audited(config)).problems == []


async def test_a_daemon_follows_the_calls_and_a_reply_that_goes_on(tmp_path: Path) -> None:
    first = recorded(chat([user("What is 1 + 1?")]), completion(assistant("Let me see.")))
    nudge = [user("What is 1 + 1?"), assistant("Let me see."), REMINDER]
    second = recorded(chat(nudge), completion(assistant("It is 2.")), began=10)

    def answers(conn: Connection) -> list[str]:
        return [row.payload["answer"] for row in conn.execute(select(tasks.c.payload))]

    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        async with Following(config) as following:
            await until(lambda: server.requests, "the first pull")
            server.log.append([first])
            await until(lambda: len(exported(config)) == 1, "the task")
            server.log.append([second])

            async def is_updated() -> bool:
                return bool(await following._store.read(answers) == ["It is 2."])

            await until(is_updated, "the reply to go on")
            server.log.append(turn(5, 100))
            await until(lambda: len(exported(config)) == 2, "the second task")
        # Its line was written already.
        assert [line["answer"] for line in exported(config)] == ["Let me see.", "It is 6."]


async def test_a_server_that_is_away_delays_conversations_and_mixes_none(tmp_path: Path) -> None:
    first, second = turn(1, 0)
    with LogServer(tmp_path / "a.db") as a, LogServer(tmp_path / "b.db") as b:
        config = config_of(tmp_path, a, b, ingest={"calls_wait_seconds": 10**9})
        a.log.append([first])
        b.log.append([second])
        a.stop()
        await ingest(config)
        assert exported(config) == []
        a.start()
        await ingest(config)
        assert len(exported(config)) == 1


async def test_a_copy_that_cannot_be_written_is_reported_and_nothing_is_lost(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        server.log.append(turn(1, 0))
        (config.state_dir / "calls").mkdir(parents=True)
        (config.state_dir / "calls" / "calls.db").write_text("This is no database." * 100)
        (report,) = await ingest(config)
        assert report.error is not None
        assert "calls.db" in str(report.error)
        (config.state_dir / "calls" / "calls.db").unlink()
        (report,) = await ingest(config)
        assert (report.error, report.new) == (None, 1)


async def test_a_removed_copy_loses_nothing_that_was_ingested(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        server.log.append(turn(1, 0))
        await ingest(config)
        for each in (config.state_dir / "calls").glob("calls.db*"):
            each.unlink()
        server.log.append(turn(2, 100))
        await ingest(config)
    assert len(exported(config)) == 2


async def test_a_reopened_trace_and_a_full_scan_are_extracted_again(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        server.log.append([*turn(1, 0), *turn(2, 100)])
        await ingest(config)
        config = config_of(tmp_path, server, ingest={"agents": {"exclude": ["my-agent"]}})
        await ingest(config)
        assert await read(config, outcomes) == {("converted", None): 2}
        excluded = ("skipped", SkipReason.AGENT_EXCLUDED)
        async with open_state(config.state_dir) as store:
            reply = await store.read(lambda conn: conn.execute(select(replies).order_by(replies.c.id)).first())
            assert await store.write(reopen, reply.source_id, [reply.trace_id]) == 2, "its calls"
        await ingest(config)
        assert await read(config, outcomes) == {("converted", None): 1, excluded: 1}
        assert (await deep_audited(config)).sources[0].extracted_differently == 1
        await ingest(config, sweep=True)
        assert await read(config, outcomes) == {excluded: 2}


async def test_a_reply_that_becomes_due_again_while_it_is_stored_is_handed_on_again(tmp_path: Path) -> None:
    """As when another source gives up its calls at that moment."""
    handed_on = []
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        server.log.append(turn(1, 0))
        async with open_state(config.state_dir) as store:
            ingestion = Ingestion(store, config)
            await ingestion.pull_calls()
            (source,) = ingestion.sources()
            number = await store.write(ledger.source_id, str(source.path), ledger.CALLS)
            async for batch in source.connector.read(number, Cursor(), final=True):
                await store.write(calls_connector.record, number, batch, train_ratio=0.5, split_seed=0)
                if batch.entries and not handed_on:
                    await store.write(reopen, number, [batch.entries[0].trace_id])
                handed_on += [entry.span_id for entry in batch.entries]
            await ingestion.close()
    assert len(handed_on) == 2
    assert len(set(handed_on)) == 1


def test_calls_that_are_not_recorded_cannot_be_a_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"calls needs .* serving\.call_log is false"):
        parse({"sources": [{"type": "calls"}], "serving": {"call_log": False}}, "test", tmp_path)


@pytest.mark.parametrize("arrival", [1, 2, 3])
@pytest.mark.parametrize("point", [*CALLS_POINTS, "before commit", "after commit"])
async def test_a_kill_between_calls_and_ledger_loses_and_doubles_nothing(
    tmp_path: Path, point: str, arrival: int
) -> None:
    with LogServer(tmp_path / "a.db", page_calls=7) as server:
        calls = [call for number in range(20) for call in turn(number, number / 2)]
        calls += [recorded(chat([user(f"{n}?")]), completion(), began=n) for n in range(5)]
        server.log.append(sorted(calls, key=lambda call: call.ended_ns))
        config = config_of(tmp_path, server)
        await asyncio.to_thread(killed_at, tmp_path / "flywheel.yaml", point, arrival)
        (report,) = await ingest(config)
        assert report.error is None
        assert await read(config, outcomes) == {("converted", None): 20, ("skipped", SkipReason.ERROR): 5}
        lines = exported(config)
        assert Counter(line["main_query"] for line in lines) == {f"What is {n} + 1?": 1 for n in range(20)}
        assert all(line["answer"] == f"It is {int(line['main_query'].split()[2]) + 1}." for line in lines)
        assert (await deep_audited(config)).problems == []


async def test_dry_runs_beside_a_daemon_change_nothing(tmp_path: Path) -> None:
    calls = sorted((call for n in range(30) for call in turn(n, n / 2)), key=lambda call: call.ended_ns)
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        async with open_state(config.state_dir) as store:
            for place in range(0, len(calls), 20):
                server.log.append(calls[place : place + 20])
                async with copied_state(config.state_dir) as first, copied_state(config.state_dir) as second:
                    each = [Ingestion(own, config, export_tasks=own is store) for own in (first, store, second)]
                    found = await asyncio.gather(*(ingestion.run(final=True) for ingestion in each))
                    assert len({(report.counts.tasks, report.error) for (report,) in found}) == 1
                    for ingestion in each:
                        await ingestion.close()
    assert await read(config, outcomes) == {("converted", None): 30}
    lines = exported(config)
    assert len({line["metadata"]["conversation_id"] for line in lines}) == 30
    assert all(line["answer"] == f"It is {int(line['main_query'].split()[2]) + 1}." for line in lines)


async def test_a_stop_ends_a_long_backlog_and_the_rest_follows(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        server.log.append([call for n in range(3) for call in turn(n, n)])
        store, stop = await Store.open(config.state_dir), Stop()
        stop.ask(StopReason.FINISHED)
        ingestion = Ingestion(store, config)
        assert await ingestion.pull_calls() == []
        (source,) = ingestion.sources()
        assert (await source.read(stop=stop)).new == 0
        assert await ingestion.pull_calls() == [source]
        assert (await source.read()).new == 3
        await ingestion.close()
        await store.close()


async def test_the_doctor_says_what_was_found_and_the_copy_is_private(tmp_path: Path) -> None:
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server)
        path = own_file(source := config.sources[0], config.state_dir)
        finding = examine_source(source, path)
        assert (finding.result, finding.text) == (Result.OK, "no reply was found in recorded calls yet")
        server.log.append(turn(1, 0))
        await ingest(config)
    finding = examine_source(source, path)
    assert (finding.result, finding.figures["calls"]) == (Result.OK, 2)
    for each in (config.state_dir / "calls").iterdir():
        assert each.stat().st_mode & 0o077 == 0, "the copy is private"


async def test_the_alias_that_was_called_says_the_target(tmp_path: Path) -> None:
    asked = [("plan", "base"), ("doer", "base"), ("plan", "plan@r0001"), ("doer", "doer@r0002")]
    with LogServer(tmp_path / "a.db") as server:
        config = config_of(tmp_path, server, model={}, targets={"planner": {"alias": "plan"}, "doer": {}})
        for number, (alias, version) in enumerate(asked):
            request = {**chat([SYSTEM, user(f"What is {number} + 1?")]), "model": alias}
            answer = completion(assistant(f"{number + 1}"))
            server.log.append([recorded(request, answer, began=number, version=version)])
        await ingest(config)

    def targets(conn: Connection) -> list[str]:
        return list(conn.execute(select(tasks.c.target).order_by(tasks.c.id)).scalars())

    assert await read(config, targets) == ["planner", "doer", "planner", "doer"]
    assert [line["metadata"]["agent_name"] for line in exported(config)] == [alias for alias, _ in asked]
