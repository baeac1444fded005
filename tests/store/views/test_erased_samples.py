"""What erased tasks were used for, and what did not see them."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, select, update

from flywheel.records.round import RoundResult
from flywheel.records.states import AdapterState, RoundState, Split, TaskState
from flywheel.store import ledger
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import adapters, round_samples, rounds, tasks
from flywheel.store.rounds import store_result
from flywheel.store.views import erased_samples
from flywheel.store.views.erased_samples import AffectedAdapter, CleanVersion, HeldOutUse
from tests.factories.round import comparison, put_deployment, put_tested_round
from tests.factories.trace import batch, record, reply

PROMOTED, PASSED = RoundState.PROMOTED, RoundState.PASSED
TRAIN, HELD_OUT = Split.TRAIN.value, Split.HELD_OUT.value
USED = {
    (1, TRAIN): (1, 2), (2, TRAIN): (3, 4, 5, 6), (3, TRAIN): (7, 8), (4, TRAIN): (3, 7), (5, TRAIN): (1, 9),
    (1, HELD_OUT): (10,), (2, HELD_OUT): (10, 11), (3, HELD_OUT): (3,),
}  # fmt: skip
"""The tasks of each round. The third follows the second, and the second the first; the fourth, which waits, has
nothing to do with them, and the fifth begins anew."""


def put(conn: Connection, directory: Path) -> None:
    found = [reply(number, conversation_id=str(number)) for number in range(1, 12)]
    record(conn, ledger.source_id(conn, "/a"), batch(*found), train_ratio=0.7, split_seed=42)
    for number, parent, state in (
        (1, None, PROMOTED), (2, "r0001", PROMOTED), (3, "r0002", PROMOTED), (4, None, PASSED),
        (5, None, RoundState.REJECTED),
    ):  # fmt: skip
        put_tested_round(conn, number, state, directory, comparison(), parent=parent)
    rows = [
        {"round_id": number, "task_id": task, "split": split}
        for (number, split), used in USED.items()
        for task in used
    ]
    conn.execute(insert(round_samples), rows)
    put_deployment(conn, "r0001", retired_at="2026-11-23")
    put_deployment(conn, "r0005", retired_at="2026-11-24")
    put_deployment(conn, "r0003", ab_test={"other": "r0002", "share": 0.5, "salt": "s"})
    put_deployment(conn, "r0001", alias="other", active_alias="other")


def erase(conn: Connection, *numbers: int) -> None:
    conn.execute(update(tasks).where(tasks.c.id.in_(numbers)).values(state=TaskState.ERASED.value))


@pytest.fixture
async def story(store: Store, tmp_path: Path) -> Store:
    await store.write(put, tmp_path)
    return store


async def found(store: Store) -> list[AffectedAdapter]:
    return await store.read(erased_samples.affected)


async def test_an_adapter_is_affected_by_its_own_samples_and_by_those_of_its_ancestors(story: Store) -> None:
    assert await found(story) == []
    await story.write(erase, 3, 4, 7)
    second, third, fourth = await found(story)
    assert (second.adapter, second.samples, second.erased, second.share) == ("r0002", 4, 2, 0.5)
    assert (second.inherited_samples, second.inherited_erased, second.serves_as) == (2, 0, ("agent",))
    assert (third.adapter, third.share, third.inherited_samples, third.inherited_erased) == ("r0003", 0.5, 6, 2)
    assert third.sentence == (
        "r0003: it was trained on texts that were erased since (1 of 2 samples, 50.0%); it goes on from adapters that"
        " were (2 of 6 samples, 33.3%); it serves as agent"
    )
    assert (fourth.adapter, fourth.share, fourth.inherited_samples) == ("r0004", 1.0, 0)
    assert fourth.sentence.endswith("it waits to be deployed: refuse it, or deploy it knowing that")
    assert third.as_json()["inherited_share"] == pytest.approx(1 / 3)


async def test_the_same_is_known_before_the_tasks_are_erased(story: Store) -> None:
    before = await story.read(erased_samples.affected, [3, 4, 7])
    held_out = await story.read(erased_samples.held_out_uses, [3, 10])
    await story.write(erase, 3, 4, 7)
    assert await found(story) == before
    await story.write(erase, 10)
    assert await story.read(erased_samples.held_out_uses) == held_out


async def test_a_descendant_alone_inherits(story: Store) -> None:
    await story.write(erase, 1, 2)
    assert [(each.adapter, each.share, each.inherited_share) for each in await found(story)] == [
        ("r0001", 1.0, 0.0),
        ("r0002", 0.0, 1.0),
        ("r0003", 0.0, 2 / 6),
        ("r0005", 0.5, 0.0),
    ]


async def test_a_task_that_was_left_out_or_held_out_trained_nothing(story: Store) -> None:
    def leave_out(conn: Connection) -> None:
        key = conn.execute(select(tasks.c.key).where(tasks.c.id == 8)).scalar_one()
        result = conn.execute(select(rounds.c.result).where(rounds.c.id == 3)).scalar_one()
        store_result(conn, 3, RoundResult.model_validate({**result, "left_out": {key: "too long"}}))
        # An erasure removes it from there.
        conn.execute(update(rounds).where(rounds.c.id == 3).values(result=result))

    await story.write(leave_out)
    await story.write(erase, 8, 10, 11)
    assert await found(story) == []
    assert await story.read(erased_samples.held_out_uses) == [
        HeldOutUse("r0001", "promoted", 1),
        HeldOutUse("r0002", "promoted", 2),
    ]


async def clean(store: Store) -> list[CleanVersion]:
    return await store.read(erased_samples.last_clean, await found(store))


async def test_the_last_clean_version_is_the_newest_that_an_alias_can_go_back_to(story: Store) -> None:
    assert await clean(story) == []
    await story.write(erase, 8)
    # The fifth served once, and is newer than the second, from which the third was trained.
    [version] = await clean(story)
    assert version == CleanVersion("agent", "r0003", "r0005")
    assert "`flywheel rollback --to r0005`" in version.sentence
    await story.write(erase, 9)
    assert await clean(story) == [CleanVersion("agent", "r0003", "r0002")]
    gone = update(adapters).where(adapters.c.name == "r0002").values(state=AdapterState.REMOVED.value)
    await story.write(lambda conn: conn.execute(gone))
    assert await clean(story) == [CleanVersion("agent", "r0003", "r0001")], "the files of r0002 were removed"
    await story.write(erase, 1)
    agent, other = await clean(story)
    assert (agent.clean, other) == (None, CleanVersion("other", "r0001", None))
    assert "the base model" in other.sentence and "--to base" in other.sentence
