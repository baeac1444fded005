"""The trainer of a round as its worker reaches it: an actor, on whichever node.

On a node without the round's directory it has a copy, and what it writes there comes back while it works.
"""

from __future__ import annotations

import secrets
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


class TrainerProcess:
    def __init__(self, actor: Any, directory: Path) -> None:
        self.actor, self._directory = actor, directory
        self._mirror: MirroredFolder | None = None

    def place(self) -> None:
        """Give it a copy of the directory if its node does not have it."""
        mark = self._directory / f".seen-{secrets.token_hex(8)}"
        mark.touch()
        try:
            [has_it] = ray_cluster.wait([self.actor.sees.remote(str(mark))])
        finally:
            mark.unlink()
        if not has_it:
            ray_cluster.wait([self.actor.use_copy.remote()])
            self._mirror = MirroredFolder(self._directory, NOT_MIRRORED)

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of one of its methods; paths in the directory are given relative to it. Raises FlywheelError,
        and Stopped."""
        if self._mirror is not None:
            self._exchange()
        call = getattr(self.actor, method).remote(*(self._relative(each) for each in arguments))
        if self._mirror is not None:
            while not ray.wait([call], timeout=EXCHANGE_SECONDS)[0]:
                check_stopped()
                self._exchange()
            # Also what a call has written that failed.
            self._exchange()
        [result] = ray_cluster.wait([call])
        return result

    def end(self) -> None:
        if self.has_copy:
            ray_cluster.stop([self.actor])
        ray.kill(self.actor)

    @property
    def has_copy(self) -> bool:
        """Whether it has to be stopped (`ray_cluster.stop`), so that nothing stays on its node."""
        return self._mirror is not None

    def _exchange(self) -> None:
        assert self._mirror is not None
        ours = self._mirror.changes()
        [theirs] = ray_cluster.wait([self.actor.exchange.remote(ours)])
        try:
            self._mirror.apply(theirs)
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
