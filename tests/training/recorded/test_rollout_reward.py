"""Checks of steps, users' functions and the judge's prompt see the steps of the rollout, not those of its trace."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.judge import JudgeSettings
from flywheel.judge.grader import Grader
from flywheel.judge.prompt import messages, parse_sections
from flywheel.judge.rubric.checks import check
from flywheel.judge.rubric.checks.python_check import task_line
from flywheel.judge.rubric.file import load_rubric, parse_rubric
from flywheel.judge.rubric.rubric import CRITERION, Rubric
from flywheel.records.trace import ChatMessage
from flywheel.records.verdict import Exchange
from flywheel.training.data.rollout import Completion, exchange
from flywheel.training.recorded.recorded_rollout import RecordedLoop, RecordedTools, ToolSetup
from flywheel.training.recorded.recordings import TraceRecording, results_of
from tests.cases import for_each
from tests.factories.judge_server import JudgeServer, nonce_of
from tests.factories.shipped_rubrics import COMPLETION, INVENTED, SHIPPED
from tests.factories.task import round_task
from tests.training.data.rollouts import prompt
from tests.training.engine.scripted_session import ScriptedPolicy, recorded_task, rollout_request
from tests.training.recorded.recordings import ADD, FINISH, call, recording, said, tool

SEARCH = tool("search", "Search.", q={"type": "string"})
SLOW = "TimeoutError: no answer in 30 s"
TRACE = recording(
    (call("add", {"a": 1, "b": 2}), "3"),
    (call("add", {"a": 1, "b": 2}), "3"),
    (call("search", {"q": "x"}), SLOW),
    tools=(ADD, SEARCH, FINISH),
    errors=(f"tool search: {SLOW}", "model: it failed"),
)
"""A traced reply that called two tools, repeated a call, and had errors."""
RIGHT = call("add", {"a": 1, "b": 2})
LOST = call("search", {"q": "x"})


def rolled_out(*turns: Sequence[dict[str, Any]], answer: str = "It is 3.", trace: TraceRecording = TRACE) -> Exchange:
    """What the judge is given of a rollout with these calls, one list for each message, and this answer."""
    finish = {"generate_response"}
    tools = RecordedTools(trace.tools, results_of(trace, finish), finish_tools=finish)
    loop = RecordedLoop(prompt().task.prompt, tools)
    for calls in turns:
        loop.advance(said(*calls))
    if loop.end is None:
        loop.advance({"role": "assistant", "content": answer})
    task = round_task(tools=trace.tools, steps=trace.steps, errors=trace.errors)
    return exchange(replace(prompt(), task=task), Completion(loop.answer, steps=tuple(loop.steps)))


def value(shown: Exchange, kind: str, **options: Any) -> float:
    return check(CRITERION.validate_python({"id": "c", "type": kind, **options}), shown).value


UNKNOWN, BROKEN = call("divide", {"a": 1}), call("add", "{")
PENALTY = {"weight": -1}


@for_each(
    ("turns", "kind", "options", "expected"),
    [
        ([], "tool-called", {"value": "add"}, 0),
        ([[RIGHT]], "tool-called", {"value": "add"}, 1),
        ([[RIGHT, RIGHT]], "tool-called", {"value": "add", "max": 1}, 0),
        ([], "tool-called", {"value": "add", "max": 0}, 1),
        ([[RIGHT], [LOST]], "tool-sequence", {"value": ["add", "search"]}, 1),
        ([[LOST], [RIGHT]], "tool-sequence", {"value": ["add", "search"]}, 0),
        # Neither the errors of the trace nor its calls count.
        ([], "no-error-span", {}, 1),
        ([[RIGHT]], "no-error-span", {}, 1),
        ([[LOST]], "no-error-span", {}, 0),
        ([[UNKNOWN]], "no-error-span", {}, 0),
        ([[BROKEN]], "no-error-span", {}, 0),
        ([[RIGHT]], "redundant-call", PENALTY, 0),
        ([[RIGHT], [RIGHT]], "redundant-call", PENALTY, 1),
        ([], "step-efficiency", {}, 0.5),
        ([[RIGHT]], "step-efficiency", {}, 1),
        ([[RIGHT], [LOST], [UNKNOWN], [BROKEN]], "step-efficiency", {}, 0.25),
        ([], "call-format", {}, 1),
        ([[RIGHT], [UNKNOWN], [BROKEN], [LOST]], "call-format", {}, 0.5),
        ([[RIGHT], [BROKEN]], "call-format", {"value": "invalid", **PENALTY}, 1),
        ([[RIGHT]], "timeout", PENALTY, 0),
        ([[RIGHT]], "timeout", {"value": 0.001, **PENALTY}, 0),
        ([[RIGHT], [LOST]], "timeout", PENALTY, 1),
        # The call of a finish function is the answer.
        ([[RIGHT], [call("generate_response", {"response": "3"})]], "tool-called", {"value": "generate_response"}, 0),
        ([[RIGHT], [call("generate_response", {"response": "3"})]], "step-efficiency", {}, 1),
    ],
)
def test_a_check_of_steps_means_the_rollout(
    turns: list[list[dict[str, Any]]], kind: str, options: dict[str, Any], expected: float
) -> None:
    assert value(rolled_out(*turns), kind, **options) == expected


def test_the_judge_is_shown_the_steps_of_the_rollout_and_its_answer() -> None:
    rubric = parse_rubric({"id": "r", "criteria": [{"id": "right", "value": "It is right."}]}, "r.yaml")
    user = messages(rubric, rolled_out([RIGHT], [UNKNOWN]), nonce="0123456789abcdef")[1]["content"]
    sections = parse_sections(user)
    assert sections["STEPS"].splitlines() == [
        '[assistant calls add 0123456789abcdef] {"a": 1, "b": 2}',
        "[tool add 0123456789abcdef] 3",
        '[assistant calls divide 0123456789abcdef] {"a": 1}',
        "[tool divide 0123456789abcdef] ToolNotFoundError: there is no tool 'divide'. Available tools: add,"
        " generate_response, search",
    ]
    assert sections["ANSWER"] == "It is 3."
    assert "STEPS" not in parse_sections(messages(rubric, rolled_out())[1]["content"])


def test_a_function_of_the_user_gets_the_steps_and_errors_of_the_rollout() -> None:
    metadata = task_line(rolled_out([RIGHT], [LOST]))["metadata"]
    assert [step["role"] for step in json.loads(metadata["trajectory_json"])] == ["assistant", "tool"] * 2
    assert json.loads(metadata["errors_json"]) == [f"tool search: {SLOW}"]
    assert json.loads(task_line(rolled_out())["metadata"]["errors_json"]) == []


class StepJudge(JudgeServer):
    """Believes an answer if a tool returned its number, and takes no promise for completion. It reads no more than
    what the grader sends."""

    def __init__(self, rubric: Rubric, completion: str, grounded: str) -> None:
        super().__init__()
        self.rubric, self.completion, self.grounded = rubric, completion, grounded

    def content(self, request: dict[str, Any]) -> dict[str, Any]:
        shown = parse_sections(request["messages"][-1]["content"])
        numbers = re.findall(r"\d+", shown["ANSWER"])
        results = re.findall(r"^\[tool .*\] (.*)$", shown.get("STEPS", ""), re.MULTILINE)
        failed = {self.completion} if "Not done" in shown["ANSWER"] else set()
        if not set(numbers) & set(results):
            failed.add(self.grounded)
        choices = {
            each.id: list(each.scale)[0 if each.weight < 0 or each.id in failed else -1] for each in self.rubric.asked
        }
        criteria = {name: {"reason": "so it is", "choice": choice} for name, choice in choices.items()}
        return {"criteria": criteria, "check": nonce_of(request)}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_under_every_shipped_rubric_a_rollout_is_rewarded_for_its_own_steps(path: Path) -> None:
    rubric = load_rubric(path)
    task = recorded_task(TRACE.steps, TRACE.tools, errors=list(TRACE.errors), query="What is 1 and 2?", reference="")

    def done(*messages: ChatMessage) -> Exchange:
        asked = rollout_request(task)
        completion = asyncio.run(ScriptedPolicy(messages).roll_out(asked, ToolSetup()))
        assert not completion.error
        return exchange(asked.prompt, completion)

    def says(text: str) -> ChatMessage:
        return {"role": "assistant", "content": text}

    with StepJudge(rubric, COMPLETION[path.stem], INVENTED[path.stem]) as judge:
        grader = Grader(rubric, JudgeSettings(base_url=judge.base_url, model="judge"))

        def reward(*messages: ChatMessage) -> float:
            verdict = grader.grade(done(*messages))
            assert verdict.score is not None, verdict.error
            return verdict.score

        correct = reward(said(RIGHT), says(r"The sum is \boxed{3}, as the tool says."))
        assert correct == 1
        assert reward(says(r"The sum is \boxed{3}, I would guess.")) < correct, "right by chance"
        assert reward(says(r"The sum is \boxed{21}, as the tool says.")) < correct
        assert reward(said(RIGHT), says(r"Not done yet: \boxed{3} is what I have.")) < 0.2
        asked_before = judge.calls
        for text in ("", "…"):
            assert reward(says(text)) == reward(said(RIGHT), says(text)) == 0
        assert judge.calls == asked_before
        grader.close()
