"""Options of SAGE and of ASTuner's trainer, by their names: those that become stages, and what to use for the others.

`algorithm`, `dpo_config` and `grpo_config` are read; each other name is an error that says what to use, or why there
is nothing like it. `flywheel docs sage` has them with their defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from flywheel.config.foreign import Row, Table
from flywheel.config.section import has, value_at

ROOTS: Final = ("ajet", "astuner")
"""The roots of configurations of AgentJet and ASTuner."""
STAGE_OF: Final = {"dpo_config": "dpo", "grpo_config": "grpo", "ppo_config": "ppo"}
ESTIMATOR: Final = "trainer_common.algorithm.adv_estimator"
"""The key of ASTuner's trainer that names a stage."""
PPO: Final = (
    "PPO is no part of TRL's stable API, and trains a model of values beside the policy, which takes as much memory"
    " again. `grpo` compares rollouts of one prompt instead"
)
INSTEAD: Final[Mapping[str, str]] = {
    "rl_config.sft_model_path run_warmup run_sft run_rl run_eval": "training.stages",
    "rl_config.num_epochs": "training.dpo.epochs, training.steps",
    "rl_config.batch_size rl_config.gradient_accumulation": "training.dpo.batch_size, training.prompts_per_step",
    "rl_config.learning_rate": "training.dpo.learning_rate, training.learning_rate",
    "rl_config.num_samples_per_prompt": "training.group_size",
    "rl_config.output_dir sft_config.output_dir experiment_name output_base_dir": "state.dir",
    "sft_config.base_model": "model.base",
    "sft_config.train_data": "sources",
    "sft_config.dev_data sft_config.max_eval_samples": "ingest.train_ratio, gate.max_tasks",
    "sft_config.task_weights": "training.task_weights",
    "sft_config.max_train_samples": "trigger.max_samples",
    "sft_config.max_length": "rollout.max_model_len",
    "sft_config.load_in_8bit sft_config.load_in_4bit": "model.trainer_quantization",
    "sft_config.fp16 sft_config.bf16": "training.precision",
    "sft_config.use_coreset_selection sft_config.coreset_target_size sft_config.coreset_strategy": "training.coreset",
    "sft_config.use_online_continual sft_config.continual_buffer_size sft_config.continual_replay_ratio":
        "training.replay",
    "sft_config.lora_r": "training.lora.r",
    "sft_config.lora_alpha": "training.lora.alpha",
    "sft_config.lora_dropout": "training.lora.dropout",
    "sft_config.lora_target_modules": "training.lora.target_modules",
    "sft_config.num_epochs": "training.sft.epochs",
    "sft_config.batch_size sft_config.gradient_accumulation": "training.sft.batch_size",
    "sft_config.learning_rate": "training.sft.learning_rate",
    "sft_config.warmup_ratio": "training.sft.warmup_steps",
    "sft_config.lr_scheduler": "training.sft.scheduler",
    "sft_config.save_steps": "training.save_steps",
    "sft_config.report_to": "tracking.report_to",
    "sft_config.seed": "training.seed",
    "reward_config": "filter.rubric",
    "wandb_project wandb_run_name": "tracking.project",
}  # fmt: skip
"""The keys to use instead of the other options of `RLTrainingConfig`, `AgentSFTConfig` and `TrainingPipelineConfig`.
Each may also be at the root of a file."""
NOTHING: Final[Mapping[str, str]] = {
    "rl_config.reference_model_path": "the reference is the policy that the stage starts from",
    "sft_config.gradient_checkpointing": "it is always on where there is a GPU",
    "sft_config.optim": "adapter and optimizer are float32, and small",
    "sft_config.output_format sft_config.padding_strategy sft_config.padding_side":
        "the model's own chat template, as the server renders it, is the only format",
    "sft_config.shuffle_train sft_config.shuffle_eval": "each epoch's order follows from `training.seed`",
    "sft_config.dataloader_num_workers": "the samples of a round are in memory",
    "sft_config.coreset_metric_key": "a sample has one loss, the mean negative log-likelihood of its reply",
    "sft_config.use_dora": "vLLM cannot serve DoRA",
    "sft_config.use_lora_plus sft_config.lora_plus_lr_ratio": "both matrices have one learning rate",
    "sft_config.logging_steps": "`metrics.jsonl` has each step",
    "sft_config.save_total_limit sft_config.eval_steps sft_config.eval_strategy sft_config.load_best_model "
    "sft_config.metric_for_best_model sft_config.greater_is_better":
        "a round writes its adapter at its end, and the gate decides whether it is used",
}  # fmt: skip
"""Why there is nothing like the rest of them."""


def _refused() -> dict[str, tuple[str, str]]:
    """What is said of each name, and of each without its class, which several may have."""
    said: dict[str, tuple[list[str], list[str]]] = {}
    for at, table in enumerate((INSTEAD, NOTHING)):
        for names, text in table.items():
            for each in names.split():
                for name in dict.fromkeys((each, each.rpartition(".")[2])):
                    said.setdefault(name, ([], []))[at].append(text)
    return {
        name: (
            f"Use `{', '.join(uses).replace(', ', '` or `')}`." if uses else "Remove it.",
            ": ".join(["an option of SAGE", *reasons]),
        )
        for name, (uses, reasons) in said.items()
    }


SAGE: Final = Table(
    "sage",
    {
        "dpo_config.beta": "training.dpo.beta",
        "dpo_config.label_smoothing": "training.dpo.label_smoothing",
        "dpo_config.loss_type": "training.dpo.loss_type",
        "grpo_config.group_size": "training.group_size",
        "grpo_config.beta": "training.beta",
    },
    made={},
    only={
        "dpo_config.reference_free": (
            (False,),
            "the reference is always the policy that the stage starts from: without it, nothing keeps the trained one"
            " near",
        ),
        "grpo_config.use_advantage": ((True,), "the loss of GRPO is made of advantages"),
    },
    refused=_refused(),
    unused={},
    closed=("dpo_config.", "grpo_config.", "rl_config."),
)


def rows_of(raw: Mapping[str, Any], sections: Collection[str]) -> tuple[list[Row], dict[str, Any]]:
    """The rows of such options, and the file without them. `sections` are Flywheel's own."""
    rest, rows = dict(raw), list[Row]()
    named, found = list[tuple[str, Any]](), list[tuple[str, str, Any]]()
    for outer in ("", "rl_config", "sft_config", *ROOTS):
        inner, above = (raw.get(outer), f"{outer}.") if outer else (raw, "")
        if not isinstance(inner, Mapping):
            continue
        left = dict(inner)
        for key, value in inner.items():
            place = f"{above}{key}"
            if key in STAGE_OF or (key == "algorithm" and isinstance(value, str)):
                # A mapping `algorithm` is a section of Trinity's files.
                named.append((place, STAGE_OF.get(key, value)))
                if key in ("dpo_config", "grpo_config") and isinstance(value, Mapping):
                    found += ((above + path, path, each) for path, each in SAGE.leaves(value, f"{key}."))
                elif key in ("dpo_config", "grpo_config") and value is not None:
                    why = f"`{place}` is a {type(value).__name__}, not a mapping"
                    rows.append(Row(place, value, "refused", why=why, hint="Correct it."))
            elif outer == "rl_config" or (key not in sections and place in SAGE.refused):
                found.append((place, place, value if value is not None else ""))
            else:
                continue
            del left[key]
        rest = rest | {outer: left} if outer else left
        if outer in ROOTS and (estimator := value_at(left, ESTIMATOR)) is not None:
            named.append((above + ESTIMATOR, estimator))
    if isinstance(raw.get("rl_config"), Mapping):
        del rest["rl_config"]
    uses = [SAGE.uses.get(key, "") for _, key, _ in found]
    for at, (place, _, value) in enumerate(found):
        if (use := uses[at]) and (use in uses[:at] or has(raw, use)):
            why = f"`{place}` and another key both set `{use}`"
            rows.append(Row(place, value, "refused", why=why, hint="Remove one of them."))
    return [*rows, *_stages(named, raw), *SAGE.rows(found)], rest


def _stages(named: list[tuple[str, Any]], raw: Mapping[str, Any]) -> Iterator[Row]:
    """The row of the stage that the keys name."""
    chosen: dict[str, str] = {}
    for place, stage in named:
        possible = ("grpo",) if place.endswith(ESTIMATOR) else ("dpo", "grpo")
        hint = "Remove one of them. `training.stages` lists several stages, each with Flywheel's keys."
        if stage in ("ppo", "gae"):
            why, hint = f"`{place}` is {stage}: {PPO}", "Use `training.stages: [grpo]`, or remove it."
        elif stage not in possible:
            why, hint = f"`{place}` is {stage}, which Flywheel does not take", f"Set it to {' or '.join(possible)}."
        elif other := next((each for each in chosen if each != stage), ""):
            why = f"`{chosen[other]}` is of {other} and `{place}` of {stage}"
        elif has(raw, "training.stages"):
            why = f"`{place}` and `training.stages` both say what is trained"
        else:
            chosen.setdefault(stage, place)
            continue
        yield Row(place, stage, "refused", why=why, hint=hint)
    for stage, place in chosen.items():
        yield Row(place, stage, "replaced by", "training.stages", [stage])
