"""The processes of a round as its worker drives them: engines, with their adapters, and those of the trainer."""

from __future__ import annotations

import itertools
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import ray

from flywheel.config.file import Config
from flywheel.config.training import Stage
from flywheel.errors import TrainError
from flywheel.records.round import AdapterRef, RoundSpec
from flywheel.serving.server.vllm_command import chat_arguments
from flywheel.system.files import remove_temporary, whole_file
from flywheel.system.signals import check_stopped
from flywheel.training.data.rollout import LoadedAdapter
from flywheel.training.data.samples import Item, StepSize, TrainingRow, divided
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.engine import Engine, EngineSettings, StartedEngine
from flywheel.training.engine.gpu_placement import place_on_gpus
from flywheel.training.engine.policy import AdapterFiles, rank
from flywheel.training.optim.trainer_actor import Trainer
from flywheel.training.recorded.recorded_rollout import ToolSetup

KEPT: Final = 2
"""Number of checkpoints of a stage that are kept."""


def start(
    spec: RoundSpec,
    settings: Config,
    engines: list[Any],
    *,
    adapters: Sequence[AdapterRef | None],
    frozen: int,
    trains: bool,
    files: Sequence[str],
) -> tuple[StartedEngine, Trainers | None]:
    """Start them and wait until all are ready. `engines` gets those that have to be stopped, also if this fails.
    `adapters` exist before the round, and engines load them; so many of them, `frozen`, stay loaded beside those of
    the steps. A trainer is started if the round `trains`. `files` of the user's agent are needed on the nodes of
    engines. Raises FlywheelError."""
    rollout, training, address = settings.rollout, settings.training, settings.ray.address
    placement = place_on_gpus(
        rollout.engines,
        ray_cluster.gpus(),
        trainers=training.workers if trains else 0,
        tensor_parallel=rollout.tensor_parallel,
    )
    places = ray_cluster.Places(placement, settings.ray.placement_seconds)
    server, threads = tuple(chat_arguments(spec.base_model, settings.serving)), ray_cluster.cpu_threads()
    for gpu_share in placement.engines:
        engine = EngineSettings(
            model=spec.base_model,
            max_model_len=rollout.max_model_len,
            max_lora_rank=rank(adapters, training.lora),
            more_adapters=frozen,
            seed=spec.seed,
            gpu_memory_utilization=gpu_share.memory(rollout.gpu_memory_utilization),
            kv_cache_gib=rollout.cpu_kv_cache_gib,
            cpu_threads=threads,
            server=server,
            tensor_parallel=rollout.tensor_parallel,
            imitates=trains and imitates(spec, training.kinds),
        )
        engines.append(ray_cluster.start(Engine, engine, gpus=gpu_share.share, within=places.at(gpu_share)))
    # On one machine, the processes of the trainer compute at the same time.
    threads = threads if address is not None else max(1, threads // training.workers)
    members = [
        ray_cluster.start(Trainer, spec, threads, number, gpus=gpu_share.share, within=places.at(gpu_share))
        for number, gpu_share in enumerate(placement.trainers)
    ]
    ray_cluster.gather(engines, members, settings, spec.base_model, files)
    ray_cluster.wait([engine.check_memory.remote() for engine in engines])
    meeting = ray_cluster.on_all(members[:1], "meet") if len(members) > 1 else None
    starting = [engine.start.remote() for engine in engines]
    starting += [member.start.remote(meeting) for member in members]
    started = ray_cluster.wait(starting)[: rollout.engines]
    about = replace(started[0], context=min(engine.context for engine in started))
    return about, Trainers(members) if members else None


def imitates(spec: RoundSpec, stages: Sequence[str]) -> bool:
    """Whether all that a round trains on are recorded replies."""
    return all(stage == "sft" or (stage == "dpo" and all(task.has_pair for task in spec.train)) for stage in stages)


def use_tools(spec: RoundSpec, settings: Config, engines: list[Any]) -> None:
    """Tell the engines how tools answer in training, and in the gate, where a miss always ends the rollout."""
    rollout = settings.rollout
    training = ToolSetup(
        shared=spec.shared,
        on_miss=rollout.tools.on_miss,
        finish_tools=tuple(rollout.finish_tools),
        max_turns=rollout.max_turns,
    )
    gate = replace(training, shared=spec.shared_gate, on_miss="end")
    ray_cluster.everywhere(engines, lambda engine: engine.use_tools.remote(training, gate))


class Trainers:
    """Each method raises FlywheelError, and Stopped."""

    def __init__(self, actors: Sequence[Any]) -> None:
        """Several must have met: see `Trainer`."""
        self.actors = list(actors)
        self._signs: list[Any] = []
        """Of life, that were asked for last."""

    def begin(self, stage: Stage, settings: Config, steps: int, longest: int, parent: AdapterFiles | None) -> None:
        """Begin a stage of so many steps with these settings. `parent` is the adapter that the stage starts from,
        `longest` the maximum length of a completion in tokens."""
        ray_cluster.on_all(self.actors, "begin", stage, settings, steps, longest, ray.put(parent))

    def restore(self, checkpoint: Path) -> None:
        """Go on with the stage behind its checkpoint."""
        with zipfile.ZipFile(checkpoint) as pieces:
            for name in pieces.namelist():
                ray_cluster.on_all(self.actors, "restore", name, ray.put(pieces.read(name)))

    def step(self, items: Sequence[Item]) -> dict[str, float]:
        """Train on the items of a step, and return its figures: see `PolicyStep.step`, and `refuse_not_finite`."""
        size, parts = StepSize.of(items), divided(items, len(self.actors))
        calls = [actor.step.remote(part, size) for actor, part in zip(self.actors, parts, strict=True)]
        return ray_cluster.result_of_all(calls)  # type: ignore[no-any-return]

    def adapter(self) -> AdapterFiles:
        """The adapter as it is now."""
        return AdapterFiles.joined(self._pieces("adapter"))

    def write_adapter(self, folder: Path) -> None:
        """Make a folder with the adapter as it is now."""
        folder.mkdir()
        for name, data in self._pieces("adapter"):
            with (folder / name).open("ab") as file:
                file.write(data)

    def nll(self, rows: Sequence[Sequence[TrainingRow]]) -> list[float | None]:
        """The mean negative log-likelihood of the trained tokens of each of these, in nats a token; None without
        one."""
        return ray_cluster.on_all(self.actors[:1], "nll", rows)  # type: ignore[no-any-return]

    def save(self, folder: Path, step: int) -> None:
        """Write the checkpoint after so many steps of the stage, which appears whole, into the folder of its
        checkpoints; the last ones stay."""
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporary(folder)
        with whole_file(folder / f"step-{step:06}.zip") as file, zipfile.ZipFile(file, "w") as checkpoint:
            for name, data in self._pieces("checkpoint"):
                checkpoint.writestr(name, data)
        for old in sorted(folder.glob("step-*.zip"))[:-KEPT]:
            old.unlink()

    def _pieces(self, of: Literal["adapter", "checkpoint"]) -> Iterator[tuple[str, bytes]]:
        """One at a time: the state may be larger than Ray's object store. Only the first actor has an adapter."""
        for actor in self.actors[:1] if of == "adapter" else self.actors:
            while (piece := ray_cluster.wait([actor.piece.remote(of)])[0]) is not None:
                yield piece

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


class EngineAdapters:
    """Those of one round. Its methods raise as `ray_cluster.everywhere`."""

    def __init__(self, engines: list[Any]) -> None:
        self._engines = engines
        self._numbers = itertools.count(1)

    def load(self, name: str, files: AdapterFiles) -> LoadedAdapter:
        """Load an adapter on every engine."""
        number = next(self._numbers)
        return ray_cluster.load(self._engines, f"{name}-{number}", number, files)

    def load_saved(self, adapter: AdapterRef | None) -> LoadedAdapter | None:
        """The same from its folder. None is the base model, which needs no loading."""
        return None if adapter is None else self.load(adapter.name, AdapterFiles.read(Path(adapter.path)))

    def unload(self, adapter: LoadedAdapter) -> None:
        ray_cluster.everywhere(self._engines, lambda engine: engine.unload.remote(adapter))
