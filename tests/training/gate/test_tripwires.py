"""Tripwires block what a mean score hides, and only harm that is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.config.training import GateSettings
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.round import Comparison, CriterionComparison, DecisionReason
from flywheel.records.trace import ChatMessage
from flywheel.records.verdict import CriterionResult
from flywheel.training.data.rollout import AnsweredCall, CallOutcome, Completion, Rollout, RolloutRequest
from flywheel.training.gate.gate import TRIPWIRES, decide
from flywheel.training.gate.intervals import Paired, compare_criterion
from flywheel.training.gate.tripwires import SHORTEST, measures
from tests.factories.gate import comparison
from tests.factories.round import GATE
from tests.training.data.rollouts import missed, prompt, verdict

TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
OFF = GATE.model_copy(update={"tripwires": False})


def answer(
    text: str = "seven",
    *,
    calls: Sequence[tuple[str, str]] = (),
    answered: Sequence[AnsweredCall] = (),
    results: Sequence[CriterionResult] = (),
    truncated: bool = False,
) -> Rollout:
    """An answer to a prompt with a tool; each of its calls has arguments and a result."""
    steps: list[ChatMessage] = []
    for number, (arguments, result) in enumerate(calls):
        function = {"name": "add", "arguments": arguments}
        steps += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": f"c{number}", "function": function}]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": result},
        ]
    asked = prompt()
    task = asked.task.model_copy(update={"exchange": replace(asked.task.exchange, tools=(TOOL,))})
    request = RolloutRequest(replace(asked, task=task), 0, 0, 1.0, 8, None)
    judged = replace(verdict(1.0), results=tuple(results))
    return Rollout(request, Completion(text, steps=tuple(steps), calls=tuple(answered), truncated=truncated), judged)


def values_of(new: Rollout, old: Rollout, rubric: Rubric | None = None) -> dict[str, tuple[Any, Any]]:
    """The values of one answer of each side."""
    found = measures([[new]], [[old]], rubric)
    return {name: (pair[0][0], pair[1][0]) for name, [pair] in found.items()}


LONG = "word " * SHORTEST
FAILED, WORKED = "TypeError: no", "8"


@pytest.mark.parametrize(
    ("new", "old", "measure", "expected"),
    [
        (answer(truncated=True), answer(), "cut", (0.0, 1.0)),
        (answer(LONG * 2 + "."), answer(LONG), "longer", (0.0, 1.0)),
        (answer(LONG * 2), answer(LONG), "longer", (1.0, 1.0)),
        (answer(LONG), answer(LONG * 2 + "."), "shorter", (0.0, 1.0)),
        (answer("It is seven."), answer("7"), "longer", (1.0, 1.0)),
        (answer(""), answer("seven"), "shorter", (1.0, 1.0)),
        (answer(calls=[('{"a": 1}', FAILED), ('{"a": 1}', WORKED)]), answer(calls=[('{"a": 1}', WORKED)]),
         "failed_calls", (0.5, 1.0)),
        (answer(calls=[('{"a"', FAILED)]), answer(calls=[('{"a": 1}', WORKED)]), "invalid_format", (0.0, 1.0)),
        (answer(calls=[('{"a": "x"}', WORKED)]), answer(), "invalid_format", (0.0, 1.0)),
        (answer('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'), answer(), "invalid_format",
         (0.0, 1.0)),
    ],
)  # fmt: skip
def test_what_is_measured_of_an_answer(
    new: Rollout, old: Rollout, measure: str, expected: tuple[float, float]
) -> None:
    assert values_of(new, old)[measure] == expected


def test_what_only_one_side_tells_is_not_measured() -> None:
    without = Rollout(answer().request, Completion(error="the engine failed"), None)
    for pair in ((answer(truncated=True), without), (without, answer()), (missed(0), answer())):
        assert set(values_of(*pair).values()) == {(None, None)}
    assert values_of(answer(calls=[('{"a": 1}', FAILED)]), answer())["failed_calls"] == (None, None)


def test_a_call_for_which_nothing_was_recorded_is_no_failed_call() -> None:
    unrecorded = (AnsweredCall("c0", "add", CallOutcome.MISS),)
    new = answer(calls=[('{"a": 1}', "ToolUnavailableError: add returned no result")], answered=unrecorded)
    assert values_of(new, answer(calls=[('{"a": 1}', WORKED)]))["failed_calls"] == (None, None)


def test_checks_of_the_form_in_the_rubric_count_and_checks_of_the_content_do_not() -> None:
    rubric = Rubric.model_validate(
        {
            "version": 1, "id": "r", "criteria": [
                {"id": "form", "type": "json-schema", "value": {"type": "object"}},
                {"id": "right", "type": "contains", "value": "seven"},
            ],
        }
    )  # fmt: skip
    bad = answer(results=[CriterionResult("form", "no", 0.0, False), CriterionResult("right", "no", 0.0, False)])
    good = answer(results=[CriterionResult("form", "yes", 1.0, True), CriterionResult("right", "no", 0.0, False)])
    assert values_of(bad, good, rubric)["invalid_format"] == (0.0, 1.0)


def compared(new: Callable[[int], Rollout], old: Callable[[int], Rollout], tasks: int = 50) -> Comparison:
    """A comparison that shows a better score, with what the tripwires measured of so many conversations."""
    found = measures([[new(place)] for place in range(tasks)], [[old(place)] for place in range(tasks)], None)
    wires = [
        compare_criterion(
            name,
            [Paired(f"t-{place}", *pair, f"c-{place}") for place, pair in enumerate(found[name])],
            takes_away=False,
            confidence=0.95,
            seed=1,
        )
        for name in TRIPWIRES
    ]
    return comparison().model_copy(update={"tripwires": [each for each in wires if each.tasks]})


GOOD = [('{"a": 1}', WORKED)]
HARMFUL: dict[str, Callable[[int], Rollout]] = {
    "longer": lambda place: answer(LONG * 3, calls=GOOD),
    "shorter": lambda place: answer("word", calls=GOOD),
    "cut": lambda place: answer(LONG, calls=GOOD, truncated=place % 3 == 0),
    "failed_calls": lambda place: answer(LONG, calls=[('{"a": 1}', FAILED if place % 2 else WORKED)]),
    "invalid_format": lambda place: answer(LONG, calls=[('{"a": "x"}' if place % 3 == 0 else '{"a": 1}', WORKED)]),
}


@pytest.mark.parametrize("name", TRIPWIRES)
def test_each_tripwire_blocks_harm_that_the_score_does_not_show(name: str) -> None:
    seen = compared(HARMFUL[name], lambda place: answer(LONG, calls=GOOD))
    decision = decide(seen, GATE)
    assert (decision.promote, decision.reason_code, decision.tripwire) == (False, DecisionReason.HARMFUL, name)
    assert decision.reason.startswith(f"{TRIPWIRES[name].harm}: {TRIPWIRES[name].label} 1.000 before and ")
    assert decide(seen, OFF).promote


def test_a_candidate_that_is_as_good_in_everything_is_promoted() -> None:
    def same(place: int) -> Rollout:
        return answer(LONG, calls=[('{"a": 1}', FAILED if place % 7 == 0 else WORKED)], truncated=place % 9 == 0)

    seen = compared(same, same)
    assert [each.criterion for each in seen.tripwires] == list(TRIPWIRES)
    assert decide(seen, GATE).promote


def test_harm_that_may_be_chance_blocks_nothing() -> None:
    """Three of fifty answers more are cut: the loss is beyond the margin, and the interval reaches above it."""
    seen = compared(lambda place: answer(truncated=place < 3), lambda place: answer())
    cut = next(each for each in seen.tripwires if each.criterion == "cut")
    assert cut.gain < -TRIPWIRES["cut"].margin < cut.upper
    assert decide(seen, GATE).promote


def test_what_no_answer_tells_is_not_listed() -> None:
    failed = Rollout(answer().request, Completion(error="the engine failed"), None)
    assert compared(lambda place: failed, lambda place: answer()).tripwires == []
    assert "failed_calls" not in [
        each.criterion for each in compared(lambda _: answer(), lambda _: answer()).tripwires
    ]


@given(bounds=st.dictionaries(st.sampled_from(list(TRIPWIRES)), st.floats(-1, 1)), on=st.booleans())
def test_only_an_upper_bound_below_the_margin_blocks(bounds: dict[str, float], on: bool) -> None:
    wires = [
        CriterionComparison(
            criterion=name, tasks=20, candidate_mean=0.5, deployed_mean=0.5, gain=upper, lower=-1, upper=upper
        )
        for name, upper in bounds.items()
    ]
    decision = decide(comparison().model_copy(update={"tripwires": wires}), GateSettings(tripwires=on))
    harm = {name for name, upper in bounds.items() if upper < -TRIPWIRES[name].margin}
    assert decision.promote == (not on or not harm)
    assert (decision.tripwire in harm) == (not decision.promote)
