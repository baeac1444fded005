"""A promotion is watched: outcomes by arm, the rollback of a worse version, and what a crash leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select, update

from flywheel.daemon.deployer import SplitRequest
from flywheel.daemon.promotion_watch import outcome_of_call
from flywheel.daemon.status import snapshot
from flywheel.daemon.watch_figures import figures_of
from flywheel.records.states import SkipReason, WatchState
from flywheel.sources.call_puller import CallLogCopy
from flywheel.sources.calls.parsing import parse
from flywheel.store import deployments, watches
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import tasks
from flywheel.store.views import lineage
from flywheel.store.watches import Outcome, Result
from tests.cases import for_each
from tests.factories.config import make_config
from tests.factories.round import put_adapter, put_deployment, put_round, put_trained
from tests.factories.trace import put_replies, reply
from tests.factories.verdict import accepted, judge_all, rejected, undecided
from tests.factories.watched import BAD, GOOD, Watched
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, replica
from tests.sources.calls.recorded import assistant, chat, completion, user

UNITS = 40


@pytest.fixture
async def watched(tmp_path: Path, store: Store) -> AsyncIterator[Watched]:
    apps = [FakeVllm({BASE: PROBE.second.base}) for _ in range(2)]
    with replica(apps[0]) as first, replica(apps[1]) as second:
        for number in (1, 2, 3):
            await store.write(put_trained, number, tmp_path / f"r{number:04d}", *apps)
        serving = {"urls": [first, second], "drain_seconds": 0}
        deploy = {"watch": {"new_share": 0.5, "until_units": UNITS}}
        config = make_config(
            tmp_path, sources=[], model={"base": BASE, "alias": "agent"}, serving=serving, deploy=deploy
        )
        own = Watched(store, config)
        await own.deployer.deploy("r0001", "test")
        await own.deployer.deploy("r0002", "r0002: better", SplitRequest(0.5, "salt"))
        yield own


@pytest.mark.slow
async def test_a_version_that_is_worse_in_traffic_is_rolled_back(watched: Watched) -> None:
    watch = watched.watch()
    await watch.look()
    assert (await watched.row()).state == WatchState.WATCHING
    for _ in range(12):
        await watched.answered("old", GOOD)
        await watched.answered("new", BAD)
        await watch.look()
    row = await watched.row()
    assert row.state == WatchState.ROLLED_BACK
    assert row.reason.startswith("worse in traffic: r0002 0 % of ")
    assert await watched.serving() == ("r0001", False)
    active = await watched.store.read(deployments.active, "agent")
    assert active is not None and "worse in traffic" in active.reason
    assert (await watched.store.read(deployments.outcomes, "agent"))["rolled_back"] == 1
    story = await watched.store.read(lineage.why, "r0002")
    assert story is not None
    assert "; rolled back since: worse in traffic: r0002" in story["reason"]
    assert [(each["state"], each["other"], each["reason"]) for each in story["watches"]] == [
        ("rolled_back", "r0001", row.reason)
    ]
    units = await watched.store.read(lambda conn: conn.execute(select(schema.watch_units)).all())
    assert units == [], "units of watches that have ended are removed"


@pytest.mark.slow
async def test_a_version_that_is_as_good_gets_everything(watched: Watched) -> None:
    watch = watched.watch()
    for _ in range(UNITS // 4):
        await watched.answered("old", GOOD)
        await watched.answered("new", GOOD)
        await watched.answered("old", BAD)
        await watched.answered("new", BAD)
    await watch.look()
    row = await watched.row()
    assert row.state == WatchState.KEPT
    assert row.reason.startswith(f"no loss was shown in {UNITS} conversations: r0002 50 %")
    assert await watched.serving() == ("r0002", False)
    assert not await watched.store.read(deployments.watched, "agent")


@pytest.mark.slow
async def test_after_so_many_days_the_new_version_gets_everything(watched: Watched) -> None:
    await watched.answered("new", GOOD)
    await watched.watch().look()
    assert (await watched.row()).state == WatchState.WATCHING
    await watched.watch(max_days=1e-9).look()
    assert (await watched.row()).state == WatchState.KEPT
    assert "no loss could have been noticed yet" in (await watched.row()).reason
    assert await watched.serving() == ("r0002", False)


@pytest.mark.slow
async def test_a_rollback_by_hand_ends_a_watch(watched: Watched) -> None:
    await watched.watch().look()
    await watched.deployer.rollback()
    await watched.watch().look()
    row = await watched.row()
    assert (row.state, row.reason) == (WatchState.REPLACED, "r0001 was deployed meanwhile: rollback")


async def worse(watched: Watched) -> Any:
    """The state in which a process died after it had decided to roll back."""
    await watched.answered("old", GOOD, 15)
    await watched.answered("new", BAD, 15)
    watch = watched.watch()

    async def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    watch._roll_back = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        await watch.look()
    assert (await watched.row()).state == WatchState.ROLLING_BACK
    return watch


@pytest.mark.slow
async def test_a_rollback_that_a_crash_interrupted_is_carried_out(watched: Watched) -> None:
    await worse(watched)
    assert await watched.serving() == ("r0002", True)
    await watched.watch().look()
    assert (await watched.row()).state == WatchState.ROLLED_BACK
    assert await watched.serving() == ("r0001", False)


@pytest.mark.slow
async def test_a_rollback_that_happened_before_the_crash_is_not_repeated(watched: Watched) -> None:
    await worse(watched)
    await watched.deployer.rollback("r0001", why="worse in traffic")
    number = (await watched.store.read(deployments.active, "agent")).id  # type: ignore[union-attr]
    await watched.watch().look()
    assert (await watched.row()).state == WatchState.ROLLED_BACK
    assert (await watched.store.read(deployments.active, "agent")).id == number  # type: ignore[union-attr]


@pytest.mark.slow
async def test_a_split_that_ended_before_the_crash_ends_the_watch(watched: Watched) -> None:
    await watched.watch().look()
    row = await watched.row()
    figures = await watched.store.read(figures_of, row)
    await watched.store.write(watches.note, row, "no loss was shown", figures)
    await watched.deployer.end_split("no loss was shown")
    await watched.watch().look()
    row = await watched.row()
    assert (row.state, row.reason) == (WatchState.KEPT, "no loss was shown")


@pytest.mark.slow
async def test_a_unit_counts_once_by_its_first_call_after_the_swap(watched: Watched) -> None:
    watch = watched.watch()
    early = watched.call("new", 1, started_ns=1)
    first, second = watched.call("new", 1), watched.call("new", 1)
    other = watched.call("old", 2, started_ns=second.started_ns)
    watched.pull(early, second, other)
    await watch.look()

    def known(conn: Connection) -> list[tuple[str, str, int]]:
        rows = conn.execute(select(schema.watch_units).order_by(schema.watch_units.c.unit))
        return [(row.unit[-1], row.request_id, row.calls) for row in rows]

    assert await watched.store.read(known) == [("1", second.request_id, 1), ("2", other.request_id, 1)]
    watched.pull(first)  # of a replica whose log was read later
    await watch.look()
    assert await watched.store.read(known) == [("1", first.request_id, 2), ("2", other.request_id, 1)]
    await watched.store.write(watched._judged, [second], BAD)
    await watch.look()
    assert await watched.store.read(watches.results, (await watched.row()).id) == []
    await watched.store.write(watched._judged, [first], GOOD)
    await watch.look()
    assert await watched.store.read(watches.results, (await watched.row()).id) == [(True, Result.SUCCESS)]
    # What follows changes nothing any more.
    watched.pull(watched.call("new", 1, status=500, answer={"error": {"message": "dead"}}))
    await watch.look()
    assert await watched.store.read(watches.results, (await watched.row()).id) == [(True, Result.SUCCESS)]


@pytest.mark.slow
async def test_errors_that_no_trace_shows_count_against_a_version(watched: Watched) -> None:
    """With judged replies alone, a version that loses replies would never be rolled back."""
    watch = watched.watch(until_units=1000)
    for _ in range(30):
        await watched.answered("old", GOOD)
        watched.pull(watched.call("new", status=500, answer={"error": {"message": "dead"}}))
    await watch.look()
    assert (await watched.row()).state == WatchState.ROLLED_BACK
    assert (await watched.row()).figures["new"]["reasons"] == {"an error of the engine": 30}


@pytest.mark.slow
async def test_a_process_that_dies_while_it_reads_calls_loses_no_outcome(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.pull(*(watched.call("new", status=500, answer={"error": {"message": "dead"}}) for _ in range(3)))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    for place in (CallLogCopy, "calls_of"), (watches, "decide"):
        with monkeypatch.context() as patch:
            patch.setattr(*place, killed)
            with pytest.raises(KeyboardInterrupt):
                await watched.watch().look()
    await watched.watch().look()
    assert await watched.store.read(watches.results, (await watched.row()).id) == [(True, Result.FAILURE)] * 3


@pytest.mark.slow
async def test_units_that_go_on_after_a_response_are_counted_and_not_tested(watched: Watched) -> None:
    watch = watched.watch()
    watched.pull(*(watched.call("", 900 + n, status=500, answer={"error": "x"}) for n in range(30)))
    await watch.look()
    figures = await watched.store.read(figures_of, await watched.row())
    assert (figures.untested, figures.outcomes, figures.units) == (30, 0, 30)


@pytest.mark.slow
async def test_missing_outcomes_are_shown_and_tested_and_roll_nothing_back(watched: Watched) -> None:
    watch = watched.watch(until_units=10_000)
    for _ in range(40):
        await watched.answered("old", GOOD)
        watched.pull(watched.call("new", is_complete=False))
    await watch.look()
    row = await watched.row()
    assert row.state == WatchState.WATCHING
    status = await watched.store.read(snapshot, watched.config)
    own = status.targets[""].watch
    assert own is not None
    assert (own.figures.new.missing, own.figures.old.missing, own.figures.e_value) == (40, 0, 1.0)
    assert own.figures.e_value_missing > 20
    assert any("more replies of r0002 have no outcome" in text for text in status.warnings)


@pytest.mark.slow
async def test_status_warns_of_units_that_are_no_conversations(watched: Watched) -> None:
    watch = watched.watch(until_units=10_000)
    watched.pull(*(watched.call("new", 1) for _ in range(50)))
    watched.pull(*(watched.call("old", 100 + n, unit_kind="fallback") for n in range(30)))
    await watch.look()
    status = await watched.store.read(snapshot, watched.config)
    assert any("one conversation has 62 % of the calls" in text for text in status.warnings)
    assert any(
        "97 % of the conversations are told apart by their first message alone" in text for text in status.warnings
    )


async def test_units_of_the_base_model_belong_to_the_alias_that_was_asked_for(tmp_path: Path, store: Store) -> None:
    """Two targets are watched at once, and the base model is the version before of both."""
    targets = {"one": {"alias": "agent"}, "two": {"alias": "other"}}
    config = make_config(tmp_path, sources=[], model={"base": BASE}, targets=targets)

    def put(conn: Connection) -> None:
        split = {"other": None, "share": 0.5, "salt": "s"}
        for number, alias in ((1, "agent"), (2, "other")):
            put_round(conn, number)
            put_adapter(conn, number)
            put_deployment(conn, f"r000{number}", alias=alias, active_alias=alias, split=split)

    await store.write(put)
    own = Watched(store, config)
    asked = {
        alias: own.call("old", version="base", answer=completion(assistant("7"))) for alias in ("agent", "other")
    }
    request = chat([user("1 + 1?")])
    own.pull(
        *(replace(call, request=json.dumps({**request, "model": alias}).encode()) for alias, call in asked.items())
    )
    await own.watch().look()
    for alias, call in asked.items():
        watch = await store.read(watches.current, alias)
        found = await store.read(watches.undecided, watch.id)
        assert [row.request_id for row in found] == [call.request_id], alias


CALLS: list[tuple[dict[str, Any], Outcome | None]] = [
    ({}, None),
    ({"status": 400, "answer": {"error": {"message": "no"}}}, Outcome(Result.MISSING, "refused by the server (4xx)")),
    ({"status": 429, "answer": {}}, Outcome(Result.MISSING, "refused by the server (4xx)")),
    ({"status": 503, "answer": {}}, Outcome(Result.FAILURE, "an error of the engine")),
    ({"answer": {"error": {"message": "dead"}}}, Outcome(Result.FAILURE, "an error of the engine")),
    ({"is_complete": False}, Outcome(Result.MISSING, "the client did not wait for the end")),
    ({"status": 0, "is_complete": False}, Outcome(Result.MISSING, "the client did not wait for the end")),
    ({"answer": completion(assistant(""))}, Outcome(Result.FAILURE, "an empty answer")),
    ({"answer": completion(assistant(None))}, Outcome(Result.FAILURE, "an empty answer")),
    (
        {"answer": {"choices": [{"index": 0, "message": assistant("7 and"), "finish_reason": "length"}]}},
        Outcome(Result.FAILURE, "a cut answer"),
    ),
]


@for_each("values, expected", CALLS)
def test_what_a_call_alone_decides(values: dict[str, Any], expected: Outcome | None) -> None:
    call = Watched(None, None).call("new", **values)  # type: ignore[arg-type]
    assert outcome_of_call(parse(call)) == expected


REPLIES: list[tuple[dict[str, Any], Any, Outcome | None]] = [
    ({}, accepted, Outcome(Result.SUCCESS, "accepted")),
    ({}, rejected, Outcome(Result.FAILURE, "rejected")),
    ({}, undecided, None),
    ({}, None, None),
    ({"skip": SkipReason.ERROR}, None, Outcome(Result.FAILURE, "the agent ended with an error")),
    ({"skip": SkipReason.INTERRUPTED}, None, Outcome(Result.MISSING, "interrupted by the user")),
    ({"skip": SkipReason.NESTED}, None, Outcome(Result.MISSING, "not judged (nested)")),
]


async def test_what_a_reply_decides() -> None:
    for values, verdict, expected in REPLIES:
        store = await Store.empty()
        await store.write(put_replies, reply(1, calls=("call-1",), **values))
        if verdict is not None:
            await store.write(judge_all, lambda _, verdict=verdict: verdict())
        found = await store.read(watches.outcomes_of, ["call-1", "call-2"])
        assert found == ({"call-1": expected} if expected is not None else {}), values
        await store.close()


async def test_what_the_question_decides_is_missing(store: Store) -> None:
    def put(conn: Connection, reason: str) -> None:
        conn.execute(update(schema.verdicts).values(reason=reason))

    await store.write(lambda conn: put_replies(conn, reply(1, calls=("call-1",))))
    await store.write(judge_all, lambda _: rejected())
    for reason, result in (
        ("filter rules: the question is too long", Result.MISSING),
        ("filter rules: the answer is too short", Result.FAILURE),
        ("filter python: not for training", Result.FAILURE),
    ):
        await store.write(put, reason)
        assert (await store.read(watches.outcomes_of, ["call-1"]))["call-1"].result is result

    def repeat(conn: Connection) -> None:
        number = conn.execute(select(tasks.c.id)).scalar_one()
        values = {"task_id": number, "original_id": number, "similarity": 1.0, "method": "exact", "created_at": "now"}
        conn.execute(schema.duplicates.insert().values(**values))

    await store.write(repeat)
    assert (await store.read(watches.outcomes_of, ["call-1"]))["call-1"].why == "the question repeats another one"
