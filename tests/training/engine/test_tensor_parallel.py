"""Engines of several GPUs: refused where they do not fit, and started as vLLM needs it inside Ray. No GPU is used."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.serving.environment_variables import CPU_LORA_VARIABLE
from flywheel.training.engine import engine as engine_module
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.engine import Engine
from flywheel.training.worker.round import Round
from tests.factories.chat_rendering import SETTINGS
from tests.factories.round import round_spec

GIB = 1 << 30


@pytest.mark.parametrize(
    ("gpus", "why"), [(4, "5 in all, and there are 4"), (1, "5 in all, and there is 1"), (0, "and there is none")]
)
def test_a_round_that_does_not_fit_starts_nothing(
    gpus: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Config.model_validate({"rollout": {"engines": 2, "tensor_parallel": 2}})
    monkeypatch.setattr(ray_cluster, "gpus", lambda: gpus)
    round_ = Round(round_spec(rubric={}, settings=settings.model_dump(mode="json")), tmp_path, settings, None)  # type: ignore[arg-type]
    with pytest.raises(TrainError, match=f"place the round on GPUs.*{why}"):
        round_.start()
    assert round_.engines == []


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What vLLM was started with, which then fails; on a machine that seems to have two GPUs."""
    import torch

    given: list[dict[str, Any]] = []

    def refuse(**arguments: Any) -> None:
        given.append(arguments)
        raise ValueError("no engine in this test")

    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(AsyncEngineArgs=refuse))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", SimpleNamespace(AsyncLLM=None))
    monkeypatch.setattr(engine_module, "base_dtype", lambda _: "bfloat16")
    server = SimpleNamespace(generation_config="auto", override_generation_config=None, max_model_len=None)
    monkeypatch.setattr(engine_module, "server_arguments", lambda *_: server)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS", "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS",
                 CPU_LORA_VARIABLE):  # fmt: skip
        monkeypatch.setenv(name, "")  # what the engine sets is undone
    return given


@pytest.mark.slow
@pytest.mark.parametrize(
    ("each", "wanted"),
    [(1, {}), (2, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"})],
)
async def test_vllm_gets_the_number_and_starts_its_own_processes(
    each: int, wanted: dict[str, Any], arguments: list[dict[str, Any]]
) -> None:
    with pytest.raises(TrainError, match="no engine in this test"):
        await Engine(replace(SETTINGS, tensor_parallel=each)).start()
    found = arguments[0]
    assert {
        name: found[name] for name in ("tensor_parallel_size", "distributed_executor_backend") if name in found
    } == wanted


@pytest.mark.slow
@pytest.mark.usefixtures("arguments")
def test_an_engine_that_is_too_small_for_the_weights_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(100 * GIB)
    settings = replace(SETTINGS, model=str(tmp_path), gpu_memory_utilization=0.5, tensor_parallel=2)
    with pytest.raises(TrainError, match=r"40.0 GiB, cannot hold the model's weights, 100 GiB / .* = 50.0 GiB"):
        Engine(settings).check_memory()
    Engine(replace(settings, tensor_parallel=4)).check_memory()
