"""A promotion is watched: outcomes by arm, the rollback of a worse version, and what a crash leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, select, update

from flywheel.config.notices import NoticeType
from flywheel.daemon.deployer import ABTestRequest
from flywheel.daemon.promotion_watch import PromotionWatch, outcome_of_call
from flywheel.daemon.status import snapshot
from flywheel.daemon.watch_figures import figure_text, figures_of
from flywheel.records.skipping import AWAITS_TOOLS
from flywheel.records.states import ReplyState, SkipReason, TaskState, WatchState
from flywheel.sources.call_puller import CallLogCopy
from flywheel.sources.calls.parsing import parse
from flywheel.store import deployments, notices, watches
from flywheel.store.erasures import Kind
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import tasks
from flywheel.store.views import lineage
from flywheel.store.watches import Outcome, Result
from flywheel.training.gate.sequential_test import detectable_loss
from tests.cases import for_each
from tests.factories.config import make_config
from tests.factories.erased import erase_rows
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
        await own.deployer.deploy("r0002", "r0002: better", ABTestRequest(0.5, "salt"))
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
async def test_after_so_many_days_the_new_version_gets_everything_and_nothing_was_shown(watched: Watched) -> None:
    await watched.answered("new", GOOD)
    await watched.watch().look()
    assert (await watched.row()).state == WatchState.WATCHING
    await watched.watch(max_days=1e-9).look()
    row = await watched.row()
    assert row.state == WatchState.NOT_SHOWN
    assert row.reason.startswith("1e-09 days were not enough to show whether it is worse: ")
    assert "no loss could have been noticed yet" in row.reason
    assert await watched.serving() == ("r0002", False)
    assert [text.split(":")[0] for text in await told(watched)] == ["the watch of r0002 as agent cannot decide"]
    story = await watched.store.read(lineage.why, "r0002")
    assert story is not None and [each["state"] for each in story["watches"]] == ["not_shown"]


async def told(watched: Watched) -> list[str]:
    """The notices about watches that cannot decide."""
    found, _ = await watched.store.read(notices.after, 0, {NoticeType.WATCH_INCONCLUSIVE}, 10_000)
    return [each.text for each in found]


@pytest.mark.slow
async def test_a_watch_needs_outcomes_of_both_versions(watched: Watched) -> None:
    """As many as are asked for, but fewer than a quarter of them are of the new version, as may happen by chance."""
    for old, new, state in ((UNITS - 9, 9, WatchState.WATCHING), (0, 1, WatchState.KEPT)):
        await watched.answered("old", GOOD, old)
        await watched.answered("new", GOOD, new)
        # As where the verdicts of some are still to come.
        watched.pull(*(watched.call("new") for _ in range(2 * old // 3)))
        await watched.watch().look()
        assert (await watched.row()).state == state


@pytest.mark.slow
async def test_arms_that_chance_does_not_explain_are_told_at_once_and_nothing_is_kept(watched: Watched) -> None:
    """A version whose calls are lost has fewer conversations than it was given; those that are left may be good."""
    watch = watched.watch()
    await watched.answered("old", GOOD, 70)
    await watched.answered("new", GOOD, 20)
    for _ in range(2):
        await watch.look()
    assert (await watched.row()).state == WatchState.WATCHING
    [text] = await told(watched)
    assert "r0002 has 20 of 90 conversations, which chance does not explain at a share of 50 % (p = " in text
    status = await watched.store.read(snapshot, watched.config)
    assert any("which chance does not explain" in warning for warning in status["warnings"])
    await watched.answered("new", GOOD, 40)
    await watch.look()
    assert (await watched.row()).state == WatchState.KEPT


@pytest.mark.slow
@pytest.mark.parametrize("lacks", ["new", "old"])
async def test_a_version_that_another_one_answers_for_is_not_kept(watched: Watched, lacks: str) -> None:
    """Its adapter is not on a server: both arms are answered by the same version, and so there is no loss."""
    for arm in ("new", "old"):
        answering = "agent@r0001" if lacks == "new" else "agent@r0002"
        await watched.answered(arm, GOOD, UNITS, **({"version": answering} if arm == lacks else {}))
    await watched.watch().look()
    row = await watched.row()
    assert row.state == WatchState.WATCHING
    name = "r0002" if lacks == "new" else "r0001"
    [text] = await told(watched)
    assert f"{name} answered 0 % of its conversations" in text and f"a server lacks {name}" in text
    figures = await watched.store.read(figures_of, row)
    assert getattr(figures, lacks).answered == 0.0
    assert figures.detectable_loss is None
    await watched.watch(max_days=1e-9).look()
    assert (await watched.row()).state == WatchState.NOT_SHOWN


@pytest.mark.slow
async def test_the_loss_that_would_be_noticed_is_of_what_the_new_version_answered(watched: Watched) -> None:
    await watched.answered("old", GOOD, 120)
    await watched.answered("old", BAD, 20)
    await watched.answered("new", GOOD, 90)
    await watched.answered("new", BAD, 10)
    await watched.answered("new", GOOD, 10, version="agent@r0001")
    await watched.answered("new", BAD, 10, version="agent@r0001")
    await watched.watch(until_units=10_000).look()
    figures = await watched.store.read(figures_of, await watched.row())
    assert figures.new.answered == pytest.approx(100 / 120, abs=1e-4)
    assert (
        "r0002 83 % of 120 conversations (83 % answered by itself) against r0001 86 % of 140 conv" in figures.summary
    )
    expected = detectable_loss(260, 120 / 260, 220 / 260)
    assert expected is not None and figures.detectable_loss is not None
    assert figures.detectable_loss == pytest.approx(expected * 1.2, rel=1e-4)
    assert await told(watched) == [], "five of six is enough"


@pytest.mark.slow
async def test_after_all_its_days_a_watch_with_a_doubt_is_kept_and_says_so(watched: Watched) -> None:
    await watched.answered("old", GOOD, 70)
    await watched.answered("new", GOOD, 20)
    await watched.watch(max_days=1e-9).look()
    row = await watched.row()
    assert row.state == WatchState.KEPT
    assert "chance does not explain" in row.reason


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
@pytest.mark.parametrize("has_happened", [False, True])
async def test_a_rollback_that_a_crash_interrupted_is_carried_out_once(watched: Watched, has_happened: bool) -> None:
    await worse(watched)
    assert await watched.serving() == ("r0002", True)
    if has_happened:
        await watched.deployer.rollback("r0001", why="worse in traffic")
    for _ in range(2):
        await watched.watch().look()
    assert (await watched.row()).state == WatchState.ROLLED_BACK
    assert await watched.serving() == ("r0001", False)
    assert (await watched.store.read(deployments.outcomes, "agent"))["rolled_back"] == 1


@pytest.mark.slow
async def test_an_ab_test_that_ended_before_the_crash_ends_the_watch(watched: Watched) -> None:
    await watched.watch().look()
    row = await watched.row()
    figures = await watched.store.read(figures_of, row)
    await watched.store.write(watches.note, row, WatchState.KEPT, "no loss was shown", figures)
    await watched.deployer.end_ab_test("no loss was shown")
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
async def test_a_version_that_loses_replies_is_rolled_back(watched: Watched) -> None:
    watch = watched.watch()
    for _ in range(20):
        await watched.answered("old", GOOD)
        watched.pull(watched.call("new", is_complete=False))
    await watch.look()
    row = await watched.row()
    assert row.state == WatchState.ROLLED_BACK
    assert row.reason.startswith(
        "worse in traffic: more of its replies are missing: r0002 20 of 20 conversations against r0001 0 of 20"
        " conversations; e-value "
    )
    assert await watched.serving() == ("r0001", False)
    assert row.figures["new"]["reasons"] == {"the client disconnected before the end": 20}
    assert (row.figures["e_value"], row.figures["shows_harm"], row.figures["shows_missing"]) == (1.0, False, True)


@pytest.mark.slow
async def test_replies_that_both_versions_lose_roll_nothing_back(watched: Watched) -> None:
    watched.pull(*(watched.call(arm, is_complete=False) for _ in range(60) for arm in ("new", "old")))
    await watched.watch().look()
    row = await watched.row()
    assert row.state == WatchState.WATCHING
    own = (await watched.store.read(snapshot, watched.config))["targets"][""]["watch"]["figures"]
    assert (own.new.missing, own.old.missing, own.e_value_missing <= 1.0) == (60, 60, True)


async def entered_a_day_ago(watched: Watched, watch: PromotionWatch) -> None:
    """As where its calls were read a day ago, by a process that has run for longer."""
    day = 24 * 3600 * 10**9
    columns = schema.watch_units.c
    entered = update(schema.watch_units).values(entered_ns=columns.entered_ns - day)
    await watched.store.write(lambda conn: conn.execute(entered))
    watch._began -= 3600


@pytest.mark.slow
async def test_a_reply_that_has_not_ended_after_a_day_is_missing(watched: Watched) -> None:
    """No source has it, or its trace has not ended. What waits for the judge or for a person is not missing."""
    watch = watched.watch()
    calls = [watched.call("new") for _ in range(6)]
    watched.pull(*calls)
    await watch.look()
    details = {1: "the agent's own span has not arrived", 2: f"{AWAITS_TOOLS}pay is allowed or carried out elsewhere"}

    def put(conn: Connection) -> None:
        for place, detail in details.items():
            skip = SkipReason.UNFINISHED
            put_replies(conn, reply(place, calls=(calls[place].request_id,), skip=skip, skip_detail=detail))
        for place in (3, 4):
            put_replies(conn, reply(place, calls=(calls[place].request_id,)))
        conn.execute(update(tasks).where(tasks.c.id == 1).values(state=TaskState.DEAD))
        put_replies(conn, reply(5, calls=(calls[5].request_id,), skip=SkipReason.UNFINISHED))
        replies = schema.replies
        is_last = replies.c.span_id == reply(5).span_id
        conn.execute(update(replies).where(is_last).values(state=ReplyState.OPEN, skip_reason=None))

    await watched.store.write(put)
    await watch.look()
    number = (await watched.row()).id
    assert await watched.store.read(watches.results, number) == []
    await entered_a_day_ago(watched, watch)
    await watched.watch().look()
    assert await watched.store.read(watches.results, number) == [], "a process that has just begun reads on first"
    await watch.look()
    waiting = {row.request_id for row in await watched.store.read(watches.undecided, number)}
    assert waiting == {calls[place].request_id for place in (2, 3, 4)}
    figures = await watched.store.read(figures_of, await watched.row())
    assert dict(figures.new.reasons) == {"the reply never ended": 3}


@pytest.mark.slow
async def test_what_the_request_alone_decides_is_no_unit_and_what_was_counted_stays(watched: Watched) -> None:
    watch = watched.watch()
    calls = [watched.call("new") for _ in range(5)]
    skipped = (SkipReason.PRIVATE, SkipReason.AGENT_EXCLUDED, SkipReason.NESTED)
    watched.pull(*calls)

    def put(conn: Connection) -> None:
        for place, skip in enumerate(skipped):
            put_replies(conn, reply(place, calls=(calls[place].request_id,), skip=skip))
        put_replies(conn, reply(3, calls=(calls[3].request_id,)))
        judge_all(conn, lambda _: accepted())

    await watched.store.write(put)
    await watch.look()
    number = (await watched.row()).id
    figures = await watched.store.read(figures_of, await watched.row())
    assert (figures.units, figures.untested, figures.new.units, figures.new.waiting) == (5, 3, 2, 1)
    # Later a call of a counted unit continues a response, and one of a unit without an outcome, too.
    units = [int(each.unit, 16) for each in calls]
    watched.pull(watched.call("", units[3]), watched.call("", units[4]))
    await watch.look()
    figures = await watched.store.read(figures_of, await watched.row())
    assert (figures.untested, figures.new.units, figures.new.successes) == (4, 1, 1)
    assert await watched.store.read(watches.results, number) == [(True, Result.SUCCESS)]


@pytest.mark.slow
async def test_an_erasure_takes_out_what_is_not_counted_and_leaves_what_is(watched: Watched) -> None:
    watch = watched.watch()
    counted, waiting = watched.call("new"), watched.call("new")
    watched.pull(counted)
    await watched.store.write(watched._judged, [counted], BAD)
    await watch.look()
    watched.pull(waiting)
    await watched.store.write(lambda conn: put_replies(conn, reply(9, calls=(waiting.request_id,))))
    await watch.look()
    figures = await watched.store.read(figures_of, await watched.row())
    assert (figures.new.failures, figures.new.waiting) == (1, 1)
    for number in (1, 9):
        await watched.store.write(erase_rows, Kind.CONVERSATION, f"conversation-{number}")
    await watch.look()
    row = await watched.row()
    assert await watched.store.read(watches.results, row.id) == [(True, Result.FAILURE)]
    figures = await watched.store.read(figures_of, row)
    assert (figures.units, figures.new.units) == (1, 1)
    units = await watched.store.read(lambda conn: conn.execute(select(schema.watch_units)).all())
    assert [(each.unit, each.request_id) for each in units] == [("erased 1", "erased 1")]


@pytest.mark.slow
async def test_status_warns_of_units_that_are_no_conversations(watched: Watched) -> None:
    watch = watched.watch(until_units=10_000)
    watched.pull(*(watched.call("new", 1) for _ in range(50)))
    watched.pull(*(watched.call("old", 100 + n, unit_kind="fallback") for n in range(30)))
    await watch.look()
    status = await watched.store.read(snapshot, watched.config)
    assert any("one conversation has 62 % of the calls" in text for text in status["warnings"])
    assert any(
        "97 % of the conversations are identified by their first message only" in text for text in status["warnings"]
    )


async def test_units_of_the_base_model_belong_to_the_alias_that_was_asked_for(tmp_path: Path, store: Store) -> None:
    """Two targets are watched at once, and the base model is the version before of both."""
    targets = {"one": {"alias": "agent"}, "two": {"alias": "other"}}
    config = make_config(tmp_path, sources=[], model={"base": BASE}, targets=targets)

    def put(conn: Connection) -> None:
        ab_test = {"other": None, "share": 0.5, "salt": "s"}
        for number, alias in ((1, "agent"), (2, "other")):
            put_round(conn, number)
            put_adapter(conn, number)
            put_deployment(conn, f"r000{number}", alias=alias, active_alias=alias, ab_test=ab_test)

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
    ({"is_complete": False}, Outcome(Result.MISSING, "the client disconnected before the end")),
    ({"status": 0, "is_complete": False}, Outcome(Result.MISSING, "the client disconnected before the end")),
    ({"answer": completion(assistant(""))}, Outcome(Result.FAILURE, "an empty answer")),
    ({"answer": completion(assistant(None))}, Outcome(Result.FAILURE, "an empty answer")),
    (
        {"answer": {"choices": [{"index": 0, "message": assistant("7 and"), "finish_reason": "length"}]}},
        Outcome(Result.FAILURE, "a cut answer"),
    ),
]


def test_a_huge_e_value_is_told_in_short() -> None:
    assert [figure_text(value) for value in (0.333, 19.6, 1234.4, 3.2e30)] == ["0.33", "20", "1,234", "3.2e+30"]


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
    ({"skip": SkipReason.TRUNCATED}, None, Outcome(Result.MISSING, "a cut trace")),
    ({"skip": SkipReason.UNFINISHED}, None, None),
    ({"skip": SkipReason.RECORDED}, None, None),
    ({"skip": SkipReason.NESTED}, None, Outcome(Result.NO_UNIT, "not judged (nested)")),
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


async def test_what_the_question_decides_is_no_unit(store: Store) -> None:
    def put(conn: Connection, reason: str) -> None:
        conn.execute(update(schema.verdicts).values(reason=reason))

    await store.write(lambda conn: put_replies(conn, reply(1, calls=("call-1",))))
    await store.write(judge_all, lambda _: rejected())
    for reason, result in (
        ("filter rules: the question is too long", Result.NO_UNIT),
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
