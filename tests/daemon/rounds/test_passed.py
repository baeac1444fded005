"""Candidates that the gate passed wait: for whom, how long, and what ends it. Nothing of it depends on when a process
died."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from flywheel.daemon.rounds import worker_watch
from flywheel.daemon.rounds.retention import remove_old
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.daemon.rounds.waiting import waits_for
from flywheel.daemon.status import snapshot
from flywheel.errors import ServeError, StoreError
from flywheel.records.states import RoundState
from flywheel.store import deployments, requests, rounds, samples
from flywheel.store.deployments import BY_HAND
from flywheel.store.kernel import schema
from flywheel.store.requests import RequestKind
from flywheel.store.views import lineage
from flywheel.system.signals import StopReason
from tests.daemon.rounds.moments import MOMENTS, Moment
from tests.daemon.rounds.workers import works
from tests.factories.verdict import put_more_tasks
from tests.factories.wheel import Wheel, leave_result, manual, passes
from tests.waiting import until

PASSED, PROMOTED, REJECTED, FAILED = (
    RoundState.PASSED, RoundState.PROMOTED, RoundState.REJECTED, RoundState.FAILED,
)  # fmt: skip


async def ask(wheel: Wheel, kind: RequestKind, name: str = "r0001") -> requests.Request:
    arguments = {"round": name, "max_uses": 3}
    number = await wheel.store.write(requests.submit, kind, arguments, "alice")
    return await wheel.store.read(requests.with_id, number)


async def states(wheel: Wheel) -> list[str]:
    return [row.state for row in await wheel.store.read(rounds.newest, 9)]


async def test_a_candidate_waits_for_a_person_and_holds_up_no_other_round(wheel: Wheel, by_hand: Rounds) -> None:
    await passes(wheel, by_hand)
    row = await wheel.row()
    assert (row.live, row.finished_at, row.reason.startswith("better: ")) == (None, None, True)
    assert await wheel.active() is None and wheel.server.loaded == {}
    assert (await wheel.books())["reserved"] == 6, "nobody else may take them yet"
    await by_hand.promote_passed()
    assert await states(wheel) == ["passed"]
    await wheel.store.write(put_more_tasks, 6)
    assert (await by_hand.due()).start
    assert await passes(wheel, by_hand) == "r0002"
    assert (await wheel.books())["reserved"] == 12
    assert await wheel.store.read(waits_for, manual(wheel), row) == "a person: `flywheel deploy r0001`"
    first, second = (await wheel.store.read(snapshot, manual(wheel)))["rounds"]
    assert first["waits_for"] == "a person: `flywheel deploy r0001`" and "waits_until" in first
    assert second["waits_for"].endswith("r0002`")


async def test_what_a_candidate_was_trained_on_counts_as_tried(wheel: Wheel, by_hand: Rounds) -> None:
    """Those that people accept are not reserved: the next round must not take them again."""
    tried = select(schema.tasks.c.id).where(samples.tried() == 1)
    assert not await wheel.store.read(lambda conn: conn.execute(tried).all())
    await passes(wheel, by_hand)
    assert await wheel.store.read(lambda conn: conn.execute(tried).all())


async def test_a_deployment_by_hand_promotes_in_the_same_transaction(wheel: Wheel, by_hand: Rounds) -> None:
    await passes(wheel, by_hand)
    await wheel.deployer.deploy("r0001", BY_HAND)
    row = await wheel.row()
    assert (row.state, row.live, row.reason.startswith("better: ")) == ("promoted", None, True)
    assert row.finished_at is not None
    assert (await wheel.books())["consumed"] == 6
    await by_hand.promote_passed()
    assert (await wheel.store.read(lineage.why, "r0001"))["state"] == "promoted"


async def test_a_person_approves_and_whoever_runs_rounds_next_deploys(wheel: Wheel, by_hand: Rounds) -> None:
    await passes(wheel, by_hand)
    assert (await ask(wheel, RequestKind.DEPLOY)).result == {"deploys": "r0001"}
    assert await states(wheel) == ["passed"], "the request alone swaps nothing"
    told = (await wheel.store.read(snapshot, manual(wheel)))["rounds"][0]
    assert "next `flywheel run`" in told["waits_for"] and "waits_until" not in told
    await wheel.others(manual(wheel)).promote_passed()
    assert await states(wheel) == ["promoted"]
    assert (await wheel.active()).adapter == "r0001"
    assert (await wheel.books())["consumed"] == 6


@pytest.mark.slow
async def test_an_approved_candidate_is_deployed_beside_the_worker_of_another_round(
    wheel: Wheel, by_hand: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await passes(wheel, by_hand)
    await wheel.store.write(put_more_tasks, 6)
    works(tmp_path, monkeypatch, "exec sleep 600")
    await by_hand.plan("test")
    going = asyncio.create_task(by_hand.finish_live())
    await until(lambda: wheel.trains("r0002"), "the worker")
    await ask(wheel, RequestKind.DEPLOY)
    await by_hand.promote_passed()
    assert await states(wheel) == ["promoted", "training"]
    by_hand._stop.ask(StopReason.FINISHED)
    await going


@pytest.mark.parametrize("kind", [RequestKind.DEPLOY, RequestKind.REFUSE])
async def test_there_is_nothing_to_decide_about_a_round_that_does_not_wait(wheel: Wheel, kind: RequestKind) -> None:
    leave_result(wheel, await wheel.started())
    await wheel.rounds.finish_live()
    failed = await ask(wheel, kind)
    assert failed.error is not None and "it is promoted, and does not wait" in str(failed.error)
    failed = await ask(wheel, kind, "r0009")
    assert failed.error is not None and "there is no such round" in str(failed.error)
    assert await states(wheel) == ["promoted"]


async def test_a_refused_candidate_is_rejected_and_its_samples_are_free(wheel: Wheel, by_hand: Rounds) -> None:
    await passes(wheel, by_hand)
    assert (await ask(wheel, RequestKind.REFUSE)).result == {"refused": ["r0001"]}
    row = await wheel.row()
    assert (row.state, row.reason.partition("; but ")[2]) == ("rejected", "alice refused it")
    assert (await wheel.books())["accepted"] == 6 + 2
    assert await wheel.active() is None


async def test_a_candidate_about_which_nobody_decides_is_rejected_in_the_end(wheel: Wheel, by_hand: Rounds) -> None:
    await passes(wheel, by_hand)

    async def days_pass(days: int) -> None:
        at = f"2026-01-{1 + days:02d}T00:00:00.000+00:00"
        passing = schema.events.c.new == "passed"
        await wheel.store.write(lambda conn: conn.execute(update(schema.events).where(passing).values(at=at)))

    week = wheel.others(manual(wheel, deploy={"approval_days": 36_500}))
    await days_pass(1)
    await week.promote_passed()
    assert await states(wheel) == ["passed"]
    await by_hand.promote_passed()
    row = await wheel.row()
    assert row.state == "rejected"
    assert row.reason.endswith("; but nobody deployed it within 7 days (deploy.approval_days)")
    assert (await wheel.books())["accepted"] == 6 + 2


async def test_an_approved_candidate_does_not_expire_while_the_servers_are_away(wheel: Wheel) -> None:
    short = wheel.others(manual(wheel, deploy={"approval_days": 1e-9}))
    leave_result(wheel, await wheel.started())
    assert await short.finish_live() is PASSED
    await ask(wheel, RequestKind.DEPLOY)
    wheel.server.faults["/v1/models"] = (503, "no such place")
    with pytest.raises(ServeError):
        await short.promote_passed()
    assert await states(wheel) == ["passed"]
    wheel.server.faults.clear()
    await short.promote_passed()
    assert await states(wheel) == ["promoted"]


async def test_a_candidate_whose_files_have_changed_while_it_waited_fails(wheel: Wheel, by_hand: Rounds) -> None:
    name = await passes(wheel, by_hand)
    (wheel.config.state_dir / "rounds" / name / "adapter" / "weights").write_text("tampered")
    await ask(wheel, RequestKind.DEPLOY)
    await by_hand.promote_passed()
    assert await states(wheel) == ["failed"]
    assert "not those that were evaluated" in (await wheel.row()).reason
    assert (await wheel.books())["accepted"] == 6 + 2


@pytest.mark.parametrize(("name", "ends"), [("r0002", ["failed", "promoted"]), ("r0001", ["promoted", "failed"])])
async def test_the_promotion_of_one_ends_the_others_that_were_compared_with_the_same(
    wheel: Wheel, by_hand: Rounds, name: str, ends: list[str]
) -> None:
    await passes(wheel, by_hand)
    await wheel.store.write(put_more_tasks, 6)
    await passes(wheel, by_hand)
    await wheel.deployer.deploy(name, BY_HAND)
    assert await states(wheel) == ends
    other = await wheel.row({"r0001": "r0002", "r0002": "r0001"}[name])
    assert other.reason.endswith(f"; but it was compared with the base model, and {name} serves now")
    books = await wheel.books()
    assert (books["consumed"], books["accepted"]) == (6, 6 + 2)
    due = await by_hand.due()
    assert due.start, f"it delays no round: {due.reason}"


async def test_of_two_that_are_decided_at_once_one_is_promoted(wheel: Wheel, by_hand: Rounds) -> None:
    """The swap of the other one finds under the lock that it was compared with something else."""
    await passes(wheel, by_hand)
    await wheel.store.write(put_more_tasks, 6)
    leave_result(wheel, await wheel.started())
    await asyncio.gather(wheel.rounds.promote_passed(), wheel.rounds.finish_live())
    ends = dict(zip(["r0001", "r0002"], await states(wheel), strict=True))
    assert sorted(ends.values()) == ["failed", "promoted"]
    assert ends[(await wheel.active()).adapter] == "promoted"
    books = await wheel.books()
    assert (books["consumed"], books["accepted"]) == (6, 6 + 2)


async def test_a_rollback_ends_what_was_compared_with_the_adapter_that_is_rolled_back(
    wheel: Wheel, by_hand: Rounds
) -> None:
    leave_result(wheel, await wheel.started())
    assert await wheel.rounds.finish_live() is PROMOTED
    await wheel.store.write(put_more_tasks, 6)
    await passes(wheel, by_hand)
    await wheel.deployer.rollback()
    assert await states(wheel) == ["promoted", "failed"]
    assert "compared with r0001, and the base model serves now" in (await wheel.row("r0002")).reason


def full(*_: object, **__: object) -> None:
    raise StoreError("use the state database", "the disk is full")


@pytest.mark.parametrize("broken", ["let_wait", "decide_passed"])
async def test_a_crash_while_a_candidate_begins_to_wait_changes_nothing(
    wheel: Wheel, by_hand: Rounds, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    leave_result(wheel, await wheel.started())
    with monkeypatch.context() as patch:
        patch.setattr(rounds, broken, full)
        with pytest.raises(StoreError):
            await by_hand.finish_live()
    assert await states(wheel) == ["evaluating"]
    assert await wheel.others(manual(wheel)).finish_live() is PASSED
    decided = select(schema.gate_tests).where(schema.gate_tests.c.decision.is_not(None))
    assert len(await wheel.store.read(lambda conn: conn.execute(decided).all())) == 1
    await wheel.books()


@pytest.mark.parametrize("broken", [(deployments, "activate"), (rounds, "decide_passed"), (rounds, "finish")])
async def test_a_crash_between_swap_and_record_is_repeated_as_a_whole(
    wheel: Wheel, by_hand: Rounds, monkeypatch: pytest.MonkeyPatch, broken: tuple[Any, str]
) -> None:
    await passes(wheel, by_hand)
    await ask(wheel, RequestKind.DEPLOY)
    with monkeypatch.context() as patch:
        patch.setattr(*broken, full)
        with pytest.raises(StoreError):
            await by_hand.promote_passed()
    assert await wheel.active() is None, "the swap and what follows of it are recorded together or not at all"
    assert await states(wheel) == ["passed"]
    await wheel.others(manual(wheel)).promote_passed()
    assert await states(wheel) == ["promoted"]
    assert (await wheel.active()).adapter == "r0001"
    assert (await wheel.books())["consumed"] == 6


async def test_a_crash_after_an_automatic_swap_leaves_nothing_that_waits(
    wheel: Wheel, by_hand: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings may have changed before the restart: what serves has been promoted."""
    leave_result(wheel, await wheel.started())
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "finish", full)
        with pytest.raises(StoreError):
            await wheel.rounds.finish_live()
    assert await states(wheel) == ["evaluating"]
    assert await by_hand.finish_live() is PROMOTED


async def test_a_candidate_that_waited_is_promoted_once_the_settings_ask_for_nobody(
    wheel: Wheel, by_hand: Rounds
) -> None:
    await passes(wheel, by_hand)
    await wheel.rounds.promote_passed()
    assert await states(wheel) == ["promoted"]


@pytest.mark.slow
async def test_the_files_of_a_candidate_stay_as_long_as_it_waits(wheel: Wheel, by_hand: Rounds) -> None:
    name = await passes(wheel, by_hand)
    assert (await remove_old(wheel.store, wheel.config, 0, "test")).removed == []
    assert (wheel.config.state_dir / "rounds" / name / "adapter" / "weights").exists()
    await ask(wheel, RequestKind.REFUSE)
    removed = (await remove_old(wheel.store, wheel.config, 0, "test")).removed
    assert [each.round for each in removed] == [name]


async def with_parent(wheel: Wheel) -> None:
    """An adapter serves, and there are samples for the next round."""
    leave_result(wheel, await wheel.started())
    assert await wheel.rounds.finish_live() is PROMOTED
    await wheel.store.write(put_more_tasks, 6)


WHY = "its parent r0001 was rolled back"


@pytest.mark.slow
@pytest.mark.parametrize("number", MOMENTS)
async def test_a_round_is_cancelled_at_any_moment_with_its_worker(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(worker_watch, "WATCH_SECONDS", 0.05)
    await with_parent(wheel)
    works(tmp_path, monkeypatch, f"echo $$ >> {tmp_path}/pids; exec sleep 600")
    await wheel.rounds.plan("test")
    moment = Moment(wheel.rounds.finish_live(), number, monkeypatch)
    await moment.has_come((tmp_path / "pids").exists)
    row = await wheel.row("r0002")
    cancelling = asyncio.create_task(wheel.rounds.cancel(row, WHY))
    await until(wheel.rounds._stop_of(row).is_set, "the cancellation")
    moment.go_on()
    assert await cancelling == "r0002"
    row = await wheel.row("r0002")
    assert (row.state, row.live, row.reason) == ("failed", None, WHY)
    assert (await wheel.books())["accepted"] == 6 + 2
    await moment.task
    pids = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
    assert [pid for pid in pids if Path("/proc", pid).exists()] == []
    await wheel.store.write(put_more_tasks, 12)
    await wheel.rounds.plan("test")
    assert await wheel.state("r0003") == "planned", "the next round is not cancelled with it"


@pytest.mark.parametrize("state", ["planned", "training", "evaluating", "abandoned"])
async def test_a_round_is_cancelled_in_each_state_without_anyone_who_finishes_it(wheel: Wheel, state: str) -> None:
    await with_parent(wheel)
    await wheel.started()
    own = schema.rounds.c.name == "r0002"
    await wheel.store.write(lambda conn: conn.execute(update(schema.rounds).where(own).values(state=state)))
    assert await wheel.rounds.cancel(await wheel.row("r0002"), WHY) == "r0002"
    assert await wheel.state("r0002") == "failed"
    assert (await wheel.books())["accepted"] == 6 + 2


async def test_a_cancellation_that_comes_late_ends_no_other_round(wheel: Wheel) -> None:
    """The round ends while whoever cancels it still looks."""
    leave_result(wheel, await wheel.started())
    row = await wheel.row()
    assert await wheel.rounds.finish_live() is PROMOTED
    await wheel.store.write(put_more_tasks, 6)
    directory = await wheel.started()
    await wheel.rounds.cancel(row, WHY)
    assert await states(wheel) == ["promoted", "training"]
    leave_result(wheel, directory)
    assert await wheel.rounds.finish_live() is PROMOTED
