"""The index of a round's rollouts, and reading without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import StoreError
from flywheel.training.data import rollout_file
from flywheel.training.data.rollout_file import IndexedGroup, append, groups, rollout_of
from tests.factories.rollout import rollout

INDEX, ROLLOUTS = "rollouts.index.jsonl", "rollouts.jsonl"


def step(number: int, groups: int = 3, size: int = 4) -> list[dict[str, Any]]:
    """The rollouts of a step."""
    return [
        rollout(
            step=number, group=group, task_id=f"t-{group}", seed=seed, reward=seed / size, missed=False, dropped=None,
            answer=f"{'ä' * seed} answer {seed}",
        )
        for group in range(groups)
        for seed in range(size)
    ]  # fmt: skip


def whole(directory: Path) -> list[tuple[IndexedGroup, list[dict[str, Any]]]]:
    return [
        (group, [rollout_of(directory, group, place) for place in range(len(group.rollouts))])
        for group in groups(directory)
    ]


@pytest.fixture
def no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading of rollouts to find their groups fails."""

    def fail(*_: Any) -> Iterator[Any]:
        raise AssertionError("the rollouts are read")

    monkeypatch.setattr(rollout_file, "_read", fail)


@pytest.mark.usefixtures("no_scan")
def test_groups_and_their_rollouts_are_found_without_reading_the_others(tmp_path: Path) -> None:
    written = [*step(1), *step(2)]
    append(tmp_path, step(1))
    append(tmp_path, step(2))
    found = whole(tmp_path)
    assert [(group.step, group.group, group.task_id) for group, _ in found] == [
        (number, group, f"t-{group}") for number in (1, 2) for group in range(3)
    ]
    assert [each for _, rollouts in found for each in rollouts] == written
    first = found[0][0]
    assert (first.rewards, first.mean, first.spread) == ([0.0, 0.25, 0.5, 0.75], 0.375, 0.75)
    assert first.rollouts[0].failed == ("right",)


def test_rollouts_without_an_index_have_the_same_groups(tmp_path: Path) -> None:
    append(tmp_path, step(1))
    append(tmp_path, step(2))
    with_index = whole(tmp_path)
    (tmp_path / INDEX).unlink()
    assert whole(tmp_path) == with_index
    # Read again, and from what is remembered.
    assert whole(tmp_path) == with_index


def test_a_file_without_an_index_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ROLLOUTS
    path.write_text("".join(json.dumps(rollout(group=group)) + "\n" for group in (0, 0, 1, 1)))
    assert [len(group.rollouts) for group in groups(tmp_path)] == [2, 2]
    read: list[int] = []
    original = rollout_file._read

    def noted(path: Path, start: int) -> Iterator[tuple[dict[str, Any], int]]:
        read.append(start)
        return original(path, start)

    monkeypatch.setattr(rollout_file, "_read", noted)
    found = list(groups(tmp_path))
    assert read == [found[-1].at]
    # A file that grows, and one that is started over.
    with path.open("a") as file:
        file.write(json.dumps(rollout(group=1)) + "\n" + json.dumps(rollout(group=2)) + "\n")
    assert [len(group.rollouts) for group in groups(tmp_path)] == [2, 3, 1]
    path.write_text(json.dumps(rollout()) + "\n")
    assert [len(group.rollouts) for group in groups(tmp_path)] == [1]


@pytest.mark.parametrize("lost", [1, 40, 400])
def test_an_index_that_lacks_its_end_is_completed_from_the_rollouts(tmp_path: Path, lost: int) -> None:
    append(tmp_path, step(1))
    append(tmp_path, step(2))
    with_index = whole(tmp_path)
    index = tmp_path / INDEX
    index.write_bytes(index.read_bytes()[:-lost])
    assert whole(tmp_path) == with_index


def test_an_incomplete_line_of_rollouts_is_left_out(tmp_path: Path) -> None:
    append(tmp_path, step(1))
    with (tmp_path / ROLLOUTS).open("ab") as file:
        file.write(b'{"step": 2, "gro')
    assert [group.group for group in groups(tmp_path)] == [0, 1, 2]


def test_an_index_of_other_rollouts_is_refused_when_they_are_read(tmp_path: Path) -> None:
    append(tmp_path, step(1))
    path = tmp_path / ROLLOUTS
    path.write_text(path.read_text().replace('"t-1"', '"t-9"'))
    second = list(groups(tmp_path))[1]
    with pytest.raises(StoreError, match=r"of another group than its index says.*delete rollouts\.index\.jsonl"):
        rollout_of(tmp_path, second, 0)


def test_a_round_without_rollouts_has_no_groups(tmp_path: Path) -> None:
    assert list(groups(tmp_path)) == []


def test_the_index_is_small(tmp_path: Path) -> None:
    """Fewer than 100 bytes for each rollout, whatever its length."""
    written = step(1, groups=8, size=8)
    append(tmp_path, written)
    assert (tmp_path / INDEX).stat().st_size < 100 * len(written)
