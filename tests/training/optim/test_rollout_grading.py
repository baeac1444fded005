"""A round's worker grades: it waits for a judge that is away, keeps to what is lent, and writes its calls down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.errors import JudgeError
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.file import parse_rubric
from flywheel.judge.usage import Allowance, Purpose, UsageFile
from flywheel.records.program_run import RunResult
from flywheel.records.verdict import Exchange, Verdict
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import Completion, RewardWeights, RolloutRequest
from flywheel.training.optim.collector import Collector
from flywheel.training.optim.rollout_grading import Grading, PauseLimits
from tests.factories.judge_server import JudgeServer
from tests.factories.task import round_task
from tests.training.data.rollouts import request, verdict
from tests.waiting import wait_for

RUBRIC = parse_rubric(
    {
        "version": 1,
        "id": "math",
        "criteria": [
            {"id": "boxed", "type": "contains", "value": "\\boxed{", "required": True},
            {"id": "right", "value": "It is right."},
        ],
    },
    "the test's rubric",
)
COST = 120
"""Tokens of a verdict of the test's judge."""


class World:
    """A clock that only waiting moves, and what happens at certain times of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[str] = []
        self.events: dict[float, Callable[[], None]] = {}
        self._lock = threading.Lock()

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds
            for at in [at for at in self.events if at <= self.now]:
                self.events.pop(at)()


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    with JudgeServer(lambda *_: True) as server:
        yield server


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def grading(judge: JudgeServer, world: World, tmp_path: Path) -> Callable[..., Grading]:
    def make(purpose: Purpose = Purpose.ROUNDS, wait_seconds: float = 600, **judge_settings: Any) -> Grading:
        settings = Config.model_validate(
            {"judge": {"base_url": judge.base_url, "model": "j", "max_attempts": 1, **judge_settings}}
        ).judge
        pause_limits = PauseLimits(wait_seconds, world.told.append, world.clock, world.sleep)
        return Grading(Grader(RUBRIC, settings), settings.budget, tmp_path, purpose, pause_limits)

    return make


def answer(number: int) -> Exchange:
    return Exchange("What is it?", f"\\boxed{{{number}}}")


def in_threads(grade: Grading, number: int) -> list[float | None]:
    scores: list[float | None] = [None] * number

    def one(place: int) -> None:
        scores[place] = grade(answer(place)).score

    threads = [threading.Thread(target=one, args=(place,)) for place in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return scores


@pytest.mark.parametrize("threads", [1, 8])
def test_an_outage_is_waited_for_and_leaves_nothing_undecided(
    grading: Callable[..., Grading], judge: JudgeServer, world: World, tmp_path: Path, threads: int
) -> None:
    grade = grading()
    assert grade(answer(0)).score == 1
    judge.behave("500")
    world.events[100] = lambda: judge.behave("good")
    assert in_threads(grade, threads) == [1.0] * threads
    assert 100 <= world.now < 100 + 31
    waited, went_on = world.told
    url = judge.base_url
    assert waited == f"the judge is unreachable (cannot ask the judge j at {url}: it answered 500 (scripted 500))"
    assert went_on == ""
    # The threads' own calls, a look now and then by one of them, and the calls again: nobody hammers at the judge.
    assert judge.calls < 1 + threads + 10 + threads
    used, _ = UsageFile(tmp_path).read(0)
    assert sum(each.calls for each in used) == 1 + threads + 1, "the look that was answered is paid too"


def test_an_outage_that_lasts_is_given_up_once_and_for_all(
    grading: Callable[..., Grading], judge: JudgeServer, world: World
) -> None:
    grade = grading(wait_seconds=60)
    judge.behave("500")
    verdict = grade(answer(0))
    assert verdict.unreachable
    assert world.now == 60
    assert in_threads(grade, 4) == [None] * 4
    assert world.now == 60, "nobody waits again for what did not come"
    judge.behave("good")
    assert grade(answer(0)).score == 1
    judge.behave("500")
    assert grade(answer(0)).unreachable
    assert world.now == 120, "the next outage is another one"


def test_an_exchange_on_which_the_judge_fails_is_no_outage(
    grading: Callable[..., Grading], judge: JudgeServer, world: World
) -> None:
    grade = grading()
    assert grade(answer(0)).score == 1

    def verdict(question: str, text: str) -> bool:
        if "666" in text:
            raise ConnectionResetError
        return True

    judge.verdict = verdict
    poisoned = grade(answer(666))
    assert poisoned.unreachable
    assert world.now < 30, "the judge answers about another one at once"
    assert world.told[-1] == ""
    assert grade(answer(1)).score == 1


def test_a_judge_that_refuses_the_key_is_not_waited_for(
    grading: Callable[..., Grading], judge: JudgeServer, world: World
) -> None:
    grade = grading()
    judge.behave("401")
    with pytest.raises(JudgeError):
        grade(answer(0))
    assert world.told == []


def test_each_verdict_is_written_down_with_its_purpose_and_what_costs_nothing_is_not(
    grading: Callable[..., Grading], judge: JudgeServer, tmp_path: Path
) -> None:
    assert grading(Purpose.ROUNDS)(answer(1)).score == 1
    assert grading(Purpose.GATES)(answer(1)).score == 1
    assert grading(Purpose.GATES)(Exchange("What is it?", "seven")).score == 0
    judge.behave("unknown choice")
    assert grading(Purpose.GATES)(answer(1)).score is None
    used, end = UsageFile(tmp_path).read(0)
    assert [(each.purpose, each.calls, each.tokens) for each in used] == [
        (Purpose.ROUNDS, 1, COST),
        (Purpose.GATES, 1, COST),
        (Purpose.GATES, 1, COST),
    ]
    assert UsageFile(tmp_path).read(end) == ([], end)


def test_a_worker_stays_within_what_is_lent_and_goes_on_when_it_is_more(
    grading: Callable[..., Grading], judge: JudgeServer, world: World, tmp_path: Path
) -> None:
    Allowance(3 * COST, "the day's tokens are spent").write(tmp_path)
    grade = grading(budget={"tokens_per_day": 10**9})
    world.events[5000] = lambda: Allowance(5 * COST, "the day's tokens are spent").write(tmp_path)
    asked_by_then: list[int] = []
    world.events[4999] = lambda: asked_by_then.append(judge.calls)
    # One after the other: each thread may end the verdict that it has begun.
    assert [grade(answer(1)).score for _ in range(4)] == [1.0] * 4
    assert asked_by_then == [3]
    assert world.now >= 5000, "no outage: it may last until midnight"
    assert world.told[0] == "the day's tokens are spent"
    assert world.told[-1] == ""
    assert judge.calls == 4


def test_what_earlier_attempts_used_was_used(
    grading: Callable[..., Grading], judge: JudgeServer, world: World, tmp_path: Path
) -> None:
    Allowance(2 * COST, "spent").write(tmp_path)
    assert in_threads(grading(budget={"tokens_per_run": 10**9}), 2) == [1.0] * 2
    world.events[10] = lambda: Allowance(9 * COST, "spent").write(tmp_path)
    assert grading(budget={"tokens_per_run": 10**9})(answer(3)).score == 1
    assert world.now >= 10


def test_without_limits_or_a_daemon_nobody_waits(
    grading: Callable[..., Grading], judge: JudgeServer, world: World, tmp_path: Path
) -> None:
    assert in_threads(grading(budget={"tokens_per_day": 1}), 2) == [1.0] * 2
    Allowance(0, "left by an earlier attempt").write(tmp_path)
    assert in_threads(grading(), 2) == [1.0] * 2
    assert (world.now, world.told) == (0, [])


def test_half_a_line_of_a_dead_worker_spoils_no_other(tmp_path: Path, grading: Callable[..., Grading]) -> None:
    file = UsageFile(tmp_path)
    grading()(answer(1))
    whole = file.size()
    with file.path.open("ab") as appended:
        appended.write(b'{"day": "2026-01-01", "purp')
    assert file.read(0)[1] == whole
    file.mend()
    grading()(answer(2))
    assert [each.calls for each in file.read(0)[0]] == [1, 1]
    wait_for(lambda: file.read(whole)[0], "the second line")


def test_a_wait_that_is_over_while_it_is_told_is_no_error() -> None:
    now, waits = [0.0], list[float]()

    def pause(why: str) -> None:
        now[0] += 5.0 if why else 0.0

    limits = PauseLimits(1.0, pause, clock=lambda: now[0], sleep=waits.append)
    assert not limits.until_back(0, "it is away", lambda: False)
    assert waits == [0.0]


def test_without_a_weight_of_the_rubric_the_judge_is_not_asked_about_the_users_agent() -> None:
    class Calls:
        """A call is the seed of its request, and has ended."""

        def submit(self, _: Any, wanted: RolloutRequest) -> int:
            return wanted.seed

        def ended(self, calls: Any, *, seconds: float) -> list[Any]:
            return list(calls)

        def completion(self, _: int) -> Completion:
            return Completion(text="seven", run=RunResult(reward=1.0))

    graded: list[Exchange] = []

    def grade(work: Exchange) -> Verdict:
        graded.append(work)
        return verdict(0.25)

    of = Prompt(round_task().model_copy(update={"agent": "program"}), (5, 6, 7))
    about: dict[str, Any] = {"max_thread": 1, "timeout_seconds": 60, "calls": Calls()}
    for rubric, judged, reward in ((0.0, 0, 1.0), (1.0, 1, 0.625)):
        with Collector([1], grade, weights=RewardWeights(rubric=rubric, program=1.0), **about) as collector:
            [rollout] = collector.collect([request(of=of)]).rollouts
        assert (len(graded), rollout.reward) == (judged, reward)
