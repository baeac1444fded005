"""Which held-out conversations a round's test asks, at which level, and what spends the error budget."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select

from flywheel.config.file import Config
from flywheel.daemon.rounds import planner
from flywheel.daemon.rounds.gate_planning import NextTest, next_test
from flywheel.daemon.status import snapshot
from flywheel.errors import TrainError
from flywheel.records.round import AdapterRef, RoundSpec
from flywheel.records.states import RoundState, Split
from flywheel.store import gate_tests
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from flywheel.system.files import tree_sha256, write_json
from flywheel.training.gate.gate import alpha_of
from tests import warm
from tests.daemon.rounds.killed_decision import finish
from tests.factories.gate import ended, filled, gate_config, result_of
from tests.factories.round import debug_round, planned_round
from tests.factories.state import open_state
from tests.factories.trace import replies_on, reply
from tests.factories.verdict import put_judged


def keys(spec: RoundSpec) -> set[str]:
    return {task.task_id for task in spec.held_out}


def number_of(spec: RoundSpec) -> tuple[int, int, float]:
    return spec.test.epoch, spec.test.number, spec.test.alpha


def used(conn: Connection) -> dict[int, int]:
    """How many conversations each test that was spent has used."""
    table = schema.gate_tests
    rows = conn.execute(select(table.c.round_id, table.c.conversations).where(table.c.conversations.is_not(None)))
    return {row.round_id: row.conversations for row in rows}


async def test_a_round_on_the_same_conversations_is_the_next_test_of_the_epoch(tmp_path: Path, store: Store) -> None:
    await filled(store, 10)
    config = gate_config(tmp_path, non_inferiority_margins={"correct": 0.1, "boxed": 0.1})
    first = await planned_round(store, config)
    assert number_of(first) == (1, 1, alpha_of(0.004, 1))
    assert len({task.conversation for task in first.held_out}) == 10
    assert await store.read(used) == {}, "it is planned, and not spent"
    await ended(store, first)
    assert await store.read(used) == {1: 10}
    recorded = await store.read(lambda conn: conn.execute(select(schema.gate_conversations.c.conversation)).scalars())
    assert set(recorded) == {task.conversation for task in first.held_out}
    second = await planned_round(store, config)
    assert number_of(second) == (1, 2, alpha_of(0.004, 2)), "two criteria with margins have spent nothing"
    assert keys(second) == keys(first)


async def test_what_came_since_is_asked_too_while_the_epoch_goes_on(tmp_path: Path, store: Store) -> None:
    await filled(store, 10)
    first = await planned_round(store, gate_config(tmp_path))
    await ended(store, first)
    await filled(store, 19)
    second = await planned_round(store, gate_config(tmp_path))
    assert number_of(second)[:2] == (1, 2)
    assert len(keys(second)) == 19 and keys(first) < keys(second)


async def test_an_epoch_begins_with_as_many_conversations_as_the_last_test_used_and_asks_only_those(
    tmp_path: Path, store: Store
) -> None:
    await filled(store, 10)
    first = await planned_round(store, gate_config(tmp_path))
    await ended(store, first)
    await filled(store, 20)
    second = await planned_round(store, gate_config(tmp_path))
    assert number_of(second) == (2, 1, alpha_of(0.004, 1))
    assert len(keys(second)) == 10 and keys(first).isdisjoint(keys(second))
    await ended(store, second)
    third = await planned_round(store, gate_config(tmp_path))
    assert number_of(third)[:2] == (2, 2)
    assert keys(third) == keys(second), "those of an earlier epoch are never asked again"


async def test_a_full_gate_leaves_new_conversations_for_the_next_epoch(tmp_path: Path, store: Store) -> None:
    config = gate_config(tmp_path, max_tasks=8)
    await filled(store, 8)
    first = await planned_round(store, config)
    await ended(store, first)
    await filled(store, 15)
    second = await planned_round(store, config)
    assert number_of(second)[:2] == (1, 2)
    assert keys(second) == keys(first)
    await ended(store, second)
    await filled(store, 16)
    third = await planned_round(store, config)
    assert number_of(third)[:2] == (2, 1)
    assert keys(third).isdisjoint(keys(first))


@pytest.mark.parametrize("state", [RoundState.REJECTED, RoundState.FAILED])
@pytest.mark.parametrize(
    ("values", "test"),
    [
        ({"outcome": "refused", "reason": "no spread", "comparison": None}, 1),
        ({"outcome": "trained", "comparison": None}, 1),
        ({}, 2),
    ],
)
async def test_only_a_round_whose_rewards_were_seen_has_spent_its_test(
    tmp_path: Path, store: Store, state: RoundState, values: dict[str, Any], test: int
) -> None:
    await filled(store, 10)
    await ended(store, await planned_round(store, gate_config(tmp_path)), state, **values)
    assert number_of(await planned_round(store, gate_config(tmp_path)))[:2] == (1, test)


async def test_a_debug_round_is_no_test(tmp_path: Path, store: Store) -> None:
    await filled(store, 10)
    config = gate_config(tmp_path)
    spec = await debug_round(store, config)
    assert (spec.test, spec.held_out) == (None, [])
    assert number_of(await planned_round(store, config))[:2] == (1, 1)


async def test_one_task_of_every_conversation_is_asked_before_a_second_one(tmp_path: Path, store: Store) -> None:
    long = [
        reply(1000 + turn, conversation_id=each.conversation_id)
        for each in replies_on(Split.HELD_OUT, 1)
        for turn in range(30)
    ]
    await store.write(put_judged, *replies_on(Split.TRAIN, 2), *replies_on(Split.HELD_OUT, 10), *long)
    spec = await planned_round(store, gate_config(tmp_path, max_tasks=12))
    assert len(spec.held_out) == 12
    assert len({task.conversation for task in spec.held_out}) == 10


async def test_replies_without_a_conversation_are_told_apart_by_their_traces(tmp_path: Path, store: Store) -> None:
    alone = [each for number in range(60) if (each := reply(number, conversation_id="unknown"))]
    await store.write(put_judged, *alone, *replies_on(Split.TRAIN, 2))
    first = await planned_round(store, gate_config(tmp_path))
    assert len({task.conversation for task in first.held_out}) == len(first.held_out) > 5
    await ended(store, first)
    assert await store.read(used) == {1: len(first.held_out)}
    assert number_of(await planned_round(store, gate_config(tmp_path)))[:2] == (1, 2)


async def coming(store: Store, config: Config) -> NextTest:
    return await store.read(next_test, config)


async def test_no_round_starts_that_could_hardly_show_ten_points_and_status_tells_what_is_missing(
    tmp_path: Path, store: Store
) -> None:
    config = gate_config(tmp_path, min_power=0.3)
    await filled(store, 20)
    gate = (await store.read(snapshot, config))["targets"][""]["gate"]
    assert (gate["epoch"], gate["test"], gate["conversations"]) == (1, 1, 20)
    assert gate["power"] < 0.3
    missing = gate["missing"]
    assert missing is not None and missing > 0
    wanted = await store.read(planner.due, config)
    assert not wanted.start
    assert wanted.reason.startswith(
        f"waiting for {missing} more held-out conversations (20 of {20 + missing}, for 30% power"
    )
    with pytest.raises(TrainError, match=rf"20 of {20 + missing}, for 30% power \(gate\.min_power\)"):
        await planned_round(store, config)
    await filled(store, 20 + missing - 1)
    assert (await coming(store, config)).missing == 1
    await filled(store, 20 + missing)
    assert (await coming(store, config)).missing == 0
    assert (await store.read(planner.due, config)).start
    await planned_round(store, config)


async def test_what_is_missing_is_the_shorter_way_to_this_test_or_a_new_epoch(tmp_path: Path, store: Store) -> None:
    config = gate_config(tmp_path, min_power=0.3)
    await filled(store, 45)
    for number in range(1, 4):
        spec = await planned_round(store, config.model_copy(update={"gate": gate_config(tmp_path).gate}))
        assert number_of(spec)[:2] == (1, number)
        await ended(store, spec)
    found = await coming(store, config)
    assert (found.test.number, found.conversations) == (4, 45)
    assert found.missing is not None and 1 < found.missing < 100
    await filled(store, 45 + found.missing - 1)
    assert (await coming(store, config)).missing == 1
    await filled(store, 45 + found.missing)
    assert (await coming(store, config)).missing == 0


async def test_a_gate_that_can_never_ask_enough_says_so(tmp_path: Path, store: Store) -> None:
    config = gate_config(tmp_path, min_power=0.3, max_tasks=10)
    await filled(store, 30)
    found = await coming(store, config)
    assert found.missing is None
    assert found.shortfall.startswith("gate.max_tasks 10 is too low for")


async def test_past_comparisons_tell_how_many_conversations_are_needed(tmp_path: Path, store: Store) -> None:
    config = gate_config(tmp_path, min_power=0.3)
    await filled(store, 45)
    spec = await planned_round(store, config)
    await ended(store, spec)
    varied = (await coming(store, config)).power

    def calm(conn: Connection) -> None:
        conn.execute(schema.gate_tests.update().values(spread=0.05))

    await store.write(calm)
    assert (await coming(store, config)).power > varied + 0.1


def put_result(config: Config, spec: RoundSpec) -> None:
    adapter = config.state_dir / "rounds" / spec.round_id / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "weights").write_text("good")
    ref = AdapterRef(name=spec.round_id, path=str(adapter), sha256=tree_sha256(adapter))
    write_json(adapter.parent / "result.json", result_of(spec, adapter=ref).model_dump(mode="json"))


@pytest.mark.parametrize("point", ["_trained", "decide", "finish"])
async def test_a_kill_between_evaluation_and_decision_spends_the_test_once(tmp_path: Path, point: str) -> None:
    config = gate_config(tmp_path)
    async with open_state(config.state_dir) as store:
        await filled(store, 10)
        spec = await planned_round(store, config)
        await store.write(move, 1, RoundState.PLANNED, RoundState.TRAINING)
        put_result(config, spec)
    command = [sys.executable, "-m", "tests.daemon.rounds.killed_decision", str(tmp_path), point]
    killed = await asyncio.to_thread(warm.run, command, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert await finish(config) is RoundState.REJECTED
    async with open_state(config.state_dir) as store:
        assert await store.read(used) == {1: 10}
        assert [test.number for test in await store.read(gate_tests.spent, 10)] == [1]
        await store.write(put_judged, *replies_on(Split.TRAIN, 30))
        assert number_of(await planned_round(store, config))[:2] == (1, 2)
