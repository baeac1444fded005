"""Response formats: the strictest supported one is requested, and what is not supported is recorded once."""

from __future__ import annotations

import logging

import pytest

from flywheel.judge.chat_completions import is_rejection_of
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.verdict import Exchange, Outcome
from tests.factories.judge_server import JudgeServer, form_of, nonce_of
from tests.judge.conftest import GOOD, Make

RUBRIC = Rubric.model_validate(
    {"id": "test", "criteria": [{"id": "correct", "value": "It is right."}, {"id": "clear", "value": "It is clear."}]}
)
BAD = Exchange("What is 3 plus 4?", "seven")


def formats(judge: JudgeServer) -> list[str]:
    return [form_of(request) for request in judge.tasks]


@pytest.mark.parametrize(
    ("behaviour", "asked"),
    [
        ("good", ["schema", "schema", "schema"]),
        # What is refused is sent once more, and then tested by short requests.
        ("no schema", ["schema", "schema", "tool", "tool", "tool"]),
        ("no schema, no tools", ["schema", "schema", "tool", "text", "text", "text"]),
        ("refuses silently", ["schema", "schema", "tool", "tool", "tool"]),
        # The reply shows that nobody looked at the schema, but it carries the nonce: it is used.
        ("ignoring, prose", ["schema"] * 3),
        ("ignoring, without nonce", ["schema"] * 9),
    ],
)
def test_the_strictest_format_that_is_left(make: Make, behaviour: str, asked: list[str]) -> None:
    with JudgeServer(behaviour=behaviour) as judge:
        outcomes = {make_verdict.outcome for make_verdict in map(make(judge).grade, [GOOD] * 3)}
    assert formats(judge) == asked
    assert outcomes == {Outcome.UNDECIDED if "without nonce" in behaviour else Outcome.ACCEPTED}


def test_a_tool_call_is_forced_and_read(make: Make) -> None:
    with JudgeServer(behaviour="no schema") as judge:
        grader = make(judge)
        assert grader.grade(GOOD).outcome is Outcome.ACCEPTED
        assert grader.grade(BAD).outcome is Outcome.REJECTED
    tool = judge.requests[-1]
    assert tool["tool_choice"]["function"]["name"] == tool["tools"][0]["function"]["name"] == "verdict"
    assert tool["tools"][0]["function"]["parameters"]["required"] == ["criteria", "check"]


def test_the_retry_shows_the_problem_in_the_format_that_is_left(make: Make) -> None:
    with JudgeServer(behaviour="no schema, no tools") as judge:
        grader = make(judge)
        grader.grade(GOOD)
        judge.behave("missing criterion", "good")
        verdict = grader.grade(GOOD)
    assert (verdict.outcome, verdict.calls) == (Outcome.ACCEPTED, 2)
    assert "missing: correct" in judge.requests[-1]["messages"][-1]["content"]
    assert formats(judge)[-2:] == ["text", "text"]


@pytest.mark.parametrize("behaviour", ["fenced", "prose"])
def test_text_is_read_in_fences_and_prose(make: Make, behaviour: str) -> None:
    with JudgeServer(behaviour=behaviour) as judge:
        grader = make(judge, response_format="text")
        good = grader.grade(GOOD)
        bad = grader.grade(BAD)
    assert (good.outcome, bad.outcome) == (Outcome.ACCEPTED, Outcome.REJECTED), (good.error, bad.error)
    assert (good.calls, bad.calls) == (1, 1)


def test_parameters_that_are_not_known_are_left_out_from_then_on(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    twice = RUBRIC.model_copy(update={"judge": RUBRIC.judge.model_copy(update={"repeats": 2})})
    with JudgeServer(behaviour="no seed") as judge:
        assert make(judge, twice).grade(GOOD).outcome is Outcome.ACCEPTED
        assert make(judge, twice).grade(GOOD).outcome is Outcome.ACCEPTED
    assert ["seed" in request for request in judge.tasks] == [False, True, True, False] * 2
    with JudgeServer(behaviour="newer") as judge:
        grader = make(judge)
        for _ in range(2):
            assert grader.grade(GOOD).outcome is Outcome.ACCEPTED
    assert [request.get("max_tokens") for request in judge.requests] == [2048, None, None]
    assert [request.get("max_completion_tokens") for request in judge.requests] == [None, 2048, 2048]
    assert "does not support max_tokens" in caplog.text


@pytest.mark.parametrize(
    "behaviour", ["no temperature", "no max_tokens", "no system message", "breaks on a system message"]
)
def test_a_judge_that_refuses_a_parameter_is_asked_without(make: Make, behaviour: str) -> None:
    with JudgeServer(behaviour=behaviour) as judge:
        grader = make(judge)
        for _ in range(2):
            assert grader.grade(GOOD).outcome is Outcome.ACCEPTED
    assert len(judge.tasks) == (4 if behaviour == "no temperature" else 3), "it is recorded once"
    last = judge.requests[-1]
    assert ("temperature" in last) is (behaviour != "no temperature")
    assert ("max_tokens" in last) is (behaviour != "no max_tokens")
    assert [each["role"] for each in last["messages"]] == (
        ["user"] if "system message" in behaviour else ["system", "user"]
    )
    assert "response_format" in last, "that was not refused"


def test_a_server_that_fails_where_others_reject_is_asked_in_another_format(make: Make) -> None:
    with JudgeServer(behaviour="breaks on schema and tools") as judge:
        grader = make(judge)
        for _ in range(2):
            assert grader.grade(GOOD).outcome is Outcome.ACCEPTED
    assert formats(judge) == ["schema", "schema", "tool", "text", "text"]


def test_a_failure_that_names_nothing_that_was_sent_is_a_failure(make: Make) -> None:
    with JudgeServer(behaviour=["500", "breaks on a system message", "500", "good"]) as judge:
        verdict = make(judge, max_attempts=4).grade(GOOD)
    assert verdict.outcome is Outcome.ACCEPTED
    assert judge.requests[-1]["messages"][0]["role"] == "system"


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("Unsupported parameter: 'temperature' is not supported with this model.", "temperature"),
        ("'temperature' is deprecated for this model.", "temperature"),
        ("temperature: must be between 0 and 1", ""),
        ("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", "max_tokens"),
        ("'max_tokens' or 'max_completion_tokens' is too large: 9. This model's maximum context length is 8.", ""),
        ("max_tokens is too large: 2048. This model supports at most 1024 completion tokens", ""),
        ("Conversation roles must alternate user/assistant/user/assistant/...", "system"),
        ("Only user and assistant roles are supported!", "system"),
        ("Developer instruction is not enabled for models/gemma-3-27b-it", "system"),
        ("the operating system failed", ""),
    ],
)
def test_a_refusal_names_a_parameter_or_its_value(said: str, what: str) -> None:
    assert [each for each in ("temperature", "max_tokens", "system") if is_rejection_of(said, each)] == (
        [what] if what else []
    )


def test_each_call_has_a_nonce_of_its_own_and_one_schema(make: Make) -> None:
    with JudgeServer() as judge:
        grader = make(judge)
        for _ in range(5):
            grader.grade(GOOD)
    assert len({nonce_of(request) for request in judge.requests}) == 5
    assert len({str(request["response_format"]) for request in judge.requests}) == 1, "servers compile and keep it"


def test_one_call_for_each_criterion(make: Make) -> None:
    each = RUBRIC.model_copy(update={"judge": RUBRIC.judge.model_copy(update={"per_criterion": True})})
    with JudgeServer() as judge:
        verdict = make(judge, each).grade(GOOD)
        assert make(judge, each).estimate(GOOD).prompt_tokens > make(judge).estimate(GOOD).prompt_tokens
    assert [result.criterion for result in verdict.results] == ["correct", "clear"]
    assert (verdict.calls, verdict.prompt_tokens) == (2, 200)
    asked = [
        request["response_format"]["json_schema"]["schema"]["properties"]["criteria"] for request in judge.requests
    ]
    assert [list(criteria["properties"]) for criteria in asked] == [["correct"], ["clear"]]
    assert "- clear:" not in judge.requests[0]["messages"][0]["content"]


def test_one_unreadable_criterion_of_several_calls_is_no_verdict_but_is_billed(make: Make) -> None:
    each = RUBRIC.model_copy(update={"judge": RUBRIC.judge.model_copy(update={"per_criterion": True})})
    with JudgeServer(behaviour=["good", "unknown choice", "unknown choice"]) as judge:
        verdict = make(judge, each, max_attempts=2).grade(GOOD)
    assert (verdict.outcome, verdict.score, verdict.results) == (Outcome.UNDECIDED, None, ())
    assert (verdict.calls, verdict.prompt_tokens) == (3, 300)


def test_a_stream_that_nobody_asked_for_is_read(make: Make) -> None:
    with JudgeServer(behaviour="streamed") as judge:
        grader = make(judge)
        good, bad = grader.grade(GOOD), grader.grade(BAD)
    assert (good.outcome, bad.outcome) == (Outcome.ACCEPTED, Outcome.REJECTED)
    assert (good.calls, good.prompt_tokens, good.completion_tokens) == (1, 100, 20)


def test_a_billed_error_is_billed_and_not_asked_again(make: Make) -> None:
    with JudgeServer(behaviour="billed error object") as judge:
        verdict = make(judge).grade(GOOD)
    assert (verdict.outcome, verdict.calls, verdict.prompt_tokens) == (Outcome.UNDECIDED, 1, 100)
    assert judge.calls == 1


def test_a_huge_body_is_not_read_to_its_end(make: Make) -> None:
    with JudgeServer(behaviour="huge") as judge:
        verdict = make(judge).grade(GOOD)
    assert (verdict.outcome, judge.calls) == (Outcome.UNDECIDED, 1)
    assert "larger than" in verdict.error
