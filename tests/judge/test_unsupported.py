"""What an endpoint does not support is decided by what it says of it, or by short requests, and never by one odd
answer."""

from __future__ import annotations

import logging

import pytest

from flywheel.errors import JudgeError
from flywheel.judge.chat_completions import DAY_SECONDS, EndpointCapabilities
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.thread_pool import grade_all
from flywheel.records.verdict import Outcome
from tests.factories.judge_server import JudgeServer, form_of
from tests.judge.conftest import GOOD, Make

RUBRIC = Rubric.model_validate({"id": "test", "criteria": [{"id": "correct", "value": "It is right."}]})


@pytest.mark.parametrize(
    "odd",
    [
        "ignoring, nonsense",
        "refusal",
        "empty content",
        "truncated verdict",
        "overlong",
        "overlong without a code",
        "odd",
        "400 response_format is odd",
        "500 failed to parse grammar",
    ],
)
def test_one_odd_answer_does_not_change_how_later_tasks_are_asked(
    make: Make, caplog: pytest.LogCaptureFixture, odd: str
) -> None:
    with JudgeServer(behaviour=[odd, *["good"] * 30]) as judge:
        grader = make(judge)
        grader.grade(GOOD)
        assert grader.grade(GOOD).outcome is Outcome.ACCEPTED
    assert {form_of(request) for request in judge.tasks} == {"schema"}
    assert "does not support" not in caplog.text


def test_what_the_endpoint_names_as_unsupported_is_left_out_at_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with JudgeServer(behaviour="names the schema by param") as judge:
        grader = make(judge)
        assert [grader.grade(GOOD).outcome for _ in range(2)] == [Outcome.ACCEPTED] * 2
    assert [form_of(request) for request in judge.requests] == ["schema", "tool", "tool"]
    [warning] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "does not support JSON schema" in warning.message and "Set judge.response_format: tool" in warning.message
    with JudgeServer(behaviour="names the temperature by param") as judge:
        grader = make(judge)
        assert [grader.grade(GOOD).outcome for _ in range(2)] == [Outcome.ACCEPTED] * 2
    assert ["temperature" in request for request in judge.requests] == [True, False, False]
    assert "Set judge.omit: [temperature]" in caplog.records[-1].message


def test_a_wrong_value_is_the_error_of_its_request(make: Make) -> None:
    with JudgeServer(behaviour="temperature too high") as judge:
        with pytest.raises(JudgeError, match=r"judge\.temperature"):
            make(judge, temperature=3).grade(GOOD)
        assert judge.calls == 1
        judge.behave("good", "temperature too high", "good")
        grader = make(judge, temperature=3)
        outcomes = [grader.grade(GOOD).outcome for _ in range(3)]
    assert outcomes == [Outcome.ACCEPTED, Outcome.UNDECIDED, Outcome.ACCEPTED]
    assert all("temperature" in request for request in judge.requests)


def test_a_silent_refusal_is_decided_by_short_requests(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert DAY_SECONDS == 24 * 60 * 60
    now = [0.0]
    capabilities = EndpointCapabilities(lambda: now[0])
    with JudgeServer(behaviour="refuses temperature silently") as judge:
        grader = make(judge, capabilities=capabilities)
        assert [grader.grade(GOOD).outcome for _ in range(3)] == [Outcome.ACCEPTED] * 3
        short = [request for request in judge.requests if request not in judge.tasks]
        # Without all, with the schema, which is answered, and twice with the temperature.
        assert [(form_of(each), "temperature" in each) for each in short] == [
            ("text", False),
            ("schema", False),
            ("text", True),
            ("text", True),
        ]
        assert {form_of(request) for request in judge.tasks} == {"schema"}
        assert ["temperature" in request for request in judge.tasks] == [True, True, False, False, False]
        assert caplog.text.count("does not support") == 1
        # Other graders of this process know it, for a day.
        now[0] += DAY_SECONDS - 1
        asked = judge.calls
        assert make(judge, capabilities=capabilities).grade(GOOD).outcome is Outcome.ACCEPTED
        assert judge.calls == asked + 1
        now[0] += 1
        judge.behave("good")
        make(judge, capabilities=capabilities).grade(GOOD)
    assert "temperature" in judge.requests[-1]


def test_what_passed_its_test_is_not_tested_again_that_day(make: Make) -> None:
    now = [0.0]
    capabilities = EndpointCapabilities(lambda: now[0])
    with JudgeServer(behaviour=["good", "odd", "odd", *["good"] * 3]) as judge:
        grader = make(judge, capabilities=capabilities)
        assert [grader.grade(GOOD).outcome for _ in range(2)] == [Outcome.ACCEPTED, Outcome.UNDECIDED]
        assert (judge.calls, len(judge.tasks)) == (6, 3)
        judge.behave("odd", "odd", *["good"] * 9)
        assert grader.grade(GOOD).outcome is Outcome.UNDECIDED
        assert (judge.calls, len(judge.tasks)) == (8, 5)
        now[0] += DAY_SECONDS
        judge.behave("odd", "odd", *["good"] * 9)
        grader.grade(GOOD)
        assert (judge.calls, len(judge.tasks)) == (13, 7)


@pytest.mark.parametrize(
    "short",
    [
        ["odd", "odd", "odd"],  # it does not answer at all
        ["good", "429", "429"],
        ["good", "503", "503"],
        ["good", "odd", "429"],
        ["good", "odd", "500"],  # not the same failure
        ["good", "odd", "good", "good"],
    ],
    ids="-".join,
)
def test_short_requests_that_fail_in_another_way_decide_nothing(make: Make, short: list[str]) -> None:
    with JudgeServer(behaviour=["good", "odd", "odd", *short, *["good"] * 9]) as judge:
        grader = make(judge)
        for _ in range(3):
            grader.grade(GOOD)
    assert {form_of(request) for request in judge.tasks} == {"schema"}
    assert all("temperature" in request for request in judge.tasks)


def test_threads_that_are_refused_together_test_once(make: Make) -> None:
    with JudgeServer(behaviour="no schema", hold_until=8) as judge:
        done = dict(grade_all(make(judge, max_thread=8), ((n, GOOD) for n in range(32)), 8))
    assert {verdict.outcome for verdict in done.values()} == {Outcome.ACCEPTED}
    assert judge.calls - len(judge.tasks) == 3


@pytest.mark.parametrize("form", ["schema", "tool", "json", "text"])
def test_the_settings_say_how_the_judge_is_asked(make: Make, form: str) -> None:
    twice = RUBRIC.model_copy(update={"judge": RUBRIC.judge.model_copy(update={"repeats": 2})})
    with JudgeServer() as judge:
        grader = make(judge, twice, response_format=form, omit=["seed", "temperature"])
        assert grader.grade(GOOD).outcome is Outcome.ACCEPTED
        assert grader.judge_hash == make(judge, twice).judge_hash, "its verdicts are those of the same judge"
    assert [form_of(request) for request in judge.requests] == [form] * 2
    assert not any(name in request for request in judge.requests for name in ("seed", "temperature"))


@pytest.mark.parametrize("form", ["schema", "json"])
@pytest.mark.parametrize("behaviour", ["no schema", "names the schema by param", "refuses silently"])
def test_a_format_that_is_set_and_refused_is_named(make: Make, behaviour: str, form: str) -> None:
    with JudgeServer(behaviour=behaviour) as judge, pytest.raises(JudgeError, match=r"judge\.response_format"):
        make(judge, response_format=form).grade(GOOD)
    assert {form_of(request) for request in judge.tasks} == {form}
