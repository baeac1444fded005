"""A task file with ground truth is ingested and filtered by the checks that use it, without a judge."""

from __future__ import annotations

import json
from typing import Any

from flywheel.records.ground_truth import GroundTruth, ground_truth_of
from tests.cli.filter_bench import Bench
from tests.judge.rubric.steps import made

CRITERIA = [
    {"id": "tools", "type": "expected-tools", "order": "as-listed", "required": True},
    {"id": "steps", "type": "optimal-steps", "required": True},
]
TRUTH = {"target_tools": ["search"], "optimal_steps": 1}


def line(name: str, steps: tuple[dict[str, Any], ...], **metadata: Any) -> dict[str, Any]:
    return {
        "task_id": name,
        "messages": [
            {"role": "user", "content": f"How cold is it in {name}?"},
            *steps,
            {"role": "assistant", "content": "7 °C"},
        ],
        "metadata": metadata,
    }


def test_a_file_with_ground_truth_is_filtered_by_it(bench: Bench) -> None:
    search, read = made("search", "{}", "7 °C"), made("read", "{}", "7 °C")
    lines = [
        line("right", search, ground_truth=TRUTH),
        line("wrong", read, ground_truth=TRUTH),
        line("failed", made("search", "{}", "Error: gone"), ground_truth=TRUTH),
        line("wasteful", (*search, *search, *search), ground_truth=TRUTH),
        line("unknown", search),
        line("mistaken", search, ground_truth={**TRUTH, "optimal_steps": "one"}),
    ]
    (bench.folder / "source.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    bench.rubric(CRITERIA)
    shown = bench.filter("--dry-run")
    assert bench.judge.calls == 0
    assert {each["task_id"]: each["outcome"] for each in shown["verdicts"]} == {
        "right": "accepted",
        "wrong": "rejected",
        "failed": "rejected",
        "wasteful": "rejected",
        "unknown": "undecided",
        "mistaken": "undecided",
    }
    reasons = {each["task_id"]: each["reason"] for each in shown["verdicts"] if each["outcome"] == "undecided"}
    assert "the task has no metadata.ground_truth.target_tools" in reasons["unknown"]
    assert '`metadata.ground_truth.optimal_steps` is "one"' in reasons["mistaken"]
    bench.filter()
    assert bench.judge.calls == 0
    tasks = [json.loads(text) for text in (bench.folder / "state" / "tasks.jsonl").read_text().splitlines()]
    [right] = [ground_truth_of(task) for task in tasks if task["task_id"] == "right"]
    assert right == GroundTruth(("search",), 1)
