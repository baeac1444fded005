"""The loop of a stage in this process: a trainer without Ray, and engines that only get numbers."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flywheel.config.file import Config
from flywheel.config.training import Stage, TrainingSettings
from flywheel.records.round import RoundSpec
from flywheel.training.data.rollout import LoadedAdapter
from flywheel.training.data.round_progress import Meter
from flywheel.training.data.samples import StepSize, TrainingRow
from flywheel.training.data.stages import Training, stage_adapter
from flywheel.training.engine.policy import AdapterFiles
from flywheel.training.worker.processes import Trainers
from flywheel.training.worker.stage import StageWork

FIGURES = {"loss": 0.1, "grad_norm": 0.1, "learning_rate": 1e-5}


class StandInTrainers:
    """Takes the place of `Trainers`. `items` are those of each step; each has the same figures."""

    def __init__(self, figures: Mapping[str, float] = FIGURES) -> None:
        self.figures = figures
        self.items: list[Sequence[Any]] = []
        self.restored: list[Path] = []

    def begin(self, *arguments: Any) -> None:
        """There is nothing to load."""

    def restore(self, checkpoint: Path) -> None:
        self.restored.append(checkpoint)

    def step(self, items: Sequence[Any]) -> Mapping[str, float]:
        self.items.append(items)
        return self.figures

    def nll(self, rows: Sequence[Sequence[TrainingRow]]) -> list[float | None]:
        return [float(len(each)) for each in rows]

    def adapter(self) -> AdapterFiles:
        return AdapterFiles({}, {})

    def write_adapter(self, folder: Path) -> None:
        folder.mkdir()

    def save(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(folder / f"step-{step:06}.zip", "w") as checkpoint:
            checkpoint.writestr("weights", b"of a step")


class StandInAdapters:
    """Takes the place of `EngineAdapters`: engines have nothing, and adapters a number."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def load(self, name: str, files: AdapterFiles) -> LoadedAdapter:
        number = next(self._numbers)
        return LoadedAdapter(f"step-{number}", number)

    def unload(self, adapter: LoadedAdapter) -> None:
        """There is nothing to unload."""


def work(spec: RoundSpec, settings: Config, directory: Path, trainers: Any, stage: Any = "grpo") -> StageWork:
    """Of the first stage of a round on the base model, whose engines have nothing."""
    [planned] = TrainingSettings(stages=[stage]).planned
    folder = stage_adapter(directory, planned).parent
    folder.mkdir(parents=True, exist_ok=True)
    adapters: Any = StandInAdapters()
    meter = Meter(directory, steps=settings.training.steps)
    return StageWork(spec, settings, directory, Training(None), trainers, adapters, meter, folder, planned.name)


class TrainersHere(Trainers):
    """One actor's trainer, which is in this process, and has started."""

    def __init__(self, spec: RoundSpec) -> None:
        from flywheel.training.optim.trainer_actor import Trainer

        self.actor = Trainer(spec, threads=1)
        self.actor.start()

    def begin(self, stage: Stage, settings: Config, steps: int, longest: int, parent: AdapterFiles | None) -> None:
        self.actor.begin(stage, settings, steps, longest, parent)

    def restore(self, checkpoint: Path) -> None:
        with zipfile.ZipFile(checkpoint) as pieces:
            for name in pieces.namelist():
                self.actor.restore(name, pieces.read(name))

    def step(self, items: Sequence[Any]) -> dict[str, float]:
        return self.actor.step(items, StepSize.of(items))

    def nll(self, rows: Sequence[Sequence[TrainingRow]]) -> list[float | None]:
        return self.actor.nll(rows)

    def _pieces(self, of: Literal["adapter", "checkpoint"]) -> Iterator[tuple[str, bytes]]:
        while (piece := self.actor.piece(of)) is not None:
            yield piece

    @property
    def model(self) -> Any:
        """The policy that is trained."""
        return self.actor._policy._loss.model
