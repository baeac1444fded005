"""The processes of a trainer, whose steps are observed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from flywheel.config.file import Config
from flywheel.config.training import Stage
from flywheel.training.data.samples import Item, StepSize, rows_of
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.gpu_placement import place_on_gpus
from flywheel.training.engine.policy import AdapterFiles
from flywheel.training.optim.trainer_actor import Trainer
from flywheel.training.worker.processes import Trainers
from flywheel.training.worker.stage import stage_settings
from tests.factories import cluster
from tests.factories.policy_training import LONGEST, TEMPERATURE, TRAINING, OutOfMemory, gradients
from tests.factories.round import POLICY, round_spec


@contextlib.contextmanager
def two_nodes() -> Iterator[None]:
    """A session on two nodes, which have room for one process each."""
    with (
        cluster.two_nodes(cpus=1, gpus=0) as address,
        ray_cluster.session(Config.model_validate({"ray": {"address": address}})),
    ):
        yield


class Observed(Trainer):
    """A process of the trainer that remembers what it did."""

    def _loaded(self, config: Config) -> Any:
        """The model in float64: in float32, matrix products of other shapes differ by more than what is compared."""
        return super()._loaded(config).double()

    def begin(self, *arguments: Any) -> None:
        super().begin(*arguments)
        self._late: Path | None = None
        self.found: list[dict[str, Any]] = []
        self.logs: list[Mapping[str, float]] = []
        self._policy._optimizer.optimizer.register_step_pre_hook(lambda *_: self.found.append(gradients(self._model)))

    @property
    def _model(self) -> Any:
        return self._policy._loss.model

    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def step(self, items: Sequence[Item], size: StepSize) -> dict[str, float]:
        if self._late is not None:
            self._late.touch()
            time.sleep(600)
        self.logs.append(super().step(items, size))
        return dict(self.logs[-1])

    def be_late(self, rank: int, mark: Path) -> None:
        """Let the next step of this rank make a file and not go on."""
        if self._rank == rank:
            self._late = mark

    def exhaust(self, rank: int, half: str, at: int = -1, most: int | None = None) -> None:
        """Let passes of this rank run out of memory."""
        if self._rank == rank:
            OutOfMemory(self._model, half, at=at, most=most)

    def observed(self) -> tuple[list[dict[str, Any]], list[Mapping[str, float]]]:
        return self.found, self.logs

    def budget(self) -> int:
        return int(self._policy.max_tokens)

    def weights(self) -> dict[str, Any]:
        named = self._model.named_parameters()
        return {name: p.detach().clone() for name, p in named if p.requires_grad and ".ref." not in name}


def settings(workers: int, **training: Any) -> Config:
    made = {
        "training": {**TRAINING, "precision": "float32", "micro_batch_tokens": 30, **training, "workers": workers},
        "rollout": {"max_completion_tokens": LONGEST, "max_model_len": 64, "temperature": TEMPERATURE},
    }
    return Config.model_validate(made)


class Processes:
    """Those of a trainer, each on a node or a GPU of its own, or the only one, which is this process."""

    def __init__(self, workers: int, parent: AdapterFiles, gpus: int = 0) -> None:
        self.workers, self.parent = workers, parent
        spec = round_spec(seed=3, base_model=str(POLICY), settings=settings(workers).model_dump(mode="json"))
        self.members: list[Any] = []
        if workers == 1:
            self.alone = Observed(spec, 1)
            self.alone.start()
            return
        placement = place_on_gpus(workers, gpus, trainers=0)
        places = ray_cluster.Places(placement, 60)
        for rank, share in enumerate(placement.engines):
            within = places.at(share)
            self.members.append(ray_cluster.start(Observed, spec, 1, rank, gpus=share.share, within=within))
        meeting = ray_cluster.on_all(self.members[:1], "meet")
        ray_cluster.on_all(self.members, "start", meeting)
        self.trainers = Trainers(self.members)

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """What a method returns in each."""
        if self.workers == 1:
            return [getattr(self.alone, method)(*arguments)]
        return ray_cluster.wait([getattr(member, method).remote(*arguments) for member in self.members])

    def begin(self, stage: Stage = "grpo", items: int = 1, checkpoint: Path | None = None, **training: Any) -> None:
        """Begin a stage on so many items, or go on with it."""
        own = settings(self.workers, **training)
        own = own if stage == "grpo" else stage_settings(own, stage, items)
        steps = own.training.steps
        if self.workers == 1:
            self.alone.begin(stage, own, steps, LONGEST, self.parent)
        else:
            self.trainers.begin(stage, own, steps, LONGEST, self.parent)
            if checkpoint is not None:
                self.trainers.restore(checkpoint)

    def train(self, items: Sequence[Any]) -> dict[str, float]:
        """A step."""
        return self.alone.step(items, StepSize.of(items)) if self.workers == 1 else self.trainers.step(items)

    def step(self, stage: Stage, items: Sequence[Any], **training: Any) -> tuple[dict[str, Any], dict[str, float]]:
        """The gradient and the figures of the first step of a stage, which are the same in each."""
        self.begin(stage, len(items), **training)
        return self.step_on(rows_of(items) if stage == "sft" else items)

    def step_on(self, items: Sequence[Any]) -> tuple[dict[str, Any], dict[str, float]]:
        figures = self.train(items)
        (found, _), *others = self.each("observed")
        for their_gradients, their_logs in others:
            assert furthest(found[0], their_gradients[0]) == 0
            assert their_logs == [figures]
        weights, *other_weights = self.each("weights")
        assert all(furthest(weights, each) == 0 for each in other_weights)
        return found[0], figures


def furthest(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest distance of a gradient, relative to the largest value of all."""
    assert found.keys() == wanted.keys()
    scale = max(float(value.abs().max()) for value in wanted.values())
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / scale
