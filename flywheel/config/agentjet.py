"""Configurations of AgentJet or ASTuner: what becomes of each key, and where their relative paths start.

The section `feedback_tracing` (at the root, or in `task_reader` below `ajet` or `astuner`) has Studio's database, the
task file, the judge's model and its parameters. Below the root are the trained model, rollouts with the workflow that
runs in them, and the class that rewards it. Names are relative to the root. Relative paths start at one folder, as in
AgentJet, which runs in the folder that has the workflow's package. `flywheel migrate` prints the rows.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from flywheel.config.foreign import SECTIONS, Made, Only, Refusal, Row, Table, Without
from flywheel.config.sage import ESTIMATOR, ROOTS
from flywheel.config.section import GivenSetting, has, merged, value_at
from flywheel.config.training import TRACKER_PACKAGES
from flywheel.errors import ConfigError
from flywheel.system.files import tidied

SECTION: Final = "feedback_tracing"
READER: Final = "task_reader"
TRACED: Final = f"{READER}.{SECTION}"
MARKERS: Final = frozenset((*ROOTS, READER, SECTION))
"""Root keys that identify such a configuration."""
TRACING: Final = "tracing"
HUB: Final = "huggingface_dat_repo"
"""The type of `task_reader` that reads a data set of the Hub, or a folder."""
LINES: Final = ("jsonl", "jsonl_dataset_file", "dataset_file")
"""The types of `task_reader` that read files of tasks; below a key of that name, `training.file_path` is the file."""
KINDS: Final = (*LINES, HUB)
MODEL: Final = "qwen3-235b-a22b-instruct-2507"
DASHSCOPE: Final = "https://dashscope.aliyuncs.com/compatible-mode/v1"
DASHSCOPE_KEYS: Final = ("DASHSCOPE_API_KEY", "DASHSCOPE_API_KEY_BACKUP")
DASHSCOPE_JUDGE: Final = {
    "judge.model": (MODEL, ""),
    "judge.base_url": (DASHSCOPE, ""),
    "judge.api_key_env": (DASHSCOPE_KEYS[0], ""),
    "judge.backup.api_key_env": (DASHSCOPE_KEYS[1], ""),
}
"""AgentJet's judge, for a file without the address of another."""
ASSUMED: Final = {
    "sources.models.include": (["*"], "replies of every model count"),
    "training.inexact_prompts": ("use", "tasks without an exact prompt are used"),
    "rollout.tools.uncalled": ("use", "tasks whose tools were not called are used"),
}
"""Keys whose default of Flywheel's would leave out tasks that AgentJet uses: the value of a file that sets none, and
what it means."""
FILES: Final = " ".join(
    f"task_reader.{kind}.{name}" for kind in LINES for name in ("path", "file_path", "training.file_path")
)
WORKFLOW: Final = "rollout.agentscope_learn_protocol rollout.agentscope_workflow rollout.user_workflow"
"""The names that the workflow's key has had, the present one last."""
OPTIONAL: Final = {
    *f"{WORKFLOW} {FILES} task_judge.judge_protocol {TRACED}.filters".split(),
    *f"model.path {TRACED}.base_url task_reader.{HUB}.dataset_path".split(),
}
"""Keys whose empty value is none."""
CHECKS: Final = "rollout.compute_madness_checklist"
LOOPS: Final = "nonsense"
"""The check that finds loops."""
LOGGER: Final = "trainer_common.logger"
DEFAULTS: Final = """
model: {path: null}
rollout: {
  num_repeat: 4, temperature: 0.9, n_vllm_engine: 1, tensor_model_parallel_size: 1, max_model_len: 18000,
  max_response_length_in_one_turn: 4096, multi_turn: {max_steps: 30, max_sample_per_task: 30, expected_steps: 1},
  user_workflow: null, agentscope_workflow: null, agentscope_learn_protocol: null,
  compute_madness_checklist: [nonsense], agent_madness_reward: -1.0, force_disable_toolcalls: false,
  agentscope_disable_toolcalls: false, max_env_worker: 64, gamma: 1.0, agent_madness_termination: true,
  max_num_seqs: 10, name: vllm, top_p: 1.0, val_kwargs: {temperature: 0.0, top_k: -1, top_p: 1.0, do_sample: false,
  num_repeat: 1}}
data: {train_batch_size: 32, max_prompt_length: 3000, max_response_length: 15000}
trainer_common: {
  optim: {lr: 1.0e-6}, use_kl_loss: true, kl_loss_coef: 0.002, save_freq: 20, logger: swanlab,
  algorithm: {adv_estimator: grpo, use_kl_in_reward: false}, val_before_train: false, val_pass_n: 4, test_freq: 20,
  total_epochs: 50, total_training_steps: null, nnodes: 1, n_gpus_per_node: 8, mini_batch_num: 1,
  fsdp_config: {param_offload: true, optimizer_offload: true}, kl_loss_type: low_var_kl,
  ulysses_sequence_parallel_size: 1, checkpoint_base_dir: ./saved_checkpoints, save_trajectory_as_json_file: false}
lora: {lora_rank: 0, lora_alpha: 16, target_modules: all-linear, load_format: auto}
debug: {
  debug_first_n_tasks: 2, debug_max_parallel: 4, debug_vllm_port: 18000, debug_vllm_seed: 12345,
  debug_tensor_parallel_size: 4}
task_judge: {
  alien_llm_model: qwen3-235b-a22b-instruct-2507, alien_llm_response_length: 512, judge_type: customized_protocol,
  judge_protocol: null, rubrics_auto_grader: {model_name: qwen-max, grader_mode: pointwise, language: en,
  query_specific_generate_number: 1, enable_categorization: false, categories_number: 5, grader_name: auto_grader,
  query_field: main_query, answer_field: final_answer, reference_field: answer, custom_evaluation_prompt: null,
  input_data_type: jsonl_dataset_file, jsonl_dataset_file: null, min_score: 0, max_score: 1}}
task_reader: {
  feedback_tracing: {base_url: null, train_output_path: null, alien_llm_model: null, alien_llm_response_length: null,
  train_ratio: 0.7, split_seed: 42, filters: null}, type: huggingface_dat_repo,
  huggingface_dat_repo: {dataset_path: gsm8k, training_split: train, validation_split: validation},
  jsonl_dataset_file: {training: {file_path: null}, validation: {file_path: null}},
  dataset_file: {training: {file_path: null}, validation: {file_path: null}}, jsonl: {training: {file_path: null},
  validation: {file_path: null}}, env_service: {env_type: appworld, env_url: "http://127.0.0.1:8080",
  env_action_preference: code, training_split: train, validation_split: dev}, data_generation: {document_reader: null,
  query_reader: null, task_num: 10, llm_model: qwen-long, llm_response_length: 8192, num_workers: 32,
  sampling_params: null, deduplication_filter: null}}
project_name: ajet_default_project
experiment_name: read_yaml_name
experiment_dir: auto
backbone: debug
context_tracker: {
  timeline_merging_policy: {timeline_compare_level: text, ignore_tools: true}, fix_retokenization_drift: true,
  log_tool_format_check: false, log_tool_format_error_detail: false, detect_timeline_snap: false,
  context_tracker_type: linear, max_env_len: 4096, alien_llm_model: qwen3-235b-a22b-instruct-2507,
  alien_llm_response_length: 512}
enable_experimental_interchange_server: false
interchange_server: {
  interchange_method: ipc, interchange_server_port: auto, num_fastapi_process: 2, max_fastapi_threads: 128,
  max_inference_tracker_threads: 64}
task_runner: {llm_infer_submit_method: async, wrapper_type: asyncio-with-gc, wrapper_multiprocessing_timeout: 3600}
execute_test: false
execute_testing_lambda: ""
"""
"""AgentJet's documented settings, which workflows and judges read."""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _beta(values: Mapping[str, Any]) -> Any:
    is_used = values.get("trainer_common.use_kl_loss", True)
    return values.get("trainer_common.kl_loss_coef", 0.002) if is_used else 0


def _loop_reward(values: Mapping[str, Any]) -> Any:
    """What a rollout gets whose message loops."""
    return values.get("rollout.agent_madness_reward", -1.0) if LOOPS in _list(values.get(CHECKS, LOOPS)) else None


def _save_steps(values: Mapping[str, Any]) -> Any:
    every = values["trainer_common.save_freq"]
    return every if isinstance(every, int) and every > 0 else Without("it is not above 0")


def _of_lora(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """An option of adapters, which AgentJet has from rank 1 on."""
    without = Without(
        "it trains all weights without a `lora_rank`, and a round an adapter, as `training.lora` has it"
    )
    return lambda values: values[f"lora.{name}"] if values.get("lora.lora_rank") else without


def _trackers(values: Mapping[str, Any]) -> list[str]:
    """Those that are installed: usual files name SwanLab, also those of people who do not have it."""
    packages = {each: TRACKER_PACKAGES.get(each) for each in _list(values[LOGGER]) if isinstance(each, str)}
    return [each for each, package in packages.items() if package and importlib.util.find_spec(package) is not None]


AGENTJET: Final = Table("migrate", {
    "task_reader.type": "sources.type",
    f"{TRACED}.base_url {FILES}": "sources.path",
    f"task_reader.{HUB}.dataset_path": "sources.dataset.path",
    f"task_reader.{HUB}.training_split": "sources.0.dataset.split",
    f"task_reader.{HUB}.validation_split": "sources.1.dataset.split",
    f"{TRACED}.train_output_path": "ingest.output",
    f"{TRACED}.train_ratio": "ingest.train_ratio",
    f"{TRACED}.split_seed": "ingest.split_seed",
    f"{TRACED}.filters": "filter.chain",
    f"task_judge.alien_llm_model {TRACED}.alien_llm_model": "judge.model",
    f"task_judge.alien_llm_response_length {TRACED}.alien_llm_response_length": "judge.max_tokens",
    "model.path": Made("model.base", lambda values: _placed(values["model.path"])),
    "rollout.num_repeat": "training.group_size",
    "data.train_batch_size": "training.prompts_per_step",
    "debug.debug_first_n_tasks": "training.debug_prompts",
    "trainer_common.optim.lr": "training.learning_rate",
    "trainer_common.use_kl_loss trainer_common.kl_loss_coef": Made("training.beta", _beta),
    "trainer_common.save_freq": Made("training.save_steps", _save_steps),
    "lora.lora_rank": Made("training.lora.r", _of_lora("lora_rank")),
    "lora.lora_alpha": Made("training.lora.alpha", _of_lora("lora_alpha")),
    "lora.target_modules": Made("training.lora.target_modules", _of_lora("target_modules")),
    LOGGER: Made("tracking.report_to", _trackers),
    "rollout.temperature": "rollout.temperature",
    "rollout.n_vllm_engine": "rollout.engines",
    "rollout.tensor_model_parallel_size": "rollout.tensor_parallel",
    "rollout.max_model_len": "rollout.max_model_len",
    "rollout.max_response_length_in_one_turn": "rollout.max_turn_tokens",
    "rollout.multi_turn.max_steps": "rollout.max_turns",
    f"{CHECKS} rollout.agent_madness_reward": Made("rollout.loop_reward", _loop_reward),
    WORKFLOW: "rollout.agent.workflow",
    "task_judge.judge_protocol": "rollout.reward_function",
    "backbone=verl backbone=trinity": Refusal(
        "rounds train with Flywheel's own trainer",
        "Use `flywheel export --format agentjet`, which writes the tasks for a training there.",
    ),
    "task_reader.type=env_service": Refusal(
        "its tasks are in an environment's server, which Flywheel does not run",
        "Use `task_reader.type: jsonl_dataset_file`, a task per line; the workflow may ask the environment.",
    ),
    "task_reader.type=data_generation task_reader.type=random_dummy": Refusal(
        "tasks are generated by a command, before a round, and a person releases them",
        "Use `flywheel tasks from-documents`, or `task_reader.type: jsonl_dataset_file` with JSON lines.",
    ),
    "task_judge.judge_type=rubrics_auto_grader": Refusal(
        "its rubrics are made and graded by a library of AgentJet's",
        "Use a rubric (`filter.rubric`, with `rollout.reward: {rubric: 1}`), or `judge_type: customized_protocol`.",
    ),
    "trainer_common.algorithm.use_kl_in_reward": Only((False,), "the KL term is part of the loss: `training.beta`"),
    "task_judge.judge_type": Only(("customized_protocol",), "a class of `task_judge.judge_protocol` judges"),
    "project_name experiment_name experiment_dir trainer_common.checkpoint_base_dir "
    "trainer_common.save_trajectory_as_json_file": Without("rounds have numbers, and `state.dir` has their files"),
    "backbone": Without("`flywheel round --debug` makes rollouts without training"),
    "data": Without("prompt and rollout have one limit together, `rollout.max_model_len`"),
    "rollout.force_disable_toolcalls rollout.agentscope_disable_toolcalls":
        Without("a workflow has the tools that it gives its agent"),
    "rollout.max_env_worker debug.debug_max_parallel":
        Without("`rollout.workers` has the number of processes that run workflows"),
    "rollout.gamma rollout.multi_turn rollout.multi_turn.expected_steps":
        Without("all turns of a rollout have its reward, and are trained on"),
    "rollout.agent_madness_termination": Without("a message that loops ends at its limit of tokens"),
    "rollout.name rollout.top_p rollout.max_num_seqs":
        Without("rollouts always run on vLLM, with its own defaults, and are sampled from the policy itself"),
    "rollout.val_kwargs": Without("the gate samples as the server does; see `gate.temperature`, `gate.samples`"),
    "task_reader.jsonl.validation task_reader.jsonl_dataset_file.validation "
    "task_reader.dataset_file.validation":
        Without("held-out tasks are chosen from the file of tasks; see `ingest.train_ratio`"),
    "task_reader.env_service task_reader.data_generation": Without("that `task_reader.type` is refused"),
    "task_judge.rubrics_auto_grader": Without("that `judge_type` is refused"),
    "context_tracker": Without(
        "`flywheel rollouts` shows the turns of a rollout, and the tokens that the engine sampled are trained on"
    ),
    "debug": Without("a debug round starts its engines as other rounds do; see `training.seed`"),
    "trainer_common.val_before_train trainer_common.val_pass_n trainer_common.test_freq":
        Without("a round writes its adapter at its end, and the gate decides whether it is used"),
    "trainer_common.total_epochs trainer_common.total_training_steps":
        Without("`training.steps` is the length of a round, and rounds follow as long as tasks come"),
    "trainer_common.nnodes trainer_common.n_gpus_per_node":
        Without("a round uses the GPUs of this machine, or of the cluster in `ray.address`"),
    "trainer_common trainer_common.kl_loss_type trainer_common.mini_batch_num":
        Without("TRL trains an adapter, its KL term is always the same, and a step has one batch"),
    "lora.load_format lora.layered_summon":
        Without("engines load the base model from its checkpoint, and each adapter from its file"),
    "lora": Without("`training.lora` has what a new adapter is, and a round goes on from the deployed one"),
    "enable_experimental_interchange_server interchange_server":
        Without("each rollout has an OpenAI API of its own in any case"),
    "task_runner": Without("workflows run in processes of their own, at most `rollout.agent_timeout_seconds`"),
    "execute_test execute_testing_lambda": Without("it is for AgentJet's own tests"),
    "hydra defaults": Without("what a file does not set has Flywheel's default, not AgentJet's"),
    "trainer trinity actor_rollout_ref": Without("it sets the other trainer directly; the keys of AgentJet are read"),
}, closed=(f"{TRACED}.",))  # fmt: skip


def rows_of(raw: Mapping[str, Any], file: Path | None) -> list[Row]:
    """The rows of a configuration in a `file`. Sections of Flywheel's own may also be present and take precedence."""
    own, kind, rows = {key: raw[key] for key in raw if key in SECTIONS}, _kind(raw), list[Row]()
    found = list[tuple[str, str, Any]]()
    for place, key, value in _keys_in(raw):
        reader = key.split(".")[1] if key.startswith("task_reader.") else ""
        if value is None or key == ESTIMATOR or (key in OPTIONAL and not value):
            continue
        if (reader in KINDS and reader != kind) or (key == f"{TRACED}.base_url" and kind != TRACING):
            rows.append(Row(place, value, "without effect", why=f"`task_reader.type` is {kind}"))
        elif key != f"{TRACED}.filters":
            found.append((place, key, value))
        elif file is not None:
            found.append((place, key, str(file)))
        if key in (CHECKS, LOGGER):
            used = [LOOPS] if key == CHECKS else ["console", *_trackers({LOGGER: value})]
            why = "only loops are looked for" if key == CHECKS else "it is no installed tracker"
            left = (each for each in _list(value) if each not in used)
            rows += (Row(f"{place} {each}", each, "without effect", why=why) for each in left)
    rows += AGENTJET.rows(found)
    made = {row.use: row for row in rows}
    return [*rows, *_program(raw, own, made), *_missing(raw, own, made)]


def _keys_in(raw: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The keys of a configuration that are not Flywheel's own: each with its path in the file, its path below the
    root (or beside it), and its value."""
    beside = {key: value for key, value in raw.items() if key not in (*SECTIONS, *MARKERS)}
    yield from ((key, key, value) for key, value in AGENTJET.leaves(beside))
    place, above = section_in(raw)[0], _above(raw)
    for key, value in AGENTJET.leaves(_settings(raw)):
        yield place + key.removeprefix(TRACED) if key.startswith(f"{TRACED}.") else above + key, key, value


def _program(raw: Mapping[str, Any], own: Mapping[str, Any], made: Mapping[str, Row]) -> Iterator[Row]:
    """The settings that a workflow reads, and the reward, which is its own or its judge's alone; without a workflow,
    a judge is refused."""
    workflow, judge = (made.get(f"rollout.{key}") for key in ("agent.workflow", "reward_function"))
    if workflow is not None:
        # Whatever the name of the root in the file. What else stands in it, workflows read, too.
        config = {ROOTS[0] if key == _root(raw) else key: raw[key] for key in raw if key not in SECTIONS}
        yield workflow._replace(outcome="replaced by", use="rollout.agent.config", made=config)
    elif judge is not None and not isinstance(value_at(own, "rollout.agent"), Mapping):
        why = f"`{judge.place}` judges a workflow's answers, and there is no workflow"
        hint = f"Add `{_root(raw)}.rollout.user_workflow`, or remove it: `filter.rubric` judges other answers."
        yield judge._replace(outcome="refused", use="", why=why, hint=hint)
    if (of := workflow or judge) is not None:
        yield of._replace(outcome="replaced by", use="rollout.reward.rubric", made=0)
        yield of._replace(outcome="replaced by", use="rollout.reward.workflow", made=1)


def _missing(raw: Mapping[str, Any], own: Mapping[str, Any], made: Mapping[str, Row]) -> Iterator[Row]:
    """Refused rows for values that a file needs."""
    # Beside the other one, or a section at the root, an empty one says nothing.
    kinds = Mapping if not _root(raw) and raw.keys().isdisjoint((READER, SECTION)) else Mapping | None
    wrong = [root for root in ROOTS if not isinstance(raw.get(root, {}), kinds)]
    for root in wrong:
        shown = "a list" if isinstance(raw[root], list) else "empty" if raw[root] is None else raw[root]
        yield Row(root, raw[root], "refused", why=f"`{root}` is {shown}, not a mapping", hint="Correct it.")
    if wrong:
        return
    (place, traced), reader, kind = section_in(raw), f"{_above(raw)}{READER}", _kind(raw)
    if kind not in (TRACING, *KINDS) and f"task_reader.type={kind}" not in AGENTJET.entries:
        why = f"`{reader}.type` is {kind}, which Flywheel does not take"
        yield Row(f"{reader}.type", kind, "refused", why=why, hint=f"It reads {', '.join((TRACING, *KINDS))}.")
    model = own.get("model") or {"base": "model.base" in made}
    tasks, path = "where the tasks are", "sources.0.path"
    hub = f"{reader}.{HUB}.dataset_path", "sources.0.dataset.path"
    for is_missing, key, use, what in (
        (kind == TRACING and not isinstance(traced, Mapping), place, path, "where the traces are"),
        (kind in LINES and "sources.path" not in made, f"{reader}.{kind}.training.file_path", path, tasks),
        (kind == HUB and "sources.dataset.path" not in made, *hub, tasks),
        (
            isinstance(model, Mapping) and not model.get("base", "model.base" in made),
            f"{_root(raw)}.model.path" if _root(raw) else "model.base",
            "model.base",
            "which model is trained",
        ),
    ):
        if is_missing:
            yield Row(key, None, "refused", use, why=f"`{key}` is missing: nothing says {what}", hint="Add it.")


def settings_of(raw: Mapping[str, Any], made: dict[str, Any]) -> tuple[dict[str, Any], list[Row]]:
    """All settings of such a file: those `made` of its rows, its own, and what AgentJet assumes, with its rows."""
    own = {key: raw[key] for key in raw if key in SECTIONS and raw[key] is not None}
    made["sources"] = _sources(_kind(raw), _settings(raw), _mapping(made.get("sources")).get("path"))
    settings, assumed = merged(made, own), list[Row]()
    if _kind(raw) == HUB:
        # A split that the section does not name has the section's line.
        assumed.append(Row(f"{_root(raw)}.task_reader.{HUB}", None, "taken over", "sources.dataset.split"))
    count = len(settings["sources"]) if isinstance(settings["sources"], list) else 0
    judge = {} if value_at(own, "judge.base_url") else DASHSCOPE_JUDGE
    for key, (value, why) in {**judge, **ASSUMED}.items():
        for path in [f"sources.{n}.models.include" for n in range(count)] if key.startswith("sources.") else [key]:
            if not has(settings, path):
                # What stands in the place of a section is refused later.
                with contextlib.suppress(ConfigError):
                    settings = GivenSetting(path, value).put_into(settings)
                    assumed.append(Row("", None, "taken over", path, value, why))
    return settings, assumed


def _sources(kind: Any, settings: Mapping[str, Any], path: Any) -> list[dict[str, Any]]:
    """The sources of `task_reader`; `path` is that of traces or of a file of tasks."""
    if kind != HUB:
        return [({"path": path} if path else {}) | ({"type": "jsonl"} if kind in LINES else {})]
    hub = _mapping(value_at(settings, f"task_reader.{HUB}"))
    splits = {"train": hub.get("training_split", "train"), "held-out": hub.get("validation_split", "validation")}
    return [
        {"type": "jsonl", "dataset": {"path": _placed(hub.get("dataset_path")), "split": name}, "split": split}
        for split, name in splits.items()
        if name is not None
    ]


def assumptions(rows: Iterable[Row]) -> list[str]:
    """What a file means where it sets nothing, each once."""
    said = (
        f"{row.why} ({re.sub(r'[.][0-9]+', '[]', row.use)}: {row.made})" for row in rows if row.why and not row.place
    )
    return [*dict.fromkeys(said)]


def section_in(raw: Mapping[str, Any]) -> tuple[str, Any]:
    """The path and content of `feedback_tracing`."""
    places = [SECTION, *(f"{_above(raw)}{name}" for name in (TRACED, SECTION))]
    place = next((each for each in places if has(raw, each)), places[-1])
    return place, value_at(raw, place)


def _root(raw: Mapping[str, Any]) -> str:
    """The root's key; empty for a bare `task_reader` or `feedback_tracing`."""
    return next((root for root in ROOTS if isinstance(raw.get(root), Mapping)), "")


def _above(raw: Mapping[str, Any]) -> str:
    """What the paths of its keys begin with."""
    return f"{root}." if (root := _root(raw)) else ""


def _settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What is below the root, with `feedback_tracing` in `task_reader` wherever it stands."""
    root = raw[_root(raw)] if _root(raw) else {key: raw[key] for key in (READER,) if key in raw}
    below = {key: value for key, value in root.items() if key != SECTION}
    if (traced := section_in(raw)[1]) is not None:
        below["task_reader"] = {**_mapping(below.get("task_reader")), SECTION: traced}
    return below


def _kind(raw: Mapping[str, Any]) -> Any:
    kind = value_at(_settings(raw), "task_reader.type")
    return TRACING if kind is None else kind


def _placed(name: Any) -> Any:
    """A name of the Hub or a path. One with more parts than a name of the Hub is a path, as in AgentJet."""
    return f"./{name}" if isinstance(name, str) and name.count("/") > 1 and name[:1] not in "/~." else name


def filters_in(raw: Any) -> Any:
    """The filters of such a configuration as a chain, in their order and with AgentJet's embeddings; other values of
    `raw` unchanged."""
    if not isinstance(raw, Mapping) or MARKERS.isdisjoint(raw) or not isinstance(section_in(raw)[1], Mapping):
        return raw
    filters = section_in(raw)[1].get("filters") or []
    made = [_with_embeddings(each) for each in filters] if isinstance(filters, list) else filters
    return {"version": 1, "id": "agentjet", "keep_order": True, "decides": True, "filters": made}


def _with_embeddings(entry: Any) -> Any:
    params = _mapping(_mapping(entry).get("params"))
    url = params.get("base_url") or DASHSCOPE
    if not params.get("model") or "dashscope" not in str(url) or entry.get("type") != "deduplication":
        return entry
    key, backup = DASHSCOPE_KEYS
    return entry | {"params": {"api_key_env": key, "backup_api_key_env": backup, **params, "base_url": url}}


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What workflows and judges of AgentJet read: the settings of a file, whose root is `ajet`, over AgentJet's
    documented defaults, as JSON has them (dates are texts)."""
    defaults = {ROOTS[0]: yaml.safe_load(DEFAULTS)}
    made: dict[str, Any] = json.loads(json.dumps(merged(defaults, config), default=str))
    return made


@dataclass(frozen=True, slots=True)
class ProjectRoot:
    """The folder at which relative paths of such a file start, and how it was found."""

    folder: Path
    why: str

    def __str__(self) -> str:
        return f"the project root {self.folder}, {self.why}"


def project_root(rows: Iterable[Row], settings: Mapping[str, Any], file: Path) -> ProjectRoot:
    """The nearest folder at or above `file` with the package or file of the workflow or the judge, which its rows or
    its settings name; without one, the working directory if the file is below it, else the file's folder."""
    specs = ("rollout.agent.workflow", "rollout.reward_function")
    modules = [
        *_modules([*(row.made for row in rows if row.use in specs), *(value_at(settings, key) for key in specs)])
    ]
    tops = [Path(module.parts[0]) for module in modules]
    folders = tidied(file).parents
    # An output of an earlier run may have the name of the package: a folder with the modules themselves is preferred.
    for enough, wanted in ((all, modules), (any, modules), (any, tops)):
        for folder in folders if wanted else ():
            if enough(_has(folder, module) for module in wanted):
                top = next(top for top in tops if _has(folder, top))
                return ProjectRoot(folder, f"where {top}{'/' if (folder / top).is_dir() else '.py'} is")
    with contextlib.suppress(OSError):
        here = Path.cwd()
        # A service without a working directory starts in /, which is no project.
        if here != Path("/") and Path(os.path.realpath(folders[0])).is_relative_to(here):
            return ProjectRoot(here, "the working directory")
    return ProjectRoot(folders[0], "the folder of the configuration")


def _modules(specs: Iterable[Any]) -> Iterator[Path]:
    """The relative paths of modules, without `.py`."""
    for name in specs:
        where = re.split("->|:", name)[0].strip() if isinstance(name, str) else ""
        path = Path(where) if where.endswith(".py") else Path(*where.split("."))
        if path.parts and not path.is_absolute() and path.parts[0][0] not in "~.":
            yield path.with_suffix("")


def _has(folder: Path, module: Path) -> bool:
    return any(os.path.exists(folder / name) for name in (module, f"{module}.py"))  # noqa: PTH110 - False if denied
