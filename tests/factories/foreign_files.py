"""Configurations of AgentJet, ASTuner and SAGE, as users have them: those of the tests and of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from flywheel.config.agentjet import DEFAULTS, MARKERS
from flywheel.config.sage import CLASSES
from flywheel.config.section import merged, put, value_at

ROOT = Path(__file__).parent.parent.parent
KEYS = ROOT / "tests" / "config" / "agentjet_keys.txt"
MODEL = {"base": "Qwen/Qwen3-0.6B"}
SECTION = yaml.safe_load(
    r"""
base_url: ~/AgentScope-Studio/database.sqlite
train_output_path: ./tasks.jsonl
alien_llm_model: qwen3-235b
alien_llm_response_length: 2048
filters:
  - type: llm_evaluate
    enabled: true
    params:
      custom_rubrics: |
        1. Drop the task if the answer is not wrapped in \boxed{}.
      temperature: 0.5
      print_reason: false
      max_thread: 16
  - type: deduplication
    enabled: false
    params: {similarity_threshold: 0.8, db_path: ./.similarity_db, model: null, api_key: null, base_url: null}
"""
)
AGENT = {"rollout": {"user_workflow": "agents->Mine"}}
EFFECTS: list[tuple[dict[str, Any], str, Any]] = [
    ({"rollout": {"max_model_len": 9000}}, "rollout.max_model_len", 9000),
    ({"rollout": {"max_response_length_in_one_turn": 700}}, "rollout.max_turn_tokens", 700),
    ({"rollout": {"multi_turn": {"max_steps": 5}}}, "rollout.max_turns", 5),
    ({"rollout": {"num_repeat": 12}}, "training.group_size", 12),
    ({"rollout": {"temperature": 0.4}}, "rollout.temperature", 0.4),
    ({"data": {"train_batch_size": 3}}, "training.prompts_per_step", 3),
    ({"trainer_common": {"optim": {"lr": "3e-6"}}}, "training.learning_rate", 3e-6),
    ({"trainer_common": {"use_kl_loss": True, "kl_loss_coef": 0.03}}, "training.beta", 0.03),
    ({"trainer_common": {"kl_loss_coef": 0.03}}, "training.beta", 0.03),
    ({"trainer_common": {"use_kl_loss": True}}, "training.beta", 0.002),
    ({"trainer_common": {"use_kl_loss": False, "kl_loss_coef": 0.03}}, "training.beta", 0),
    ({"trainer_common": {}}, "training.beta", 0),
    ({}, "rollout.loop_reward", 0),
    ({"rollout": {"agent_madness_reward": -0.5}}, "rollout.loop_reward", -0.5),
    ({"rollout": {"agent_madness_reward": 0.0}}, "rollout.loop_reward", 0),
    ({"rollout": {"compute_madness_checklist": ["nonsense"]}}, "rollout.loop_reward", -1),
    ({"rollout": {"compute_madness_checklist": []}}, "rollout.loop_reward", None),
    ({"rollout": {"compute_madness_checklist": ["wrong_toolcall"]}}, "rollout.loop_reward", None),
    (
        {"rollout": {"compute_madness_checklist": ["wrong_toolcall", "nonsense"], "agent_madness_reward": -2}},
        "rollout.loop_reward",
        -2,
    ),
    ({"debug": {"debug_first_n_tasks": 3}}, "training.debug_prompts", 3),
    ({"lora": {"lora_rank": 128}}, "training.lora.r", 128),
    ({"lora": {"lora_rank": 128}}, "serving.max_lora_rank", 128),
    ({"lora": {"lora_rank": 8, "lora_alpha": 64}}, "training.lora.alpha", 64),
    ({"lora": {"lora_rank": 8, "target_modules": ["q_proj"]}}, "training.lora.target_modules", ["q_proj"]),
    ({"lora": {"lora_rank": 0, "lora_alpha": 64, "load_format": "auto"}}, "training.lora.alpha", 32),
    ({"task_judge": {"alien_llm_model": "other"}}, "judge.model", "other"),
    ({"task_judge": {"alien_llm_response_length": 99}}, "judge.max_tokens", 99),
    ({}, "judge.model", "qwen3-235b-a22b-instruct-2507"),
    ({"model": {"path": "models/of/mine"}}, "model.base", "{root}/models/of/mine"),
    ({"model": {"path": "./mine"}}, "model.base", "{root}/mine"),
    ({"model": {"path": "org/mine"}}, "model.base", "org/mine"),
    (AGENT, "rollout.agent.workflow", "agents->Mine"),
    ({"rollout": {"agentscope_workflow": "a.py->B"}}, "rollout.agent.workflow", "{root}/a.py->B"),
    ({"rollout": {"agentscope_learn_protocol": "a.py->B"}}, "rollout.agent.folder", "{root}"),
    (AGENT | {"task_judge": {"judge_protocol": "./j.py->J"}}, "rollout.reward_function", "{root}/j.py->J"),
    (AGENT | {"task_judge": {"judge_type": "customized_protocol"}}, "rollout.reward.workflow", 1),
]
"""Settings of AgentJet, below the root, with a key of Flywheel's and the value that it has."""
SFT = {
    "base_model": "Qwen/Qwen2.5-7B-Instruct", "max_length": 2048, "load_in_8bit": True, "bf16": True, "lora_r": 128,
    "lora_alpha": 256, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"], "num_epochs": 2,
    "batch_size": 4, "gradient_accumulation": 8, "learning_rate": 2e-5, "warmup_ratio": 0.1, "lr_scheduler": "cosine",
    "save_steps": 500, "report_to": "wandb", "seed": 7, "max_train_samples": 900, "use_coreset_selection": True,
    "coreset_target_size": 60, "coreset_strategy": "diversity", "use_online_continual": True,
    "continual_buffer_size": 99, "continual_replay_ratio": 0.3, "train_data": "a.jsonl", "dev_data": "b.jsonl",
    "use_dora": False, "gradient_checkpointing": True,
}  # fmt: skip
RL = {
    "learning_rate": 5e-6, "num_epochs": 2, "batch_size": 2, "num_samples_per_prompt": 6,
    "dpo_config": {"beta": 0.2, "label_smoothing": 0.1, "loss_type": "sigmoid", "reference_free": False},
    "ppo_config": {"kl_coef": 0.02, "clip_range": 0.2}, "grpo_config": {"group_size": 4, "use_advantage": True},
}  # fmt: skip
REWARDS = {
    "weights": {"task_completion": 0.5, "tool_accuracy": 0.3, "efficiency": 0.2},
    "penalties": {"wrong_tool": -0.4, "timeout": -0.5, "hallucination": -0.4}, "max_steps": 10, "timeout_seconds": 60,
}  # fmt: skip


def foreign_files() -> Iterator[tuple[str, dict[str, Any]]]:
    """A name for each file, and its content; some of the documentation's are refused."""
    yield from _agentjets()
    for name, raw in (
        ("sft", {"sft_config": SFT}), ("sft at the root", SFT), ("preset", {"development": {"lora_r": 16}}),
        ("dpo", {"rl_config": {"algorithm": "dpo", **RL}}), ("grpo", {"rl_config": {"algorithm": "grpo", **RL}}),
        ("rl at the root", RL), ("rewards", {"reward_config": REWARDS}), ("ajet", {"ajet": {"algorithm": "dpo"}}),
        ("pipeline", {"run_warmup": True, "sft_config": {"lora_r": 8}, "rl_config": RL, "reward_config": REWARDS}),
        ("own", {"sft_config": {"lora_r": 64}, "judge": {"model": "m"}, "training": {"stages": ["sft", "grpo"]}}),
    ):  # fmt: skip
        yield f"SAGE's {name}", raw if "ajet" not in raw else {"ajet": raw["ajet"] | _TRACED["ajet"]}
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for at, text in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)):
            raw = yaml.safe_load(text)
            if isinstance(raw, dict) and not (MARKERS | CLASSES.keys()).isdisjoint(raw):
                yield f"{page.stem} {at}", raw


_TRACED: dict[str, Any] = {"ajet": {"model": {"path": "m"}, "feedback_tracing": {"base_url": "x"}}}


def _agentjets() -> Iterator[tuple[str, dict[str, Any]]]:
    whole = yaml.safe_load(DEFAULTS)
    yield "AgentJet's defaults", {"ajet": merged(whole, {"model": {"path": "m"}, "task_reader": {"type": "jsonl"}})}
    for key in KEYS.read_text().splitlines():
        if not key.startswith("#") and (value := value_at(whole, key)) is not None:
            alone: dict[str, Any] = {}
            put(alone, key, value)
            yield f"AgentJet's {key}", {"ajet": merged(alone, _TRACED["ajet"])}
    for settings, *_ in EFFECTS:
        yield f"AgentJet's {settings}", {"astuner": merged(_TRACED["ajet"], settings)}
    inner = {"task_reader": {"type": "tracing", "feedback_tracing": SECTION}}
    off = {**SECTION, "filters": [{**each, "enabled": False} for each in SECTION["filters"]]}
    keyed = {"type": "deduplication", "params": {"model": "e", "api_key": "sk-of-nobody-at-all-012345"}}
    yield "a section", {"feedback_tracing": SECTION, "model": MODEL}
    yield "a bare reader", {**inner, "model": MODEL}
    yield "a chain that decides", {"feedback_tracing": off, "model": MODEL}
    yield "a chain with a key", {"feedback_tracing": {**SECTION, "filters": [keyed]}, "model": MODEL}
    for root in ("ajet", "astuner"):
        yield (
            f"{root} with own sections",
            {root: inner, "model": MODEL, "judge": {"base_url": "http://127.0.0.1:9/v1"}},
        )
    for kind in ("jsonl", "jsonl_dataset_file", "dataset_file"):
        reader = {"type": kind, kind: {"training": {"file_path": "t.jsonl"}}}
        yield kind, {"ajet": {"model": {"path": "a/b/c"}, "task_reader": reader}}
    hub = {"dataset_path": "openai/gsm8k", "training_split": "train", "validation_split": "test"}
    yield (
        "hub",
        {
            "ajet": {
                "model": {"path": "m"},
                "task_reader": {"type": "huggingface_dat_repo", "huggingface_dat_repo": hub},
            }
        },
    )
    agent = {"command": ["node", "agent.mjs"]}
    yield (
        "a judge of a command",
        {**_TRACED, "rollout": {"agent": agent}}
        | {"ajet": {**_TRACED["ajet"], "task_judge": {"judge_protocol": "a->B"}}},
    )
