"""Counts of tasks, and of the criteria that replies miss, are the lengths of the lists that they lead to."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from flywheel.records.states import Split, TaskState
from flywheel.store.kernel.database import Store
from flywheel.store.views import acceptance, task_counts, task_list
from flywheel.store.views.task_counts import FILTERS, TaskCounts
from tests.factories import misses
from tests.factories.misses import NEW, OLD, OTHER, TRUE_MISS

ROWS = ("adapter", "agent", "model", "week")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(tmp_path)
    await store.write(misses.put_misses)
    yield store
    await store.close()


def length(conn: Connection, **chosen: str) -> int:
    """The length of the list of tasks with these values."""
    given: dict[str, Any] = dict(chosen)
    of_stage = [acceptance.stages()[given.pop("stage")]] if "stage" in given else []
    for name, kind in (("state", TaskState), ("split", Split)):
        if name in given:
            given[name] = kind(given[name])
    return task_list.count(conn, [*of_stage, *task_list.conditions(**given)])


async def test_every_share_is_of_the_tasks_that_its_list_has(store: Store) -> None:
    def compare(conn: Connection) -> int:
        counts = task_counts.task_counts(conn)
        compared = 0
        for rubric, by in itertools.product(misses.NAMES, ROWS):
            for value, shares in counts.misses(rubric, by).items():
                for criterion, share in shares.items():
                    chosen = {"rubric": rubric, by: value}
                    assert length(conn, **chosen, criterion=criterion) == share.part, (chosen, criterion)
                    # The list has also the replies whose verdict has no result for this criterion.
                    assert length(conn, **chosen) >= share.whole >= share.part
                    compared += share.part > 0
        return compared

    assert await store.read(compare) > 100


async def test_only_the_verdict_that_decides_a_reply_counts(store: Store) -> None:
    """By hand, from the numbers of the tasks: see `misses._decide`."""

    def expected(conn: Connection) -> dict[str, tuple[int, int]]:
        ids = range(1, 241)
        missed, whole = Counter[str](), Counter[str]()
        for task in ids:
            met = (task % 2 == 0, task % 3 == 0, task % 7 < 4)
            turned = tuple(not each for each in met)
            of = {5: (NEW, turned), 6: (OLD, met), 7: (NEW, turned), 8: (OLD, met)}.get(misses.way_of(task))
            if misses.way_of(task) >= 9:
                of = OTHER, met
            if misses.way_of(task) == 4:
                of = OTHER, (False,)
            if of is not None:
                for name, is_met in zip(("correct", "polite", TRUE_MISS), of[1], strict=False):
                    whole[f"{of[0]} {name}"] += 1
                    missed[f"{of[0]} {name}"] += not is_met
        return {name: (missed[name], whole[name]) for name in whole}

    def found(conn: Connection) -> dict[str, tuple[int, int]]:
        counts = task_counts.task_counts(conn)
        return {
            f"{rubric} {name}": (share.part, share.whole)
            for rubric in misses.NAMES
            for name, share in counts.misses(rubric, "stage")["judged"].items()
        }

    assert await store.read(found) == await store.read(expected)


async def test_versions_are_those_that_decided_something_with_the_newest_verdict_first(store: Store) -> None:
    counts = await store.read(task_counts.task_counts)
    assert {(each.hash, each.name) for each in counts.rubrics} == {*misses.NAMES.items()}
    times = [each.judged_at for each in counts.rubrics]
    assert times == sorted(times, reverse=True)
    # A filter's and a person's decisions are of no rubric.
    decided = sum(each.decided.whole for each in counts.rubrics)
    assert decided == sum(each.number for each in counts.groups if each.of("rubric"))
    assert decided == sum(misses.way_of(task) >= 4 for task in range(1, 241))


@pytest.mark.slow
async def test_the_number_beside_a_value_is_the_length_of_its_list(store: Store) -> None:
    """For every value of every filter, alone and beside every other value that was chosen."""

    def compare(conn: Connection) -> tuple[int, TaskCounts]:
        counts = task_counts.task_counts(conn)
        alone = counts.by_filter({})
        chosen: list[dict[str, str]] = [{}]
        for name in FILTERS:
            chosen += [{name: value} for value, _ in alone[name].most_common()[:: max(1, len(alone[name]) // 3)]]
        chosen += [{"adapter": "r0001"}, {"rubric": OLD, "criterion": "polite", "agent": " Eve "}]
        compared = 0
        for each in chosen:
            if "split" not in each:
                assert counts.by_filter(each)["split"].total() == length(conn, **each) > 0, each
            for name, values in counts.by_filter(each).items():
                for value, number in values.items():
                    assert length(conn, **{**each, name: value}) == number, (each, name, value)
                    compared += 1
        return compared, counts

    compared, counts = await store.read(compare)
    assert compared > 1000
    assert set(counts.by_filter({})) == {*FILTERS} and counts.by_filter({})["split"].total() == 240
    assert counts.by_filter({})["adapter"]["base"] > 0 < counts.by_filter({})["adapter"]["unrecorded"]


async def test_a_state_without_tasks_has_no_counts(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "empty")
    try:
        assert await store.read(task_counts.task_counts) == TaskCounts([], [])
    finally:
        await store.close()


async def test_a_list_shows_the_verdict_that_decides_after_a_change_of_rubric_and_back(store: Store) -> None:
    rows = await store.read(task_list.listed, [])
    for row in rows:
        if misses.way_of(row.id) in (5, 6, 7, 8):
            assert row.outcome == ("accepted" if row.state in ("accepted", "reserved") else "rejected")
        if misses.way_of(row.id) == 2:
            assert (row.state, row.outcome) == ("undecided", "undecided")
