"""Rate limiter, concurrency limit, keys, failover and budget: with an injected clock and a server that counts."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.config.judge import JudgeBudget
from flywheel.errors import JudgeError
from flywheel.judge.chat_completions import MAX_TOKEN_COUNT
from flywheel.judge.limits import (
    MAX_REST_SECONDS,
    REJECTED_SECONDS,
    THROTTLED_SECONDS,
    ConcurrencyLimit,
    Key,
    KeyPool,
    RateLimiter,
)
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.thread_pool import grade_all
from flywheel.judge.usage import Budget, BudgetClock, BudgetSpentError
from flywheel.records.verdict import Exchange, Outcome, Verdict
from flywheel.system.http_client import NEVER, CallError
from tests.factories.judge_server import JudgeServer
from tests.judge.conftest import GOOD, Make

RUBRIC = Rubric.model_validate({"id": "test", "criteria": [{"id": "correct", "value": "It is right."}]})
CHECKED = Rubric.model_validate(
    {
        "id": "checked",
        "criteria": [
            {"id": "some", "type": "regex", "value": ".", "required": True},
            {"id": "correct", "value": "It is right."},
        ],
    }
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class NeverStopped(threading.Event):
    """Is waited for as a stop without waiting; `waits` has the seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return False


# In flight


def acquire(limiter: ConcurrencyLimit) -> Any:
    began = limiter.acquire(NEVER)
    assert began is not None
    return began


def test_a_refusal_for_speed_halves_and_answers_add_one_for_each_round() -> None:
    clock = Clock()
    limiter = ConcurrencyLimit(16, clock)
    clock.now += 1
    first = [acquire(limiter) for _ in range(4)]
    clock.now += 1
    for began in first:
        limiter.release(began, throttled=True)
    assert limiter.limit == 8, "the other three are echoes of the first"
    clock.now += 1
    limiter.release(acquire(limiter), throttled=True)
    assert limiter.limit == 4
    for _ in range(5):
        limiter.release(acquire(limiter), throttled=False)
    assert int(limiter.limit) == 5
    for _ in range(1000):
        limiter.release(acquire(limiter), throttled=False)
    assert limiter.limit == 16


def test_an_answer_that_says_nothing_of_speed_changes_nothing() -> None:
    clock = Clock()
    limiter = ConcurrencyLimit(8, clock)
    limiter.release(acquire(limiter), throttled=True)
    for _ in range(100):
        limiter.release(acquire(limiter), throttled=None)
    assert limiter.limit == 4


def test_at_least_one_is_always_let_in() -> None:
    clock = Clock()
    limiter = ConcurrencyLimit(2, clock)
    for _ in range(10):
        clock.now += 1
        limiter.release(acquire(limiter), throttled=True)
    assert limiter.limit == 1


def test_who_waits_for_a_place_notices_the_stop() -> None:
    limiter = ConcurrencyLimit(1)
    acquire(limiter)
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    assert limiter.acquire(stop) is None


def test_who_waits_for_a_place_gets_the_next() -> None:
    limiter = ConcurrencyLimit(1)
    began = acquire(limiter)
    threading.Timer(0.05, limiter.release, [began], {"throttled": False}).start()
    assert limiter.acquire(threading.Event()) is not None


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["429", "429 with Retry-After"])
def test_after_429_fewer_are_in_flight_and_all_are_judged(make: Make, fault: str) -> None:
    with JudgeServer(behaviour=[*[fault] * 8, *["good"] * 1000], delay_seconds=0.01) as judge:
        grader = make(judge, max_thread=8, max_attempts=20)
        limiter = grader.client.endpoints[0].concurrency
        seen: list[int] = []
        release = limiter.release

        def released(began: float, *, throttled: bool | None) -> None:
            release(began, throttled=throttled)
            seen.append(int(limiter.limit))

        limiter.release = released  # type: ignore[method-assign]
        outcomes: Counter[Outcome] = Counter()
        for _, verdict in grade_all(grader, ((n, GOOD) for n in range(300)), 8):
            outcomes[verdict.outcome] += 1
    assert outcomes == {Outcome.ACCEPTED: 300}
    assert min(seen) <= 4
    assert seen[-1] == 8, "it recovers by itself"


# RateLimiter


def test_turns_are_evenly_spaced() -> None:
    clock = Clock()
    limiter = RateLimiter(120, clock)
    assert [limiter.reserve() for _ in range(4)] == [0.0, 0.5, 1.0, 1.5]
    clock.now += 60
    assert [limiter.reserve() for _ in range(2)] == [0.0, 0.5], "unused turns are not saved up"


def test_what_was_estimated_is_corrected() -> None:
    clock = Clock()
    limiter = RateLimiter(6000, clock)
    limiter.reserve(300)
    limiter.correct(-200)
    assert limiter.reserve(1) == pytest.approx(1.0)
    assert RateLimiter(None, clock).reserve(10**9) == 0.0


@given(st.integers(1, 10_000), st.lists(st.floats(0, 30), min_size=1, max_size=200))
def test_no_minute_holds_more_than_was_allowed(per_minute: int, pauses: list[float]) -> None:
    clock = Clock()
    limiter = RateLimiter(per_minute, clock)
    turns = []
    for pause in pauses:
        clock.now += pause / per_minute
        turns.append(clock.now + limiter.reserve())
    for begin in turns:
        assert sum(begin <= turn < begin + 60 - 1e-6 for turn in turns) <= per_minute


def test_requests_and_tokens_are_held_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = NeverStopped()
    with JudgeServer() as judge:
        grader = make(judge, requests_per_minute=60)
        for _ in range(3):
            assert grader.grade(GOOD, stop).outcome is Outcome.ACCEPTED
        assert stop.waits[-1] == pytest.approx(2.0, abs=0.5)
        stop.waits.clear()
        grader = make(judge, tokens_per_minute=1200)
        for _ in range(2):
            grader.grade(GOOD, stop)
    # The call had 120 tokens, as the endpoint said: six seconds at twenty a second, however many were expected.
    assert stop.waits == [pytest.approx(6.0, abs=0.5)]


@pytest.mark.parametrize("fault", ["500", "reset", "400 too long"])
def test_a_call_that_failed_gives_its_tokens_back(make: Make, fault: str) -> None:
    stop = NeverStopped()
    with JudgeServer(behaviour=[fault, "good"]) as judge:
        grader = make(judge, tokens_per_minute=60, max_attempts=1)
        with contextlib.suppress(JudgeError):
            grader.grade(GOOD, stop)
        grader.grade(GOOD, stop)
    assert judge.calls == 2
    assert stop.waits == [], "nothing was used of this minute's tokens"


# Keys


def pool_of(secrets: str, clock: Clock) -> KeyPool:
    return KeyPool([Key(place, secret) for place, secret in enumerate(secrets, start=1)], clock)


def taken(pool: KeyPool, number: int) -> str:
    return "".join(pool.take(NEVER, 0.0).secret for _ in range(number))


def test_keys_take_turns_and_a_slow_one_rests() -> None:
    clock = Clock()
    pool = pool_of("abc", clock)
    assert taken(pool, 4) == "abca"
    pool.throttle(pool.take(NEVER, 0.0), None)
    assert "b" not in taken(pool, 6)
    clock.now += THROTTLED_SECONDS
    assert "b" in taken(pool, 3)
    for key in pool.keys:
        pool.throttle(key, 86_400)
    with pytest.raises(CallError, match=f"a delay of {MAX_REST_SECONDS:.0f} s") as failure:
        taken(pool, 1)
    assert not failure.value.retryable


def test_a_refused_key_rests_and_all_refused_is_told() -> None:
    clock = Clock()
    pool = pool_of("ab", clock)
    assert pool.reject(pool.take(NEVER, 0.0), CallError("no such key", status=401))
    second = pool.take(NEVER, 0.0)
    assert second.secret == "b"
    assert not pool.reject(second, CallError("no money", status=402))
    with pytest.raises(CallError, match="no money, and so for each of 2 keys") as refused:
        taken(pool, 1)
    assert refused.value.status == 402
    clock.now += REJECTED_SECONDS
    again = pool.take(NEVER, 0.0)
    again.rejection = None
    assert taken(pool, 2) == "ba"


def test_secrets_are_in_no_representation() -> None:
    assert "hush" not in repr(Key(1, "hush"))


def keys_used(judge: JudgeServer) -> list[str]:
    return [headers["authorization"].removeprefix("Bearer ") for headers in judge.headers]


def test_a_pool_of_keys_takes_turns(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k1| k2 |")
    with JudgeServer() as judge:
        grader = make(judge)
        for _ in range(4):
            grader.grade(GOOD)
    assert keys_used(judge) == ["k1", "k2", "k1", "k2"]


@pytest.mark.parametrize("fault", ["401", "402", "403", "429", "429 tomorrow", "429 quota type"])
def test_a_key_that_is_refused_or_slow_rests_while_the_other_works(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "bad-key|good-key")
    # As with a real endpoint, the answer to a key does not depend on when it is asked.
    with JudgeServer(by_key={"bad-key": fault}) as judge:
        grader = make(judge)
        outcomes = [grader.grade(GOOD).outcome for _ in range(5)]
    assert outcomes == [Outcome.ACCEPTED] * 5
    assert Counter(keys_used(judge)) == {"bad-key": 1, "good-key": 5}
    assert "bad-key" not in caplog.text


def test_all_keys_refused_names_the_variable(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k1|k2")
    with JudgeServer(behaviour="401") as judge:
        grader = make(judge)
        for _ in range(2):
            with pytest.raises(JudgeError, match="OPENAI_API_KEY") as caught:
                grader.grade(GOOD)
            assert not caught.value.retryable
    assert judge.calls == 2, "they rest; nobody asks again at once"
    assert "k1" not in str(caught.value)


@pytest.mark.parametrize("behaviour", ["402", "429 quota code"])
def test_keys_without_money_are_said_to_have_none_also_by_later_calls(
    make: Make, monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k1|k2")
    with JudgeServer(behaviour=behaviour) as judge:
        grader = make(judge)
        for _ in range(3):
            with pytest.raises(JudgeError, match=f"scripted {behaviour}.*, and so for each of 2 keys") as caught:
                grader.grade(GOOD)
            assert caught.value.hint.startswith("Add credit to the account of the key")
    assert judge.calls == 2


# The backup


@pytest.mark.parametrize("fault", ["401", "500", "reset", "429 tomorrow"])
def test_the_backup_judges_while_the_judge_is_away(make: Make, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("BACKUP_KEY", "the-other-key")
    with JudgeServer(behaviour=fault) as judge, JudgeServer() as other:
        backup = {"base_url": other.base_url, "api_key_env": "BACKUP_KEY", "model": "m2"}
        grader = make(judge, backup=backup, max_attempts=1)
        verdicts = [grader.grade(GOOD) for _ in range(3)]
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ACCEPTED}
    assert judge.calls == 1, "it is left alone for a while"
    assert (other.calls, other.requests[0]["model"], keys_used(other)[0]) == (3, "m2", "the-other-key")
    assert verdicts[0].judgements[0].judge == f"m2 at {other.base_url}"


def test_when_both_are_away_the_judge_is_named(make: Make) -> None:
    with JudgeServer(behaviour="401") as judge, JudgeServer(behaviour="500") as other:
        grader = make(judge, backup={"base_url": other.base_url}, max_attempts=1)
        with pytest.raises(JudgeError, match=r"judge\.api_key_env"):
            grader.grade(GOOD)
    with JudgeServer(behaviour="500") as judge, JudgeServer(behaviour="401") as other:
        grader = make(judge, backup={"base_url": other.base_url}, max_attempts=1)
        verdict = grader.grade(GOOD)
    assert verdict.unreachable
    assert judge.base_url in verdict.error


def test_another_backup_is_another_judge(make: Make) -> None:
    with JudgeServer() as judge:
        hashes = {make(judge, backup=each).judge_hash for each in (None, {"model": "a"}, {"model": "b"})}
    assert len(hashes) == 3


# The budget


def spend(budget: Budget, tokens: int) -> None:
    budget.check()
    budget.book(tokens)


def test_a_day_s_budget_is_spent_and_comes_back_at_midnight() -> None:
    now = [datetime(2026, 3, 1, 23, 0, tzinfo=UTC)]
    budget = Budget(JudgeBudget(tokens_per_day=1000), lambda: 400, BudgetClock(lambda: now[0]))
    spend(budget, 500)
    spend(budget, 100)
    for _ in range(2):
        with pytest.raises(BudgetSpentError, match=r"1,000 tokens a day .*midnight UTC.*tokens_per_day") as caught:
            spend(budget, 1)
        assert caught.value.retryable
    now[0] += timedelta(hours=1)
    spend(budget, 999)
    spend(budget, 1)
    with pytest.raises(BudgetSpentError):
        spend(budget, 1)


def test_a_clock_that_steps_back_over_midnight_gives_no_budget_twice(caplog: pytest.LogCaptureFixture) -> None:
    now = [datetime(2026, 3, 1, 23, 0, tzinfo=UTC)]
    stored = {date(2026, 3, 1): 400, date(2026, 2, 28): 300}
    budget = Budget(JudgeBudget(tokens_per_day=1000), lambda: stored[now[0].date()], BudgetClock(lambda: now[0]))
    spend(budget, 100)
    now[0] += timedelta(hours=2)
    spend(budget, 700)
    now[0] -= timedelta(hours=23, minutes=59)
    spend(budget, 300)
    with pytest.raises(BudgetSpentError):
        spend(budget, 1)
    now[0] += timedelta(hours=23, minutes=58)
    with pytest.raises(BudgetSpentError):
        spend(budget, 1)
    assert not caplog.records
    # Farther: a day of its own, with what was used on it.
    now[0] -= timedelta(hours=27)
    assert now[0].date() == date(2026, 2, 28)
    spend(budget, 700)
    with pytest.raises(BudgetSpentError):
        spend(budget, 1)
    [warning] = caplog.messages
    assert "the clock stepped back" in warning and "2026-02-28" in warning


def test_a_run_s_budget_is_not_the_day_s() -> None:
    budget = Budget(JudgeBudget(tokens_per_run=100), lambda: 10**9)
    spend(budget, 100)
    with pytest.raises(BudgetSpentError, match="a run"):
        spend(budget, 1)


def test_without_a_budget_nothing_is_counted() -> None:
    def fail() -> int:
        raise AssertionError

    spend(Budget(JudgeBudget(), fail), 10**12)


@pytest.mark.parametrize("threads", [1, 16])
def test_judging_pauses_when_the_budget_is_spent(make: Make, threads: int) -> None:
    taken = []

    def items() -> Iterator[tuple[int, Exchange]]:
        for number in range(1000):
            taken.append(number)
            yield number, GOOD

    done = []
    with JudgeServer(delay_seconds=0.005) as judge:
        grader = make(judge, max_thread=threads)
        budget = Budget(JudgeBudget(tokens_per_run=1200))
        for _ in range(2):
            with pytest.raises(BudgetSpentError):
                for key, verdict in grade_all(grader, items(), threads, budget=budget):
                    done.append((key, verdict.prompt_tokens + verdict.completion_tokens))
            took = len(taken)
    # 120 tokens a call: ten calls and those in flight, all of them kept; once it is spent, nothing is taken.
    assert sum(tokens for _, tokens in done) == 120 * len(done)
    assert 10 <= judge.calls == len(done) <= 9 + threads
    # Each thread looks before it takes one.
    assert len(taken) == took <= 10 + 2 * threads


def test_what_costs_nothing_is_decided_by_all_threads_at_once(make: Make) -> None:
    together = threading.Barrier(8)

    def earlier(_: int) -> tuple[Verdict, ...]:
        together.wait(60)
        return ()

    with JudgeServer() as judge:
        budget = Budget(JudgeBudget(tokens_per_run=1))
        items = ((n, Exchange("q", "")) for n in range(64))
        done = list(grade_all(make(judge, CHECKED), items, 8, budget=budget, earlier=earlier))
    assert (len(done), judge.calls) == (64, 0)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("limit", "threads"), [(10_000, 1), (100_000, 16)])
def test_a_budget_is_passed_by_one_verdict_of_each_thread(
    make: Make, limit: int, threads: int, checked: bool
) -> None:
    """Also where every other exchange is decided by the checks, for nothing."""
    cost = 8_000
    items = ((n, Exchange("q", "") if checked and n % 2 else GOOD) for n in range(1000))
    with JudgeServer(behaviour="costly", delay_seconds=0.02) as judge:
        budget = Budget(JudgeBudget(tokens_per_run=limit))
        with pytest.raises(BudgetSpentError):
            list(grade_all(make(judge, CHECKED, max_thread=threads), items, threads, budget=budget))
        assert budget.run_left() == limit - judge.calls * cost
    assert limit <= judge.calls * cost < limit + threads * cost


def test_a_judge_that_is_away_is_given_up_as_soon_with_a_budget(make: Make) -> None:
    with JudgeServer(behaviour="500") as judge, pytest.raises(JudgeError, match="in a row"):
        budget = Budget(JudgeBudget(tokens_per_run=1000))
        list(grade_all(make(judge, max_attempts=1), ((n, GOOD) for n in range(1000)), 8, budget=budget))
    # Sixteen are read or in flight at once, and seven were read before the eighth failure in a row.
    assert judge.calls <= 3 * 8


def test_usage_that_no_call_can_have_is_not_believed(make: Make) -> None:
    with JudgeServer(behaviour="boundless usage") as judge:
        verdict = make(judge).grade(GOOD)
    assert verdict.outcome is Outcome.ACCEPTED
    assert (verdict.prompt_tokens, verdict.completion_tokens) == (MAX_TOKEN_COUNT, MAX_TOKEN_COUNT)


def test_a_wrong_key_with_status_400_is_one_and_the_next_is_taken() -> None:
    pool = KeyPool([Key(1, "one"), Key(2, "two")])

    def call(key: Key) -> str:
        if key.secret == "one":
            raise CallError("Incorrect API key provided", status=400)
        return key.secret

    assert [pool.attempt(call, NEVER, 0.0, "m at u") for _ in range(3)] == ["two"] * 3
    assert pool.keys[0].rejection is not None
