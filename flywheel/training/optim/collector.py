"""Sends rollout requests to the engines and grades each completion as soon as it is complete.

Generation and judging overlap. A failed rollout has no reward; a dead engine, or a judge that cannot answer at all
(for example with a wrong key), ends the round.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Self

import ray
from ray.exceptions import RayActorError, RayTaskError

from flywheel.config import AgentProgramSettings, Config
from flywheel.errors import FlywheelError, TrainError
from flywheel.records.verdict import Exchange, Outcome, Verdict
from flywheel.system.signals import POLL_SECONDS, check_stopped
from flywheel.training.data.graded_rollouts import GradedRollouts
from flywheel.training.data.rollout import Completion, RewardWeights, Rollout, RolloutBatch, RolloutRequest, exchange
from flywheel.training.data.round_progress import Meter

log = logging.getLogger(__name__)

Grade = Callable[[Exchange], Verdict]

MAX_OPEN: Final = 256
"""Rollouts that one of several engines has at a time: more than vLLM generates at once by default. The others wait
for the engine that is done first."""


class Collector:
    """A context manager: its threads end with it."""

    @classmethod
    def of(
        cls,
        settings: Config,
        engines: Sequence[Any],
        grade: Grade,
        meter: Meter | None = None,
        store: GradedRollouts | None = None,
    ) -> Self:
        """A collector by the settings of a round."""
        reward = settings.rollout.weights
        return cls(
            engines,
            grade,
            max_thread=settings.judge.max_thread,
            timeout_seconds=_batch_seconds(settings),
            meter=meter,
            weights=RewardWeights(reward.rubric, reward.workflow),
            store=store,
        )

    def __init__(
        self,
        engines: Sequence[Any],
        grade: Grade,
        *,
        max_thread: int,
        timeout_seconds: float,
        meter: Meter | None = None,
        weights: RewardWeights | None = None,
        store: GradedRollouts | None = None,
    ) -> None:
        """`meter` counts the completed rollouts. `weights` are for those of the user's agent, which are not graded if
        the rubric has none. `store` gets each rollout, and may have some already."""
        self._engines = engines
        self._grade = grade
        self._meter = meter
        self._weights = weights or RewardWeights()
        self._store = store
        self._timeout = timeout_seconds
        self._threads = ThreadPoolExecutor(max_thread, thread_name_prefix="grade")

    @property
    def weights(self) -> RewardWeights:
        """Those of the rewards of rollouts of the user's agent."""
        return self._weights

    def clear(self) -> None:
        """Forget the rollouts of the step, which are stored elsewhere."""
        if self._store is not None:
            self._store.clear()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def collect(self, requests: Sequence[RolloutRequest]) -> RolloutBatch:
        """One rollout per request, in the same order. Raises TrainError when an engine dies, and the judge's own
        error when it can never answer (a wrong key, for example)."""
        started = time.monotonic()
        if self._meter is not None:
            self._meter.begin(len(requests))
        rollouts = [self._find(request) for request in requests]
        if known := sum(found is not None for found in rollouts):
            log.info("%d of %d rollouts were graded by an earlier worker", known, len(requests))
        grades: dict[int, Future[Rollout]] = {}
        engines = _Dispatch(self._engines, requests, [place for place, found in enumerate(rollouts) if found is None])
        while engines.submit():
            check_stopped()
            late = time.monotonic() > started + self._timeout
            # After the timeout, take all completed rollouts without waiting.
            running = list(engines.running)
            ready, _ = ray.wait(running, num_returns=len(running) if late else 1, timeout=0 if late else POLL_SECONDS)
            for reference in ready:
                place = engines.ended(reference)
                completion, request = _fetch(reference), requests[place]
                if self._meter is not None:
                    self._meter.completed(len(completion.token_ids))
                if not completion.error and self._is_graded(request):
                    grades[place] = self._threads.submit(self._graded, request, completion)
                else:
                    rollouts[place] = self._kept(Rollout(request, completion, None, self._weights))
            if late:
                self._give_up(engines, requests, rollouts)
                break
        generated = time.monotonic()
        if self._meter is not None:
            self._meter.generated()
        waiting: set[Future[Rollout]] = set(grades.values())
        while waiting:
            check_stopped()
            done, waiting = futures.wait(waiting, timeout=POLL_SECONDS, return_when=futures.FIRST_EXCEPTION)
            for future in done:
                future.result()
        for place, future in grades.items():
            rollouts[place] = future.result()
        graded = time.monotonic()
        made = tuple(rollout for rollout in rollouts if rollout is not None)
        return RolloutBatch(made, {"generate": generated - started, "grade": graded - generated})

    def _find(self, request: RolloutRequest) -> Rollout | None:
        """The rollout of an earlier worker of the round."""
        found = self._store.find(request, self._weights) if self._store is not None else None
        if found is not None and self._meter is not None:
            self._meter.completed(0)
        return found

    def _kept(self, rollout: Rollout) -> Rollout:
        if self._store is not None:
            self._store.add(rollout)
        return rollout

    def _is_graded(self, request: RolloutRequest) -> bool:
        return self._weights.rubric > 0 or request.prompt.task.agent != "program"

    def _give_up(
        self, engines: _Dispatch, requests: Sequence[RolloutRequest], rollouts: list[Rollout | None]
    ) -> None:
        places = engines.cancel()
        for place in places:
            error = f"no completion within {self._timeout:g} s"
            rollouts[place] = Rollout(requests[place], Completion(error=error), None, self._weights)
        if places:
            log.warning("%d rollouts had no completion within %g s", len(places), self._timeout)

    def _graded(self, request: RolloutRequest, completion: Completion) -> Rollout:
        verdict = self._verdict(exchange(request.prompt, completion))
        return self._kept(Rollout(request, completion, verdict, self._weights))

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


class _Dispatch:
    """Gives each request to the engine with the fewest open rollouts. A group, whose prompt an engine computes once,
    stays on one engine while that has no more than its share of the rollouts to do."""

    def __init__(self, engines: Sequence[Any], requests: Sequence[RolloutRequest], places: Sequence[int]) -> None:
        """`places` are those of the requests that engines have to do."""
        self._engines, self._requests = engines, requests
        self._waiting = deque(places)
        self._open = [0] * len(engines)
        self._most = MAX_OPEN if len(engines) > 1 else len(requests)
        self._of_group: dict[int, int] = {}
        self.running: dict[Any, tuple[int, int]] = {}
        """The place of each request that an engine has, and the engine's number."""

    def submit(self) -> bool:
        """Submit requests as far as engines take them. False when all have ended."""
        while self._waiting and min(self._open) < self._most:
            place = self._waiting.popleft()
            number = self._engine(self._requests[place].group)
            self._open[number] += 1
            reference = self._engines[number].generate.remote(self._requests[place])
            self.running[reference] = place, number
        return bool(self.running)

    def ended(self, reference: Any) -> int:
        """The place of a request whose rollout has ended."""
        place, number = self.running.pop(reference)
        self._open[number] -= 1
        return place

    def cancel(self) -> list[int]:
        """Give up all requests that have not ended. Returns their places."""
        for reference in self.running:
            ray.cancel(reference)
        places = [*(place for place, _ in self.running.values()), *self._waiting]
        self.running.clear()
        self._waiting.clear()
        return places

    def _engine(self, group: int) -> int:
        share = math.ceil((len(self.running) + len(self._waiting) + 1) / len(self._engines))
        known = self._of_group.get(group)
        if known is None or self._open[known] >= min(share, self._most):
            known = self._of_group[group] = self._open.index(min(self._open))
        return known


def _fetch(reference: Any) -> Completion:
    try:
        completion: Completion = ray.get(reference)
    except RayActorError as error:
        raise _dead(error) from error
    except RayTaskError as error:
        if "EngineDead" in type(error.cause).__name__:
            raise _dead(error.cause) from error
        log.warning("one rollout failed: %s", error.cause)
        return Completion(error=f"the engine failed: {error.cause}")
    return (
        completion if completion.token_ids or completion.error else Completion(error="the engine returned no token")
    )


def _dead(error: BaseException) -> TrainError:
    return TrainError(
        "generate rollouts",
        f"a rollout engine died ({' '.join(str(error).split())[:200]})",
        "The worker's log has the cause; often memory ran out. The round can be started again.",
        retryable=True,
    )


def _undecided(error: str) -> Verdict:
    return Verdict(Outcome.UNDECIDED, None, error=error)


def _batch_seconds(settings: Config) -> float:
    """The timeout of a batch. The user's agent, of which only so many run at a time, may need more than
    `rollout.timeout_seconds`: each of its runs has a time limit."""
    rollout, training = settings.rollout, settings.training
    if not isinstance(rollout.agent, AgentProgramSettings):
        return rollout.timeout_seconds
    rollouts = rollout.prompts_asked(training.prompts_per_step) * training.group_size
    runs_in_turn = math.ceil(rollouts / (rollout.workers * rollout.engines))
    return max(rollout.timeout_seconds, (runs_in_turn + 1) * rollout.agent_timeout_seconds)
