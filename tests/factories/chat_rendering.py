"""vLLM's renderer of a model, without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flywheel.training.data.samples import Sample
from flywheel.training.engine.chat_rendering import ServedChat
from flywheel.training.engine.engine import EngineSettings
from flywheel.training.engine.served_application import server_arguments


@dataclass(frozen=True)
class Served:
    """vLLM's renderer and configuration of a model, without an engine."""

    renderer: Any
    model_config: Any
    vllm_config: Any

    def chat(self, *arguments: str) -> ServedChat:
        """With these arguments of the server."""
        return ServedChat(server_arguments(arguments, self.model_config.model), self.model_config, self.renderer)

    def decoded(self, tokens: Sequence[int]) -> str:
        return str(self.renderer.get_tokenizer().decode(tokens))

    def trained(self, sample: Sample) -> list[str]:
        """The text of each run of trained tokens."""
        runs: list[list[int]] = [[]]
        for token, own in zip(sample.token_ids, sample.loss_mask, strict=True):
            runs = [*runs[:-1], [*runs[-1], token]] if own else [*runs, []] if runs[-1] else runs
        return [self.decoded(run) for run in runs if run]


def rendering(model: Path, *arguments: str) -> Iterator[Served]:
    """With the server's defaults of sampling."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import renderer_from_config

    server = server_arguments(arguments, str(model))
    config = AsyncEngineArgs(
        str(model),
        max_model_len=512,
        dtype="float32",
        generation_config=server.generation_config,
        override_generation_config=server.override_generation_config,
    ).create_engine_config()
    made = renderer_from_config(config)
    yield Served(made, config.model_config, config)
    made.shutdown()


SETTINGS = EngineSettings(
    model="none", max_model_len=64, max_lora_rank=8, seed=1, gpu_memory_utilization=0.3, kv_cache_gib=1, cpu_threads=1
)
