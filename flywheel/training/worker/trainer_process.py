"""The trainer of a round as its worker reaches it: one actor or several, on whichever nodes.

On a node without the round's directory it has a copy, and what it writes there comes back while it works.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import ray

from flywheel.errors import TrainError
from flywheel.system.signals import check_stopped
from flywheel.training.data.mirrored_folder import MirroredFolder
from flywheel.training.data.round_directory import NOT_MIRRORED
from flywheel.training.engine import ray_cluster

EXCHANGE_SECONDS: Final = 1.0
"""How often files are exchanged while the trainer works. A worker that dies loses what is newer."""


class TrainerProcesses:
    """The processes of the trainer, of which the first one counts; several work together (`training.workers`)."""

    def __init__(self, actors: Sequence[Any], directory: Path) -> None:
        self.actors, self._directory = list(actors), directory
        self._mirrors: list[tuple[Any, MirroredFolder]] = []

    def place(self) -> None:
        """Give each a copy of the directory whose node does not have it."""
        mark = self._directory / f".seen-{secrets.token_hex(8)}"
        mark.touch()
        try:
            have_it = ray_cluster.wait([actor.sees.remote(str(mark)) for actor in self.actors])
        finally:
            mark.unlink()
        without = [actor for actor, has_it in zip(self.actors, have_it, strict=True) if not has_it]
        ray_cluster.wait([actor.use_copy.remote() for actor in without])
        self._mirrors = [(actor, MirroredFolder(self._directory, NOT_MIRRORED)) for actor in without]

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method on all of them; the result of the first one. Paths in the directory are given relative to it.
        Raises FlywheelError, and Stopped."""
        return self._call(self.actors, method, *arguments)

    def call_first(self, method: str, *arguments: Any) -> Any:
        """The same on the first one alone."""
        return self._call(self.actors[:1], method, *arguments)

    def _call(self, actors: Sequence[Any], method: str, *arguments: Any) -> Any:
        given = [self._relative(each) for each in arguments]
        self._exchange()
        calls = [getattr(actor, method).remote(*given) for actor in actors]
        if self._mirrors:
            # Until the first one ends: where it fails, the others may wait for it.
            while not ray.wait(calls, timeout=EXCHANGE_SECONDS)[0]:
                check_stopped()
                self._exchange()
            # Also what a call has written that failed.
            self._exchange()
        result = ray_cluster.result_of_all(calls)
        self._exchange()
        return result

    def end(self) -> None:
        if copies := self.copies:
            ray_cluster.stop(copies)
        for actor in self.actors:
            ray.kill(actor)

    @property
    def copies(self) -> list[Any]:
        """Those that have to be stopped (`ray_cluster.stop`), so that nothing stays on their nodes."""
        return [actor for actor, _ in self._mirrors]

    def _exchange(self) -> None:
        for actor, mirror in self._mirrors:
            ours = mirror.changes()
            [theirs] = ray_cluster.wait([actor.exchange.remote(ours)])
            try:
                mirror.apply(theirs)
            except OSError as error:
                raise TrainError(
                    f"write what the trainer sends to {self._directory}",
                    error.strerror or str(error),
                    "Free space, or move state.dir; the round is retried.",
                    retryable=True,
                ) from error

    def _relative(self, argument: Any) -> Any:
        is_ours = isinstance(argument, Path) and argument.is_relative_to(self._directory)
        return argument.relative_to(self._directory) if is_ours else argument
