"""What the loop of a stage works with, and its checkpoints."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from flywheel.config.file import Config
from flywheel.config.training import Stage
from flywheel.errors import TrainError
from flywheel.records.round import ADAPTER_DIR, RoundSpec
from flywheel.training.data.round_directory import CHECKPOINTS_DIR, END_FILE
from flywheel.training.data.round_progress import Meter
from flywheel.training.data.stages import Training
from flywheel.training.engine.policy import AdapterFiles
from flywheel.training.worker.processes import EngineAdapters, Trainers


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage works with.

    Attributes:
        directory: The round's, for figures and rollouts.
        training: What the stages before ended with, to which this one adds.
        folder: The stage's, for checkpoints and its adapter.
    """

    spec: RoundSpec
    settings: Config
    directory: Path
    training: Training
    trainers: Trainers
    adapters: EngineAdapters
    meter: Meter
    folder: Path

    @property
    def parent(self) -> AdapterFiles | None:
        """The adapter that the stage starts from; None for the base model."""
        found = self.training.adapter
        return None if found is None else AdapterFiles.read(Path(found.path))

    @property
    def adapter(self) -> Path:
        """Where the stage's own will be."""
        return self.folder / ADAPTER_DIR

    def checkpoint(self, most: int | None = None) -> Path | None:
        """The last one, or that of at most so many steps."""
        found = [path for path in self._checkpoints() if most is None or steps_of(path) <= most]
        return max(found, key=steps_of, default=None)

    def begin(self, stage: Stage, steps: int, longest: int, most: int | None = None) -> int:
        """Let the trainer go on from the last checkpoint, or that of at most so many steps; those behind it are
        removed, because they will be written again. The stage has so many `steps`, `longest` is the maximum length of
        a completion in tokens. Returns how many steps the checkpoint contains."""
        found = self.checkpoint(most)
        done = steps_of(found) if found is not None else 0
        for path in self._checkpoints():
            if steps_of(path) > done:
                shutil.rmtree(path)
        self.trainers.begin(stage, self.settings, steps, longest, self.parent, found)
        return done

    def save_checkpoint(self, steps: int, last: int) -> None:
        """Save the state after so many steps of `last`, if it is time to. Raises TrainError if the worker is asked to
        end."""
        if steps % self.settings.training.save_steps and steps < last:
            return
        self.trainers.save(self.folder / CHECKPOINTS_DIR, steps)
        if (self.directory / END_FILE).exists():
            raise TrainError(
                "go on with the round",
                "the daemon, which is of another version, has asked its worker to end at this checkpoint",
                "The round is started again from here.",
                retryable=True,
            )

    def _checkpoints(self) -> list[Path]:
        return list((self.folder / CHECKPOINTS_DIR).glob("step-*[0-9]"))


def steps_of(checkpoint: Path) -> int:
    """The number of steps that a checkpoint contains."""
    return int(checkpoint.name.removeprefix("step-"))
