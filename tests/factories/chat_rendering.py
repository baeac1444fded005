"""vLLM's renderer of a model, without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flywheel.training.engine.chat_rendering import ChatFormat, ServedChat
from flywheel.training.engine.engine import EngineSettings


@dataclass(frozen=True)
class Served:
    """vLLM's renderer and configuration of a model, without an engine."""

    renderer: Any
    model_config: Any

    def chat(self, chat: ChatFormat | None = None, context: int = 512) -> ServedChat:
        return ServedChat(chat or ChatFormat(), self.model_config, self.renderer, context)

    def decoded(self, tokens: Sequence[int]) -> str:
        return str(self.renderer.get_tokenizer().decode(tokens))


def rendering(model: Path, chat: ChatFormat | None = None) -> Iterator[Served]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import renderer_from_config

    chat = chat or ChatFormat()
    config = AsyncEngineArgs(
        str(model),
        max_model_len=512,
        dtype="float32",
        generation_config=chat.generation,
        override_generation_config=chat.overrides,
    ).create_engine_config()
    made = renderer_from_config(config)
    yield Served(made, config.model_config)
    made.shutdown()


SETTINGS = EngineSettings(
    model="none", max_model_len=64, max_lora_rank=8, seed=1, gpu_memory_utilization=0.3, kv_cache_gib=1, cpu_threads=1
)
