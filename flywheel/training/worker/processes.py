"""The processes of a round: its engines and those of its trainer, started side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flywheel.config.file import Config
from flywheel.records.round import AdapterRef, RoundSpec
from flywheel.serving.server.vllm_command import chat_arguments
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.engine import Engine, EngineSettings, StartedEngine
from flywheel.training.engine.gpu_placement import place_on_gpus
from flywheel.training.engine.policy import rank
from flywheel.training.optim.trainer_actor import Trainer
from flywheel.training.recorded.recorded_rollout import ToolSetup
from flywheel.training.worker.trainers import Trainers


@dataclass(frozen=True, slots=True)
class Needed:
    """What a round's processes have to do.

    Attributes:
        adapters: Those that exist before the round and that engines load.
        frozen: Number of them that stay loaded beside those of the steps.
        trains: Whether a stage is left.
        files: Of the user's agent, which the nodes of engines need.
    """

    adapters: Sequence[AdapterRef | None]
    frozen: int
    trains: bool
    files: Sequence[str]


def start(
    spec: RoundSpec, settings: Config, needed: Needed, engines: list[Any]
) -> tuple[StartedEngine, Trainers | None]:
    """Start them and wait until all are ready. `engines` gets those that have to be stopped, also if this fails.
    Raises FlywheelError."""
    rollout, training, address = settings.rollout, settings.training, settings.ray.address
    placement = place_on_gpus(
        rollout.engines,
        ray_cluster.gpus(),
        trainers=training.workers if needed.trains else 0,
        tensor_parallel=rollout.tensor_parallel,
    )
    places = ray_cluster.Places(placement, settings.ray.placement_seconds)
    server, threads = tuple(chat_arguments(spec.base_model, settings.serving)), ray_cluster.cpu_threads()
    for gpu_share in placement.engines:
        engine = EngineSettings(
            model=spec.base_model,
            max_model_len=rollout.max_model_len,
            max_lora_rank=rank(needed.adapters, training.lora),
            more_adapters=needed.frozen,
            seed=spec.seed,
            gpu_memory_utilization=gpu_share.memory(rollout.gpu_memory_utilization),
            kv_cache_gib=rollout.cpu_kv_cache_gib,
            cpu_threads=threads,
            server=server,
            tensor_parallel=rollout.tensor_parallel,
            imitates=needed.trains and imitates(spec, training.stages),
        )
        engines.append(ray_cluster.start(Engine, engine, gpus=gpu_share.share, within=places.at(gpu_share)))
    # On one machine, the processes of the trainer compute at the same time.
    threads = threads if address is not None else max(1, threads // training.workers)
    members = [
        ray_cluster.start(Trainer, spec, threads, number, gpus=gpu_share.share, within=places.at(gpu_share))
        for number, gpu_share in enumerate(placement.trainers)
    ]
    ray_cluster.gather(engines, members, settings, spec.base_model, needed.files)
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
