"""A judge of which some calls fail: replies without a verdict are attempts, and failures in a row end a run."""

from __future__ import annotations

import pytest

from flywheel.errors import JudgeError
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.thread_pool import FAILURES_IN_ROW, grade_all
from flywheel.records.verdict import Outcome
from tests.factories.judge_server import JudgeServer
from tests.judge.conftest import GOOD, Make

RUBRIC = Rubric.model_validate({"id": "test", "criteria": [{"id": "correct", "value": "It is right."}]})
WITHOUT_VERDICT = ("nonsense", "truncated verdict", "missing criterion", "refusal", "empty content", "empty choices")


@pytest.mark.parametrize("way", WITHOUT_VERDICT)
def test_a_reply_without_a_verdict_is_an_attempt(make: Make, way: str) -> None:
    with JudgeServer(behaviour=[way, "500", way, "429", *["good"] * 9]) as judge:
        verdict = make(judge, max_attempts=5).grade(GOOD)
        assert (verdict.outcome, verdict.calls, judge.calls) == (Outcome.ACCEPTED, 3, 5)
        judge.behave(way)
        verdict = make(judge, max_attempts=4).grade(GOOD)
        assert (verdict.outcome, verdict.calls, judge.calls) == (Outcome.UNDECIDED, 4, 9)
        # Calls that fail count as well.
        judge.behave(way, "500", way, "500", *["good"] * 9)
        verdict = make(judge, max_attempts=4).grade(GOOD)
    assert (verdict.outcome, verdict.calls, judge.calls) == (Outcome.UNDECIDED, 2, 13)


def test_a_reply_that_is_cut_off_is_asked_for_once_more(make: Make) -> None:
    with JudgeServer(behaviour=["cut off", "500", "cut off", "good"]) as judge:
        assert make(judge, max_attempts=9).grade(GOOD).outcome is Outcome.UNDECIDED
    assert judge.calls == 3


def test_one_unlucky_task_of_a_single_thread_does_not_end_the_run(make: Make) -> None:
    assert FAILURES_IN_ROW == 8
    failing = FAILURES_IN_ROW - 1
    with JudgeServer(behaviour=[*["500"] * failing, "good", *["500"] * failing, *["good"] * 30]) as judge:
        outcomes = [
            verdict.outcome
            for _, verdict in grade_all(make(judge, max_attempts=1), ((n, GOOD) for n in range(30)), 1)
        ]
    assert len(outcomes) == 30 and outcomes.count(Outcome.UNDECIDED) == 2 * failing


@pytest.mark.parametrize("threads", [1, 3])
def test_a_run_ends_after_failures_in_a_row(make: Make, threads: int) -> None:
    with JudgeServer(behaviour=["good", *["500"] * 1000]) as judge, pytest.raises(JudgeError, match="in a row"):
        list(grade_all(make(judge, max_attempts=1), ((n, GOOD) for n in range(1000)), threads))
    assert FAILURES_IN_ROW <= judge.calls - 1 < FAILURES_IN_ROW + 2 * threads
