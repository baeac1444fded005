"""The checks `expected-tools` and `optimal-steps`, in the filter's form of a task and in that of a rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.judge import JudgeSettings
from flywheel.errors import CheckError, ConfigError
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.checks import check
from flywheel.judge.rubric.file import contradictions, parse_rubric, read_rubric
from flywheel.judge.rubric.rubric import CRITERION
from flywheel.records.trace import ChatMessage
from flywheel.records.verdict import CriterionResult, Exchange, Outcome
from tests.cases import for_each
from tests.factories.judge_server import JudgeServer
from tests.judge.rubric.steps import made

SEARCH, READ = made("search", "{}", "x"), made("read", "{}", "y")
FAILED = made("read", "{}", "gone", status="error")
FINISH = made("generate_response", {"response": "7"}, "done")
TRUTH = {"target_tools": ["search", "read"], "optimal_steps": 2}


def of_task(truth: Any) -> dict[str, Any]:
    """The line of a task of the task file."""
    return {"task_id": "t-7", "metadata": {"extra_json": json.dumps({"metadata": {"ground_truth": truth}})}}


def result(kind: str, *steps: tuple[ChatMessage, ...], truth: Any = TRUTH, **options: Any) -> CriterionResult:
    criterion = CRITERION.validate_python({"id": "c", "type": kind, **options})
    trajectory: tuple[ChatMessage, ...] = sum(steps, ())
    found, same = (
        check(criterion, Exchange("q", "7", trajectory=trajectory, line=line))
        for line in (of_task(truth), {"metadata": {"ground_truth": truth}})
    )
    assert found == same
    return found


@for_each(
    ("steps", "in_any_order", "as_listed"),
    [
        ((SEARCH, READ), 1, 1),
        ((READ, SEARCH), 1, 0),
        ((SEARCH, SEARCH, READ, FINISH), 1, 1),
        ((SEARCH,), 2 / 3, 0),
        ((SEARCH, FAILED), 1, 0),
        ((SEARCH, FAILED, READ), 1, 1),
        ((), 0, 0),
    ],
)
def test_the_expected_tools_as_a_set_or_in_their_order(
    steps: tuple[tuple[ChatMessage, ...], ...], in_any_order: float, as_listed: float
) -> None:
    assert result("expected-tools", *steps).value == pytest.approx(in_any_order)
    assert result("expected-tools", *steps, order="any").value == pytest.approx(in_any_order)
    assert result("expected-tools", *steps, order="as-listed").value == as_listed


@for_each(
    ("steps", "truth", "value"),
    [
        ((SEARCH, READ), TRUTH, 1),
        ((SEARCH, SEARCH, READ, READ), TRUTH, 1 / 2),
        # The finish function is the answer.
        ((SEARCH, READ, FINISH), TRUTH, 1),
        # A target that is missing, or failed: few calls are no merit.
        ((SEARCH,), TRUTH, 0),
        ((SEARCH, FAILED), TRUTH, 0),
        ((SEARCH, FAILED, READ), TRUTH, 2 / 3),
        ((SEARCH,), {"optimal_steps": 2}, 1),
        ((), {"optimal_steps": 2}, 0),
        ((), {"optimal_steps": 0}, 1),
        ((SEARCH,), {"optimal_steps": 0}, 0),
    ],
)
def test_the_optimal_number_of_calls(
    steps: tuple[tuple[ChatMessage, ...], ...], truth: dict[str, Any], value: float
) -> None:
    assert result("optimal-steps", *steps, truth=truth).value == pytest.approx(value)


def test_the_reasons_say_what_was_called_and_what_was_expected() -> None:
    assert result("expected-tools", SEARCH).reason == "tools called: search; expected: search, read"
    assert result("expected-tools", SEARCH, FAILED, order="as-listed").reason == (
        "tools called: search, read (failed); expected: search, read"
    )
    assert result("expected-tools", truth={"target_tools": []}).reason == "tools called: none; expected: none"
    assert result("optimal-steps", SEARCH).reason == "1 calls, 2 are enough; not called without error: read"
    assert result("optimal-steps", truth={"optimal_steps": 1}).reason == "0 calls, 1 are enough; none was made"


def test_a_task_without_the_ground_truth_is_undecided_and_costs_no_call() -> None:
    criteria = [{"id": "tools", "type": "expected-tools"}, {"id": "good", "value": "It is good."}]
    settings = {"model": "judge"}
    with JudgeServer(lambda question, answer: True) as judge:
        grader = Grader(
            parse_rubric({"id": "r", "criteria": criteria}, "r"),
            JudgeSettings.model_validate({"base_url": judge.base_url, **settings}),
        )
        for line, why in (
            ({}, "the task has no metadata.ground_truth.target_tools. Give it one"),
            (of_task({"optimal_steps": 2}), "the task has no metadata.ground_truth.target_tools"),
            (of_task("42"), '`metadata.ground_truth` is "42", not an object'),
        ):
            verdict = grader.grade(Exchange("q", "7", trajectory=SEARCH, line=line))
            assert (verdict.outcome, verdict.calls, verdict.broken) == (Outcome.UNDECIDED, 0, False)
            assert f"cannot decide criterion tools: {why}" in verdict.error
        assert judge.calls == 0
        grader.close()


def test_checks_alone_accept_and_reject_without_a_judge() -> None:
    criteria = [
        {"id": "order", "type": "expected-tools", "order": "as-listed", "required": True},
        {"id": "steps", "type": "optimal-steps"},
    ]
    grader = Grader(
        parse_rubric({"id": "r", "threshold": 0.8, "criteria": criteria}, "r"),
        JudgeSettings.model_validate({"base_url": "http://127.0.0.1:9/v1", "model": "none"}),
    )
    outcomes = [
        grader.grade(Exchange("q", "7", trajectory=steps, line={"metadata": {"ground_truth": TRUTH}}))
        for steps in ((*SEARCH, *READ), (*SEARCH, *SEARCH, *SEARCH, *SEARCH, *READ), (*READ, *SEARCH))
    ]
    assert [(each.outcome, each.score) for each in outcomes] == [
        (Outcome.ACCEPTED, 1), (Outcome.REJECTED, 0.7), (Outcome.REJECTED, 0),
    ]  # fmt: skip
    grader.close()


def test_math_equal_compares_with_the_answer_of_the_ground_truth() -> None:
    criterion = CRITERION.validate_python({"id": "c", "type": "math-equal"})

    def passes(line: dict[str, Any], **more: Any) -> bool:
        return check(criterion, Exchange("q", r"\boxed{7}", line=line, **more)).passed

    assert passes(of_task({"answer": 7}), reference=r"\boxed{8}")
    assert not passes(of_task({"answer": "8"}))
    assert passes({"metadata": {"reference": "7", "ground_truth": {"answer": "8"}}}), "the task's reference is first"
    assert passes(of_task("8"), reference=r"\boxed{7}"), "a ground truth of another program is none"
    with pytest.raises(CheckError, match="no reference answer"):
        passes(of_task({"answer": None}))


@pytest.mark.parametrize(
    "raw",
    [
        {"type": "expected-tools", "value": ["search"]},
        {"type": "expected-tools", "order": "sorted"},
        {"type": "expected-tools", "weight": -1},
        {"type": "optimal-steps", "order": "any"},
        {"type": "optimal-steps", "value": 2},
        {"type": "tool-sequence", "value": ["a"], "order": "any"},
    ],
)
def test_what_the_criteria_do_not_have_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_rubric({"id": "r", "criteria": [{"id": "good", "value": "Good."}, {"id": "c", **raw}]}, "r")


def test_an_example_of_a_rubric_may_have_ground_truth(tmp_path: Path) -> None:
    example = {"query": "q", "answer": r"\boxed{7}", "verdict": "accept"}
    whole = {**example, "trajectory": list(SEARCH), "ground_truth": {**TRUTH, "answer": "8"}}

    def problems(*examples: dict[str, Any]) -> list[str]:
        kinds = ("expected-tools", "optimal-steps", "math-equal")
        criteria = [{"id": kind, "type": kind, "required": True} for kind in kinds]
        path = tmp_path / "r.yaml"
        path.write_text(json.dumps({"id": "r", "criteria": criteria, "examples": examples}))
        read = read_rubric(path)
        return [each.message for each in (*read.problems, *contradictions(read))]

    assert problems(example, {**example, "trajectory": list(SEARCH)}) == []
    [said] = problems(whole)
    assert "expected-tools says" not in said
    assert "optimal-steps says: 1 calls, 2 are enough; not called without error: read" in said
    assert "math-equal says: 7 is not 8" in said
    [said] = problems({**example, "ground_truth": {"optimal_steps": "2"}})
    assert '`metadata.ground_truth.optimal_steps` is "2", not a whole number' in said
