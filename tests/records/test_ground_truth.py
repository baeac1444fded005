"""The ground truth of a task: where a line has it, and what it is refused for."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import EXIT_CONFIG, ConfigError
from flywheel.records.ground_truth import GroundTruth, ground_truth_of, raw_ground_truth
from flywheel.records.task import whole_line
from flywheel.sources.jsonl.record import entry_of_line

TRUTH: dict[str, Any] = {
    "target_tools": ["search", "read"],
    "optimal_steps": 2,
    "answer": "7 °C",
    "trajectory": [{"role": "assistant", "content": "7 °C"}],
}


def ingested(**metadata: Any) -> dict[str, Any]:
    """The task of a line of a task file."""
    text = json.dumps({"question": "How cold?", "answer": "7", "metadata": metadata}).encode()
    task: dict[str, Any] = json.loads(entry_of_line(text, Path("rows.jsonl"), datetime.now(UTC)).line)
    return task


def test_a_task_file_s_ground_truth_is_in_the_task_and_in_the_task_that_is_read_again() -> None:
    whole = GroundTruth(("search", "read"), 2, "7 °C", ({"role": "assistant", "content": "7 °C"},))
    task = ingested(ground_truth=TRUTH, difficulty="easy")
    for line in (task, whole_line(task), ingested(**task["metadata"]), {"metadata": {"ground_truth": TRUTH}}):
        assert ground_truth_of(line) == whole


def test_every_part_may_be_missing_and_an_empty_list_is_no_missing_part() -> None:
    nothing: list[dict[str, Any]] = [
        {}, {"metadata": None}, {"metadata": {}}, ingested(), ingested(ground_truth=None), ingested(ground_truth={}),
        ingested(difficulty="ground_truth"), {"metadata": {"extra_json": "{ground_truth"}},
    ]  # fmt: skip
    assert [ground_truth_of(line) for line in nothing] == [GroundTruth()] * len(nothing)
    none_needed = ground_truth_of(ingested(ground_truth={"target_tools": [], "trajectory": [], "optimal_steps": 0}))
    assert none_needed == GroundTruth((), 0, None, ())
    # Data sets have keys of their own.
    assert ground_truth_of(ingested(ground_truth={"answer": 7, "note": "by hand"})) == GroundTruth(answer="7")


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ("42", '`metadata.ground_truth` is "42", not an object'),
        (
            {"target_tools": "search"},
            '`metadata.ground_truth.target_tools` is "search", not a list of names of tools',
        ),
        ({"target_tools": ["a", 1]}, "target_tools"),
        ({"target_tools": [""]}, "target_tools"),
        (
            {"optimal_steps": "2"},
            '`metadata.ground_truth.optimal_steps` is "2", not a whole number of at least 0',
        ),
        ({"optimal_steps": True}, "optimal_steps` is true"),
        ({"optimal_steps": -1}, "optimal_steps` is -1"),
        ({"optimal_steps": 2.5}, "optimal_steps` is 2.5"),
        ({"answer": ["7"]}, "`metadata.ground_truth.answer` is ["),
        ({"answer": False}, "`metadata.ground_truth.answer` is false, not a text or a number"),
        ({"trajectory": "[]"}, "`metadata.ground_truth.trajectory` is"),
        ({"trajectory": [{"content": "x"}]}, "not a list of messages, each with a `role`"),
    ],
)
def test_a_wrong_type_is_an_error_that_names_the_key_and_the_task(raw: Any, complaint: str) -> None:
    task = {**ingested(ground_truth=raw), "task_id": "t-7"}
    assert raw_ground_truth(task) == raw
    with pytest.raises(ConfigError) as caught:
        ground_truth_of(task)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("cannot read the ground truth of task t-7: ")
    assert caught.value.exit_code == EXIT_CONFIG
