"""Repeats and escalation: the majority decides, and only a majority."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flywheel.errors import JudgeError
from flywheel.judge.grader import Grader, Plan, majority
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.verdict import Judgement, Outcome, Verdict
from tests.factories.judge_server import JudgeServer
from tests.judge.conftest import GOOD, Make

CRITERIA = [{"id": "correct", "value": "It is right."}]
MIXED = [{"id": "boxed", "type": "contains", "value": "boxed", "weight": 3}, {**CRITERIA[0], "weight": 2}]
"""A yes scores 1.0 and a no 0.6."""
A, R, U = Outcome.ACCEPTED, Outcome.REJECTED, Outcome.UNDECIDED


@pytest.fixture
def vote(make: Make) -> Make:
    """Makes a grader by criteria and the keys of a rubric's `judge`."""

    def vote(judge: JudgeServer, criteria: Any = CRITERIA, threshold: float = 0.7, **how: Any) -> Grader:
        rubric = Rubric.model_validate({"id": "t", "criteria": criteria, "threshold": threshold, "judge": how})
        return make(judge, rubric, max_attempts=1)

    return vote


def says(*answers: bool) -> Callable[[str, str], bool]:
    left = iter(answers)
    return lambda *_: next(left)


@pytest.mark.parametrize(
    ("outcomes", "score"),
    [
        ([(A, 0.9)], 0.9),
        ([(U, None)], None),
        ([(A, 0.7), (A, 0.9), (R, 0.1)], 0.7),
        ([(A, 0.9), (A, 0.8), (A, 1.0)], 0.9),
        ([(R, 0.2), (A, 0.9), (R, 0.0)], 0.0),
        ([(A, 0.9), (R, 0.1)], None),
        ([(A, 0.9), (U, None)], None),
        ([(A, 0.9), (A, 0.8), (U, None)], 0.8),
        ([(A, 0.9), (R, 0.8), (U, None)], None),
        ([], None),
    ],
)
def test_more_than_half_of_all_decide(outcomes: list[tuple[Outcome, float | None]], score: float | None) -> None:
    chosen = majority([Judgement(*each) for each in outcomes])
    assert (chosen and chosen.score) == score


def test_repeats_ask_each_time_anew_and_differently(vote: Make) -> None:
    with JudgeServer(says(True, False, True)) as judge:
        verdict = vote(judge, repeats=3, temperature=0.7).grade(GOOD)
    assert (verdict.outcome, verdict.score, verdict.calls, verdict.prompt_tokens) == (A, 1.0, 3, 300)
    assert [each.outcome for each in verdict.judgements] == [A, R, A]
    assert [request.get("seed") for request in judge.requests] == [None, 1, 2]
    assert "2 accepted, 1 rejected" in verdict.reason


def test_a_plan_and_an_estimate_know_what_is_reused_and_ask_nothing(vote: Make) -> None:
    with JudgeServer(says(False, True, True, True)) as judge:
        first = vote(judge, MIXED).grade(GOOD)
        close = vote(judge, MIXED, escalate={"band": [0.5, 0.9], "repeats": 3})
        new, known = close.estimate(GOOD), close.estimate(GOOD, [first])
        assert (new.calls, new.criteria, new.more) == (1, 1, 3)
        assert (known.calls, known.criteria, known.more) == (3, 3, 0), "only the second look is missing"
        assert new.prompt_tokens == known.prompt_tokens // 3 > 0
        assert isinstance(close.begin(GOOD, [first]), Plan)
        far = vote(judge, MIXED, escalate={"band": [0.8, 0.9], "repeats": 3}).begin(GOOD, [first])
        assert isinstance(far, Verdict) and far.calls == 0
        assert judge.calls == 1
        again = close.grade(GOOD, earlier=[first])
    assert (again.outcome, again.calls, [each.calls for each in again.judgements]) == (A, 3, [0, 1, 1, 1])


def test_without_a_majority_nothing_is_decided(vote: Make) -> None:
    with JudgeServer(says(True, False)) as judge:
        verdict = vote(judge, repeats=2).grade(GOOD)
    assert (verdict.outcome, verdict.score, verdict.calls) == (U, None, 2)
    assert "no majority: 1 accepted, 1 rejected" in verdict.error


@pytest.mark.parametrize(
    ("answers", "outcome", "calls"),
    [
        ((True,), A, 1),  # 1.0 is outside of the band
        ((False, False, False, True), R, 4),
        ((False, True, False, True), A, 4),
    ],
)
def test_a_score_in_the_band_is_judged_again_and_the_repeats_decide(
    vote: Make, answers: tuple[bool, ...], outcome: Outcome, calls: int
) -> None:
    with JudgeServer(says(*answers)) as judge:
        verdict = vote(judge, MIXED, escalate={"band": [0.55, 0.8], "repeats": 3}).grade(GOOD)
    assert (verdict.outcome, judge.calls, verdict.calls, len(verdict.judgements)) == (outcome, calls, calls, calls)
    assert [each.stage for each in verdict.judgements] == ["first", *["again"] * (calls - 1)]


def test_the_first_opinion_has_no_casting_vote(vote: Make) -> None:
    with JudgeServer(says(False, True, False)) as judge:
        verdict = vote(judge, MIXED, escalate={"band": [0.55, 0.8], "repeats": 2}).grade(GOOD)
    assert (verdict.outcome, verdict.calls) == (U, 3)


def test_a_failed_required_criterion_is_not_judged_again(vote: Make) -> None:
    required = [{**CRITERIA[0], "required": True}]
    with JudgeServer(says(False)) as judge:
        assert vote(judge, required, escalate={"band": [0.0, 1.0]}).grade(GOOD).outcome is R
    assert judge.calls == 1


def test_a_reply_that_cannot_be_read_does_not_vote_but_counts(vote: Make) -> None:
    with JudgeServer(lambda *_: True, behaviour=["good", "unknown choice", "good"]) as judge:
        verdict = vote(judge, repeats=3).grade(GOOD)
    assert (verdict.outcome, verdict.calls, verdict.prompt_tokens) == (A, 3, 300)
    assert [each.outcome for each in verdict.judgements] == [A, U, A]
    assert [each.calls for each in verdict.judgements] == [1, 1, 1]


@pytest.mark.parametrize("fault", ["500", "401"])
def test_what_was_billed_before_the_judge_went_away_is_on_record(vote: Make, fault: str) -> None:
    with JudgeServer(behaviour=["good", fault]) as judge:
        verdict = vote(judge, repeats=3).grade(GOOD)
    assert (verdict.outcome, verdict.calls, verdict.prompt_tokens) == (U, 1, 100)
    assert verdict.unreachable is (fault == "500")
    with JudgeServer(behaviour="401") as judge, pytest.raises(JudgeError):
        vote(judge, repeats=3).grade(GOOD)
