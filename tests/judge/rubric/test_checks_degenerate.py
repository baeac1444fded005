"""Degenerate answers are caught, and legitimate ones are not, however strange they look."""

from __future__ import annotations

from flywheel.judge.rubric.checks import check
from flywheel.judge.rubric.checks.degenerate import Degenerate, find_loop
from flywheel.judge.rubric.text import split
from flywheel.records.verdict import CriterionResult, Exchange
from tests.cases import for_each
from tests.judge.legitimate import LEGITIMATE
from tests.judge.rubric.degenerate_texts import BROKEN, LOOPS, TOOL_TEXTS

CRITERION = Degenerate(id="sound", required=True)


def checked(answer: str) -> CriterionResult:
    return check(CRITERION, Exchange("q", answer))


@for_each("name", LEGITIMATE)
def test_a_legitimate_answer_is_no_false_alarm(name: str) -> None:
    result = checked(LEGITIMATE[name])
    assert result.passed, result.reason


@for_each("name", LOOPS)
def test_every_loop_is_caught(name: str) -> None:
    result = checked(LOOPS[name])
    assert not result.passed
    assert "repeated" in result.reason or "word groups" in result.reason


COUNTING = {
    "steps": " ".join(f"Step {n}: continue." for n in range(1, 401)),
    "sentences": " ".join(f"{n}. I check once more whether the result of the sum is right." for n in range(60)),
    "chinese": "".join(f"第{n}步：继续。" for n in range(1, 401)),
    "after an opening": "Sure!\n\n" + "\n".join(f"Step {n}: continue." for n in range(1, 401)),
}
"""Endless sentences that differ in a number alone, and would be no loop to the criterion."""
COUNTED = {
    "a list": "\n".join(f"- Item {n}: {n * n}" for n in range(400)),
    "rows": "\n".join(f"row {n},London,{n * 7 % 13},ok" for n in range(400)),
    "data": "[" + ", ".join(f'{{"id": {n}, "name": "user{n}"}}' for n in range(500)),
    "equal data": '[{"a": 0, "b": null}' + ', {"a": 0, "b": null}' * 40,
    "a few steps": " ".join(f"Step {n}: continue." for n in range(1, 40)),
}


@for_each("share", [1.0, 0.9, 0.7, 0.5, 0.3])
def test_a_legitimate_message_that_was_cut_off_has_no_loop(share: float) -> None:
    texts = LEGITIMATE | COUNTED
    found = {name: find_loop(text[: int(share * len(text))]) for name, text in texts.items()}
    assert {name: loop for name, loop in found.items() if loop} == {}


@for_each("name", LOOPS | COUNTING)
def test_every_loop_in_a_message_that_was_cut_off_is_found(name: str) -> None:
    assert find_loop((LOOPS | COUNTING)[name])


@for_each("name", COUNTING)
def test_stored_verdicts_of_the_criterion_stay_valid(name: str) -> None:
    """What the look at rollouts finds beyond it is no part of it, where its hash would have to change."""
    assert checked(COUNTING[name]).passed


def test_a_loop_at_the_end_of_a_very_long_message_is_found() -> None:
    words = " ".join(f"word{pow(3, n, 10007)}" for n in range(40_000))
    assert not find_loop(words)
    assert find_loop(words + " and again" * 400)


@for_each("name", TOOL_TEXTS)
def test_a_tool_call_that_became_text_is_caught(name: str) -> None:
    result = checked(TOOL_TEXTS[name])
    assert not result.passed
    assert "tool call" in result.reason or "chat template" in result.reason


@for_each("name", BROKEN)
def test_broken_encoding_is_caught(name: str) -> None:
    result = checked(BROKEN[name])
    assert not result.passed
    assert "broken encoding" in result.reason


def test_a_legitimate_answer_that_runs_into_a_loop_is_caught() -> None:
    missed = [
        name for name, text in LEGITIMATE.items() if checked(f"{text}\n```\n\nAnd so it is as it is said. ").passed
        and checked(f"{text}\n\n" + "And so it is as it is said. " * 60).passed
    ]  # fmt: skip
    assert missed == []


def test_a_very_long_answer_is_no_burden() -> None:
    words = " ".join(f"word{pow(3, n, 10007)}" for n in range(9_000))
    assert checked(words).passed
    assert not checked(words + " and again" * 400).passed


@for_each("fence", ["`", "~"])
def test_a_fence_that_never_ends_is_gone_through_once(fence: str) -> None:
    """And not once more for each of its characters, which takes minutes."""
    text = fence * 1_000_000
    assert not split(text).code
