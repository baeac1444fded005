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
    # A criterion with one of SAGE's names for a metric does not take its place.
    bench.rubric([{"id": name, "type": "contains", "value": "°C"} for name in ("cold", "tool_accuracy")])
    shown = bench.filter("--dry-run", "--tasks", str(file), "--metrics", "tool_accuracy,step_efficiency,timing,cold")
    found = shown["metrics"]
    assert list(found) == ["tool_selection_accuracy", "step_efficiency", "timing_precision", "cold"]
    tools, steps, timing = (found[name] for name in list(found)[:3])
    assert (tools["mean"], tools["count"], tools["unmeasured"]) == (2 / 3, 3, 2)
    assert (steps["mean"], steps["count"]) == ((1 + 1 + 0.5) / 3, 3)
    assert 0 <= steps["lower"] <= steps["mean"] <= steps["upper"] <= 1
    assert (timing["mean"], timing["count"], timing["unmeasured"]) == (None, 0, 5)
    assert (found["cold"]["mean"], found["cold"]["count"]) == (1, 5)


def test_what_cannot_be_measured_is_named(bench: Bench) -> None:
    file = bench.folder / "replies.jsonl"
    file.write_text(json.dumps(line("right", made("search", "{}", "7 °C"), ground_truth=TRUTH)) + "\n")
    bench.rubric(CRITERIA)
    for options, why in (
        (("--metrics", "retrieval"), "Measure it with `flywheel retrieval evaluate`."),
        (("--metrics", "all", "--estimate"), "--metrics measures replies that are judged"),
    ):
        ran = bench("filter", "--dry-run", "--tasks", file, *options)
        assert (ran.code != 0, why in ran.err) == (True, True)
