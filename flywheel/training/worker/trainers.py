"""The trainer of a round as its worker drives it: one actor or several, which take their parts of each step."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import ray

from flywheel.config.file import Config
from flywheel.config.training import Stage
from flywheel.errors import TrainError
from flywheel.system.signals import check_stopped
from flywheel.training.data.samples import Item, StepSize, TrainingRow, divided
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.policy import AdapterFiles, appear

KEPT: Final = 2
"""Number of checkpoints of a stage that are kept."""


class Trainers:
    """Each method raises FlywheelError, and Stopped."""

    def __init__(self, actors: Sequence[Any]) -> None:
        """Several must have met: see `Trainer`."""
        self.actors = list(actors)
        self._signs: list[Any] = []
        """Of life, that were asked for last."""

    def begin(
        self,
        stage: Stage,
        settings: Config,
        steps: int,
        longest: int,
        parent: AdapterFiles | None,
        checkpoint: Path | None = None,
    ) -> None:
        """Begin a stage of so many steps with these settings, or go on with it behind a checkpoint. `parent` is the
        adapter that the stage starts from, `longest` the maximum length of a completion in tokens."""
        ray_cluster.on_all(self.actors, "begin", stage, settings, steps, longest, ray.put(parent))
        for path in sorted(checkpoint.iterdir()) if checkpoint is not None else ():
            ray_cluster.on_all(self.actors, "restore", path.name, ray.put(path.read_bytes()))

    def step(self, items: Sequence[Item]) -> dict[str, float]:
        """Train on the items of a step, and return its figures: see `PolicyStep.step`, and `refuse_not_finite`."""
        size, parts = StepSize.of(items), divided(items, len(self.actors))
        calls = [actor.step.remote(part, size) for actor, part in zip(self.actors, parts, strict=True)]
        return ray_cluster.result_of_all(calls)  # type: ignore[no-any-return]

    def adapter(self) -> AdapterFiles:
        """The adapter as it is now."""
        return ray_cluster.on_all(self.actors[:1], "adapter")  # type: ignore[no-any-return]

    def nll(self, rows: Sequence[Sequence[TrainingRow]]) -> list[float | None]:
        """The mean negative log-likelihood of the trained tokens of each of these, in nats a token; None without
        one."""
        return ray_cluster.on_all(self.actors[:1], "nll", rows)  # type: ignore[no-any-return]

    def save(self, folder: Path, step: int) -> None:
        """Write the checkpoint after so many steps of the stage, which appears whole, into the folder of its
        checkpoints; the last ones stay."""
        folder.mkdir(parents=True, exist_ok=True)
        appear(folder / f"step-{step:06}", self._write)
        for old in sorted(folder.glob("step-*"))[:-KEPT]:
            shutil.rmtree(old)

    def _write(self, folder: Path) -> None:
        folder.mkdir()
        for actor in self.actors:
            # One piece at a time: the state may be larger than Ray's object store.
            while (piece := ray_cluster.wait([actor.checkpoint.remote()])[0]) is not None:
                name, data = piece
                with (folder / name).open("ab") as file:
                    file.write(data)

    def check(self) -> None:
        """Raise TrainError if an actor has died. Does not wait for those that are at work. May be called in several
        threads."""
        check_stopped()
        ended, running = ray.wait(self._signs, num_returns=len(self._signs), timeout=0) if self._signs else ([], [])
        ray_cluster.wait(ended)
        self._signs = running or [actor.__ray_ready__.remote() for actor in self.actors]

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


def refuse_not_finite(step: int, figures: Mapping[str, float]) -> None:
    """Raise TrainError where a figure of a step, counted from 1, is not a number."""
    if wrong := [name for name in ("loss", "grad_norm") if not math.isfinite(figures[name])]:
        raise TrainError(
            f"take step {step} of the round",
            f"{wrong[0]} is {figures[wrong[0]]}",
            "Lower training.learning_rate or training.max_grad_norm.",
        )
