"""The names of AgentScope's tuner and of Trinity-RFT's configurations.

Names without a section are those of the tuner's classes, and short ones that a mapping for `tune` may have.
`train_dataset`, `eval_dataset` and `monitor_type` are arguments of `tune`. `flywheel migrate` prints the
table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from flywheel.config.agentjet import MARKERS
from flywheel.config.foreign import SECTIONS, Only, Row, Table, Without, check, fit_engines, settings_in
from flywheel.config.section import put, value_at

TASKSET: Final = "buffer.explorer_input.taskset"
EVAL_TASKSETS: Final = "buffer.explorer_input.eval_tasksets"
DATASET: Final[Mapping[str, str]] = {
    "path": f"{TASKSET}.path",
    "name": f"{TASKSET}.subset_name",
    "split": f"{TASKSET}.split",
    "total_epochs": "buffer.total_epochs",
    "total_steps": "buffer.total_steps",
}
"""The keys of a Trinity file that the fields of `DatasetConfig` stand for."""
EPOCHS: Final = 1
"""The default of `buffer.total_epochs`."""
POLICY: Final = "rollouts are sampled from the policy itself"
MODELS: Final = (
    "a round starts no engines for other models; serve each, and name it in"
    " `tune(auxiliary_models={NAME: {base_url: …, model: …}})`"
)
# Names without a section are the last of each row: whoever adds one to a copied file wants it to count.
TRINITY: Final = Table("migrate", {
    "model.model_path model_path": "model.base",
    "algorithm.repeat_times group_size repeat_times": "training.group_size",
    "buffer.batch_size batch_size": "training.prompts_per_step",
    "algorithm.optimizer.lr learning_rate lr": "training.learning_rate",
    "algorithm.optimizer.warmup_style algorithm.optimizer.lr_scheduler_type": "training.scheduler",
    "trainer.total_steps buffer.total_steps total_steps": "training.steps",
    "trainer.save_interval save_interval_steps": "training.save_steps",
    "algorithm.kl_loss_fn_args.kl_coef": "training.beta",
    "algorithm.policy_loss_fn_args.clip_range_low": "training.clip_epsilon",
    "algorithm.policy_loss_fn_args.clip_range_high": "training.clip_epsilon_high",
    "trainer.grad_clip": "training.max_grad_norm",
    "trainer.max_token_len_per_gpu": "training.micro_batch_tokens",
    "model.lora_configs.lora_rank": "training.lora.r",
    "model.lora_configs.lora_alpha": "training.lora.alpha",
    "model.lora_configs.target_modules": "training.lora.target_modules",
    "model.max_model_len max_model_len": "rollout.max_model_len",
    "model.max_response_tokens max_tokens max_response_tokens": "rollout.max_completion_tokens",
    f"model.temperature explorer.rollout_model.temperature {TASKSET}.rollout_args.temperature temperature":
        "rollout.temperature",
    "explorer.max_timeout timeout max_timeout": "rollout.agent_timeout_seconds",
    "explorer.rollout_model.engine_num inference_engine_num engine_num": "rollout.engines",
    "explorer.rollout_model.tensor_parallel_size tensor_parallel_size": "rollout.tensor_parallel",
    "explorer.rollout_model.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "explorer.rollout_model.tool_call_parser tool_call_parser": "serving.tool_call_parser",
    "explorer.rollout_model.reasoning_parser reasoning_parser": "serving.reasoning_parser",
    "monitor.monitor_type": "monitor_type",
    f"{TASKSET}.path": "train_dataset.path",
    f"{TASKSET}.subset_name": "train_dataset.name",
    f"{TASKSET}.split": "train_dataset.split",
    "buffer.total_epochs total_epochs": "train_dataset.total_epochs",
    f"{TASKSET}.format.prompt_key": "train_dataset.prompt_key",
    f"{TASKSET}.format.response_key": "train_dataset.response_key",
    EVAL_TASKSETS: "eval_dataset",
    "mode": Only(("both", "colocate"), "a round samples rollouts and trains on them"),
    "algorithm_type algorithm.algorithm_type": Only(("multi_step_grpo", "grpo"), "`flywheel.tune` trains with GRPO"),
    "top_p model.top_p explorer.rollout_model.top_p model.repetition_penalty": Only((1,), POLICY),
    "model.top_k": Only((-1,), POLICY),
    "enable_thinking model.enable_thinking explorer.rollout_model.enable_thinking":
        Only((), "put --default-chat-template-kwargs into serving.extra_args"),
    "tinker_config": Only((), "rounds train on this machine"),
    "model.tinker.enable": Only((False,), "rounds train on this machine"),
    "model.external_model.enable": Only((False,), "rollouts are the policy's own"),
    f"{TASKSET}.storage_type": Only(("file",), "data sets are files, or of the Hub"),
    "explorer.rollout_model.engine_type": Only(("vllm", "vllm_async"), "engines are vLLM's"),
    "explorer.auxiliary_models": Only(([],), MODELS),
    "stages": Only(([],), "a call of `tune` is one stage: call it once for each"),
    "tool_call_parser=hermes explorer.rollout_model.tool_call_parser=hermes reasoning_parser=deepseek_r1 "
    "explorer.rollout_model.reasoning_parser=deepseek_r1":
        Without("the model's family decides where it is the tuner's default for Qwen 3"),
    "project project_name name experiment_name group checkpoint_root_dir checkpoint_job_dir "
    "continue_from_checkpoint log": Without("each call is a round of its own, and its files are in `directory`"),
    "ray_namespace ignore_validator_suggestions cluster": Without("a round starts a Ray of its own, on this machine"),
    "trainer trainer.ppo_max_token_len_per_gpu actor_rollout_ref critic algorithm.optimizer": Without("TRL trains"),
    "algorithm algorithm.kl_loss_fn algorithm.policy_loss_fn algorithm.policy_loss_fn_args.clip_range":
        Without("the loss is TRL's GRPO: `training.beta`, `training.scale_rewards`"),
    "buffer buffer.explorer_output buffer.read_batch_size buffer.train_batch_size explorer.over_rollout":
        Without("a step trains on all of its own rollouts, which no buffer holds"),
    "monitor": Without("nothing is sent to a service"),
    "model.custom_chat_template model.chat_template_path model.rope_scaling model.rope_theta "
    "model.critic_model_path model.trust_remote_code":
        Without("the model is used as its own files and its chat template say"),
    "model.max_prompt_tokens model.enable_prompt_truncation":
        Without("a prompt may have what `rollout.max_model_len` leaves, and is not cut"),
    "model.min_response_tokens model.logprobs model.external_model "
    f"{TASKSET}.rollout_args explorer.rollout_model.top_k": Without(POLICY),
    "model.lora_configs model.fully_sharded_loras model.max_cpu_loras model.tinker":
        Without("a round makes a float32 adapter of its own, on this machine"),
    f"buffer.explorer_input {TASKSET}s {TASKSET}": Without("a workflow gets the line of its task as it is"),
    "explorer": Without("`rollout.workers` has the number of processes; a run that fails is not repeated"),
    "explorer.rollout_model": Without("other options of an engine are Flywheel's own"),
    "eval_interval_steps explorer.eval_interval explorer.eval_on_startup trainer.save_strategy":
        Without("a round writes its adapter, and is evaluated beside the base model, at its end"),
    "sync_interval synchronizer explorer.max_inflight_batches": Without("engines get the weights after each step"),
    "service data_processor": Without("`filter.chain` has filters for tasks"),
}, refuses_close=True)  # fmt: skip
_SECTIONS: Final = {name.partition(".")[0] for name in TRINITY.names if "." in name}


def is_trinitys(raw: Any) -> bool:
    """Whether this is a configuration of Trinity-RFT."""
    if not isinstance(raw, Mapping) or not MARKERS.isdisjoint(raw):
        return False
    return any(isinstance(raw.get(key), Mapping) for key in ("buffer", "explorer", "synchronizer", "algorithm"))


def rows_of(raw: Mapping[str, Any]) -> tuple[list[Row], dict[str, Any]]:
    """The rows of the tuner's and Trinity's keys, and the rest in Flywheel's keys. A section that both have may have
    keys of both."""
    found, own = list[tuple[str, str, Any]](), dict[str, Any]()
    for key, value in raw.items():
        is_section = isinstance(value, Mapping) and (key in _SECTIONS or TRINITY.reason(key) != "")
        if is_section and isinstance(loras := value.get("lora_configs"), list) and loras:
            value = {**value, "lora_configs": loras[0]}  # noqa: PLW2901
        for path, inner in TRINITY.leaves(value, f"{key}.") if is_section else [(str(key), value)]:
            if TRINITY.knows(path) and (is_section or not (key in SECTIONS or key in _SECTIONS)):
                found.append((path, path, inner))
            else:
                put(own, path, inner)
    rows = TRINITY.rows(found)
    return [each for row in rows for each in (_tasksets(row) if row.use == "eval_dataset" else [row])], own


def _tasksets(row: Row) -> Iterator[Row]:
    """The row of `eval_tasksets` with Flywheel's names, and those of the keys in it that have no effect."""
    if not isinstance(row.value, list) or not all(isinstance(each, Mapping) for each in row.value):
        why = f"`{row.place}` is no list of mappings"
        yield Row(row.place, row.value, "refused", why=why, hint="Give each a `path`.")
        return
    made = list[dict[str, Any]]()
    for number, each in enumerate(row.value):
        place = f"{row.place}[{number}]"
        made.append({})
        named = TRINITY.leaves(each, f"{TASKSET}.")
        for inner in TRINITY.rows((path.replace(TASKSET, place, 1), path, value) for path, value in named):
            if inner.use.startswith("train_dataset."):
                made[-1][inner.use.removeprefix("train_dataset.")] = inner.made
            elif inner.use:
                yield Row(inner.place, inner.value, "without effect", why="`gate.temperature` is that of the gate")
            else:
                yield inner._replace(why=inner.why.replace(TASKSET, place))
    yield row._replace(outcome="replaced by", made=made)


def missing(settings: Mapping[str, Any]) -> Iterator[Row]:
    """Refused rows for what a round needs, and the settings of a file do not have."""
    for place, use, what in (
        ("model.model_path", "model.base", "which model is trained"),
        (f"{TASKSET}.path", "train_dataset.path", "where the tasks are"),
    ):
        if not value_at(settings, use):
            yield Row(place, None, "refused", use, why=f"`{place}` is missing: nothing says {what}", hint="Add it.")


def settings_of(rows: Sequence[Row], name: str) -> dict[str, Any]:
    """Flywheel's settings. Raises ConfigError for refused keys."""
    check(rows, f"use {name}", name, TRINITY.page)
    made = settings_in(rows)
    if "rollout" in made:
        fit_engines(made["rollout"], rows, name)
    return made
