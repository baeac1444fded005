"""Which samples a round can take: what ordinary installations have suffices, and what waits is counted by reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.config import Config
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.rounds import planner
from flywheel.daemon.status import snapshot
from flywheel.records.states import Split
from flywheel.records.trace import Reply
from flywheel.store import rounds
from flywheel.store.kernel.database import Store
from flywheel.system import files
from tests.daemon.filter_bench import Make, burst, run, states, tell
from tests.factories.trace import replies_on, reply

CHAINS = files.shipped_folder() / "filters"
NEEDED: dict[str, Any] = {"trigger": {"min_samples": 40}, "gate": {"min_tasks": 2, "min_power": 0}}


def by_chain(make: Make, name: str, **values: Any) -> Config:
    chain = {"chain": str(CHAINS / f"{name}.yaml"), "rubric": "rubric.yaml"}
    return make(filter=chain, **{**NEEDED, **values})


def one_kind(count: int, users: int = 0, conversations: int = 0) -> list[Reply]:
    """So many samples of one kind of question, by few users or in few conversations if it is said."""
    first = replies_on(Split.TRAIN, count)
    return [
        reply(
            1000 + n,
            query=f"What is {1000 + n} plus 1?",
            conversation_id=first[n % (conversations or count)].conversation_id,
            turn=n // conversations if conversations else 0,
            user=f"user {n % users}" if users else "",
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("kind", "widened"),
    [
        ({}, None),
        ({"users": 3}, "one user may be 35% of a round"),
        ({"users": 1}, "one user may be 100% of a round"),
        ({"conversations": 3}, "one conversation may be 35% of a round"),
        ({"conversations": 1, "users": 1}, "one conversation may be 100% and one user may be 100% of a round"),
    ],
)
async def test_the_default_chain_fills_a_round_with_what_an_ordinary_installation_has(
    store: Store, make: Make, kind: dict[str, int], widened: str | None
) -> None:
    """One kind of question, few users, few conversations, bursts: none of them keeps the wheel from turning."""
    config = by_chain(make, "default")
    await tell(store, *one_kind(40, **kind), *replies_on(Split.HELD_OUT, 2))
    await run(store, config)
    assert set(await states(store)) == {"accepted"}
    assert (await store.read(planner.due, config)).start
    state = await store.read(snapshot, config)
    own = state.targets[""]
    assert (own.free_samples, own.waiting_samples) == (40, {})
    assert [text.partition(",")[0] for text in state.warnings] == ([widened] if widened else [])
    row = await store.write(planner.plan, config, rubric_of(config), config.state_dir / "rounds", "test")
    assert len(await store.read(rounds.samples_of, row.id, Split.TRAIN)) == 40


async def test_open_to_strangers_keeps_to_its_shares_and_holds_bursts(store: Store, make: Make) -> None:
    config = by_chain(make, "open-to-strangers")
    await tell(store, *one_kind(40), *replies_on(Split.HELD_OUT, 2))
    await run(store, config)
    due = await store.read(planner.due, config)
    assert not due.start
    waiting = "39 over their share"
    assert due.reason == f"1 of 40 samples are free; {waiting}"
    state = await store.read(snapshot, config)
    own = state.targets[""]
    assert (own.free_samples, own.waiting_samples) == (1, {"over their share": 39})
    from flywheel.cli import status as status_command

    assert f"1 free of 40 needed, 2 held out; {waiting}\n" in status_command._text(state) + "\n"
    await tell(store, *burst(25, first=5000))
    await run(store, config)
    assert (await states(store)).count("held") > 0


async def test_the_default_chain_holds_no_burst(store: Store, make: Make) -> None:
    config = by_chain(make, "default")
    await tell(store, *burst(25))
    await run(store, config)
    assert "held" not in await states(store)


async def test_what_is_more_than_a_round_takes_is_counted_apart(tmp_path: Path, store: Store, make: Make) -> None:
    trigger = {"min_samples": 4, "max_samples": 8}
    await tell(store, *one_kind(20), *replies_on(Split.HELD_OUT, 2))
    for config in (make(trigger=trigger), by_chain(make, "default", trigger=trigger)):
        await run(store, config)
        state = await store.read(snapshot, config)
        own = state.targets[""]
        assert (own.free_samples, own.waiting_samples) == (8, {"more than a round takes": 12})


async def test_status_works_without_a_chain_that_can_be_read(store: Store, make: Make, tmp_path: Path) -> None:
    config = make(filter={"chain": "chain.yaml"})
    (tmp_path / "chain.yaml").write_text("filters: no")
    state = await store.read(snapshot, config)
    assert "read filter chain" in state.warnings[0]
    assert state.targets[""].free_samples == 0
