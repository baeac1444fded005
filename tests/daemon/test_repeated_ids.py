"""Ids that repeat: runs of a client with the same trace and span ids are as many replies."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from flywheel.config.file import Config
from flywheel.judge.annotations import Annotation, LeftOutError
from flywheel.records.states import SkipReason
from flywheel.records.task import joined, task_id
from flywheel.sources.otlp.inbox import COLUMNS, Inbox, erase, inbox_path
from flywheel.sources.otlp.rows import rows_of
from flywheel.store import labels
from tests.factories.config import make_config
from tests.factories.state import deep_audited, execute, ingest, open_state
from tests.factories.trace import START, batch, reply
from tests.sources.otlp.exporting import BEGAN, pairs, request
from tests.sources.studio.writer import Studio

LISTEN = "127.0.0.1:4318"
HOUR = 3600.0
DAY = 24 * HOUR
TRACE = f"{8:032x}"
AGENT, CHAT = f"{0x47:016x}", f"{0x48:016x}"


def messages(role: str, text: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}], "finish_reason": "stop"}])


def run(
    name: str, began: float, *, trace: str = TRACE, agent: bool = True, chat: bool = True, **attributes: Any
) -> list[Span]:
    """The spans of one reply, a second each; `began` is in seconds."""
    said = {
        "gen_ai.input.messages": messages("user", f"{name}?"),
        "gen_ai.output.messages": messages("assistant", name),
    }
    spans = []
    for span_id, operation, parent, wanted in ((AGENT, "invoke_agent", "", agent), (CHAT, "chat", AGENT, chat)):
        start = BEGAN + int((began + (0.01 if parent else 0)) * 1e9)
        span = Span(
            trace_id=bytes.fromhex(trace),
            span_id=bytes.fromhex(span_id),
            parent_span_id=bytes.fromhex(parent),
            name=operation,
            start_time_unix_nano=start,
            end_time_unix_nano=start + (10**9 if not parent else 10**8),
            attributes=pairs({"gen_ai.operation.name": operation, **said, "gen_ai.request.model": "m", **attributes}),
        )
        spans += [span] * wanted
    return spans


def configured(folder: Path, **sections: Any) -> Config:
    return make_config(folder, sources=[{"type": "otlp", "listen": LISTEN}], **sections)


async def receive(config: Config, *spans: Span, instance: str = "") -> None:
    """Store spans as the receiver does."""
    body = request(*spans)
    if instance:
        body.resource_spans[0].resource.attributes.extend(pairs({"service.instance.id": instance}))
    rows = rows_of(body, config.privacy.exclude.names)
    inbox = Inbox(inbox_path(config.state_dir, LISTEN))
    await inbox.store(rows.accepted, rows.private)
    await inbox.close()


async def lines_of(config: Config) -> list[dict[str, Any]]:
    rows = execute(config.state_dir / "state.db", "SELECT payload FROM tasks WHERE state <> 'withdrawn'")
    return [json.loads(payload) for (payload,) in rows]


async def tasks_of(config: Config) -> dict[str, str]:
    """The answer of each task, by key."""
    return {line["task_id"]: line["answer"] for line in await lines_of(config)}


async def answers(config: Config) -> list[str]:
    return sorted((await tasks_of(config)).values())


async def balances(config: Config) -> None:
    audit = await deep_audited(config)
    assert audit.problems == []
    assert [(each.missing, each.changed, each.extracted_differently) for each in audit.sources] == [([], [], 0)]


async def test_runs_with_the_same_ids_are_as_many_replies(tmp_path: Path) -> None:
    config = configured(tmp_path)
    await receive(config, *run("First", 0))
    await receive(config, *run("Second", HOUR))
    (report,) = await ingest(config)
    assert await answers(config) == ["First", "Second"]
    assert (await tasks_of(config))[task_id(TRACE, AGENT)] == "First"
    assert "1 reply with trace and span ids of earlier ones" in report.warnings[0]
    assert "random.seed" in report.warnings[0]
    await balances(config)
    # A third one, and both of the others again, which are known.
    await receive(config, *run("Third", 30 * HOUR), *run("First", 0), *run("Second", HOUR))
    before = await tasks_of(config)
    (report,) = await ingest(config)
    assert (report.new, await answers(config)) == (1, ["First", "Second", "Third"])
    assert before.items() <= (await tasks_of(config)).items()
    assert "2 replies" in report.warnings[0]
    # The warning stays, also after a restart.
    (report,) = await ingest(config)
    assert "2 replies" in report.warnings[0]
    await balances(config)


async def test_the_same_span_with_the_same_start_is_updated(tmp_path: Path) -> None:
    config = configured(tmp_path)
    await receive(config, *run("First", 0), *run("Second", HOUR))
    await ingest(config)
    await receive(config, *run("Other", HOUR))
    (report,) = await ingest(config)
    assert (report.new, report.counts.replies, await answers(config)) == (0, 2, ["First", "Other"])
    await balances(config)


async def test_spans_that_are_numbered_by_trace_are_told_apart(tmp_path: Path) -> None:
    config = configured(tmp_path)
    for number in range(1, 5):
        await receive(config, *run(f"Answer {number}", 0, trace=f"{number:032x}"))
    (report,) = await ingest(config)
    assert report.warnings == ()
    keys = {task_id(f"{number:032x}", AGENT): f"Answer {number}" for number in range(1, 5)}
    assert await tasks_of(config) == keys
    (report,) = await ingest(config)
    assert (report.new, report.counts.replies) == (0, 4)
    await balances(config)


def in_studio(studio: Studio, *spans: Span, rounded: int) -> None:
    """Write spans as Studio does, one row for each id, with starts `rounded` to so many nanoseconds."""
    for values in rows_of(request(*spans)).accepted:
        # Studio has more columns, which no reader looks at.
        row = dict(zip(COLUMNS, values, strict=True)) | {"kind": 1, "scope": "{}", "latencyNs": 0.0}
        for name in ("startTimeUnixNano", "endTimeUnixNano"):
            row[name] = str(int(row[name]) // rounded * rounded)
        changes = ", ".join(f"{name} = excluded.{name}" for name in row)
        places = ", ".join("?" * len(row))
        added = f"INSERT INTO span_table ({', '.join(row)}) VALUES ({places})"
        execute(studio.path, f"{added} ON CONFLICT (id) DO UPDATE SET {changes}", *row.values())


@pytest.mark.parametrize("rounded", [1, 1_000_000])
async def test_the_same_spans_in_studio_and_at_the_receiver_are_one_task(tmp_path: Path, rounded: int) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    config = make_config(
        tmp_path,
        sources=[{"type": "studio", "path": str(studio.path)}, {"type": "otlp", "listen": LISTEN}],
    )
    first, second = run("First", 0.0015), run("Second", HOUR + 0.0015)
    in_studio(studio, *first, rounded=rounded)
    await ingest(config)
    # Studio has one row for each id: the second run takes the place of the first.
    in_studio(studio, *second, rounded=rounded)
    await ingest(config)
    assert await answers(config) == ["First", "Second"]
    await receive(config, *second)
    await ingest(config)
    await receive(config, *first)
    reports = await ingest(config)
    assert await answers(config) == ["First", "Second"]
    assert [report.counts.replies for report in reports] == [2, 2]


async def test_a_late_agent_completes_the_reply_of_its_own_run(tmp_path: Path) -> None:
    config = configured(tmp_path)
    await receive(config, *run("First", 0, agent=False))
    (report,) = await ingest(config)
    assert report.counts.skipped == {"unfinished": 1}
    await receive(config, *run("First", 0, chat=False))
    await ingest(config)
    assert await answers(config) == ["First"]
    # Of the second run, too, though the agent's id is there already.
    await receive(config, *run("Second", HOUR, agent=False))
    (report,) = await ingest(config)
    assert (report.counts.skipped, await answers(config)) == ({"unfinished": 1}, ["First"])
    await balances(config)
    await receive(config, *run("Second", HOUR, chat=False))
    (report,) = await ingest(config)
    assert (report.counts.replies, await answers(config)) == (2, ["First", "Second"])
    await balances(config)


async def test_the_rest_of_a_run_that_was_killed_is_not_completed_by_the_next_one(tmp_path: Path) -> None:
    config = configured(tmp_path)
    await receive(config, *run("First", 0, agent=False))
    await ingest(config)
    await receive(config, *run("Second", 60))
    (report,) = await ingest(config)
    assert (report.counts.skipped, await answers(config)) == ({"unfinished": 1}, ["Second"])
    await balances(config)


async def test_concurrent_replicas_are_told_apart_by_their_resource(tmp_path: Path) -> None:
    config = configured(tmp_path)
    await receive(config, *run("First", 0, **{"gen_ai.request.model": "a"}), instance="a")
    await receive(config, *run("Second", 0.005, **{"gen_ai.request.model": "b"}), instance="b")
    (report,) = await ingest(config)
    assert {line["answer"]: line["metadata"]["model"] for line in await lines_of(config)} == {
        "First": "a",
        "Second": "b",
    }
    assert "left out" not in report.warnings[0]
    await balances(config)


async def test_a_trace_across_services_stays_whole(tmp_path: Path) -> None:
    config = configured(tmp_path)
    for name, began in (("First", 0), ("Second", HOUR)):
        agent, chat = run(name, began, **{"gen_ai.request.model": name})
        await receive(config, agent, instance="front")
        # The service that calls the model was restarted, and its ids repeat as well.
        await receive(config, chat, instance=f"back {name}")
    (report,) = await ingest(config)
    found = {line["answer"]: line["metadata"]["model"] for line in await lines_of(config)}
    assert (found, report.counts.replies) == ({"First": "First", "Second": "Second"}, 2)
    await balances(config)


async def test_what_fits_two_runs_is_left_out_and_counted(tmp_path: Path) -> None:
    config = configured(tmp_path)
    # Both agents work at the time of the one call, in one process.
    await receive(config, *run("First", 0), *run("Second", 0.005, chat=False))
    (report,) = await ingest(config)
    assert await answers(config) == ["First", "Second"]
    assert "1 span left out" in report.warnings[0]
    await balances(config)


@settings(deadline=None, max_examples=25)
@given(
    gaps=st.lists(st.sampled_from([2.0, 60.0, HOUR, 2 * DAY]), min_size=1, max_size=4),
    data=st.data(),
)
async def test_whatever_the_order_of_arrival_each_run_is_one_reply(
    tmp_path_factory: pytest.TempPathFactory, gaps: list[float], data: st.DataObject
) -> None:
    config = configured(tmp_path_factory.mktemp("any"))
    starts = [0.0, *itertools.accumulate(gaps)]
    spans = [span for number, start in enumerate(starts) for span in run(f"Run {number}", start)]
    for span in data.draw(st.permutations(spans)):
        await receive(config, span)
        if data.draw(st.booleans()):
            await ingest(config)
    (report,) = await ingest(config)
    assert await answers(config) == [f"Run {number}" for number in range(len(starts))]
    assert report.counts.replies == report.counts.tasks == len(starts)
    await balances(config)


async def kept(config: Config) -> list[str]:
    """The names of the runs of which the inbox has something."""
    rows = execute(inbox_path(config.state_dir, LISTEN), "SELECT attributes FROM span_table WHERE attributes <> '{}'")
    return sorted({json.loads(text)["gen_ai"]["output"]["messages"][0]["parts"][0]["content"] for (text,) in rows})


OUT = {"flywheel.record": False}


async def test_a_refusal_covers_its_run_and_no_other_one(tmp_path: Path) -> None:
    config = configured(tmp_path)
    await receive(config, *run("Before", 0))
    # The agent's span, which refuses, comes last.
    await receive(config, *run("Secret", 2 * DAY, agent=False))
    await receive(config, *run("Secret", 2 * DAY, chat=False, **OUT))
    await receive(config, *run("After", 4 * DAY))
    # Within a day of the private run, in whatever service, and of what that adds to it.
    await receive(config, *run("Still", 2.9 * DAY, trace=TRACE), instance="other")
    assert await kept(config) == ["After", "Before"]
    await ingest(config)
    assert await answers(config) == ["After", "Before"]
    await balances(config)


async def test_what_could_belong_to_two_runs_is_private(tmp_path: Path) -> None:
    config = configured(tmp_path)
    await receive(config, *run("Secret", 0, **OUT))
    await receive(config, *run("Open", 1.5 * DAY))
    assert await kept(config) == ["Open"]
    await receive(config, *run("Between", 0.8 * DAY))
    assert await kept(config) == []
    await receive(config, *run("Later", 3 * DAY))
    assert await kept(config) == ["Later"]


async def test_an_erasure_covers_the_whole_id(tmp_path: Path) -> None:
    config = configured(tmp_path)
    await receive(config, *run("Erased", 0))
    path = inbox_path(config.state_dir, LISTEN)
    await erase(path, {trace for (trace,) in execute(path, "SELECT traceId FROM span_table")})
    await receive(config, *run("Later", 30 * DAY))
    assert await kept(config) == []


async def test_studios_runs_refuse_each_for_itself(tmp_path: Path) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    config = make_config(tmp_path, sources=[{"type": "studio", "path": str(studio.path)}])
    others = {span: f"{number + 0x90:016x}" for number, span in enumerate((AGENT, CHAT))}
    spans = run("Secret", 0, **OUT) + run("Open", 2 * DAY)
    for span in spans[2:]:
        # Studio keeps one row for each span id.
        span.span_id = bytes.fromhex(others[span.span_id.hex()])
        span.parent_span_id = bytes.fromhex(others.get(span.parent_span_id.hex(), ""))
    in_studio(studio, *spans, rounded=1)
    (report,) = await ingest(config)
    assert (report.counts.skipped, await answers(config)) == ({"private": 1}, ["Open"])


async def test_an_annotation_that_fits_two_is_reported(tmp_path: Path) -> None:
    config = configured(tmp_path)
    await receive(config, *run("First", 0), *run("Second", HOUR))
    await ingest(config)

    async with open_state(config.state_dir) as store:
        for ids in ({"trace_id": TRACE, "span_id": AGENT}, {"span_id": AGENT}):
            with pytest.raises(LeftOutError, match="different runs the same ids"):
                await store.read(labels._task_of, Annotation.model_validate(ids))


def test_of_a_trace_that_was_extracted_twice_in_a_row_the_last_time_counts() -> None:
    first = batch(reply(1, skip=SkipReason.UNFINISHED), reply(2))
    last = batch(reply(1, started_at=START))
    whole = joined([first, last])
    assert [(entry.trace_id, entry.skip) for entry in whole.entries] == [
        (reply(2).trace_id, None),
        (reply(1).trace_id, None),
    ]
