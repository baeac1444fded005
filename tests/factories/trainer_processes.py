"""The processes of a trainer, whose steps are observed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import ray

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.training.data.round_directory import go_on_from
from flywheel.training.data.samples import TrainingRow
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.adapter_files import AdapterFiles
from flywheel.training.engine.gpu_placement import place_on_gpus
from flywheel.training.optim.trainer import Trainer
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
    """A process of the trainer that remembers what it did, and trains on rows without engines."""

    def load(self, parent: AdapterFiles | None) -> None:
        """The policy in float64: in float32, matrix products of other shapes differ by more than what is compared."""
        super().load(parent)
        self._model.double()

    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def _common(self, *arguments: Any) -> Any:
        from transformers import TrainerCallback

        observed = self
        self.found: list[dict[str, Any]] = []
        self.logs: list[dict[str, float]] = []

        class Observing(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                observed.found.append(gradients(observed._model))

            def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
                if "loss" in logs:
                    observed.logs.append(dict(logs))

        common = super()._common(*arguments)
        return {**common, "callbacks": [Observing(), *common["callbacks"]]}

    def reinforce(self, steps: Sequence[Sequence[TrainingRow]], adapter: Path, fails: str = "") -> None:
        """Train on the rows of each step. Rank 0 fails, or goes on no more (`late: …`), where `fails` says."""

        def fail(where: str) -> None:
            if fails == where:
                raise TrainError("learn", f"it has failed at the {where}", "")
            if fails == f"late: {where}":
                (self._directory / "late").touch()
                time.sleep(600)

        def roll_out(step: int) -> Sequence[TrainingRow]:
            fail(f"rows of step {step + 1}")
            return steps[step]

        arguments = self._settings, roll_out, lambda step, _: fail(f"report of step {step}"), LONGEST, adapter
        trainer = self._trainer(*arguments)
        if self._ranks.is_first:
            self._run(trainer, lambda: go_on_from(adapter.parent))
        else:
            self._follow(trainer)

    def exhaust(self, rank: int, half: str, at: int = -1, most: int | None = None) -> None:
        """Let passes of this rank run out of memory."""
        if self._ranks.rank == rank:
            OutOfMemory(self._model, half, at=at, most=most)

    def _run(self, trainer: Any, begin: Any) -> None:
        self.trainer = trainer
        super()._run(trainer, begin)

    def observed(self) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
        return self.found, self.logs

    def budget(self) -> int:
        return int(self.trainer._micro_batch_tokens)

    def weights(self) -> dict[str, Any]:
        return {
            name: weight.detach().clone() for name, weight in self._model.named_parameters() if weight.requires_grad
        }


def settings(workers: int, **training: Any) -> dict[str, Any]:
    made = {
        "training": {**TRAINING, "precision": "float32", "micro_batch_tokens": 30, **training, "workers": workers},
        "rollout": {"max_completion_tokens": LONGEST, "max_model_len": 64, "temperature": TEMPERATURE},
    }
    return Config.model_validate(made).model_dump(mode="json")


class Processes:
    """Those of a trainer, each on a node of its own, or the only one, which is this process."""

    def __init__(self, directory: Path, workers: int, parent: AdapterFiles) -> None:
        self.workers, self.parent, self._folders = workers, parent, count()
        self.directory = directory
        arguments = round_spec(seed=3, base_model=str(POLICY), settings=settings(workers)), str(directory), 1
        self.members: list[Any] = []
        if workers == 1:
            self.alone = Observed(*arguments)
            self.alone.start(parent)
            return
        places = ray_cluster.Places(place_on_gpus(workers, 0, trainers=0), 60)
        for rank, share in enumerate(place_on_gpus(workers, 0, trainers=0).engines):
            within = places.at(share)
            self.members.append(ray_cluster.start(Observed, *arguments, rank, gpus=0, within=within))
        meeting = ray_cluster.on_all(self.members[:1], "meet")
        ray_cluster.on_all(self.members, "start", parent, meeting)

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """What a method returns in each."""
        if self.workers == 1:
            return [getattr(self.alone, method)(*arguments)]
        return ray_cluster.wait([getattr(member, method).remote(*arguments) for member in self.members])

    def prepare(self, **training: Any) -> Path:
        """Load the policy anew. Returns where its adapter will be."""
        self.each("use_settings", settings(self.workers, **training))
        self.each("load", self.parent)
        folder = self.directory / f"stage-{next(self._folders)}"
        folder.mkdir(parents=True)
        return folder / "adapter"

    def step(self, stage: str, items: Any, **training: Any) -> tuple[dict[str, Any], dict[str, float]]:
        """The gradient and the figures of the first step, which are the same in each."""
        return self.step_on(stage, items, self.prepare(**training))

    def step_on(self, stage: str, items: Any, adapter: Path) -> tuple[dict[str, Any], dict[str, float]]:
        self.each(*{
            "grpo": ("reinforce", [items], adapter),
            "sft": ("imitate", items, items, adapter, 0),
            "dpo": ("prefer", items, adapter, 0),
        }[stage])  # fmt: skip
        (found, logs), *others = self.each("observed")
        for their_gradients, their_logs in others:
            assert furthest(found[0], their_gradients[0]) == 0
            assert [their_logs[0][name] for name in ("loss", "grad_norm")] == [
                logs[0][name] for name in ("loss", "grad_norm")
            ]
        weights, *other_weights = self.each("weights")
        assert all(furthest(weights, each) == 0 for each in other_weights)
        return found[0], logs[0]


def furthest(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest distance of a gradient, relative to the largest value of all."""
    assert found.keys() == wanted.keys()
    scale = max(float(value.abs().max()) for value in wanted.values())
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / scale
