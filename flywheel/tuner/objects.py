"""The objects of AgentScope's tuner, with its fields and defaults, for programs that import them from here.

The workflow's process imports them, too: only pydantic is needed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel


class DatasetConfig(BaseModel):
    """A data set: a file, a folder, or a name of the Hub, with the subset `name` and the `split` of it.

    A round has `total_steps` steps, or as many as `total_epochs` need.
    """

    path: str
    name: str | None = None
    split: str | None = "train"
    total_epochs: int = 1
    total_steps: int | None = None

    def preview(self, n: int = 5) -> list[dict[str, Any]]:
        """The first lines, which are printed as well. Raises ConfigError."""
        import itertools
        import json

        from flywheel.sources.jsonl.data_set import DataSet, lines_of, trainer_python

        with lines_of(DataSet.of(self), trainer_python(None), f"read {self.path}") as lines:
            samples = [json.loads(line) for line in itertools.islice(lines, n)]
        print(json.dumps(samples, indent=2, ensure_ascii=False))
        return samples


class TinkerConfig(BaseModel):
    """Training on Tinker, which `tune` refuses: rounds train on this machine."""

    rank: int = 16
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    base_url: str | None = None


class TunerModelConfig(BaseModel):
    """The model that is trained, and how rollouts sample from it."""

    model_path: str
    max_model_len: int
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 8192
    enable_thinking: bool | None = None
    tensor_parallel_size: int = 1
    inference_engine_num: int = 1
    tool_call_parser: str | None = "hermes"
    reasoning_parser: str | None = "deepseek_r1"
    tinker_config: TinkerConfig | None = None


class AlgorithmConfig(BaseModel):
    """How it is trained."""

    algorithm_type: str = "multi_step_grpo"
    learning_rate: float = 1e-6
    group_size: int = 8
    batch_size: int = 32
    save_interval_steps: int = 100
    eval_interval_steps: int = 100


class WorkflowOutput(BaseModel):
    """What a workflow returns: a reward, or a response for the judge."""

    reward: float | None = None
    response: Any | None = None
    metrics: dict[str, float] | None = None


class JudgeOutput(BaseModel):
    """What a judge returns."""

    reward: float
    metrics: dict[str, float] | None = None


WorkflowType = Callable[..., Awaitable[WorkflowOutput]]
JudgeType = Callable[..., Awaitable[JudgeOutput]]
