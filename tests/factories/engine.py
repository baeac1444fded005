"""Engines of rollouts in real Ray actors: their settings, adapters and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flywheel.config.training import LoraSettings
from flywheel.training.data.rollout import Completion, LoadedAdapter, RolloutRequest
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.engine import EngineSettings
from flywheel.training.engine.gpu_placement import place_on_gpus
from flywheel.training.engine.policy import AdapterFiles
from tests.factories.round import POLICY


def settings(model: str) -> EngineSettings:
    return EngineSettings(
        model=model,
        max_model_len=128,
        max_lora_rank=8,
        seed=1,
        gpu_memory_utilization=0.3,
        kv_cache_gib=1,
        cpu_threads=ray_cluster.cpu_threads(),
    )


def share_of_an_engine() -> float:
    [gpu_share] = place_on_gpus(1, ray_cluster.gpus(), trainers=1).engines
    return gpu_share.share


def load(engine: Any, number: int, path: Path) -> LoadedAdapter:
    return ray_cluster.load([engine], f"test-{number}", number, AdapterFiles.read(path))


def strange_adapter(engine: Any, number: int, path: Path) -> LoadedAdapter:
    """An adapter that changes what the policy says beyond recognition, written there and loaded."""
    import torch

    from tests.factories.policy import load_policy, save_adapter

    model = load_policy(str(POLICY), None, LoraSettings(r=8, alpha=16), seed=number)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    save_adapter(model, path)
    return load(engine, number, path)


def generate(engine: Any, wanted: list[RolloutRequest]) -> list[Completion]:
    found: list[Completion] = ray_cluster.wait([engine.generate.remote(request) for request in wanted])
    return found
