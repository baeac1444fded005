"""Settings of AgentScope's tuner and configurations of Trinity-RFT, translated to Flywheel's keys."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from flywheel.config.section import merged, put
from flywheel.errors import ConfigError

log = logging.getLogger(__name__)

TUNER_KEYS: Final[Mapping[str, str]] = {
    "model_path": "model.base",
    "max_model_len": "rollout.max_model_len",
    "max_tokens": "rollout.max_completion_tokens",
    "max_response_tokens": "rollout.max_completion_tokens",
    "temperature": "rollout.temperature",
    "inference_engine_num": "rollout.engines",
    "engine_num": "rollout.engines",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "tool_call_parser": "serving.tool_call_parser",
    "reasoning_parser": "serving.reasoning_parser",
    "learning_rate": "training.learning_rate",
    "lr": "training.learning_rate",
    "repeat_times": "training.group_size",
    "group_size": "training.group_size",
    "batch_size": "training.prompts_per_step",
    "total_steps": "training.steps",
    "timeout": "rollout.agent_timeout_seconds",
    "max_timeout": "rollout.agent_timeout_seconds",
}
"""The tuner's settings by their own names, which are the last part of a key in Trinity's files."""
TRINITY_SECTIONS: Final[Mapping[str, Collection[str]]] = {
    "algorithm": ("algorithm_type", "repeat_times", "optimizer.lr"),
    "model": ("model_path", "max_model_len", "max_response_tokens"),
    "buffer": ("batch_size", "total_steps"),
    "explorer": (
        "rollout_model.engine_num", "rollout_model.temperature", "rollout_model.tensor_parallel_size",
        "rollout_model.tool_call_parser", "rollout_model.reasoning_parser", "max_timeout",
    ),
    "synchronizer": ("sync_interval",),
    "trainer": (), "cluster": (), "data_processor": (), "service": (), "log": (), "stages": (),
}  # fmt: skip
"""The sections of a Trinity file, with the keys that are read."""
REFUSED_VALUES: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "algorithm_type": (("multi_step_grpo", "grpo"), "rounds train with GRPO"),
    "top_p": ((1, None), "rollouts are sampled from the policy itself"),
    "enable_thinking": ((None,), "put --default-chat-template-kwargs into serving.extra_args"),
    "sync_interval": ((1,), "engines get the weights after each step"),
    "tinker_config": ((None,), "rounds train on this machine"),
}
"""Settings of which only some values are possible here, and why."""
UNUSED_KEYS: Final = frozenset(
    {"save_interval_steps", "eval_interval_steps", "project", "name", "mode", "checkpoint_root_dir", "total_epochs",
     "project_name", "experiment_name"}
)  # fmt: skip
"""Settings without effect: a round writes its adapter, and is evaluated, at its end."""
TUNER_DEFAULTS: Final[Mapping[str, Any]] = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
"""The tuner's defaults, which are Qwen 3's; Flywheel chooses by the model's family."""


def from_tuner(raw: Mapping[str, Any], sections: Collection[str], name: str) -> dict[str, Any]:
    """The settings in Flywheel's keys. `sections` are Flywheel's own sections, which are kept and take precedence.

    Raises ConfigError for a value that is not possible here.
    """
    own: dict[str, Any] = {}
    renamed: dict[str, Any] = {}
    unused: list[str] = []
    for key, value in raw.items():
        if key in TRINITY_SECTIONS and isinstance(value, Mapping):
            kept: dict[str, Any] = {}
            for path, inner in _leaves(value):
                if path in TRINITY_SECTIONS[key]:
                    renamed |= _one(path.rpartition(".")[2], inner, f"{key}.{path}", name)
                elif key in sections:
                    put(kept, path, inner)
                else:
                    unused.append(f"{key}.{path}")
            if kept:
                own[key] = kept
        elif key in TUNER_KEYS or key in REFUSED_VALUES:
            renamed |= _one(key, value, key, name)
        elif key in UNUSED_KEYS:
            unused.append(key)
        else:
            own[key] = value
    if unused:
        log.warning("%s: these settings have no effect here: %s", name, ", ".join(unused))
    result: dict[str, Any] = {}
    for path, value in renamed.items():
        put(result, path, value)
    return merged(result, own)


def _one(key: str, value: Any, path: str, name: str) -> dict[str, Any]:
    if key in REFUSED_VALUES:
        allowed, why = REFUSED_VALUES[key]
        if value not in allowed:
            choices = " or ".join(str(choice) for choice in allowed if choice is not None) or "nothing"
            raise ConfigError(f"use {name}", f"`{path}` is {value}: {why}", f"Set it to {choices}, or remove it.")
        return {}
    return {} if value is None or value == TUNER_DEFAULTS.get(key) else {TUNER_KEYS[key]: value}


def _leaves(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
