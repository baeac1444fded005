"""Settings of AgentScope's tuner and configurations of Trinity-RFT, translated to Flywheel's keys.

Each table has a row for every documented key: what it is used as, why it has no effect, or which values are possible.
The translation, the log, `flywheel config show` and the tables of `flywheel docs agentscope-tuner` come from them.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from flywheel.config.agentjet import MARKERS, fit_engines
from flywheel.config.sage import Option
from flywheel.config.section import merged, put
from flywheel.errors import ConfigError

log = logging.getLogger(__name__)

GRPO: Final = Option(
    "multi_step_grpo", why="`flywheel.tune` trains with GRPO", only=("multi_step_grpo", "grpo", None)
)
POLICY: Final = "rollouts are sampled from the policy itself"
ENDS: Final = "a round writes its adapter, and is evaluated, at its end"
FILES: Final = "the files of the round are in `directory`"
GPUS: Final = "without GPUs it is 1, and with fewer than that needs as many as fit"
FAMILY: Final = "the model's family decides where it is the tuner's default (hermes, deepseek_r1)"
THINKING: Final = "put --default-chat-template-kwargs into serving.extra_args"
TINKER: Final = "rounds train on this machine"
EPOCHS: Final = "the steps are epochs × tasks / batch, rounded up"
PARALLEL: Final = Option(1, "rollout.tensor_parallel", GPUS)

MODEL: Final[Mapping[str, Option]] = {
    "model_path": Option("–", "model.base"),
    "max_model_len": Option("–", "rollout.max_model_len"),
    "temperature": Option(1.0, "rollout.temperature"),
    "top_p": Option(1.0, why=POLICY, only=(1, None)),
    "max_tokens": Option(8192, "rollout.max_completion_tokens"),
    "enable_thinking": Option(None, why=THINKING, only=(None,)),
    "tensor_parallel_size": PARALLEL,
    "inference_engine_num": Option(1, "rollout.engines", GPUS),
    "tool_call_parser": Option("hermes", "serving.tool_call_parser", FAMILY),
    "reasoning_parser": Option("deepseek_r1", "serving.reasoning_parser", FAMILY),
    "tinker_config": Option(None, why=TINKER, only=(None,)),
}
"""The fields of `TunerModelConfig`."""
ALGORITHM: Final[Mapping[str, Option]] = {
    "algorithm_type": GRPO,
    "learning_rate": Option(1e-6, "training.learning_rate"),
    "group_size": Option(8, "training.group_size"),
    "batch_size": Option(32, "training.prompts_per_step", "at most the number of tasks"),
    "save_interval_steps": Option(100, "training.save_steps"),
    "eval_interval_steps": Option(100, why=ENDS),
}
"""The fields of `AlgorithmConfig`."""
DATASET: Final[Mapping[str, Option]] = {
    "path": Option("–", "train_dataset.path", "a file, a folder or a data set of the Hub"),
    "name": Option(None, "train_dataset.name", "the subset"),
    "split": Option("train", "train_dataset.split"),
    "total_epochs": Option(1, "train_dataset.total_epochs", EPOCHS),
    "total_steps": Option(None, "training.steps"),
}
"""The fields of `DatasetConfig`."""
ARGUMENTS: Final[Mapping[str, Option]] = {
    "workflow_func": Option("–", "rollout.agent"),
    "judge_func": Option(None, "rollout.reward_function"),
    "train_dataset": Option(None, "train_dataset", "`DatasetConfig`, or a path"),
    "eval_dataset": Option(None, "eval_dataset", "`DatasetConfig`, or a path: the tasks of the comparison"),
    "model": Option(None, "model.base", "`TunerModelConfig`, or a path"),
    "auxiliary_models": Option(
        None,
        "rollout.auxiliary_models",
        "a mapping with `base_url` and `model` for each; a `TunerModelConfig` is refused, because a round starts no"
        " engines for other models",
    ),
    "algorithm": Option(None, "training", "`AlgorithmConfig`, or a mapping"),
    "project_name": Option(None, why=FILES),
    "experiment_name": Option(None, why=FILES),
    "monitor_type": Option(None, "tracking.report_to"),
    "config_path": Option(None, "config_path", "the arguments win over the file"),
}
"""The parameters of `tune`."""
TASKSET: Final = "buffer.explorer_input.taskset"
EVAL_TASKSETS: Final = "buffer.explorer_input.eval_tasksets"
USED: Final[Mapping[str, Option]] = {
    "mode": Option("both", why="a round samples rollouts and trains on them", only=("both", "colocate", None)),
    "algorithm.algorithm_type": GRPO,
    "algorithm.repeat_times": Option(1, "training.group_size"),
    "trainer.save_interval": Option(500, "training.save_steps"),
    "algorithm.optimizer.lr": Option(1e-6, "training.learning_rate"),
    "algorithm.optimizer.warmup_style": Option(None, "training.scheduler"),
    "algorithm.optimizer.lr_scheduler_type": Option("constant", "training.scheduler"),
    "algorithm.kl_loss_fn_args.kl_coef": Option(None, "training.beta"),
    "algorithm.policy_loss_fn_args.clip_range_low": Option(None, "training.clip_epsilon"),
    "algorithm.policy_loss_fn_args.clip_range_high": Option(None, "training.clip_epsilon_high"),
    "monitor.monitor_type": Option("tensorboard", "monitor_type"),
    "model.model_path": Option("", "model.base"),
    "model.max_model_len": Option(None, "rollout.max_model_len"),
    "model.max_response_tokens": Option(None, "rollout.max_completion_tokens"),
    "model.repetition_penalty": Option(1.0, why=POLICY, only=(1, None)),
    "model.top_p": Option(1.0, why=POLICY, only=(1, None)),
    "model.top_k": Option(-1, why=POLICY, only=(-1, None)),
    "model.enable_thinking": Option(None, why=THINKING, only=(None,)),
    "model.lora_configs.lora_rank": Option(32, "training.lora.r"),
    "model.lora_configs.lora_alpha": Option(32, "training.lora.alpha"),
    "model.lora_configs.target_modules": Option("all-linear", "training.lora.target_modules"),
    "model.tinker.enable": Option(False, why=TINKER, only=(False, None)),
    "model.external_model.enable": Option(False, why="rollouts are the policy's own", only=(False, None)),
    "buffer.batch_size": Option(1, "training.prompts_per_step", "at most the number of tasks"),
    "trainer.total_steps": Option(None, "training.steps"),
    "buffer.total_epochs": Option(1, "train_dataset.total_epochs", EPOCHS),
    "buffer.total_steps": Option(None, "training.steps"),
    f"{TASKSET}.storage_type": Option("file", why="data sets are files, or of the Hub", only=("file", None)),
    f"{TASKSET}.path": Option(None, "train_dataset.path"),
    f"{TASKSET}.subset_name": Option(None, "train_dataset.name"),
    f"{TASKSET}.split": Option("train", "train_dataset.split"),
    f"{TASKSET}.format.prompt_key": Option("prompt", "train_dataset.prompt_key", "the key of the question"),
    f"{TASKSET}.format.response_key": Option("response", "train_dataset.response_key", "the key of the right answer"),
    EVAL_TASKSETS: Option([], "eval_dataset", "`path`, `subset_name`, `split` and `format` of each"),
    "explorer.max_timeout": Option(1800, "rollout.agent_timeout_seconds"),
    "explorer.rollout_model.engine_type": Option("vllm", why="engines are vLLM's", only=("vllm", "vllm_async", None)),
    "explorer.rollout_model.engine_num": Option(1, "rollout.engines", GPUS),
    "explorer.rollout_model.tensor_parallel_size": PARALLEL,
    "explorer.rollout_model.gpu_memory_utilization": Option(0.9, "rollout.gpu_memory_utilization"),
    "explorer.rollout_model.top_p": Option(None, why=POLICY, only=(1, None)),
    "explorer.rollout_model.enable_thinking": Option(None, why=THINKING, only=(None,)),
    "explorer.rollout_model.tool_call_parser": Option(None, "serving.tool_call_parser", FAMILY),
    "explorer.rollout_model.reasoning_parser": Option(None, "serving.reasoning_parser", FAMILY),
    "model.temperature": Option(1.0, "rollout.temperature"),
    "explorer.rollout_model.temperature": Option(None, "rollout.temperature", "over `model.temperature`"),
    f"{TASKSET}.rollout_args.temperature": Option(
        None, "rollout.temperature", "over `rollout_model` and `model.temperature`"
    ),
    "explorer.auxiliary_models": Option(
        [],
        why="a round starts no engines for other models; serve each, and name it in"
        " `tune(auxiliary_models={NAME: {base_url: …, model: …}})`",
        only=([], None),
    ),
    "trainer.grad_clip": Option(1.0, "training.max_grad_norm"),
    "trainer.max_token_len_per_gpu": Option(None, "training.micro_batch_tokens"),
    "stages": Option([], why="a call of `tune` is one stage: call it once for each", only=([], None)),
}
"""The keys of a Trinity file by their paths that are used or refused. Where several set the same, the last counts."""
UNUSED: Final[Mapping[str, str]] = {
    FILES: "project name group checkpoint_root_dir checkpoint_job_dir",
    "each call is a round of its own": "continue_from_checkpoint",
    "a round starts a Ray of its own": "ray_namespace",
    "a round checks the memory of its GPUs itself": "ignore_validator_suggestions",
    "the optimizer is AdamW, as TRL makes it": "algorithm.optimizer",
    "it is for Trinity's trainer":
        "algorithm.optimizer.fused algorithm.optimizer.foreach trainer.trainer_config trainer actor_rollout_ref "
        "critic",
    "a step trains on its own rollouts, which no buffer holds":
        "algorithm.sample_strategy buffer.trainer_input buffer.trainer_input.experience_buffer "
        "buffer.trainer_input.auxiliary_buffers",
    "advantages are those of GRPO: `training.scale_rewards`": "algorithm.advantage_fn algorithm.advantage_fn_args",
    "the KL term is part of the loss: `training.beta`": "algorithm.kl_penalty_fn",
    "the KL term is TRL's: `training.beta`": "algorithm.kl_loss_fn",
    "the loss has no term of entropy": "algorithm.entropy_loss_fn",
    "nothing is sent to a service": "monitor.monitor_args",
    "`metrics.jsonl` has the seconds of each step": "monitor.enable_ray_timeline",
    "GRPO has no critic": "model.critic_model_path",
    "the model's own chat template, as the server renders it, is the only format":
        "model.custom_chat_template model.chat_template_path",
    "a prompt may have what `rollout.max_model_len` leaves": "model.max_prompt_tokens",
    POLICY: "model.min_response_tokens buffer.explorer_input.taskset.rollout_args",
    "no prompt is cut": "model.enable_prompt_truncation",
    "a round makes an adapter of its own": "model.lora_configs",
    "the adapter is in `adapter` of the result": "model.lora_configs.name",
    "a round of `flywheel.tune` starts with a new adapter": "model.lora_configs.path",
    "it is `model.base`": "model.lora_configs.base_model_name",
    "adapters are trained in float32": "model.lora_configs.lora_dtype",
    "it is a setting of the model's own files": "model.rope_scaling model.rope_theta",
    "without `enable` it has no effect there either": "model.tinker",
    TINKER:
        "model.tinker.rank model.tinker.seed model.tinker.train_mlp model.tinker.train_attn "
        "model.tinker.train_unembed",
    "rollouts are the policy's own":
        "model.external_model.base_url_env model.external_model.api_key_env model.external_model.model_name",
    "a round uses the GPUs of this machine":
        "cluster.node_num cluster.gpu_per_node cluster explorer.rollout_model.nnodes",
    "a step trains on all of its rollouts": "buffer.train_batch_size",
    "workflow and judge are the functions that `tune` gets":
        "buffer.explorer_input.default_workflow_type buffer.explorer_input.default_eval_workflow_type "
        "buffer.explorer_input.default_reward_fn_type buffer.explorer_input.taskset.default_workflow_type "
        "buffer.explorer_input.taskset.default_reward_fn_type",
    "it is a name for Ray": "buffer.explorer_input.taskset.name explorer.name trainer.name",
    "`algorithm.repeat_times` is used, there as well": "buffer.explorer_input.taskset.repeat_times",
    "a workflow gets the line as it is": "buffer.explorer_input.taskset.format",
    "a workflow gets the line of its task alone, there as well": "buffer.explorer_input.taskset.workflow_args",
    "`rollout.workers` has the number of processes, by this machine's memory": "explorer.runner_per_model",
    "processes of a workflow start when they are needed": "explorer.runner_prepare_concurrency",
    "a run that fails costs its own rollout, and is not repeated":
        "explorer.runner_prepare_max_retries explorer.max_retry_times",
    "a process runs one rollout at a time": "explorer.concurrent_mode explorer.max_repeat_times_per_runner",
    "a workflow has the variables of the program that calls `tune`": "explorer.env_vars",
    "other options of an engine are Flywheel's own": "explorer.rollout_model",
    "every call of a rollout is recorded": "explorer.rollout_model.enable_history",
    "a workflow always gets an OpenAI endpoint": "explorer.rollout_model.enable_openai_api",
    "it is always on": "explorer.rollout_model.enable_auto_tool_choice",
    ENDS:
        "explorer.eval_interval trainer.save_strategy trainer.save_hf_checkpoint "
        "trainer.max_checkpoints_to_keep",
    "the base model is always evaluated, too": "explorer.eval_on_startup",
    "engines get the weights after each step":
        "explorer.max_inflight_batches synchronizer.sync_method synchronizer.sync_interval "
        "synchronizer.sync_offset synchronizer.sync_timeout synchronizer.sync_style synchronizer",
    "a step waits for all of its rollouts":
        "explorer.over_rollout.ratio explorer.over_rollout.wait_after_min "
        "explorer.over_rollout.return_partial_tasks",
    "a run has `rollout.agent_timeout_seconds`":
        "explorer.dynamic_timeout.enable explorer.dynamic_timeout.warmup_min_steps explorer.dynamic_timeout.ratio",
    "`progress.json` of the round has its state": "explorer.runner_state_report_interval",
    "TRL trains": "trainer.trainer_type",
    "TRL trains, on one GPU": "trainer.trainer_strategy trainer.ulysses_sequence_parallel_size",
    "`training.micro_batch_tokens` is the limit of a pass": "trainer.use_dynamic_bsz",
    "`filter.chain` has filters for tasks":
        "service.data_juicer service.data_juicer.server_url service.data_juicer.auto_start "
        "service.data_juicer.port data_processor.task_pipeline",
    "rewards are those of workflow and judge": "data_processor.experience_pipeline",
    "`worker.log` of the round has everything": "log.level log.group_by_node",
}  # fmt: skip
"""The other documented keys, by the reason why they have no effect."""
TRINITY: Final[Mapping[str, Option]] = {
    **USED,
    **{key: Option(None, why=why) for why, keys in UNUSED.items() for key in keys.split()},
}
"""A row also stands for keys below it that have none."""
_STORED: Final = (
    "algorithm_type batch_size capacity data_selector default_eval_workflow_type default_reward_fn_type "
    "default_workflow_type enable_progress_bar format index is_eval max_read_timeout max_retry_interval "
    "max_retry_times mm_data_kwargs name path raw ray_namespace repeat_times replay_buffer replay_buffer_kwargs "
    "reuse_cooldown_time reward_fn_args rollout_args schema_type split storage_type subset_name task_selector "
    "task_type tokenizer_path total_epochs total_steps use_priority_queue workflow_args wrap_in_ray"
)
_PIPELINE: Final = (
    "agent_model_name clean_strategy config_path data_dist dj_config_path dj_process_desc format input_buffers "
    "input_save_path inputs min_priority_score min_size_ratio num_process operators output output_buffer "
    "priority_weights reward_shaping save_input target_fields top_k"
)
FIELDS: Final[Mapping[str, str]] = {
    "algorithm":
        "add_strategy add_strategy_args advantage_fn_args bypass_old_logprobs enable_router_replay "
        "entropy_loss_fn_args gamma kl_loss_fn_args kl_penalty_fn_args lam loss_agg_mode policy_loss_fn "
        "policy_loss_fn_args rollout_correction sample_strategy_args use_token_level_loss",
    "optimizer":
        "betas clip_grad lr_decay_steps lr_decay_style lr_warmup_init lr_warmup_steps lr_warmup_steps_ratio min_lr "
        "min_lr_ratio optimizer_type weight_decay",
    "buffer":
        "cache_dir explorer_output max_retry_interval max_retry_times pad_token_id read_batch_size tokenizer_path",
    "explorer_input": "reply_prefix system_prompt tasksets",
    "trainer_input": "read_experience_strategy sft_warmup_dataset sft_warmup_steps",
    **dict.fromkeys(
        ("taskset", "experience_buffer", "sft_warmup_dataset", "explorer_output", "output", "output_buffer"), _STORED
    ),
    "format":
        "chat_template chosen_key enable_concatenated_multi_turn enable_thinking image_key label_key messages_key "
        "prompt_key prompt_type rejected_key reply_prefix response_key reward_fn_key reward_key solution_key "
        "system_prompt system_prompt_key tools_key video_key workflow_key",
    "rollout_args": "logprobs max_tokens n temperature top_k top_p",
    **dict.fromkeys(("data_selector", "task_selector"), "feature_keys kwargs seed selector_type"),
    "replay_buffer": "enable priority_fn priority_fn_args reuse_cooldown_time",
    "explorer":
        "api_port bench_on_latest_checkpoint collect_experiences db_url eval_on_latest_checkpoint listen_address "
        "min_running_model_num proxy_port runner_num service_status_check_interval",
    "rollout_model":
        "api_key base_port bundle_indices chat_template checkpoint_job_dir cuda_visible_devices data_parallel_size "
        "dtype enable_chunked_prefill enable_expert_parallel enable_log_requests enable_lora enable_multimodal "
        "enable_prefix_caching enable_prompt_truncation enable_return_routed_experts enable_runtime_lora_updating "
        "enforce_eager engine_id external_model_config extra_engine_args gpu_per_engine ignore_eos logprobs "
        "lora_kwargs lora_modules max_model_len max_prompt_tokens max_response_tokens min_response_tokens model_path "
        "name node_rank pipeline_parallel_size ray_actor_name ray_namespace repetition_penalty rope_scaling "
        "rope_theta seed sync_method top_k trust_remote_code use_v1 weight_sync_buffer_size",
    "external_model_config": "api_key_env base_url_env enable model_name",
    "trainer":
        "actor_clip_ratio actor_entropy_coef actor_grad_clip actor_kl_loss_coef actor_use_kl_loss balance_batch "
        "critic_warmup enable_preview fix_actor_microbatch_loss_scale grad_offload megatron offload_policy "
        "optimizer_offload param_offload ppo_max_token_len_per_gpu trainer_config_path trust_remote_code "
        "use_remove_padding",
    "megatron":
        "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size pipeline_model_parallel_size "
        "sequence_parallel tensor_model_parallel_size virtual_pipeline_model_parallel_size",
    "monitor": "cache_dir detailed_stats",
    "synchronizer":
        "explorer_sync_interval explorer_world_size group_name ray_namespace trainer_sync_interval "
        "wait_for_checkpoint",
    "model": "fully_sharded_loras logprobs max_cpu_loras trust_remote_code",
    "lora_configs": "exclude_modules is_dummy",
    "tinker": "base_url",
    "cluster":
        "auxiliary_model_gpu_num explorer_gpu_num ray_address rollout_gpu_num total_gpu_num trainer_gpu_num "
        "trainer_gpu_num_per_node trainer_node_num",
    "data_processor":
        "agent_model_config agent_model_name clean_strategy data_dist data_processor_url data_workflow_url db_url "
        "dj_config_path dj_process_desc format load_kwargs max_retry_interval max_retry_times min_priority_score "
        "min_size_ratio priority_weights source_data_path",
    **dict.fromkeys(("task_pipeline", "experience_pipeline"), _PIPELINE),
    "log": "save_dir",
}  # fmt: skip
"""The other fields of Trinity's releases, 0.1.0 to 0.6.0, and of its examples, by the name of their section: without
effect here."""
OTHER: Final = Option(None, why="Flywheel has nothing like it")
UNKNOWN: Final = Option(None, why="no release of Trinity has it")
CLOSE: Final = 0.8
"""How similar an unknown key is to the one that was probably meant (`difflib`)."""
SHORT: Final[Mapping[str, Option]] = {
    **MODEL,
    **ALGORITHM,
    **{
        name: TRINITY[path]
        for path in (
            "algorithm.repeat_times", "algorithm.optimizer.lr", "model.max_response_tokens", "buffer.total_steps",
            "buffer.total_epochs", "explorer.rollout_model.engine_num", "explorer.max_timeout",
            "synchronizer.sync_interval", "project", "name", "mode", "checkpoint_root_dir",
        )
        for name in (path.rpartition(".")[2],)
    },
    "timeout": TRINITY["explorer.max_timeout"],
    "project_name": ARGUMENTS["project_name"],
    "experiment_name": ARGUMENTS["experiment_name"],
}  # fmt: skip
"""Names without a section, which a mapping of settings may have."""
SECTIONS: Final = frozenset(path.partition(".")[0] for path in TRINITY if "." in path)
FAMILY_DEFAULTS: Final = ("hermes", "deepseek_r1")
"""The tuner's parsers for Qwen 3."""


class Found(NamedTuple):
    """A key of such settings: its path, its value, and what Flywheel has for it."""

    path: str
    value: Any
    option: Option
    meant: str = ""
    """The known key that an unknown one was probably meant to be."""

    @property
    def is_refused(self) -> bool:
        return bool(self.option.only) and self.value not in self.option.only

    @property
    def meaning(self) -> str:
        """In words, as the tables and the log have it."""
        option = self.option
        if self.meant:
            return f"unknown: did you mean {self.meant}?"
        if self.is_refused:
            return f"refused: {option.why}"
        if option.use and self.value is not None and not self.is_left_to_family:
            return f"used as {option.use}"
        if option.only:
            return f"the only possible value: {option.why}"
        return f"without effect: {option.why}" if option.why else "without effect: it has no value"

    @property
    def is_left_to_family(self) -> bool:
        return self.option.why == FAMILY and self.value in FAMILY_DEFAULTS


def is_trinitys(raw: Any) -> bool:
    """Whether this is a configuration of Trinity-RFT."""
    if not isinstance(raw, Mapping) or not MARKERS.isdisjoint(raw):
        return False
    return any(isinstance(raw.get(key), Mapping) for key in ("buffer", "explorer", "synchronizer", "algorithm"))


def found_in(raw: Mapping[str, Any], sections: Collection[str] = ()) -> Iterator[Found]:
    """The tuner's and Trinity's keys; `sections` are Flywheel's own, whose other keys are left out."""
    for key, value in raw.items():
        if key in SECTIONS and isinstance(value, Mapping):
            for path, inner in _leaves(value, f"{key}."):
                option, meant = _row(path), meant_by(path)
                if key not in sections or option is not None or meant:
                    yield Found(path, inner, option or UNKNOWN, meant)
        elif key not in sections and key not in SECTIONS:
            option, meant = TRINITY.get(key) or SHORT.get(key), meant_by(str(key))
            if option is not None or meant:
                yield Found(str(key), value, option or UNKNOWN, meant)


def from_tuner(
    raw: Mapping[str, Any], sections: Collection[str], name: str, origins: dict[str, str] | None = None
) -> dict[str, Any]:
    """The settings in Flywheel's keys, with what is for the arguments of `tune` below their names. `sections` are
    Flywheel's own sections, which are kept and take precedence. `origins` is as in `translated`.

    Raises ConfigError for a value that is not possible here, and for a key that is unknown and close to a known one.
    """
    own: dict[str, Any] = {}
    for key, value in raw.items():
        if key in SECTIONS and isinstance(value, Mapping):
            for path, inner in _leaves(value, f"{key}."):
                if key in sections and _row(path) is None:
                    put(own, path, inner)
        elif key in sections or key in SECTIONS or (key not in TRINITY and key not in SHORT):
            own[key] = value
    return merged(translated(found_in(raw, sections), name, origins), own)


def translated(keys: Iterable[Found], name: str, origins: dict[str, str] | None = None) -> dict[str, Any]:
    """Flywheel's settings. Each key without effect is a line of the log. The keys that set them go to `origins`, by
    Flywheel's. Raises ConfigError."""
    order = {path: place for place, path in enumerate(TRINITY)}
    set_by: dict[str, Found] = {}
    made: dict[str, Any] = {}
    for found in sorted(keys, key=lambda found: order.get(found.path, len(order))):
        option = found.option
        if found.meant:
            why = f"unknown key `{found.path}` (did you mean `{found.meant}`?)"
            raise ConfigError(f"use {name}", why, "Correct it; see `flywheel docs agentscope-tuner`.")
        if found.is_refused:
            choices = " or ".join(str(choice) for choice in option.only if choice is not None) or "nothing"
            given = "given" if isinstance(found.value, list | Mapping) else found.value
            why = f"`{found.path}` is {given}: {option.why}"
            raise ConfigError(f"use {name}", why, f"Set it to {choices}, or remove it.")
        if found.value is None or option.only:
            continue
        if not option.use or found.is_left_to_family:
            log.warning("%s: %s: %s", name, found.path, found.meaning)
            continue
        if (before := set_by.get(option.use)) is not None and before.value != found.value:
            log.warning("%s: %s: without effect: %s has another value", name, before.path, found.path)
        set_by[option.use] = found
        if origins is not None:
            origins[option.use] = found.path
        put(made, option.use, _tasksets(found, name) if option.use == "eval_dataset" else found.value)
    engines, parallel = (set_by.get(use) for use in ("rollout.engines", "rollout.tensor_parallel"))
    if engines or parallel:
        names = engines.path if engines else "engines", parallel.path if parallel else "tensor_parallel_size"
        fit_engines(made["rollout"], names, name)
    return made


def _tasksets(found: Found, name: str) -> list[dict[str, Any]]:
    if not isinstance(found.value, list) or not all(isinstance(each, Mapping) for each in found.value):
        raise ConfigError(f"use {name}", f"`{found.path}` is no list of mappings", "Give each a `path`.")
    made = []
    for number, each in enumerate(found.value):
        of_it = found_in({"buffer": {"explorer_input": {"taskset": each}}})
        place = f"{found.path}[{number}]"
        named = [
            key._replace(path=key.path.replace(TASKSET, place, 1), meant=key.meant.replace(TASKSET, place, 1))
            for key in of_it
        ]
        made.append(translated(named, name).get("train_dataset", {}))
    return made


def _row(path: str) -> Option | None:
    """The row of a key, or that of the nearest section above it; None for a key that Trinity does not have."""
    section = path
    while section not in TRINITY:
        section, _, last = section.rpartition(".")
        if not section or not last:
            return OTHER if _unknown(path) is None else None
    return TRINITY[section]


def meant_by(path: str) -> str:
    """The key that one which Trinity does not have was probably meant to be; empty for any other."""
    if (unknown := _unknown(path)) is None:
        return ""
    section, name = unknown
    close = difflib.get_close_matches(name, sorted(_names(section)), n=1, cutoff=CLOSE)
    return ".".join(filter(None, (section, *close))) if close else ""


def _unknown(path: str) -> tuple[str, str] | None:
    """The section of a key, and the name in it, that Trinity does not have; None for a key that it has."""
    section = ""
    for name in path.split("."):
        known = _names(section)
        if not known or section.endswith("_fn_args"):
            return None  # anything can stand there
        if name not in known:
            return section, name
        section = f"{section}.{name}" if section else name
    return None


@functools.cache
def _names(section: str) -> frozenset[str]:
    """The names that Trinity has in a section; those without one if it is empty."""
    if not section:
        return frozenset({path.partition(".")[0] for path in TRINITY} | SHORT.keys())
    inside = {path[len(section) + 1 :].partition(".")[0] for path in TRINITY if path.startswith(f"{section}.")}
    return frozenset(inside | {*FIELDS.get(section.rpartition(".")[2], "").split()})


def _leaves(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        path = f"{above}{key}"
        inner = value[0] if path == "model.lora_configs" and isinstance(value, list) and value else value
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{path}.")
        else:
            yield path, value
