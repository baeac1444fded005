"""Options of SAGE and of ASTuner's trainer, by their names: those that become stages, and what to use for the others.

`algorithm`, `dpo_config` and `grpo_config` are read; each other name is an error that says what to use, or why there
is nothing like it. `flywheel docs sage` is generated from this table (`python -m scripts.reference_pages`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flywheel.config.section import has, merged
from flywheel.errors import ConfigError

PAGE: Final = "flywheel docs sage"
ROOTS: Final = ("ajet", "astuner")
"""The roots of configurations of AgentJet and ASTuner."""
PPO: Final = (
    "PPO is no part of TRL's stable API, and trains a model of values beside the policy, which takes as much memory"
    " again. `grpo` compares rollouts of one prompt instead"
)
FEW: Final = "a round has tens to hundreds of replies: with fewer of them per step it takes more steps"
GROUP: Final = (
    "groups with fewer than 4 rewards are dropped, so that a single undecided reward would drop a group of 4; and the"
    " rewards of 8 rollouts differ more often"
)
ENDS: Final = "a round writes its adapter at its end, and the gate decides whether it is used"
LAYOUT: Final = "the model's own chat template, as the server renders it, is the only format"
CLASSES: Final = "classes are by structure, not by words, and have other names"
STAGES: Final = "a round has the stages that are listed, and always ends at the gate"
STAGE_OF: Final = {"dpo_config": "dpo", "grpo_config": "grpo", "ppo_config": "ppo"}
ALGORITHMS: Final = ("dpo", "grpo", "ppo")


@dataclass(frozen=True, slots=True)
class Option:
    """An option of another program."""

    default: Any
    """Its default there."""
    use: str = ""
    """Flywheel's keys, separated by commas; empty where there is none."""
    why: str = ""
    """Why there is none, or why Flywheel's default differs."""
    only: tuple[Any, ...] = ()
    """The values that are possible, of an option without a key."""


READ: Final[Mapping[str, Option]] = {
    "algorithm": Option(
        "dpo", "training.stages", "GRPO learns from judged rollouts of the policy itself and needs no recorded pairs"
    ),
    "dpo_config.beta": Option(0.1, "training.dpo.beta"),
    "dpo_config.label_smoothing": Option(0.0, "training.dpo.label_smoothing"),
    "dpo_config.loss_type": Option("sigmoid", "training.dpo.loss_type"),
    "dpo_config.reference_free": Option(
        False,
        why="the reference is always the policy that the stage starts from: without it, nothing keeps the trained one"
        " near",
        only=(False,),
    ),
    "grpo_config.group_size": Option(4, "training.group_size", GROUP),
    "grpo_config.beta": Option(
        0.1,
        "training.beta",
        "it is the weight of TRL's KL term, which needs a second forward pass over each rollout; a round has few"
        " steps, and the gate rejects a policy that became worse",
    ),
    "grpo_config.use_advantage": Option(True, why="the loss of GRPO is made of advantages", only=(True,)),
}
"""Options of SAGE's `RLTrainingConfig` that become stages and their settings."""
RL: Final[Mapping[str, Option]] = {
    "sft_model_path": Option(None, "training.stages", "`[sft, dpo]` goes on from SFT's adapter within the round"),
    "reference_model_path": Option(None, why="the reference is the policy that the stage starts from"),
    "ppo_config": Option("kl_coef 0.02, clip_range 0.2, vf_coef 0.5, …", why=PPO),
    "num_epochs": Option(1, "training.dpo.epochs, training.steps", "GRPO has steps, each on new rollouts"),
    "batch_size, gradient_accumulation": Option("2, 8", "training.dpo.batch_size, training.prompts_per_step", FEW),
    "learning_rate": Option(
        5e-6,
        "training.dpo.learning_rate, training.learning_rate",
        "that of GRPO is higher, because a round takes few steps, each on new rollouts",
    ),
    "num_samples_per_prompt": Option(4, "training.group_size", GROUP),
    "output_dir": Option("~/.sage/agent_rl", "state.dir", "it is Flywheel's state directory"),
}
"""The other options of `RLTrainingConfig` (`rl_config`)."""
SFT: Final[Mapping[str, Option]] = {
    "base_model": Option(
        "Qwen/Qwen2.5-7B-Instruct", "model.base", "a smaller model; `configs/production.yaml` has SAGE's"
    ),
    "train_data": Option("agent_sft:train", "sources", "tasks come from traces or files"),
    "dev_data, max_eval_samples": Option(
        "agent_sft:dev, 512",
        "ingest.train_ratio, gate.max_tasks",
        "whole conversations are held out, so that nothing of them is trained on",
    ),
    "task_weights": Option("tool_selection 0.35, …", "training.task_weights", CLASSES),
    "max_train_samples": Option(None, "trigger.max_samples", "there is always a limit"),
    "max_length": Option(4096, "rollout.max_model_len"),
    "load_in_8bit, load_in_4bit": Option(
        "true, false",
        "model.trainer_quantization",
        "a quantised base lets the trainer's log-probabilities differ from the engine's, and needs a GPU",
    ),
    "fp16, bf16": Option("true, false", "training.precision", "the checkpoint's own numbers need no loss scaling"),
    "gradient_checkpointing": Option(True, why="it is always on where there is a GPU"),
    "optim": Option("paged_adamw_8bit", why="adapter and optimizer are float32, and small"),
    "output_format, padding_strategy, padding_side": Option("chatml, max_length, right", why=LAYOUT),
    "shuffle_train, shuffle_eval": Option("true, false", why="each epoch's order follows from `training.seed`"),
    "dataloader_num_workers": Option(0, why="the samples of a round are in memory"),
    "use_coreset_selection, coreset_target_size, coreset_strategy": Option(
        "false, null, loss_topk", "training.coreset", "a section turns it on: `{size: N, strategy: random}`"
    ),
    "coreset_metric_key": Option("loss", why="a sample has one loss, the mean negative log-likelihood of its reply"),
    "use_online_continual, continual_buffer_size, continual_replay_ratio": Option(
        "false, 2048, 0.25", "training.replay", "a section turns it on: `{ratio: 0.3, buffer: 4096}`"
    ),
    "lora_r": Option(64, "training.lora.r", "an adapter of a quarter of the size; `configs/production.yaml` has 64"),
    "lora_alpha": Option(128, "training.lora.alpha", "alpha / r, the scale, is 2 as in SAGE"),
    "lora_dropout": Option(
        0.05,
        "training.lora.dropout",
        "with dropout, the trainer's log-probabilities differ from the engine's, which GRPO compares",
    ),
    "lora_target_modules": Option(
        "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        "training.lora.target_modules",
        "of Qwen's models these are the same layers, and other models name theirs differently",
    ),
    "use_dora": Option(False, why="vLLM cannot serve DoRA"),
    "use_lora_plus, lora_plus_lr_ratio": Option("false, 16", why="both matrices have one learning rate"),
    "num_epochs": Option(3, "training.sft.epochs"),
    "batch_size, gradient_accumulation": Option("1, 16", "training.sft.batch_size", FEW),
    "learning_rate": Option(
        2e-5,
        "training.sft.learning_rate",
        "SAGE's is usual for all weights of a model; adapters need about ten times it",
    ),
    "warmup_ratio": Option(
        0.1, "training.sft.warmup_steps", "a round has few steps; a number below 1 is a share of them"
    ),
    "lr_scheduler": Option("cosine", "training.sft.scheduler", "as for GRPO; `configs/production.yaml` has SAGE's"),
    "output_dir": Option("~/.sage/agent_training", "state.dir", "it is Flywheel's state directory"),
    "logging_steps": Option(10, why="`metrics.jsonl` has each step"),
    "save_steps": Option(500, "training.save_steps", "a round has few steps"),
    "save_total_limit, eval_steps, eval_strategy, load_best_model, metric_for_best_model, greater_is_better": Option(
        "3, 200, steps, true, eval_loss, false", why=ENDS
    ),
    "report_to": Option("none", "tracking.report_to", "it is a list"),
    "seed": Option(42, "training.seed"),
}
"""The options of `AgentSFTConfig` (`sft_config`)."""
PIPELINE: Final[Mapping[str, Option]] = {
    "run_warmup, run_sft, run_rl, run_eval": Option("false, true, true, true", "training.stages", STAGES),
    "reward_config": Option(
        "task_completion 0.4, tool_accuracy 0.25, …",
        "filter.rubric",
        "rewards and penalties are criteria of a rubric: `rubrics/agent-reward.yaml`",
    ),
    "wandb_project, wandb_run_name": Option(
        None, "tracking.project", "a run has the name of its round; `report_to: [wandb]` sends it"
    ),
    "experiment_name, output_base_dir": Option(
        "agent_training, ~/.sage/experiments", "state.dir", "rounds have numbers"
    ),
}
"""The other options of `TrainingPipelineConfig`."""
TRAINER_COMMON: Final[Mapping[str, Option]] = {
    "algorithm.adv_estimator": Option(
        "grpo", "training.stages", "`grpo` is the default here as well, as a list; `gae` is PPO, which is refused"
    ),
    "algorithm.use_kl_in_reward": Option(
        False, why="the KL term is part of the loss: `training.beta`", only=(False,)
    ),
}
"""The options of ASTuner and AgentJet in `trainer_common` that are read."""


def from_sage(raw: Mapping[str, Any], sections: Collection[str], name: str) -> Mapping[str, Any]:
    """Such options as stages and their settings; other configurations unchanged. Raises ConfigError.

    `sections` are Flywheel's own.
    """
    attempted = f"use configuration {name}"
    _refuse_other(raw, sections, attempted)
    stages: dict[str, str] = {}
    """The key that names each stage."""
    training: dict[str, Any] = {}
    rest = dict(raw)
    for outer in ("", "rl_config", *ROOTS):
        inner = raw if not outer else raw.get(outer)
        if not isinstance(inner, Mapping):
            continue
        place = f"{outer}." if outer else ""
        own = {key: inner[key] for key in ("algorithm", *STAGE_OF) if key in inner and _is_named(key, inner[key])}
        if outer in ROOTS and (estimator := _estimator(inner, place, attempted)):
            stages[estimator] = f"{place}trainer_common.algorithm.adv_estimator"
        for key, value in own.items():
            stage = STAGE_OF.get(key) or _algorithm(value, f"{place}{key}", attempted)
            stages.setdefault(stage, f"{place}{key}")
            if stage == "ppo":
                raise ConfigError(attempted, f"`{place}{key}`: {PPO}", "Use `training.stages: [grpo]`, or remove it.")
            if key in STAGE_OF:
                training = merged(training, _settings(key, value, f"{place}{key}", training, raw, attempted))
        left = {key: value for key, value in inner.items() if key not in own}
        rest = left if not outer else rest | {outer: left}
    if not stages:
        return raw
    if unknown := [str(key) for key in rest.pop("rl_config", None) or {}]:
        raise ConfigError(attempted, f"unknown key `rl_config.{unknown[0]}`", f"Correct the file; see `{PAGE}`.")
    if len(stages) > 1:
        (one, first), (other, second) = list(stages.items())[:2]
        raise ConfigError(
            attempted,
            f"`{first}` is of {one} and `{second}` of {other}",
            f"Remove one. Several stages are listed in `training.stages`, each with Flywheel's keys (`{PAGE}`).",
        )
    [(stage, key)] = stages.items()
    own_training = raw.get("training")
    if isinstance(own_training, Mapping) and "stages" in own_training:
        raise ConfigError(attempted, f"`{key}` and `training.stages` both say what is trained", "Remove one of them.")
    return merged({"training": {"stages": [stage], **training}}, rest)


def _is_named(key: str, value: Any) -> bool:
    # A mapping `algorithm` is a section of Trinity's files.
    return key in STAGE_OF or isinstance(value, str)


def _algorithm(value: Any, place: str, attempted: str) -> str:
    if value not in ALGORITHMS:
        raise ConfigError(attempted, f"`{place}` is {value}, which Flywheel does not have", "Use dpo or grpo.")
    return str(value)


def _settings(
    key: str, values: Any, place: str, before: Mapping[str, Any], raw: Mapping[str, Any], attempted: str
) -> dict[str, Any]:
    """The settings below `training` of one section of options. `before` are those of other sections."""
    if not isinstance(values, Mapping | None):
        raise ConfigError(attempted, f"`{place}` is a {type(values).__name__}, not a mapping", "Correct it.")
    made: dict[str, Any] = {}
    names = [option.partition(".")[2] for option in READ if option.startswith(f"{key}.")]
    for inner, value in (values or {}).items():
        if inner not in names:
            close = difflib.get_close_matches(str(inner), names, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(names)}"
            raise ConfigError(attempted, f"unknown key `{place}.{inner}` ({hint})", "Correct the file.")
        option = READ[f"{key}.{inner}"]
        if not option.use:
            _check_only(option, value, f"{place}.{inner}", attempted)
            continue
        path = option.use.split(".")
        if any(has(settings, path) for settings in (raw, {"training": before})):
            raise ConfigError(
                attempted, f"`{place}.{inner}` and another key both set `{option.use}`", "Remove one of them."
            )
        nested: Any = value
        for part in reversed(path[1:]):
            nested = {part: nested}
        made = merged(made, nested)
    return made


def _check_only(option: Option, value: Any, place: str, attempted: str) -> None:
    if value not in option.only:
        allowed = str(option.only[0]).lower()
        raise ConfigError(attempted, f"`{place}` is {value}: {option.why}", f"Set it to {allowed}, or remove it.")


def _estimator(below: Mapping[str, Any], place: str, attempted: str) -> str:
    """The stage that ASTuner's trainer names; empty if it names none."""
    algorithm = (common := below.get("trainer_common")) and isinstance(common, Mapping) and common.get("algorithm")
    if not isinstance(algorithm, Mapping):
        return ""
    place = f"{place}trainer_common.algorithm"
    if "use_kl_in_reward" in algorithm:
        option = TRAINER_COMMON["algorithm.use_kl_in_reward"]
        _check_only(option, algorithm["use_kl_in_reward"], f"{place}.use_kl_in_reward", attempted)
    estimator = algorithm.get("adv_estimator")
    if estimator in ("gae", "ppo"):
        raise ConfigError(attempted, f"`{place}.adv_estimator` is {estimator}: {PPO}", "Set it to grpo.")
    if estimator not in (None, "grpo"):
        why = f"`{place}.adv_estimator` is {estimator}, which Flywheel does not have"
        raise ConfigError(attempted, why, "Set it to grpo.")
    return "grpo" if estimator else ""


def _refuse_other(raw: Mapping[str, Any], sections: Collection[str], attempted: str) -> None:
    """Raise ConfigError for the first option that is not read, with what to use."""
    named = [*_others(raw, sections)]
    if named:
        place, options = named[0]
        use = " or ".join(f"`{key.strip()}`" for option in options if option.use for key in option.use.split(","))
        reasons = "; ".join(dict.fromkeys(option.why for option in options if not option.use))
        why = f"`{place}` is an option of SAGE" + (f": {reasons}" if reasons else "")
        more = f" The file has {len(named) - 1} more of them." if len(named) > 1 else ""
        raise ConfigError(
            attempted, why, f"Use {use}.{more} See `{PAGE}`." if use else f"Remove it.{more} See `{PAGE}`."
        )


def _others(raw: Mapping[str, Any], sections: Collection[str]) -> Iterator[tuple[str, list[Option]]]:
    """The places of options that are not read, and what the classes that have such a name say."""
    for key, value in raw.items():
        if key in sections:
            continue
        if key in ("rl_config", "sft_config") and isinstance(value, Mapping):
            table = by_name(RL if key == "rl_config" else SFT)
            for inner in value:
                if inner in table and inner not in STAGE_OF:
                    yield f"{key}.{inner}", [table[inner]]
        elif key not in STAGE_OF and (
            options := [table[key] for table in map(by_name, (RL, SFT, PIPELINE)) if key in table]
        ):
            yield str(key), options


def by_name(table: Mapping[str, Option]) -> dict[str, Option]:
    """A table with a row for each name."""
    return {name: option for names, option in table.items() for name in names_in(names)}


def names_in(names: str) -> list[str]:
    """The names of a row. One that begins with a dot is in the section of the name before it."""
    found: list[str] = []
    for each in names.split(","):
        name = each.strip()
        found.append(found[-1].rpartition(".")[0] + name if name.startswith(".") else name)
    return found
