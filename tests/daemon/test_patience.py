"""What a round without promotion gives back, and how long the next one then waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from flywheel.config.file import Config
from flywheel.daemon.rounds import planner
from flywheel.daemon.status import snapshot
from flywheel.records.states import RoundState, Split
from flywheel.store import rounds
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from tests.factories.config import base_model, with_settings, write_chain
from tests.factories.gate import ended, filled, gate_config
from tests.factories.round import planned_round

NEEDED = 4


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Rounds of eight samples at most, of which four start one."""
    sections = {"training": {"prompts_per_step": 8}, "trigger": {"min_samples": NEEDED}}
    return with_settings(gate_config(tmp_path), model={"base": base_model(tmp_path)}, **sections)


async def states(store: Store) -> list[str]:
    table = schema.tasks
    wanted = select(table.c.state).where(table.c.split == Split.TRAIN.value).order_by(table.c.id)
    return list(await store.read(lambda conn: conn.execute(wanted).scalars().all()))


async def taken(store: Store, number: int) -> list[int]:
    return await store.read(rounds.samples_of, number, Split.TRAIN)


REFUSED: dict[str, Any] = {"outcome": "refused", "comparison": None, "reason": "no spread"}


async def test_a_rejected_round_gives_back_what_fewer_than_three_rounds_have_used(
    store: Store, config: Config
) -> None:
    await filled(store, 10, train=6)
    for _ in range(2):
        await ended(store, await planned_round(store, config))
        assert await states(store) == ["accepted"] * 6
    await filled(store, 10, train=8)
    await ended(store, await planned_round(store, config))
    assert await states(store) == ["consumed"] * 6 + ["accepted"] * 2, "two were used once"
    await ended(store, await planned_round(store, config))
    assert await states(store) == ["consumed"] * 6 + ["accepted"] * 2, "what was consumed stays consumed"
    assert config.training.max_uses == 3


@pytest.mark.parametrize("state", [RoundState.REJECTED, RoundState.FAILED])
async def test_a_refused_or_failed_round_gives_all_back_and_is_no_use(
    store: Store, config: Config, state: RoundState
) -> None:
    await filled(store, 10, train=6)
    for _ in range(4):
        await ended(store, await planned_round(store, config), state, **REFUSED)
        assert await states(store) == ["accepted"] * 6


async def test_a_promoted_round_has_consumed_its_samples(store: Store, config: Config) -> None:
    await filled(store, 10, train=6)
    await ended(store, await planned_round(store, config), RoundState.PROMOTED)
    assert await states(store) == ["consumed"] * 6


async def promoted_with_two_idle(store: Store, config: Config) -> None:
    spec = await planned_round(store, config)
    idle = [task.task_id for task in spec.train][-2:]
    await ended(store, spec, RoundState.PROMOTED, without_gradient=idle)


async def test_a_promoted_round_gives_back_what_gave_no_gradient(store: Store, config: Config) -> None:
    await filled(store, 10, train=6)
    for consumed in (4, 4, 6):
        await promoted_with_two_idle(store, config)
        assert (await states(store)).count("consumed") == consumed, "at most max_uses compared rounds use a sample"


async def test_new_samples_come_before_those_that_gave_no_gradient(store: Store, config: Config) -> None:
    await filled(store, 10, train=6)
    await promoted_with_two_idle(store, config)
    await filled(store, 10, train=13)
    await planned_round(store, config)
    first, second = await taken(store, 1), await taken(store, 2)
    assert len(second) == 8
    assert set(second) & set(first) == {first[-2]}


@pytest.mark.parametrize("chain", [False, True])
async def test_new_samples_come_before_those_that_brought_nothing(
    store: Store, config: Config, tmp_path: Path, chain: bool
) -> None:
    if chain:
        params = {"conversation": 1, "user": 1, "template": 1}
        chain = write_chain(tmp_path, {"type": "influence", "params": params})
        config = with_settings(config, filter={"chain": chain})
    await filled(store, 10, train=8)
    await ended(store, await planned_round(store, config))
    await filled(store, 10, train=13)
    await planned_round(store, config)
    first, second = await taken(store, 1), await taken(store, 2)
    assert len(second) == 8
    assert set(second) - set(first) == {number for number in second if number > max(first)}
    assert len(set(second) - set(first)) == 5
    assert set(second) & set(first) == set(first[:3])


async def wait(store: Store, config: Config) -> str:
    """Why no round starts; empty when one does."""
    due = await store.read(planner.due, config)
    return "" if due.start else due.reason


@pytest.mark.parametrize("values", [{}, REFUSED])
async def test_after_rounds_without_promotion_the_trigger_waits_for_new_samples_longer_each_time(
    store: Store, config: Config, values: dict[str, Any]
) -> None:
    await filled(store, 10, train=8)
    there = 8
    for number in (1, 2, 3):
        assert await wait(store, config) == ""
        await ended(store, await planned_round(store, config), **values)
        needed = NEEDED * number
        told = f"{needed} new samples are free, after {number} round{'s' if number > 1 else ''} without promotion"
        assert await wait(store, config) == f"0 of {told}"
        await filled(store, 10, train=there + needed - 1)
        assert await wait(store, config) == f"{needed - 1} of {told}"
        status = (await store.read(snapshot, config))["targets"][""]["new_samples"]
        assert (status["free"], status["needed"], status["rounds_without_promotion"]) == (needed - 1, needed, number)
        assert status["wait"] == f"{needed - 1} of {told}"
        there += needed
        await filled(store, 10, train=there)
    assert await wait(store, config) == ""
    assert (await store.read(snapshot, config))["targets"][""]["new_samples"]["wait"] == ""
    await ended(store, await planned_round(store, config), RoundState.PROMOTED)
    await filled(store, 10, train=there + NEEDED)
    assert await wait(store, config) == "", "a promotion begins the count anew"


async def test_a_round_that_failed_waits_by_the_clock_and_not_for_samples(store: Store, config: Config) -> None:
    await filled(store, 10, train=8)
    await ended(store, await planned_round(store, config), RoundState.FAILED)
    assert "r0001 failed; the next attempt is at" in await wait(store, config)
    assert (await store.read(snapshot, config))["targets"][""]["new_samples"]["needed"] == 0
