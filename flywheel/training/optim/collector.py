"""Sends rollout requests to the engines and grades each completion as soon as it is complete.

Generation and judging overlap. A failed rollout has no reward. The rollouts of an engine that is lost are made again
by another one, once; the loss of the last engine, or a judge that cannot answer at all (for example with a wrong
key), ends the round.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, Self

from flywheel.config.file import Config
from flywheel.config.training import AgentProgramSettings
from flywheel.errors import FlywheelError, ProcessLostError
from flywheel.records.verdict import Exchange, Outcome, Verdict
from flywheel.system.signals import POLL_SECONDS, check_stopped
from flywheel.training.data.graded_rollouts import GradedRollouts
from flywheel.training.data.rollout import Completion, RewardWeights, Rollout, RolloutBatch, RolloutRequest, exchange
from flywheel.training.data.round_progress import Meter
from flywheel.training.engine.lost_engines import leave_out

log = logging.getLogger(__name__)

Grade = Callable[[Exchange], Verdict]


class EngineCalls(Protocol):
    """How engines are reached: a call is a rollout that one of them makes."""

    def submit(self, engine: Any, request: RolloutRequest) -> Any:
        """Begin a call."""

    def ended(self, calls: Sequence[Any], *, seconds: float) -> list[Any]:
        """The calls that have ended, after a wait of at most `seconds` for the first of them."""

    def completion(self, call: Any) -> Completion:
        """The result of a call that has ended. Raises FlywheelError if its engine can make no further one:
        ProcessLostError if others may."""

    def cancel(self, call: Any) -> None: ...


MAX_OPEN: Final = 256
"""Rollouts that one of several engines has at a time: more than vLLM generates at once by default. The others wait
for the engine that is done first."""


class Collector:
    """A context manager: its threads end with it."""

    @classmethod
    def of(cls, settings: Config, engines: list[Any], grade: Grade, **more: Any) -> Self:
        """A collector by the settings of a round, with `more` arguments."""
        reward = settings.rollout.weights
        return cls(
            engines,
            grade,
            max_thread=settings.judge.max_thread,
            timeout_seconds=_batch_seconds(settings),
            weights=RewardWeights(reward.rubric, reward.workflow, settings.rollout.loop_reward, reward.range),
            **more,
        )

    def __init__(
        self,
        engines: list[Any],
        grade: Grade,
        *,
        max_thread: int,
        timeout_seconds: float,
        meter: Meter | None = None,
        weights: RewardWeights | None = None,
        store: GradedRollouts | None = None,
        calls: EngineCalls | None = None,
        check: Callable[[], None] = check_stopped,
    ) -> None:
        """`meter` counts the completed rollouts. `weights` are for those of the user's agent, which are not graded if
        the rubric has none. `store` gets each rollout, and may have some already. Without `calls`, engines are actors
        of Ray. Those that are lost are taken out of their list. `check` is called again and again while something is
        waited for, also in several threads, and may end the wait by an error."""
        if calls is None:
            # Imported here: other engines work without Ray.
            from flywheel.training.engine.ray_cluster import RayCalls

            calls = RayCalls()
        self._calls = calls
        self._engines = engines
        self._grade = grade
        self._meter = meter
        self.weights = weights or RewardWeights()
        self._store = store
        self._timeout = timeout_seconds
        self._threads = _GradingThreads(max_thread)
        self._check_others, self._is_closed = check, False

    def forget(self, batch: RolloutBatch) -> None:
        """Forget the rollouts of a step, which are stored elsewhere."""
        if self._store is not None:
            self._store.remove(batch)

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()

    def collect(
        self,
        requests: Sequence[RolloutRequest],
        *,
        most_open: int | None = None,
        on_rollout: Callable[[Rollout], None] = lambda _: None,
    ) -> RolloutBatch:
        """One rollout per request, in the same order. At most `most_open` requests are with engines at a time;
        `on_rollout` gets each rollout when it is graded, in threads of the collector, too.

        Raises TrainError when the last engine is lost, and the judge's own error when it can never answer (a wrong
        key, for example)."""
        return self.generate(requests, most_open=most_open, on_rollout=on_rollout)()

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        most_open: int | None = None,
        order: int = 0,
        on_rollout: Callable[[Rollout], None] = lambda _: None,
    ) -> Callable[[], RolloutBatch]:
        """Let engines generate the rollouts. Returns what waits until they are graded. Of several calls, the rollouts
        of that with the smallest `order` are graded first."""
        started = time.monotonic()
        timeout = self._timeout * math.ceil(len(requests) / (most_open or max(1, len(requests))))
        if self._meter is not None:
            self._meter.begin(len(requests))
        rollouts = [self._find(request, on_rollout) for request in requests]
        if known := sum(found is not None for found in rollouts):
            log.info("%d of %d rollouts were graded by an earlier worker", known, len(requests))
        grades: dict[int, Future[Rollout]] = {}
        places = [place for place, found in enumerate(rollouts) if found is None]
        engines = _Dispatch(self._engines, self._calls, requests, places, most_open)

        def graded(place: int, completion: Completion) -> None:
            work = partial(self._graded, requests[place], completion, on_rollout)
            grades[place] = self._threads.submit(order, work)

        while engines.submit():
            self._check(engines)
            late = time.monotonic() > started + timeout
            # After the timeout, take all completed rollouts without waiting.
            for call in self._calls.ended(list(engines.running), seconds=0 if late else POLL_SECONDS):
                if (taken := self._taken(call, engines)) is not None:
                    graded(*taken)
            if late:
                cut = engines.cancel()
                missing = Completion(error=f"no completion within {timeout:g} s")
                for place in cut:
                    graded(place, missing)
                if cut:
                    log.warning("%d rollouts had no completion within %g s", len(cut), timeout)
                break
        generated = time.monotonic()
        if self._meter is not None:
            self._meter.generated()

        def batch() -> RolloutBatch:
            made = _with_grades(rollouts, grades, self._check_others)
            seconds = {"generate": generated - started, "grade": time.monotonic() - generated}
            return RolloutBatch(made, seconds, generated_at=generated, lost=len(engines.lost))

        return batch

    def grade_again(self, batch: RolloutBatch, on_rollout: Callable[[Rollout], None]) -> RolloutBatch:
        """The batch with its undecided rollouts graded once more, in threads of the collector, as `collect` does."""
        grades = {
            place: self._threads.submit(0, partial(self._graded, each.request, each.completion, on_rollout))
            for place, each in enumerate(batch.rollouts)
            if each.reward is None and each.verdict is not None
        }
        return replace(batch, rollouts=_with_grades(batch.rollouts, grades, check_stopped))

    def _taken(self, call: Any, engines: _Dispatch) -> tuple[int, Completion] | None:
        """The place of a call that has ended, and its completion; None if its engine was lost and another one has to
        make it. Raises FlywheelError."""
        try:
            completion = self._calls.completion(call)
        except ProcessLostError as error:
            engine, place, is_again = engines.lose(call)
            leave_out(self._engines, engine, error)
            if not is_again:
                return None
            completion = Completion(error=str(error))
        else:
            place = engines.ended(call)
        self._completed(len(completion.token_ids))
        return place, completion

    @property
    def judge_seconds(self) -> float:
        """How long the judge has worked so far on at least one rollout."""
        return self._threads.busy_seconds

    def close(self) -> None:
        """Let calls of `generate` in other threads end with an error."""
        self._is_closed = True

    def _check(self, engines: _Dispatch) -> None:
        self._check_others()
        if self._is_closed:
            engines.cancel()
            raise futures.CancelledError

    def _find(self, request: RolloutRequest, on_rollout: Callable[[Rollout], None]) -> Rollout | None:
        """The rollout of an earlier worker of the round."""
        found = self._store.find(request, self.weights) if self._store is not None else None
        if found is not None:
            self._completed(0)
            on_rollout(found)
        return found

    def _completed(self, tokens: int) -> None:
        if self._meter is not None:
            self._meter.completed(tokens)

    def _graded(
        self, request: RolloutRequest, completion: Completion, on_rollout: Callable[[Rollout], None]
    ) -> Rollout:
        verdict = None
        is_graded = self.weights.rubric > 0 or request.prompt.task.agent != "program"
        if is_graded and not completion.error:
            verdict = self._verdict(exchange(request.prompt, completion))
        rollout = Rollout(request, completion, verdict, self.weights)
        if self._store is not None:
            self._store.add(rollout)
        on_rollout(rollout)
        return rollout

    def _verdict(self, work: Exchange) -> Verdict:
        try:
            return self._grade(work)
        except FlywheelError as error:
            if not error.retryable:
                raise
            return _undecided(str(error))
        except Exception as error:
            log.exception("the grader failed on one rollout")
            return _undecided(f"the grader failed: {type(error).__name__}: {error}")


def _with_grades(
    rollouts: Sequence[Rollout | None], grades: Mapping[int, Future[Rollout]], check: Callable[[], None]
) -> tuple[Rollout, ...]:
    """The rollouts with those in place that are being graded, by place. `check` is called again and again meanwhile,
    and may end the wait by an error."""
    waiting: set[Future[Rollout]] = set(grades.values())
    while waiting:
        check()
        done, waiting = futures.wait(waiting, timeout=POLL_SECONDS, return_when=futures.FIRST_EXCEPTION)
        for future in done:
            future.result()
    placed = (grades[place].result() if place in grades else each for place, each in enumerate(rollouts))
    return tuple(rollout for rollout in placed if rollout is not None)


class _GradingThreads:
    """Threads that take the work of the smallest order first, and of one order in the order of its arrival.

    They do not delay the end of the process: one may wait for a judge that is away for hours. A thread ends when
    nothing waits.
    """

    def __init__(self, count: int) -> None:
        self._most = count
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, Callable[[], Rollout], Future[Rollout]]] = []
        self._working, self._since, self._seconds = 0, 0.0, 0.0

    @property
    def busy_seconds(self) -> float:
        """How long at least one thread has worked so far."""
        with self._lock:
            return self._seconds + (time.monotonic() - self._since if self._working else 0.0)

    def _count(self, more: int) -> None:
        now = time.monotonic()
        if self._working:
            self._seconds += now - self._since
        self._since, self._working = now, self._working + more

    def submit(self, order: int, work: Callable[[], Rollout]) -> Future[Rollout]:
        """Raises CancelledError after `close`."""
        found: Future[Rollout] = Future()
        with self._lock:
            if not self._most:
                raise futures.CancelledError
            heapq.heappush(self._waiting, (order, next(self._numbers), work, found))
            if self._working < self._most:
                self._count(+1)
                threading.Thread(target=self._work, name="grade", daemon=True).start()
        return found

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            work, found = taken
            if not found.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                found.set_exception(error)
            else:
                found.set_result(result)

    def _next(self) -> tuple[Callable[[], Rollout], Future[Rollout]] | None:
        """What a thread takes; None ends it."""
        with self._lock:
            if not self._waiting:
                self._count(-1)
                return None
            _, _, work, found = heapq.heappop(self._waiting)
            return work, found

    def close(self) -> None:
        """No work is begun any more."""
        with self._lock:
            self._most = 0
            self._waiting.clear()


class _Dispatch:
    """Gives each request to the engine with the fewest open rollouts. A group, whose prompt an engine computes once,
    stays on one engine while that has no more than its share of the rollouts to do."""

    def __init__(
        self,
        engines: Sequence[Any],
        calls: EngineCalls,
        requests: Sequence[RolloutRequest],
        places: Sequence[int],
        most_open: int | None = None,
    ) -> None:
        """`places` are those of the requests that engines have to do, at most `most_open` at a time."""
        self._engines, self._calls, self._requests = list(engines), calls, requests
        self._waiting = deque(places)
        self._open = [0.0] * len(engines)
        """The rollouts that each engine has; infinite for one that is lost."""
        self._most = MAX_OPEN if len(engines) > 1 else len(requests)
        if most_open is not None:
            self._most = min(self._most, math.ceil(most_open / len(engines)))
        self._of_group: dict[int, int] = {}
        self.lost: set[int] = set()
        """The places of requests whose engine was lost."""
        self.running: dict[Any, tuple[int, int]] = {}
        """The place of each request that an engine has, and the engine's number."""

    def submit(self) -> bool:
        """Submit requests as far as engines take them. False when all have ended."""
        while self._waiting and min(self._open) < self._most:
            place = self._waiting.popleft()
            number = self._engine(self._requests[place].group)
            self._open[number] += 1
            call = self._calls.submit(self._engines[number], self._requests[place])
            self.running[call] = place, number
        return bool(self.running)

    def ended(self, call: Any) -> int:
        """The place of a request whose rollout has ended."""
        place, number = self.running.pop(call)
        self._open[number] -= 1
        return place

    def lose(self, call: Any) -> tuple[Any, int, bool]:
        """The engine of a call, which takes no further requests, and the place of its request. The request waits for
        another engine, unless it has lost one before: perhaps it is what ends engines."""
        place, number = self.running.pop(call)
        self._open[number] = math.inf
        if not (is_again := place in self.lost):
            self.lost.add(place)
            self._waiting.appendleft(place)
        return self._engines[number], place, is_again

    def cancel(self) -> list[int]:
        """Give up all requests that have not ended. Returns their places."""
        for call in self.running:
            self._calls.cancel(call)
        places = [*(place for place, _ in self.running.values()), *self._waiting]
        self.running.clear()
        self._waiting.clear()
        return places

    def _engine(self, group: int) -> int:
        living = sum(map(math.isfinite, self._open))
        share = math.ceil((len(self.running) + len(self._waiting) + 1) / living)
        known = self._of_group.get(group)
        if known is None or self._open[known] >= min(share, self._most):
            known = self._of_group[group] = self._open.index(min(self._open))
        return known


def _undecided(error: str) -> Verdict:
    return Verdict(Outcome.UNDECIDED, None, error=error)


def _batch_seconds(settings: Config) -> float:
    """The timeout of a batch. The user's agent, of which only so many run at a time, may need more than
    `rollout.timeout_seconds`: each of its runs has a time limit."""
    rollout, training = settings.rollout, settings.training
    if not isinstance(rollout.agent, AgentProgramSettings):
        return rollout.timeout_seconds
    of_stages = training, *training.of_grpo
    rollouts = max(rollout.prompts_asked(each.prompts_per_step) * each.group_size for each in of_stages)
    runs_in_turn = math.ceil(rollouts / (rollout.workers * rollout.engines))
    return max(rollout.timeout_seconds, (runs_in_turn + 1) * rollout.agent_timeout_seconds)
