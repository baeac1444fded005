"""Sends rollout requests to the engines and grades each completion as soon as it is complete.

Generation and judging overlap. A failed rollout has no reward; a dead engine, or a judge that cannot answer at all
(for example with a wrong key), ends the round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from flywheel.errors import FlywheelError, TrainError
from flywheel.training.process_setup import POLL_SECONDS, check_stopped
from flywheel.training.progress_meter import Meter
from flywheel.training.rollout import Batch, Completion, Rollout, RolloutRequest, exchange
from flywheel.verdict import Exchange, Outcome, Verdict

log = logging.getLogger(__name__)

Grade = Callable[[Exchange], Verdict]


class Collector:
    """A context manager: its threads end with it."""

    def __init__(
        self,
        engines: Sequence[Any],
        grade: Grade,
        *,
        max_thread: int,
        timeout_seconds: float,
        meter: Meter | None = None,
    ) -> None:
        """`meter` counts the completed rollouts."""
        self._engines = engines
        self._grade = grade
        self._meter = meter
        self._timeout = timeout_seconds
        self._threads = ThreadPoolExecutor(max_thread, thread_name_prefix="grade")

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def collect(self, requests: Sequence[RolloutRequest]) -> Batch:
        """One rollout per request, in the same order. Raises TrainError when an engine dies, and the judge's own
        error when it can never answer (a wrong key, for example)."""
        started = time.monotonic()
        if self._meter is not None:
            self._meter.begin(len(requests))
        completions: list[Completion] = [Completion(error="not generated")] * len(requests)
        grades: dict[int, Future[Verdict]] = {}
        # A group stays on one engine, which then computes the prompt once.
        pending = {
            self._engines[request.group % len(self._engines)].generate.remote(request): place
            for place, request in enumerate(requests)
        }
        while pending:
            check_stopped()
            late = time.monotonic() > started + self._timeout
            # After the timeout, take all completed rollouts without waiting.
            ready, _ = ray.wait(
                list(pending), num_returns=len(pending) if late else 1, timeout=0 if late else POLL_SECONDS
            )
            for reference in ready:
                place = pending.pop(reference)
                completion = completions[place] = _fetch(reference)
                if self._meter is not None:
                    self._meter.completed(len(completion.token_ids))
                if not completion.error:
                    work = exchange(requests[place].prompt, completion)
                    grades[place] = self._threads.submit(self._verdict, work)
            if late:
                self._give_up(pending, completions)
                break
        generated = time.monotonic()
        if self._meter is not None:
            self._meter.generated()
        waiting: set[Future[Verdict]] = set(grades.values())
        while waiting:
            check_stopped()
            done, waiting = futures.wait(waiting, timeout=POLL_SECONDS, return_when=futures.FIRST_EXCEPTION)
            for future in done:
                future.result()
        verdicts = {place: future.result() for place, future in grades.items()}
        graded = time.monotonic()
        rollouts = tuple(
            Rollout(request, completions[place], verdicts.get(place)) for place, request in enumerate(requests)
        )
        return Batch(rollouts, {"generate": generated - started, "grade": graded - generated})

    def _give_up(self, pending: dict[Any, int], completions: list[Completion]) -> None:
        if not pending:
            return
        for reference, place in pending.items():
            ray.cancel(reference)
            completions[place] = Completion(error=f"no completion within {self._timeout:g} s")
        log.warning("%d rollouts had no completion within %g s", len(pending), self._timeout)

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
