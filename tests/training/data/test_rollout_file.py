"""The files of a round's steps, whole or absent and listed without reading tokens, and that of the gate's answers."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import StoreError
from flywheel.training.data import rollout_file
from flywheel.training.data.rollout_file import groups, read_answers, rollout_of, rollouts, step_file, write_step
from tests.factories.rollout import IN_ONE_FILE, rollout
from tests.factories.round import put_answers


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


def test_groups_and_their_rollouts_are_found_without_reading_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (2, 10, 1):
        write_step(step_file(tmp_path, number), step(number))
    assert list(rollouts(tmp_path)) == [*step(1), *step(2), *step(10)]
    monkeypatch.setattr(rollout_file, "_sized", None)
    found = list(groups(tmp_path))
    assert [(group.step, group.group, group.task_id) for group in found] == [
        (number, group, f"t-{group}") for number in (1, 2, 10) for group in range(3)
    ]
    first = found[0]
    assert (first.rewards, first.mean, first.spread) == ([0.0, 0.25, 0.5, 0.75], 0.375, 0.75)
    assert first.rollouts[0].failed == ("right",)
    assert [rollout_of(group, place) for group in found for place in range(4)] == [*step(1), *step(2), *step(10)]
    # A list reads the first lines alone: all others may be anything.
    for path in rollout_file.step_files(tmp_path):
        head, _, tokens = path.read_bytes().partition(b"\n")
        path.write_bytes(head + b"\n" + b"x" * len(tokens))
    assert list(groups(tmp_path)) == found


def test_files_of_steps_are_private(tmp_path: Path) -> None:
    write_step(path := step_file(tmp_path, 1), step(1))
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path)] == [0o700, 0o600]


def test_a_round_without_rollouts_has_no_groups(tmp_path: Path) -> None:
    assert (list(groups(tmp_path)), list(rollouts(tmp_path))) == ([], [])


@pytest.mark.parametrize("first", [b"", b"{}\n", b'{"is_usable": true, "groups": [{"step": 1}]}\n'])
def test_what_is_no_file_of_a_step_is_named_with_what_its_removal_would_cost(tmp_path: Path, first: bytes) -> None:
    write_step(path := step_file(tmp_path, 1), step(1))
    path.write_bytes(first)
    with pytest.raises(
        StoreError, match=r"0001\.jsonl: its first line is no summary.*If you remove it, its rollouts"
    ):
        list(groups(tmp_path))


def test_a_line_that_is_no_rollout_is_named(tmp_path: Path) -> None:
    write_step(path := step_file(tmp_path, 1), step(1))
    path.write_bytes(path.read_bytes().replace(b'"samples"', b'"simples"', 1))
    with pytest.raises(StoreError, match=r"0001\.jsonl: line 2 is no rollout"):
        list(rollouts(tmp_path))
    with pytest.raises(StoreError, match=r"0001\.jsonl: the line at byte \d+ is no rollout"):
        rollout_of(next(groups(tmp_path)), 0)


def test_a_round_with_all_steps_in_one_file_is_read(tmp_path: Path) -> None:
    directory = shutil.copytree(IN_ONE_FILE, tmp_path / "r0001")
    found = list(groups(directory))
    assert [(group.step, group.group, group.task_id, group.dropped) for group in found] == [
        (number, group, f"t-{group + 1}", "misses" if group else None) for number in (1, 2) for group in (0, 1)
    ]
    assert found[0].rewards == [1.0, 0.0, 0.75, 0.25]
    read = [rollout_of(group, place) for group in found for place in range(len(group.rollouts))]
    assert read == list(rollouts(directory))
    assert [each["answer"] for each in read[:2]] == ["seven (0)", "seven (1)"]
    assert [each.missed for each in found[1].rollouts] == [False, False, False, True]
    # A process that died has left half of a line.
    with (directory / "rollouts.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "gro')
    assert list(groups(directory)) == found


def test_the_answers_about_some_tasks(tmp_path: Path) -> None:
    put_answers(tmp_path, ["t-1", "t-10", "t-2"])
    path = tmp_path / "evaluation.jsonl"
    with path.open("ab") as file:
        file.write(b'{"task_id":"t-1","side":"cand')
    found = read_answers(path, {"t-1"})
    assert found is not None
    assert [(each["task_id"], each["side"], each["seed"], each["reward"]) for each in found] == [
        ("t-1", "candidate", 0, 0.0),
        ("t-1", "candidate", 1, 1.0),
        ("t-1", "deployed", 0, 1.0),
        ("t-1", "deployed", 1, 0.0),
    ]
    assert read_answers(path, set()) == []


def test_answers_about_a_suite_are_not_those_about_a_held_out_task_of_the_same_id(tmp_path: Path) -> None:
    put_answers(tmp_path, ["math/t-1"])
    path = tmp_path / "evaluation.jsonl"
    of_suite = path.read_bytes().replace(b'{"task_id"', b'{"suite":"math","task_id"')
    path.write_bytes(path.read_bytes() + of_suite)
    assert of_suite.count(b'"suite"') == 4
    assert len(read_answers(path, {"math/t-1"}) or ()) == 4


def test_a_file_that_retention_removed_has_no_answers(tmp_path: Path) -> None:
    assert read_answers(tmp_path / "evaluation.jsonl", {"t-1"}) is None


def test_a_line_that_is_no_answer_is_named(tmp_path: Path) -> None:
    put_answers(tmp_path, ["t-1"])
    path = tmp_path / "evaluation.jsonl"
    path.write_bytes(path.read_bytes() + b'{"task_id":"t-1"}\n')
    with pytest.raises(StoreError, match="line 5 is no answer"):
        read_answers(path, {"t-1"})
