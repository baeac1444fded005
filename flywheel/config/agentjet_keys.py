"""Every documented key of AgentJet and ASTuner, with its default there and what becomes of it here.

Names are relative to the root (`ajet`, `astuner`); one that begins with a dot is in the section of the name before
it. The table of `flywheel docs agentjet` is generated from these tables (`python -m scripts.reference_pages`).
"""

from __future__ import annotations

from typing import Final

from flywheel.config.sage import ENDS, GROUP, PPO, TRAINER_COMMON, Option

MODEL: Final = "qwen3-235b-a22b-instruct-2507"
KINDS: Final = "it is read only with that `task_reader.type`"
GPUS: Final = "without GPUs it is 1, and with fewer than that needs the largest that fits"
OTHER_READER: Final = "that `task_reader.type` is refused"
GRADER: Final = "`judge_type: rubrics_auto_grader` is refused"
COPIED: Final[dict[str, Option]] = {
    "model.path": Option(None, "model.base", "it must be set"),
    "rollout.num_repeat": Option(4, "training.group_size", GROUP),
    "rollout.temperature": Option(0.9, "rollout.temperature"),
    "rollout.n_vllm_engine": Option(1, "rollout.engines", GPUS),
    "rollout.tensor_model_parallel_size": Option(1, "rollout.tensor_parallel", GPUS),
    "rollout.max_model_len": Option(18000, "rollout.max_model_len"),
    "rollout.max_response_length_in_one_turn": Option(4096, "rollout.max_turn_tokens"),
    "rollout.multi_turn.max_steps": Option(30, "rollout.max_turns"),
    "data.train_batch_size": Option(32, "training.prompts_per_step", "at most as many as the round has tasks"),
    "trainer_common.optim.lr": Option(1e-6, "training.learning_rate"),
    "debug.debug_first_n_tasks": Option(2, "training.debug_prompts", "it has effect in `flywheel round --debug`"),
    "task_judge.alien_llm_model": Option(MODEL, "judge.model", "where `feedback_tracing` names none"),
    "task_judge.alien_llm_response_length": Option(512, "judge.max_tokens", "where `feedback_tracing` has none"),
    "task_reader.feedback_tracing.base_url": Option(None, "sources.path", "it is Studio's database"),
    "task_reader.feedback_tracing.train_output_path": Option(None, "ingest.output"),
    "task_reader.feedback_tracing.alien_llm_model": Option(None, "judge.model"),
    "task_reader.feedback_tracing.alien_llm_response_length": Option(None, "judge.max_tokens"),
    "task_reader.feedback_tracing.train_ratio": Option(0.7, "ingest.train_ratio"),
    "task_reader.feedback_tracing.split_seed": Option(42, "ingest.split_seed"),
}  # fmt: skip
"""Keys whose value a key of Flywheel gets; of several with one key, the last."""
MADE: Final[dict[str, Option]] = {
    "task_reader.type":
        Option("huggingface_dat_repo", "sources.type", "`tracing`, a file of JSON lines, or a data set"),
    "task_reader.huggingface_dat_repo.dataset_path": Option("gsm8k", "sources.dataset.path", KINDS),
    "task_reader.huggingface_dat_repo.training_split, .validation_split":
        Option(("train", "validation"), "sources.dataset.split",
               "a source each: the tasks of the second are held out"),
    "task_reader.jsonl_dataset_file.training.file_path, task_reader.dataset_file.training.file_path, "
    "task_reader.jsonl.training.file_path": Option(None, "sources.path", KINDS),
    "task_reader.feedback_tracing.filters":
        Option(None, "filter.chain", "each with the parameters that it has there"),
    "rollout.user_workflow, .agentscope_workflow, .agentscope_learn_protocol":
        Option(None, "rollout.agent.workflow, rollout.reward.rubric, rollout.reward.workflow",
               "the reward is then the workflow's or the judge's alone"),
    "rollout.compute_madness_checklist, .agent_madness_reward":
        Option((["nonsense"], -1.0), "rollout.loop_reward",
               "with `nonsense`, of messages that loop and were cut off; other checks are without effect. Of a file"
               " with neither, 0"),
    "task_judge.judge_type": Option("customized_protocol", "rollout.reward_function", "with `judge_protocol`"),
    "task_judge.judge_protocol": Option(None, "rollout.reward_function", "a workflow must be set"),
    "trainer_common.use_kl_loss, .kl_loss_coef":
        Option((True, 0.002), "training.beta",
               "the coefficient with `use_kl_loss`, 0 without; of a file with neither, 0"),
    "trainer_common.save_freq": Option(20, "training.save_steps", "above 0"),
    "trainer_common.logger":
        Option("swanlab", "tracking.report_to",
               "those whose package is installed; `metrics.jsonl` of each round has the numbers in any case"),
    **{f"trainer_common.{name}": option for name, option in TRAINER_COMMON.items()},
}  # fmt: skip
"""Keys that are translated by code: their values have another form, or depend on each other."""
REFUSED: Final[dict[str, Option]] = {
    "backbone: verl, backbone: trinity":
        Option(None, "`flywheel export --format agentjet`, which writes the tasks for a training there",
               "rounds train with Flywheel's own trainer"),
    "task_reader.type: env_service":
        Option(None, "`task_reader.type: jsonl_dataset_file`, a task per line; the workflow may ask the environment",
               "its tasks are in an environment's server, which Flywheel does not run"),
    "task_reader.type: data_generation, task_reader.type: random_dummy":
        Option(None, "`flywheel tasks from-documents`, or `task_reader.type: jsonl_dataset_file` with JSON lines",
               "tasks are generated by a command, before a round, and a person releases them"),
    "task_judge.judge_type: rubrics_auto_grader":
        Option(None,
               "a rubric (`filter.rubric`, with `rollout.reward: {rubric: 1}`), or `judge_type: customized_protocol`",
               "its rubrics are made and graded by a library of AgentJet's"),
    "trainer_common.algorithm.adv_estimator: gae": Option(None, "`adv_estimator: grpo`", PPO),
}  # fmt: skip
"""Values that are an error, with what to use instead."""
UNUSED: Final[dict[str, Option]] = {
    "project_name, experiment_name, experiment_dir":
        Option(("ajet_default_project", "read_yaml_name", "auto"),
               why="rounds have numbers, and `state.dir` has their files"),
    "backbone": Option("debug", why="`flywheel round --debug` makes rollouts without training"),
    "data.max_prompt_length, .max_response_length":
        Option((3000, 15000), why="prompt and rollout have one limit together, `rollout.max_model_len`"),
    "rollout.force_disable_toolcalls, .agentscope_disable_toolcalls":
        Option((False, False), why="a workflow has the tools that it gives its agent"),
    "rollout.max_env_worker": Option(64, why="`rollout.workers` has the number of processes that run workflows"),
    "rollout.gamma": Option(1.0, why="all turns of a rollout have its reward"),
    "rollout.agent_madness_termination":
        Option(True, why="a message that loops ends at its limit of tokens, and the workflow may go on"),
    "rollout.multi_turn.max_sample_per_task, .expected_steps":
        Option((30, 1), why="all turns of a rollout are trained on, and steps are counted in prompts"),
    "rollout.max_num_seqs": Option(10, why="vLLM's own default applies"),
    "rollout.name": Option("vllm", why="rollouts always run on vLLM"),
    "rollout.top_p": Option(1.0, why="rollouts are sampled from the policy itself, without a cut"),
    "rollout.val_kwargs.temperature, .top_k, .top_p, .do_sample, .num_repeat":
        Option((0.0, -1, 1.0, False, 1),
               why="the gate samples as the server does; see `gate.temperature`, `gate.samples`"),
    "task_reader.jsonl_dataset_file.validation.file_path, task_reader.dataset_file.validation.file_path, "
    "task_reader.jsonl.validation.file_path":
        Option((None, None, None), why="held-out tasks are chosen from the file of tasks; see `ingest.train_ratio`"),
    "task_reader.env_service.env_type, .env_url, .env_action_preference, .training_split, .validation_split":
        Option(("appworld", "http://127.0.0.1:8080", "code", "train", "dev"), why=OTHER_READER),
    "task_reader.data_generation.document_reader, .query_reader, .task_num, .llm_model, .llm_response_length, "
    ".num_workers, .sampling_params, .deduplication_filter":
        Option((None, None, 10, "qwen-long", 8192, 32, None, None), why=OTHER_READER),
    "task_judge.rubrics_auto_grader.model_name, .grader_mode, .language, .query_specific_generate_number, "
    ".enable_categorization, .categories_number, .grader_name, .query_field, .answer_field, .reference_field, "
    ".custom_evaluation_prompt, .input_data_type, .jsonl_dataset_file, .min_score, .max_score":
        Option(("qwen-max", "pointwise", "en", 1, False, 5, "auto_grader", "main_query", "final_answer", "answer",
                None, "jsonl_dataset_file", None, 0, 1), why=GRADER),
    "context_tracker.timeline_merging_policy.timeline_compare_level, .ignore_tools":
        Option(("text", True), why="turns are merged where the tokens of one prompt continue another's"),
    "context_tracker.fix_retokenization_drift": Option(True, why="the tokens that the engine sampled are trained on"),
    "context_tracker.log_tool_format_check, .log_tool_format_error_detail, .detect_timeline_snap, "
    ".context_tracker_type, .max_env_len":
        Option((False, False, False, "linear", 4096),
               why="`flywheel rollouts` shows the turns of a rollout and their calls"),
    "context_tracker.alien_llm_model, .alien_llm_response_length":
        Option((MODEL, 512), why="AgentJet has replaced it by the key in `task_judge`"),
    "debug.debug_max_parallel": Option(4, why="`rollout.workers` has the number of processes that run workflows"),
    "debug.debug_vllm_port, .debug_vllm_seed, .debug_tensor_parallel_size":
        Option((18000, 12345, 4), why="a debug round starts its engines as other rounds do; see `training.seed`"),
    "trainer_common.val_before_train, .val_pass_n, .test_freq": Option((False, 4, 20), why=ENDS),
    "trainer_common.total_epochs, .total_training_steps":
        Option((50, None), why="`training.steps` is the length of a round, and rounds follow as long as tasks come"),
    "trainer_common.nnodes, .n_gpus_per_node":
        Option((1, 8), why="a round uses the GPUs of this machine, or of the cluster in `ray.address`"),
    "trainer_common.mini_batch_num": Option(1, why="a step has one batch; see `training.updates_per_batch`"),
    "trainer_common.fsdp_config.param_offload, .optimizer_offload":
        Option((True, True), why="one process trains an adapter, and nothing is sharded"),
    "trainer_common.kl_loss_type": Option("low_var_kl", why="TRL's KL term is always this one"),
    "trainer_common.ulysses_sequence_parallel_size": Option(1, why="sequences are not split over GPUs"),
    "trainer_common.checkpoint_base_dir": Option("./saved_checkpoints", why="`state.dir` has the adapters"),
    "trainer_common.save_trajectory_as_json_file": Option(False, why="`rollouts.jsonl` has all rollouts of a round"),
    "enable_experimental_interchange_server, interchange_server.interchange_method, .interchange_server_port, "
    ".num_fastapi_process, .max_fastapi_threads, .max_inference_tracker_threads":
        Option((False, "ipc", "auto", 2, 128, 64), why="each rollout has an OpenAI API of its own in any case"),
    "task_runner.llm_infer_submit_method, .wrapper_type, .wrapper_multiprocessing_timeout":
        Option(("async", "asyncio-with-gc", 3600),
               why="workflows run in processes of their own, at most `rollout.agent_timeout_seconds`"),
    "execute_test, execute_testing_lambda": Option((False, ""), why="it is for AgentJet's own tests"),
}  # fmt: skip
"""Keys without effect."""
OUTSIDE: Final[dict[str, Option]] = {
    "hydra, defaults": Option((None, None), why="what a file does not set has Flywheel's default, not AgentJet's"),
    "trinity.synchronizer": Option(None, why="engines get the weights after each step"),
    "trainer, trinity, actor_rollout_ref":
        Option((None, None, None), why="it sets the other trainer directly; the keys of AgentJet are read"),
}  # fmt: skip
"""Sections beside the root."""
