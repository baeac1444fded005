"""The collector on a real Ray session; only the engine is one that can be told to fail."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from flywheel.errors import FlywheelError, JudgeError, ProcessLostError, TrainError
from flywheel.records.verdict import Exchange, Verdict
from flywheel.training.data.graded_rollouts import GradedRollouts
from flywheel.training.data.rollout import Completion, Rollout, RolloutBatch, RolloutRequest
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.ray_cluster import RayCalls
from flywheel.training.optim import collector as collector_module
from flywheel.training.optim.collector import Collector, Grade
from tests.training.data.rollouts import reply, request, rollout, verdict

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Engine:
    """Answers with the request's seed; some seeds fail in their own way."""

    def __init__(self, *, is_mortal: bool = False) -> None:
        self._is_mortal = is_mortal
        self._released = asyncio.Event()
        self._turns: dict[int, asyncio.Event] = {}

    async def release(self) -> None:
        """Seeds 1004 and 1005 go on."""
        self._released.set()

    async def admit(self, seed: int) -> None:
        """Of the seeds above 2000, each waits for its turn, unless it was given up."""
        if seed in self._turns:
            self._turns[seed].set()

    async def generate(self, wanted: RolloutRequest) -> Completion:
        match wanted.seed:
            case 1000:
                raise ValueError("this prompt breaks me")
            case 1001:
                await asyncio.sleep(600)
            case 1002:
                os._exit(1)
            case 1003:
                return Completion()
            case 1004 if self._is_mortal:
                await self._released.wait()
                os._exit(1)
            case 1005:
                await self._released.wait()
            case 1006 if self._is_mortal:
                await asyncio.sleep(600)
            case seed if 2000 < seed < 3000:
                self._turns[seed] = asyncio.Event()
                try:
                    await self._turns[seed].wait()
                finally:
                    del self._turns[seed]
        return reply(wanted.prompt, (wanted.seed, 2), (-0.1, -0.2), str(wanted.seed))


def started() -> Any:
    """An engine that is up: the first call to an actor waits for its process."""
    actor = ray_cluster.start(Engine, gpus=0)
    ray_cluster.wait([actor.generate.remote(request())])
    return actor


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    actor = started()
    yield actor
    ray.kill(actor)


def collect(engine: Any, seeds: list[int], grade: Grade, *, threads: int = 4) -> RolloutBatch:
    with Collector([engine], grade, max_thread=threads, timeout_seconds=60) as collector:
        return collector.collect([request(place // 2, seed) for place, seed in enumerate(seeds)])


def by_answer(shown: Exchange) -> Verdict:
    return verdict(int(shown.answer) / 10)


def by_answer_or_0(shown: Exchange) -> Verdict:
    return verdict(min(int(shown.answer), 10) / 10)


def test_rollouts_come_back_in_order_with_their_own_rewards(engine: Any) -> None:
    seeds = [3, 1, 4, 1, 5, 9, 2, 6]
    batch = collect(engine, seeds, by_answer)
    assert [rollout.completion.token_ids for rollout in batch.rollouts] == [(seed, 2) for seed in seeds]
    assert batch.rewards == [seed / 10 for seed in seeds]
    assert set(batch.seconds) == {"generate", "grade"}


def test_one_failing_rollout_costs_itself_alone(engine: Any) -> None:
    batch = collect(engine, [3, 1000, 1003, 4], by_answer)
    assert batch.rewards == [0.3, 0.4]
    assert "this prompt breaks me" in batch.rollouts[1].failure
    assert batch.rollouts[2].failure == "the engine returned no token"


class Clock:
    """The collector's clock, which the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(collector_module, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_a_rollout_that_takes_too_long_is_given_up(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def note(rollout: Rollout) -> None:
        clock.now = 3.1

    with Collector([engine], by_answer, max_thread=4, timeout_seconds=3) as collector:
        batch = collector.collect([request(0, 3), request(0, 1001)], on_rollout=note)
    assert batch.rewards == [0.3]
    assert batch.rollouts[1].failure == "no completion within 3 s"


def test_rollouts_that_drip_are_given_up_like_those_that_hang(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One comes every second, for half a minute."""
    clock = Clock(monkeypatch)

    def note(rollout: Rollout) -> None:
        if not rollout.failure:
            clock.now += 1.0
            engine.admit.remote(rollout.request.seed + 1)

    with Collector([engine], lambda _: verdict(1.0), max_thread=4, timeout_seconds=8) as collector:
        batch = collector.collect([request(place, 2000 + place) for place in range(30)], on_rollout=note)
    assert 0 < len(batch.rewards) < 30
    assert batch.rollouts[-1].failure == "no completion within 8 s"


def test_the_gates_answers_are_written_as_they_are_graded_and_few_requests_are_open(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One submission: the next request goes out when any one has ended, and no answer waits for a whole batch.

    The slow answer comes when the others are written: were one of those held up, it would never come.
    """
    most, seen, lock = 0, [], threading.Lock()
    submit = collector_module._Dispatch.submit

    def watched(self: Any) -> bool:
        nonlocal most
        going_on = submit(self)
        most = max(most, len(self.running))
        return going_on

    def note(rollout: Rollout) -> None:
        with lock:
            seen.append(rollout.request.seed)
            if len(seen) == 8:
                engine.release.remote()

    monkeypatch.setattr(collector_module._Dispatch, "submit", watched)
    seeds = [1005, *range(1, 9)]
    with Collector([engine], lambda _: verdict(1.0), max_thread=4, timeout_seconds=60) as collector:
        asked = [request(place, seed) for place, seed in enumerate(seeds)]
        batch = collector.collect(asked, most_open=2, on_rollout=note)
    assert [rollout.completion.token_ids for rollout in batch.rollouts] == [(seed, 2) for seed in seeds]
    assert most == 2
    assert seen[-1] == 1005, "the slow one holds nobody up"
    assert sorted(seen) == sorted(seeds)


def test_of_two_steps_the_older_one_is_graded_first() -> None:
    """One thread: what waits is taken by step, however late it came."""
    threads, gate, order = collector_module._GradingThreads(1), threading.Event(), []

    def work(name: str) -> Rollout:
        order.append(name)
        return rollout(0, 1.0)

    def first() -> Rollout:
        gate.wait(60)
        return rollout(0, 1.0)

    waiting = [threads.submit(0, first)]
    waiting += [threads.submit(step, partial(work, name)) for step, name in ((2, "c"), (1, "a"), (2, "d"), (1, "b"))]
    gate.set()
    for each in waiting:
        each.result(60)
    assert order == ["a", "b", "c", "d"]
    threads.close()


def test_rollouts_of_an_earlier_worker_are_neither_generated_nor_graded_again(engine: Any, tmp_path: Path) -> None:
    seeds = [3, 1, 4]
    asked = [request(place, seed) for place, seed in enumerate(seeds)]

    def run(grade: Grade, engines: list[Any]) -> RolloutBatch:
        store = GradedRollouts(tmp_path)
        with Collector(engines, grade, max_thread=4, timeout_seconds=60, store=store) as collector:
            return collector.collect(asked)

    first = run(by_answer, [engine])
    again = run(lambda _: pytest.fail("it was graded"), [])
    assert again.rewards == first.rewards == [0.3, 0.1, 0.4]
    assert again.rows() == first.rows()


def test_the_engine_with_the_fewest_open_rollouts_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Ray: engines write down what they are given, and each reference is the number of a call."""
    monkeypatch.setattr(collector_module, "MAX_OPEN", 8)
    given: dict[str, list[int]] = {"a": [], "b": []}
    numbers = itertools.count()

    def engine_named(name: str) -> Any:
        def generate(wanted: RolloutRequest) -> int:
            given[name].append(wanted.group)
            return next(numbers)

        return SimpleNamespace(generate=SimpleNamespace(remote=generate))

    requests = [request(group, seed) for group in range(6) for seed in range(4)]
    engines = collector_module._Dispatch(
        [engine_named("a"), engine_named("b")], RayCalls(), requests, range(len(requests))
    )
    assert engines.submit()
    # Groups stay together where each engine then has no more than its share.
    assert given == {"a": [0] * 4 + [2] * 4, "b": [1] * 4 + [3] * 4}
    # The second engine is fast: it has the fewest open, and takes what waits.
    for reference in (*range(4, 8), *range(12, 16)):
        assert engines.ended(reference) == reference
        assert engines.submit()
    assert given == {"a": [0] * 4 + [2] * 4, "b": [1] * 4 + [3] * 4 + [4] * 4 + [5] * 4}


def test_the_rollouts_of_a_lost_engine_are_made_by_another_one(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Those that it had ended are kept; the list of engines, which others hold, too, is without it."""
    mortal = ray.remote(Engine).options(num_cpus=1).remote(is_mortal=True)
    engines = [mortal, engine]
    # The first group is on the first engine: one rollout ends before, two end with it.
    seeds = [7, 1004, 1006, 4, 5, 6]

    def note(rollout: Rollout) -> None:
        if rollout.request.seed == 7:
            mortal.release.remote()

    with Collector(engines, by_answer_or_0, max_thread=4, timeout_seconds=60) as collector:
        asked = [request(place // 3, seed) for place, seed in enumerate(seeds)]
        batch = collector.collect(asked, on_rollout=note)
    assert [each.completion.text for each in batch.rollouts] == ["7", "1004", "1006", "4", "5", "6"]
    assert (batch.lost, batch.undecided, batch.summary()["rollouts_lost"]) == (2, 0, 2)
    assert engines == [engine]
    assert "a rollout engine is lost, and 1 left" in caplog.text


def test_a_request_that_ends_engines_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """At the second one. The others go on."""

    class Calls:
        """Engines and calls are numbers."""

        def __init__(self) -> None:
            self.made: list[tuple[int, RolloutRequest]] = []

        def submit(self, engine: int, request: RolloutRequest) -> Any:
            self.made.append((engine, request))
            return len(self.made) - 1

        def ended(self, calls: Any, *, seconds: float) -> list[Any]:
            return list(calls)[:1]

        def completion(self, call: Any) -> Completion:
            engine, wanted = self.made[call]
            if wanted.seed == 1002:
                raise ProcessLostError("generate rollouts", f"engine {engine} died")
            return reply(wanted.prompt, (wanted.seed,), (-0.1,), str(wanted.seed))

        def cancel(self, call: Any) -> None:
            raise AssertionError("nothing is cancelled")

    engines = [1, 2, 3]
    with Collector(engines, by_answer, max_thread=4, timeout_seconds=60, calls=Calls()) as collector:
        batch = collector.collect([request(place, seed) for place, seed in enumerate((1002, 4, 5, 6))])
    assert len(engines) == 1
    assert batch.rollouts[0].failure.startswith("cannot generate rollouts: engine")
    assert [each.reward for each in batch.rollouts] == [None, 0.4, 0.5, 0.6]
    assert caplog.text.count("a rollout engine is lost") == 2
    last = Collector(engines, by_answer, max_thread=4, timeout_seconds=60, calls=Calls())
    with last, pytest.raises(ProcessLostError):
        last.collect([request(0, 1002)])


def test_a_dead_engine_ends_the_round_which_can_be_tried_again() -> None:
    with pytest.raises(TrainError, match="a rollout engine died") as caught:
        collect(started(), [3, 1002], by_answer)
    assert caught.value.retryable


def test_judging_overlaps_and_never_has_more_in_flight_than_allowed(engine: Any) -> None:
    lock, running, most, together = threading.Lock(), [0], [0], threading.Barrier(4)

    def slow(shown: Exchange) -> Verdict:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        together.wait(60)
        with lock:
            running[0] -= 1
        return by_answer(shown)

    assert collect(engine, list(range(16)), slow, threads=4).undecided == 0
    assert most[0] == 4


def test_a_judge_that_fails_leaves_that_rollout_undecided(engine: Any) -> None:
    def shaky(shown: Exchange) -> Verdict:
        if shown.answer == "3":
            raise JudgeError("ask the judge", "it is busy", retryable=True)
        if shown.answer == "4":
            raise KeyError("choice")
        return by_answer(shown)

    batch = collect(engine, [3, 4, 5], shaky)
    assert [rollout.reward for rollout in batch.rollouts] == [None, None, 0.5]
    assert batch.rollouts[0].failure == "cannot ask the judge: it is busy."
    assert "the grader failed: KeyError" in batch.rollouts[1].failure


def test_a_judge_that_can_never_answer_ends_the_round(engine: Any) -> None:
    def locked_out(_: Exchange) -> Verdict:
        raise JudgeError("ask the judge", "the key is wrong", "Set OPENAI_API_KEY.")

    with pytest.raises(JudgeError, match="the key is wrong"):
        collect(engine, [3, 4], locked_out)


def test_an_actors_own_words_come_out_as_they_were_raised() -> None:
    class Judge:
        def fail(self, error: FlywheelError) -> None:
            raise error

    actor = ray_cluster.start(Judge, gpus=0)
    with pytest.raises(JudgeError, match="the key is wrong"):
        ray_cluster.wait([actor.fail.remote(JudgeError("ask", "the key is wrong"))])
    ray.kill(actor)
