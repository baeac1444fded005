"""Verdicts from an HTTP endpoint: good, failing, and unreadable ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tenacity import RetryCallState, Retrying

from flywheel.config.judge import JudgeSettings
from flywheel.errors import ConfigError, FlywheelError, JudgeError
from flywheel.judge import prompt
from flywheel.judge.client import require_judge
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.thread_pool import MAX_BROKEN, grade_all
from flywheel.records.verdict import Exchange, Outcome, Verdict
from flywheel.system.http_client import OPENAI_URL, CallError, parse_retry_after, retry_delay
from tests.factories.judge_faults import FAULTS
from tests.factories.judge_server import JudgeServer
from tests.judge.conftest import GOOD, Make
from tests.waiting import wait_for

RUBRIC = Rubric.model_validate(
    {
        "id": "test",
        "criteria": [
            {"id": "boxed", "type": "regex", "value": r"\\boxed\{.+\}", "required": True},
            {"id": "correct", "value": "It is right.", "weight": 10, "required": True},
            {"id": "clear", "value": "It is clear.", "weight": 2, "choices": ["poor", "fair", "good"]},
        ],
    }
)


def test_a_whole_verdict_with_what_was_billed(make: Make) -> None:
    with JudgeServer(verdict=lambda question, answer: "7" in answer and "3 plus 4" in question) as judge:
        grader = make(judge)
        good, bad = grader.grade(GOOD), grader.grade(Exchange("What is 3 plus 4?", "\\boxed{8}"))
    assert (good.outcome, good.score, good.failed) == (Outcome.ACCEPTED, 1.0, ())
    assert (bad.outcome, bad.score, bad.failed) == (Outcome.REJECTED, 0.0, ("correct", "clear"))
    assert "correct: it is not so" in bad.reason
    assert (good.calls, good.prompt_tokens, good.completion_tokens) == (1, 100, 20)


def test_the_request_says_what_the_settings_say(make: Make) -> None:
    with JudgeServer() as judge:
        make(judge, temperature=0.3, max_tokens=77).grade(GOOD)
        make(judge).grade(GOOD)
    first, second = judge.requests
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("the-judge", 0.3, 77)
    assert (second["temperature"], second["max_tokens"]) == (0.0, 2048)
    assert judge.headers[0]["authorization"] == "Bearer the-key"
    properties = first["response_format"]["json_schema"]["schema"]["properties"]["criteria"]["properties"]
    assert {name: part["properties"]["choice"]["enum"] for name, part in properties.items()} == {
        "correct": ["no", "yes"],
        "clear": ["poor", "fair", "good"],
    }


def test_a_failed_required_check_saves_the_call(make: Make) -> None:
    with JudgeServer() as judge:
        grader = make(judge)
        exchange = Exchange("What is 3 plus 4?", "7")
        verdict = grader.grade(exchange)
        assert grader.estimate(exchange).prompt_tokens == 0
        assert grader.estimate(GOOD).prompt_tokens > 100
    assert judge.calls == 0
    assert (verdict.outcome, verdict.score, verdict.failed, verdict.calls) == (Outcome.REJECTED, 0.0, ("boxed",), 0)


PASSING = {
    "429",
    "429 with Retry-After",
    "500",
    "reset",
    "truncated body",
    "html",
    "cut off stream",
    "error object",
    "error object 429",
}
UNREADABLE = {
    "choices of text",
    "content of thoughts",
    "empty choices",
    "empty content",
    "refusal",
    "truncated verdict",
    "missing criterion",
    "unknown criterion",
    "unknown choice",
    "nonsense",
    "quoted verdict",
    "cut off",
}
TRIES = {**dict.fromkeys(PASSING | UNREADABLE | {"stream"}, 3), "cut off": 2}
NO_VERDICT = sorted({*FAULTS, "nonsense"} - {"400", "401", "403", "404", "422", "prose", "no schema"})


@pytest.mark.parametrize("fault", NO_VERDICT)
def test_a_fault_is_undecided_and_never_a_pass_or_a_fail(make: Make, fault: str) -> None:
    with JudgeServer(behaviour=fault) as judge:
        verdict = make(judge).grade(GOOD)
    assert (verdict.outcome, verdict.score) == (Outcome.UNDECIDED, None)
    assert verdict.error
    assert len(judge.tasks) == TRIES.get(fault, 1)
    assert verdict.unreachable is (fault in PASSING)
    if fault in UNREADABLE:
        billed = (TRIES[fault], 100 * TRIES[fault], 20 * TRIES[fault])
        assert (verdict.calls, verdict.prompt_tokens, verdict.completion_tokens) == billed
    if fault in PASSING | {"too long"}:
        assert (verdict.calls, verdict.prompt_tokens) == (0, 0)


@pytest.mark.parametrize("fault", sorted(PASSING))
def test_a_fault_that_passes_is_retried(make: Make, fault: str) -> None:
    with JudgeServer(behaviour=[fault, fault, "good"]) as judge:
        assert make(judge).grade(GOOD).outcome is Outcome.ACCEPTED
    assert judge.calls == 3


def test_after_an_unreadable_reply_the_judge_is_told_what_was_wrong(make: Make) -> None:
    with JudgeServer(behaviour=["missing criterion", "good"]) as judge:
        verdict = make(judge).grade(GOOD)
    assert verdict.outcome is Outcome.ACCEPTED
    assert verdict.calls == 2
    again = judge.requests[1]["messages"]
    assert "missing: correct" in again[-1]["content"]
    assert [message["role"] for message in again] == ["system", "user"], "what it said may quote the task"


@pytest.mark.parametrize("behaviour", ["cut off", "thoughts only"])
def test_a_reply_that_was_cut_off_names_the_setting(make: Make, behaviour: str) -> None:
    with JudgeServer(behaviour=behaviour) as judge:
        assert "judge.max_tokens = 77" in make(judge, max_tokens=77).grade(GOOD).error


def test_a_judge_that_cannot_answer_as_long_as_asked_names_the_setting(make: Make) -> None:
    with JudgeServer(behaviour="short answers only") as judge, pytest.raises(JudgeError, match=r"judge\.max_tokens"):
        make(judge).grade(GOOD)


@pytest.mark.parametrize("fault", ["401", "402", "403", "404"])
def test_an_error_object_is_read_like_its_status(make: Make, fault: str) -> None:
    with (
        JudgeServer(behaviour=f"error object, {fault}") as judge,
        pytest.raises(JudgeError, match=r"judge\.") as caught,
    ):
        make(judge).grade(GOOD)
    assert (judge.calls, caught.value.retryable) == (1, False)


def test_the_code_of_an_error_object_may_be_text(make: Make) -> None:
    with JudgeServer(behaviour=["error object, 429", "good"]) as judge:
        assert make(judge).grade(GOOD).outcome is Outcome.ACCEPTED


def test_a_moderated_exchange_costs_only_itself(make: Make) -> None:
    with JudgeServer(behaviour=["moderated", "good"]) as judge:
        grader = make(judge)
        first, second = grader.grade(GOOD), grader.grade(GOOD)
    assert (first.outcome, first.unreachable, first.calls) == (Outcome.UNDECIDED, False, 0)
    assert "moderation" in first.error
    assert second.outcome is Outcome.ACCEPTED


@pytest.mark.parametrize(
    "behaviour", ["broken byte", "prose", "content of parts", "half a character", "half a character outside"]
)
def test_a_reply_in_another_form_costs_nothing(make: Make, behaviour: str) -> None:
    with JudgeServer(behaviour=behaviour) as judge:
        verdict = make(judge).grade(GOOD)
    assert (verdict.outcome, judge.calls, verdict.calls) == (Outcome.ACCEPTED, 1, 1)
    assert ("good ?" in [result.reason for result in verdict.results]) is behaviour.startswith("half")
    verdict.reason.encode()


def test_the_reply_to_another_call_is_no_verdict(make: Make) -> None:
    with JudgeServer(behaviour="kept reply") as judge:
        grader = make(judge)
        first, second = grader.grade(Exchange("What is 1 plus 1?", "\\boxed{2}")), grader.grade(GOOD)
    assert first.outcome is Outcome.ACCEPTED
    assert (second.outcome, second.calls) == (Outcome.UNDECIDED, 3)
    assert "another call" in second.error


def test_an_endpoint_that_tells_no_usage_is_named_in_the_log(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with JudgeServer(behaviour="no usage") as judge:
        grader = make(judge)
        assert [grader.grade(GOOD).prompt_tokens for _ in range(3)] == [0, 0, 0]
    assert caplog.text.count("does not report token usage") == 1


def test_an_endpoint_without_schemas_is_learned_once(make: Make) -> None:
    with JudgeServer(behaviour="no schema") as judge:
        grader = make(judge)
        for _ in range(3):
            assert grader.grade(GOOD).outcome is Outcome.ACCEPTED
    assert ["response_format" in request for request in judge.tasks] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("fault", "setting"),
    [
        ("400", "judge.max_tokens"),
        ("400 invalid token", "judge.api_key_env"),
        ("400 incorrect API key provided", "judge.api_key_env"),
        ("401", "judge.api_key_env"),
        ("402", "judge.base_url"),
        ("429 quota type", "Add credit to the account of the key in the environment variable OPENAI_API_KEY"),
        ("429 quota code", "Add credit to the account of the key in the environment variable OPENAI_API_KEY"),
        ("403", "judge.api_key_env"),
        ("404", "judge.model"),
        ("405", "judge.base_url"),
        ("422", "judge.max_tokens"),
    ],
)
def test_what_every_call_would_meet_ends_at_once_and_names_the_setting(make: Make, fault: str, setting: str) -> None:
    with JudgeServer(behaviour=fault) as judge, pytest.raises(JudgeError, match=setting) as caught:
        make(judge).grade(GOOD)
    assert judge.calls == (3 if fault in ("400", "422") else 1), "sent again, and then without anything optional"
    assert not caught.value.retryable


@pytest.mark.parametrize("end", ["", "/"])
def test_an_address_without_a_path_is_asked_for_one(make: Make, end: str) -> None:
    with JudgeServer(behaviour="404") as judge:
        root = judge.base_url.removesuffix("/v1")
        with pytest.raises(JudgeError, match=rf"Set judge\.base_url to {root}/v1, where"):
            make(judge, base_url=f"{root}{end}").grade(GOOD)
        with pytest.raises(JudgeError) as caught:
            make(judge).grade(GOOD)
    assert "/v1, where" not in str(caught.value)


def test_a_missing_key_is_named_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(JudgeError, match="OPENAI_API_KEY"):
        Grader(RUBRIC, JudgeSettings(model="m", base_url=OPENAI_URL)).grade(GOOD)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "judge.base_url and judge.model are not set"),
        ({"model": "m"}, "judge.base_url is not set"),
        ({"base_url": "http://127.0.0.1:9/v1"}, "judge.model is not set"),
        ({"backup": {"base_url": "http://127.0.0.1:9/v1", "model": "m"}}, "judge.base_url and judge.model"),
    ],
    ids=str,
)
def test_nothing_is_sent_to_a_default(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], missing: str) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "the-key")
    settings = JudgeSettings(**given)
    with pytest.raises(ConfigError, match=missing):
        Grader(RUBRIC, settings).grade(GOOD)
    with pytest.raises(ConfigError, match=missing):
        require_judge(RUBRIC, settings)


def test_a_rubric_may_name_the_model_and_one_without_judged_criteria_needs_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = RUBRIC.model_copy(update={"judge": RUBRIC.judge.model_copy(update={"model": "of-the-rubric"})})
    with JudgeServer() as judge:
        make(judge, named, model=None).grade(GOOD)
    assert judge.requests[0]["model"] == "of-the-rubric"
    checks = RUBRIC.model_copy(update={"criteria": [each for each in RUBRIC.criteria if not each.asks_the_judge]})
    require_judge(checks, JudgeSettings())
    assert Grader(checks, JudgeSettings()).grade(GOOD).calls == 0


@pytest.mark.parametrize("url", ["localhost:8000/v1", "http://", "http://[::1", "http://x:99999/v1", "ftp://x/v1"])
def test_an_endpoint_that_is_no_url_is_named_at_once(make: Make, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    with JudgeServer() as judge, pytest.raises(JudgeError, match=r"judge\.base_url") as caught:
        make(judge, base_url=None).grade(GOOD)
    assert not caught.value.retryable


@pytest.mark.parametrize("key", ["“quoted”", "two\nlines"])
def test_a_key_that_no_header_can_hold_is_not_shown(make: Make, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    with JudgeServer() as judge:
        grader = make(judge)
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(JudgeError, match="OPENAI_API_KEY") as caught:
            grader.grade(GOOD)
    assert key not in str(caught.value)


def test_an_endpoint_that_nobody_serves_is_undecided_and_says_why(make: Make) -> None:
    with JudgeServer() as judge:
        grader = make(judge)
    verdict = grader.grade(GOOD)
    assert (verdict.outcome, verdict.unreachable, verdict.calls) == (Outcome.UNDECIDED, True, 0)
    assert "refused" in verdict.error
    assert "judge.base_url" in verdict.error


def test_a_wait_that_is_too_long_is_left_to_the_next_time(make: Make) -> None:
    with JudgeServer(behaviour="429 tomorrow") as judge:
        verdict = make(judge).grade(GOOD)
    assert judge.calls == 1
    assert verdict.unreachable


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [("7", 7, 7), ("0.5", 0.5, 0.5), ("Fri, 01 Jan 2100 00:00:00 GMT", 1e9, 1e10), ("soon", 0, 0.5), ("", 0, 0.5)],
)
def test_retry_after_is_a_number_or_a_date_and_else_it_backs_off(header: str, least: float, most: float) -> None:
    state = RetryCallState(Retrying(), None, (), {})
    error = CallError("slow down", status=429, retry_after=parse_retry_after(header))
    state.set_exception((CallError, error, None))  # type: ignore[arg-type]
    assert least <= retry_delay(state) <= most


@pytest.mark.parametrize(
    "header", ["0", "0.0", "-1", "Fri, 01 Jan 2010 00:00:00 GMT", "Thu, 01 Jan 1970 00:00:00 GMT"]
)
def test_a_delay_of_nothing_is_no_hint(header: str) -> None:
    assert parse_retry_after(header) is None


@pytest.mark.parametrize(
    "date",
    ["%a, %d %b %Y %H:%M:%S GMT", "%a, %d %b %Y %H:%M:%S -0000", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %d %H:%M:%S %Y"],
)
def test_the_dates_of_http_are_utc(date: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        wait = parse_retry_after(time.strftime(date, time.gmtime(time.time() + 100)))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert wait is not None
    assert 50 < wait <= 100


def test_the_endpoint_comes_from_the_environment_like_the_client_s_own(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JudgeServer() as judge:
        monkeypatch.setenv("OPENAI_BASE_URL", judge.base_url)
        grader = make(judge, base_url=None)
        assert grader.grade(GOOD).outcome is Outcome.ACCEPTED


def test_an_earlier_task_is_never_shown(make: Make) -> None:
    with JudgeServer() as judge:
        grader = make(judge)
        grader.grade(Exchange("secret question", "\\boxed{secret}"))
        grader.grade(GOOD)
    assert "secret" not in str(judge.requests[1])


def test_exactly_max_thread_are_in_flight_and_all_are_judged(make: Make) -> None:
    with JudgeServer(delay_seconds=0.02, hold_until=16) as judge:
        grader = make(judge, max_thread=16)
        verdicts = dict(grade_all(grader, ((n, GOOD) for n in range(64)), 16))
    assert sorted(verdicts) == list(range(64))
    assert judge.most_in_flight == 16


def test_a_stop_finishes_what_is_in_flight_and_takes_no_more(make: Make) -> None:
    stop = threading.Event()
    taken = []

    def items() -> Iterator[tuple[int, Exchange]]:
        for number in range(1000):
            taken.append(number)
            yield number, GOOD

    with JudgeServer(delay_seconds=0.05) as judge:
        done = []
        for key, _ in grade_all(make(judge), items(), 4, stop):
            done.append(key)
            stop.set()
    # Who had taken one and not yet asked leaves it.
    assert set(done) <= set(taken)
    assert judge.calls == len(done)
    assert len(taken) < 20


def test_a_stop_ends_the_retries_and_what_was_not_judged_is_not_reported(make: Make) -> None:
    stop = threading.Event()
    with JudgeServer(behaviour="500") as judge:
        grader = make(judge, max_attempts=1000)
        stopping = threading.Thread(target=lambda: (wait_for(lambda: judge.calls >= 4, "retries"), stop.set()))
        stopping.start()
        assert list(grade_all(grader, ((n, GOOD) for n in range(1000)), 2, stop)) == []
        stopping.join()
        assert judge.calls < 1000


def test_a_slow_reader_is_not_run_away_from(make: Make) -> None:
    taken = []

    def items() -> Iterator[tuple[int, Exchange]]:
        for number in range(200):
            taken.append(number)
            yield number, Exchange("What is 3 plus 4?", "7")  # decided without a call

    with JudgeServer() as judge:
        for read, _ in enumerate(grade_all(make(judge), items(), 4), start=1):
            time.sleep(0.002)
            assert len(taken) <= read + 2 * 4
    assert len(taken) == 200


def test_a_reader_that_leaves_ends_the_threads(make: Make) -> None:
    before = threading.active_count()
    with JudgeServer(delay_seconds=0.01) as judge:
        verdicts = grade_all(make(judge), ((n, GOOD) for n in range(1000)), 4)
        next(verdicts)
        verdicts.close()  # type: ignore[attr-defined]
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("judge-")]
        assert judge.calls < 1000
    assert threading.active_count() <= before + 4  # the server's own, per connection


def test_a_refusal_ends_the_batch_and_keeps_what_was_judged(make: Make) -> None:
    done: list[Verdict] = []
    with JudgeServer(behaviour=["good", "good", "401"]) as judge, pytest.raises(JudgeError, match="api_key_env"):
        for _, verdict in grade_all(make(judge), ((n, GOOD) for n in range(1000)), 1):
            done.append(verdict)
    assert [verdict.outcome for verdict in done] == [Outcome.ACCEPTED] * 2
    assert judge.calls == 3


def test_an_endpoint_that_is_away_is_not_asked_a_thousand_times(make: Make) -> None:
    with JudgeServer(behaviour="500") as judge, pytest.raises(JudgeError, match="in a row") as caught:
        list(grade_all(make(judge, max_attempts=1), ((n, GOOD) for n in range(1000)), 8))
    assert judge.calls <= 2 * 8
    assert caught.value.retryable


def test_one_bad_task_among_good_ones_stops_nobody(make: Make) -> None:
    # A 400 in words that nobody knows; with and without the schema.
    with JudgeServer(behaviour=["good", "400", "400", "good"]) as judge:
        outcomes = [verdict.outcome for _, verdict in grade_all(make(judge), ((n, GOOD) for n in range(10)), 1)]
    assert len(outcomes) == 10
    assert {Outcome.ACCEPTED, Outcome.UNDECIDED} == set(outcomes)


def broken_on(grader: Grader, poison: Callable[[Exchange], bool], monkeypatch: pytest.MonkeyPatch) -> Grader:
    begin = grader.begin

    def breaks(exchange: Exchange, *given: Any) -> Any:
        if poison(exchange):
            raise AttributeError("poison")
        return begin(exchange, *given)

    monkeypatch.setattr(grader, "begin", breaks)
    return grader


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 4])
def test_an_exchange_that_breaks_the_grading_stops_no_other(
    make: Make, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    with JudgeServer() as judge:
        grader = broken_on(make(judge), lambda exchange: exchange.query == "poison", monkeypatch)
        items = [(n, Exchange("poison", "7") if n % 3 == 0 else GOOD) for n in range(30)]
        done = dict(grade_all(grader, items, threads))
    assert {n for n, verdict in done.items() if verdict.broken} == set(range(0, 30, 3))
    assert "AttributeError: poison" in done[0].error
    assert [done[n].outcome for n in (1, 2)] == [Outcome.ACCEPTED] * 2


def test_grading_that_breaks_on_everything_ends_the_batch(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    with JudgeServer() as judge, pytest.raises(FlywheelError, match=rf"{MAX_BROKEN} times in a row.*poison"):
        grader = broken_on(make(judge), lambda _: True, monkeypatch)
        for number, _ in grade_all(grader, ((n, GOOD) for n in range(1000)), 4):
            done.append(number)
    assert MAX_BROKEN <= len(done) <= MAX_BROKEN + 2 * 4


def test_the_judges_hash_is_that_of_what_answers(make: Make) -> None:
    with JudgeServer() as judge:
        hashes = {
            make(judge, **settings).judge_hash
            for settings in ({}, {"model": "b"}, {"temperature": 0.5}, {"max_tokens": 9}, {"max_thread": 2})
        }
    assert len(hashes) == 4


def test_another_wording_is_judged_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with JudgeServer() as judge:
        before = make(judge).judge_hash
        assert make(judge).judge_hash == before
        monkeypatch.setattr(prompt, "VERSION", "another")
        assert make(judge).judge_hash != before


def test_every_part_of_the_wording_counts() -> None:
    told = "\n".join(str(message["content"]) for message in prompt.messages(RUBRIC, GOOD, problem="p"))
    for wording in (prompt.RULES, prompt.REMINDER, prompt.PROBLEM):
        assert wording in prompt._WORDING
        assert wording.partition("{")[0].splitlines()[0] in told
