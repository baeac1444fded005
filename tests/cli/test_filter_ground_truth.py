"""A task file with ground truth is ingested and filtered by the checks that use it, without a judge."""

from __future__ import annotations

import json
from typing import Any

import pytest

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


def test_replies_are_measured_against_it(bench: Bench) -> None:
    search, read = made("search", "{}", "7 °C"), made("read", "{}", "7 °C")
    truth = {**TRUTH, "optimal_steps": 1}
    lines = [
        line("right", search, ground_truth=truth),
        line("wrong", read, ground_truth=truth),
        line("wasteful", (*search, *search), ground_truth=truth),
        line("unknown", search),
        line("mistaken", search, ground_truth={**TRUTH, "optimal_steps": "one"}),
    ]
    file = bench.folder / "replies.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    bench.rubric([{"id": "cold", "type": "contains", "value": "°C", "required": True}])
    shown = bench.filter("--dry-run", "--tasks", str(file), "--metrics", "tool_accuracy,step_efficiency,timing,cold")
    found = shown["metrics"]
    assert list(found) == ["tool_selection_accuracy", "step_efficiency", "timing_precision", "cold"]
    tools, steps, timing = (found[name] for name in list(found)[:3])
    assert (tools["mean"], tools["count"], tools["unmeasured"]) == (2 / 3, 3, 2)
    assert (steps["mean"], steps["count"]) == ((1 + 1 + 0.5) / 3, 3)
    assert 0 <= steps["lower"] <= steps["mean"] <= steps["upper"] <= 1
    assert (timing["mean"], timing["count"], timing["unmeasured"]) == (None, 0, 5)
    assert (found["cold"]["mean"], found["cold"]["count"]) == (1, 5)


def test_a_criterion_of_the_same_name_replaces_no_metric(bench: Bench) -> None:
    """SAGE's metrics with a rubric that has criteria by their names: a policy that calls no tool is no good one."""
    file = bench.folder / "replies.jsonl"
    file.write_text("".join(json.dumps(line(name, (), ground_truth=TRUTH)) + "\n" for name in ("one", "two")))
    named = ("tool_accuracy", "efficiency", "tool_selection_accuracy")
    bench.rubric([{"id": name, "type": "contains", "value": "°C"} for name in named])
    metrics = bench.filter("--dry-run", "--tasks", str(file), "--metrics", "tool_accuracy,efficiency")["metrics"]
    assert {name: each["mean"] for name, each in metrics.items()} == {
        "tool_selection_accuracy": 0,
        "step_efficiency": 1,
    }
    found = bench.filter("--dry-run", "--tasks", str(file), "--metrics", "all")["metrics"]
    assert {f"criterion:{name}" for name in named} < set(found)
    assert {found[f"criterion:{name}"]["mean"] for name in named} == {1}
    assert found["tool_selection_accuracy"]["mean"] == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--metrics", "retrieval"), "Measure it with `flywheel retrieval evaluate`."),
        (("--metrics", "tool_accurac"), "Did you mean tool_accuracy?"),
        (("--metrics", "all", "--estimate"), "--metrics measures replies that are judged"),
    ],
)
def test_what_cannot_be_measured_is_named(bench: Bench, options: tuple[str, ...], why: str) -> None:
    file = bench.folder / "replies.jsonl"
    file.write_text(json.dumps(line("right", made("search", "{}", "7 °C"), ground_truth=TRUTH)) + "\n")
    bench.rubric(CRITERIA)
    ran = bench("filter", "--dry-run", "--tasks", file, *options)
    assert ran.code != 0
    assert why in ran.err
    assert "Traceback" not in ran.err
