"""A round whose tasks are erased ends, whatever its state, and the next one is planned without them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from sqlalchemy import Connection, select, update

from flywheel.daemon import service as service_module
from flywheel.daemon.rounds.rounds import end_round_with_erased
from flywheel.daemon.service import Service
from flywheel.records.round import SPEC_FILE, GateTest
from flywheel.records.states import RoundState, TaskState
from flywheel.records.tool_calls import SharedRecordings, ToolResult
from flywheel.store import rounds
from flywheel.store.kernel import schema
from flywheel.store.kernel.transitions import move
from flywheel.store.samples import candidates, replayable
from flywheel.system.files import write_json
from tests.daemon.rounds.workers import stray_worker, works
from tests.factories.round import round_spec
from tests.factories.verdict import put_more_tasks
from tests.factories.wheel import Wheel, leave_result, passes
from tests.waiting import until

TEST = GateTest(epoch=1, number=2, alpha=0.01)


def erase(conn: Connection, numbers: Sequence[int]) -> None:
    for number in numbers:
        state = conn.execute(select(schema.tasks.c.state).where(schema.tasks.c.id == number)).scalar_one()
        assert move(conn, number, TaskState(state), TaskState.ERASED, "by hand")


async def samples(wheel: Wheel, name: str = "r0001") -> list[int]:
    row, of = await wheel.row(name), schema.round_samples.c
    query = select(of.task_id).where(of.round_id == row.id).order_by(of.task_id)
    return list(await wheel.store.read(lambda conn: conn.execute(query).scalars().all()))


@pytest.mark.slow
@pytest.mark.parametrize(("state", "place"), [("planned", 0), ("training", -1), ("evaluating", 0), ("abandoned", -1)])
@pytest.mark.parametrize("way", ["cancel", "finish", "command"])
async def test_a_round_with_an_erased_task_ends_in_each_state(wheel: Wheel, state: str, place: int, way: str) -> None:
    """The task is one of training (0), or held out (-1)."""
    await wheel.started()
    own = schema.rounds.c.name == "r0001"
    await wheel.store.write(lambda conn: conn.execute(update(schema.rounds).where(own).values(state=state)))
    assert await wheel.rounds.cancel_erased() is None, "it has none"
    assert await end_round_with_erased(wheel.store) is None
    gone = (await samples(wheel))[place]
    await wheel.store.write(erase, [gone])
    match way:
        case "cancel":
            assert await wheel.rounds.cancel_erased() == "r0001"
        case "finish":
            assert await wheel.rounds.finish_live() is RoundState.FAILED
        case _:
            assert await end_round_with_erased(wheel.store) == "r0001"
    row, books = await wheel.row(), await wheel.books()
    assert (row.state, row.reason) == ("failed", rounds.HAS_ERASED)
    assert (books["erased"], books.get("reserved", 0)) == (1, 0), "the others are free"
    # The next one need not wait, as after a failure.
    assert await wheel.rounds.start_due()
    assert gone not in await samples(wheel, "r0002")
    assert await wheel.rounds.cancel_erased() is None


@pytest.mark.slow
async def test_a_daemon_that_runs_ends_the_round_and_begins_the_next(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to ask it for that."""
    monkeypatch.setattr(service_module, "RETRY_SECONDS", 0.2)
    works(tmp_path, monkeypatch, f"echo $$ >> {tmp_path}/pids; exec sleep 600")

    async def begun(count: int) -> bool:
        started = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
        return len(started) == count and await wheel.state(f"r{count:04d}") == "training"

    service = Service(wheel.config, wheel.store)
    running = asyncio.create_task(service.run())
    try:
        await until(lambda: begun(1), "the first worker")
        gone = (await samples(wheel))[0]
        await wheel.store.write(erase, [gone])
        await until(lambda: begun(2), "the worker of the next round")
        assert (await wheel.row()).reason == rounds.HAS_ERASED
        assert gone not in await samples(wheel, "r0002")
        first, _ = (tmp_path / "pids").read_text().split()
        assert not Path("/proc", first).exists()
    finally:
        service.stop()
        await running


@pytest.mark.slow
async def test_a_worker_without_a_daemon_is_stopped(wheel: Wheel) -> None:
    directory = await wheel.started()
    await wheel.store.write(erase, (await samples(wheel))[:1])
    with stray_worker(directory) as process:
        assert await end_round_with_erased(wheel.store) == "r0001"
        assert process.wait(timeout=60) != 0


async def test_a_round_that_has_tool_results_of_an_erased_task_ends(wheel: Wheel) -> None:
    """They are in its specification, which may be written after the task was erased, and in the worker's memory."""
    directory = await wheel.started()
    await wheel.store.write(put_more_tasks, 1)
    of_round = await samples(wheel)
    keys = dict(
        await wheel.store.read(lambda conn: list(conn.execute(select(schema.tasks.c.id, schema.tasks.c.key))))
    )
    [other] = keys.keys() - {*of_round}
    await wheel.store.write(erase, [other])
    assert await wheel.rounds.cancel_erased() is None
    results = [{}, *({"a call": ToolResult("said", task_id=keys[number])} for number in (of_round[0], other))]
    for found, ended in zip(results, [None, None, "r0001"], strict=True):
        spec = round_spec(shared=SharedRecordings(found))
        write_json(directory / SPEC_FILE, spec.model_dump(mode="json"))
        assert await wheel.rounds.cancel_erased() == ended


async def test_a_candidate_that_waits_stays(wheel: Wheel, by_hand: object) -> None:
    await passes(wheel, by_hand)  # type: ignore[arg-type]
    await wheel.store.write(erase, (await samples(wheel))[:1])
    assert await wheel.rounds.cancel_erased() is None
    assert await wheel.state() == "passed"
    assert (await wheel.books())["erased"] == 1


async def test_nothing_takes_an_erased_task(wheel: Wheel) -> None:
    """As a sample, to replay, or to ask in the gate; nor one that was erased since the samples were chosen."""
    leave_result(wheel, await wheel.started())
    assert await wheel.rounds.finish_live() is RoundState.PROMOTED
    await wheel.store.write(put_more_tasks, 6)
    of_round = await samples(wheel)
    config = wheel.config
    scope = config.takes.train

    def replayed(conn: Connection) -> set[int]:
        rubric = conn.execute(select(schema.verdicts.c.rubric_hash)).scalars().first()
        return {row.id for row in replayable(conn, scope, 100, rubric or "", with_spread=False)}

    before = await wheel.store.read(replayed)
    assert before
    consumed, held_out = min(before), of_round[-1]
    chosen = await wheel.store.read(
        lambda conn: conn.execute(
            select(schema.tasks.c.id).where(schema.tasks.c.state == "accepted", schema.tasks.c.split == "train")
        ).scalars().all()
    )  # fmt: skip
    await wheel.store.write(erase, [consumed, held_out, chosen[0]])
    free = await wheel.store.read(candidates, scope)
    assert {row.id for row in free} == {*chosen[1:]}
    assert await wheel.store.read(replayed) == before - {consumed}
    row = await wheel.store.write(
        lambda conn: rounds.plan(
            conn, config.state_dir / "rounds", chosen, of_round[-2:], TEST, trigger="test", seed=1,
            config_hash="c", rubric_hash="r", replayed=sorted(before), more=[held_out],
        )
    )  # fmt: skip
    taken = set(await samples(wheel, row.name))
    assert taken == {*chosen, *before, *of_round[-2:]} - {consumed, held_out, chosen[0]}
