"""AgentJet's documented settings and their defaults, for workflows and judges that read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from flywheel.config.section import merged

DEFAULTS: Final[Mapping[str, Any]] = {
    "project_name": "ajet_default_project",
    "experiment_name": "read_yaml_name",
    "experiment_dir": "auto",
    "backbone": "debug",
    "data": {"max_prompt_length": 3000, "max_response_length": 15000, "train_batch_size": 32},
    "rollout": {
        "force_disable_toolcalls": False,
        "max_env_worker": 64,
        "compute_madness_checklist": ["nonsense"],
        "agent_madness_termination": True,
        "agent_madness_reward": -1.0,
        "max_response_length_in_one_turn": 4096,
        "max_model_len": 18000,
        "multi_turn": {"max_sample_per_task": 30, "max_steps": 30, "expected_steps": 1},
        "tensor_model_parallel_size": 1,
        "n_vllm_engine": 1,
        "max_num_seqs": 10,
        "name": "vllm",
        "num_repeat": 4,
        "temperature": 0.9,
        "top_p": 1.0,
        "val_kwargs": {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "do_sample": False, "num_repeat": 1},
    },
    "task_reader": {"type": "huggingface_dat_repo"},
    "task_judge": {
        "judge_type": "customized_protocol",
        "alien_llm_model": "qwen3-235b-a22b-instruct-2507",
        "alien_llm_response_length": 512,
    },
    "debug": {
        "debug_max_parallel": 4,
        "debug_first_n_tasks": 2,
        "debug_vllm_port": 18000,
        "debug_vllm_seed": 12345,
        "debug_tensor_parallel_size": 4,
    },
    "trainer_common": {
        "val_before_train": False,
        "val_pass_n": 4,
        "save_freq": 20,
        "test_freq": 20,
        "total_epochs": 50,
        "nnodes": 1,
        "n_gpus_per_node": 8,
        "logger": "swanlab",
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "mini_batch_num": 1,
        "fsdp_config": {"param_offload": True, "optimizer_offload": True},
        "optim": {"lr": 1e-6},
        "use_kl_loss": True,
        "kl_loss_coef": 0.002,
        "kl_loss_type": "low_var_kl",
        "ulysses_sequence_parallel_size": 1,
    },
}


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a file over the defaults, as JSON has them: dates are texts."""
    settings: dict[str, Any] = json.loads(json.dumps(merged({"ajet": DEFAULTS}, given), default=str))
    return settings
