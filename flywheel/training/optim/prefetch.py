"""Collects the rollouts of the next step while those of the current one are judged and trained on
(`training.overlap`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from flywheel.training.data.rollout import LoadedAdapter, RolloutBatch


class Collect(Protocol):
    """Collects the rollouts of a step. Calls `on_generated` when they are generated, before all are judged."""

    def __call__(
        self, step: int, adapter: LoadedAdapter | None, *, on_generated: Callable[[], None]
    ) -> RolloutBatch: ...


class Prefetch:
    """Its threads run until it is closed, which must happen before adapters are removed: an engine dies of a request
    for an adapter whose files are missing."""

    def __init__(self, collect: Collect, stop: Callable[[], None]) -> None:
        """`stop` makes calls of `collect` that are running raise."""
        self._collect, self._stop = collect, stop
        # The step that is judged, and the next one.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="prefetch")
        self._running: dict[int, Future[RolloutBatch]] = {}
        self._generated: dict[int, threading.Event] = {}

    def close(self) -> None:
        """Let running calls end with an error, and wait for them."""
        self._stop()
        for event in self._generated.values():
            event.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def has(self, step: int) -> bool:
        """Whether the rollouts of the step are being collected."""
        return step in self._running

    def begin(self, step: int, adapter: LoadedAdapter | None) -> None:
        """Collect the rollouts of a step with this adapter, as soon as those of the step before are generated."""
        before, done = self._generated.get(step - 1), threading.Event()
        self._generated[step] = done

        def work() -> RolloutBatch:
            try:
                if before is not None:
                    before.wait()
                return self._collect(step, adapter, on_generated=done.set)
            finally:
                done.set()

        self._running[step] = self._threads.submit(work)

    def take(self, step: int) -> RolloutBatch:
        """Wait for the rollouts of a step. Raises what collecting them has raised."""
        batch = self._running.pop(step).result()
        self._generated.pop(step - 1, None)
        return batch
