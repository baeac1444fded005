"""Configurations of SAGE's agent training, and the stage that ASTuner's trainer names: what becomes of each option.

The classes `AgentSFTConfig`, `RLTrainingConfig` and `AgentRewardConfig` are the sections `sft_config`, `rl_config`
and `reward_config`, a preset is `development` or `production`, and names of the first two classes may stand at
the root, as those of `TrainingPipelineConfig` do. They become stages of a round, their settings, and a rubric.
`flywheel docs sage` has them with their defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import yaml

from flywheel.config.foreign import SECTIONS, Refusal, Row, Table, Without
from flywheel.config.section import has, value_at
from flywheel.config.serving import ServingSettings
from flywheel.config.training import nearest_class
from flywheel.records.selection import TaskClass
from flywheel.system.files import shipped_folder

ROOTS: Final = ("ajet", "astuner")
"""The roots of configurations of AgentJet and ASTuner."""
PRESETS: Final = ("development", "production")
CLASSES: Final[Mapping[str, str]] = {
    "sft_config": "sft_config", "rl_config": "rl_config", "reward_config": "reward_config", "warmup": "warmup",
    **dict.fromkeys(PRESETS, "sft_config"),
}  # fmt: skip
"""Sections of a file, and the class of SAGE's whose options each has."""
STAGES: Final = ("dpo", "grpo", "ppo")
NAMES: Final = ("algorithm", *(f"{stage}_config" for stage in STAGES))
"""Options that ASTuner's files have as well."""
STAGE_OF: Final = {f"rl_config.{stage}_config": stage for stage in STAGES}
ESTIMATOR: Final = "trainer_common.algorithm.adv_estimator"
"""The key of ASTuner's trainer that names a stage."""
PPO: Final = (
    "PPO is no part of TRL's stable API, and trains a model of values beside the policy, which takes as much memory"
    " again. `grpo` compares rollouts of one prompt instead"
)
RUBRIC: Final = "rubrics/agent-reward.yaml"
"""The shipped rubric with SAGE's rewards and penalties, and the one that a file's own become."""
RANK: Final = "serving.max_lora_rank"
SERVED: Final = ServingSettings().max_lora_rank
"""The rank that is served without that setting."""
SMALL: Final = 1e-6
"""Above the weights of criteria that only reject."""
NO_PART: Final = "hallucination"
"""A penalty that `format_error` has here."""
WARM_UP: Final = 1000
"""Samples of a warm-up that does not say how many."""
LINES: Final = (".jsonl", ".ndjson")
USED: Final[Mapping[str, str]] = {
    "class rl_config.algorithm run_warmup run_sft run_rl warmup.enabled warmup.samples": "training.stages",
    "seed sft_config.seed": "training.seed",
    "wandb_project": "tracking.project",
    "reward_config.weights reward_config.penalties reward_config.timeout_seconds": "filter.rubric",
    "sft_config.base_model": "model.base",
    "sft_config.train_data sft_config.dev_data": "sources",
    "sft_config.task_weights": "training.task_weights",
    "sft_config.max_train_samples": "trigger.max_samples",
    "sft_config.max_length": "rollout.max_model_len",
    "sft_config.load_in_8bit sft_config.load_in_4bit": "model.trainer_quantization",
    "sft_config.bf16": "training.precision",
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
    "rl_config.dpo_config.beta": "training.dpo.beta",
    "rl_config.dpo_config.label_smoothing": "training.dpo.label_smoothing",
    "rl_config.dpo_config.loss_type": "training.dpo.loss_type",
    "rl_config.grpo_config.beta": "training.beta",
    "rl_config.num_samples_per_prompt rl_config.grpo_config.group_size": "training.group_size",
    "rl_config.num_epochs": "training.dpo.epochs",
    "rl_config.batch_size rl_config.gradient_accumulation": "training.dpo.batch_size",
    "rl_config.learning_rate": "training.dpo.learning_rate",
    "grpo.learning_rate": "training.learning_rate",
}  # fmt: skip
"""Flywheel's keys. `grpo` stands for `rl_config` where an option has another meaning with that stage, and `class` for
what names a stage where `algorithm` does not."""
ONLY: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "rl_config.dpo_config.reference_free": (
        (False,),
        "the reference is always the policy that the stage starts from: without it, nothing keeps the trained one"
        " near",
    ),
    "rl_config.grpo_config.use_advantage": ((True,), "the loss of GRPO is made of advantages"),
    "rl_config.algorithm": (("dpo", "grpo"), "of SAGE's stages of RL, a round has these"),
    "sft_config.lr_scheduler": (("linear", "cosine", "constant"), "learning rates here have no other course"),
    "sft_config.use_dora": ((False,), "vLLM cannot serve DoRA"),
    "sft_config.use_lora_plus": ((False,), "both matrices have one learning rate"),
}
REFUSED: Final[Mapping[str, tuple[str, str]]] = {
    "rl_config.algorithm=ppo rl_config.algorithm=gae": ("Use `training.stages: [grpo]`, or remove it.", PPO),
    "num_epochs batch_size gradient_accumulation learning_rate output_dir": (
        "Put it below `sft_config` or `rl_config`.",
        "an option of two classes of SAGE",
    ),
    "rl_config.sft_model_path": (
        "Remove it, and train both stages in one round: `training.stages: [sft, dpo]`.",
        "an adapter to go on from: a round goes on from the deployed one, and each stage from the stage before",
    ),
    "rl_config.reference_model_path": (
        "Remove it.",
        "another reference than the policy that the stage starts from, and there is none",
    ),
}
UNUSED: Final[Mapping[str, str]] = {
    "run_eval": "a round always ends at the gate",
    "experiment_name output_base_dir rl_config.output_dir sft_config.output_dir":
        "rounds have numbers, and `state.dir` has their files",
    "wandb_run_name": "a run has the name of its round",
    "warmup.data_source": "the samples of a stage are of the same `sources`",
    "warmup.focus": "samples are chosen by structure, not by words: `training.task_weights`",
    "reward_config.max_steps": "`rollout.max_turns` is the limit of a rollout",
    "sft_config.max_eval_samples": "the gate asks at most `gate.max_tasks` held-out tasks",
    "sft_config.fp16": "the checkpoint's own numbers need no loss scaling: `training.precision`",
    "sft_config.gradient_checkpointing": "it is always on where there is a GPU",
    "sft_config.optim": "adapter and optimizer are float32, and small",
    "sft_config.output_format sft_config.padding_strategy sft_config.padding_side":
        "the model's own chat template, as the server renders it, is the only format",
    "sft_config.shuffle_train sft_config.shuffle_eval": "each epoch's order follows from `training.seed`",
    "sft_config.dataloader_num_workers": "the samples of a round are in memory",
    "sft_config.coreset_metric_key": "a sample has one loss, the mean negative log-likelihood of its reply",
    "sft_config.lora_plus_lr_ratio": "both matrices have one learning rate",
    "sft_config.logging_steps": "`metrics.jsonl` has each step",
    "sft_config.save_total_limit sft_config.eval_steps sft_config.eval_strategy sft_config.load_best_model "
    "sft_config.metric_for_best_model sft_config.greater_is_better":
        "a round writes its adapter at its end, and the gate decides whether it is used",
    "grpo.num_epochs": "`training.steps` is the length of a round, each on new rollouts",
    "grpo.batch_size grpo.gradient_accumulation":
        "a step has `training.prompts_per_step` prompts with `training.group_size` rollouts each",
}  # fmt: skip
Values = Mapping[str, Any]


def _stages(values: Values) -> list[Any] | Refusal:
    if not values["stages"] and ("run_sft" in values or "run_rl" in values):
        return Refusal("no stage is left to train", "Switch one on, or remove it.")
    warm_up = {"sft": {"samples": values.get("warmup.samples", WARM_UP), "epochs": 1}}
    has_one = values.get("run_warmup", values.get("warmup.enabled", False))
    return [*([warm_up] if has_one else []), *(values["stages"] or ["grpo"])]


def _sources(values: Values) -> Any:
    train, held_out = (values.get(f"sft_config.{name}_data") for name in ("train", "dev"))
    if train is None:
        return Without("without `train_data`, conversations are held out of the same sources")
    if not str(train).endswith(LINES):
        hint = "Write its dialogs to a file of JSON lines, and name it, or set `sources`."
        return Refusal(f"{train} is a data set of SAGE's package, which Flywheel does not read", hint)
    if not str(held_out).endswith(LINES):
        return [{"type": "jsonl", "path": train}]
    splits = {"train": train, "held-out": held_out}
    return [{"type": "jsonl", "path": path, "split": split} for split, path in splits.items()]


def _task_weights(values: Values) -> Any:
    given, nearest = values["sft_config.task_weights"], dict[str, float]()
    if not isinstance(given, Mapping) or set(given) <= set(TaskClass):
        return given
    for name, weight in given.items():
        if (near := nearest_class(str(name))) is not None and isinstance(weight, int | float):
            nearest[near] = round(nearest.get(near, 0) + weight, 6)
    shown = ", ".join(f"{name}: {weight:g}" for name, weight in nearest.items())
    hint = f"The nearest are `training.task_weights: {{{shown}}}`." if shown else "Set `training.task_weights`."
    return Refusal("classes of SAGE are found by words, and those here by structure", hint)


def _quantization(values: Values) -> Any:
    sizes = [size for size in ("4bit", "8bit") if values.get(f"sft_config.load_in_{size}")]
    if len(sizes) > 1:
        return Refusal("the base model cannot be in 4 and in 8 bits", "Keep one of them.")
    return sizes[0] if sizes else None


def _coreset(values: Values) -> Any:
    if not values.get("sft_config.use_coreset_selection"):
        return Without("`use_coreset_selection` is not set")
    size, strategy = (values.get(f"sft_config.coreset_{name}") for name in ("target_size", "strategy"))
    if size is None:
        return Refusal("nothing says how many samples are chosen", "Set `coreset_target_size`.")
    strategy = strategy or "loss_topk"
    is_alone = values["stages"] == ["sft"] and not values.get("sft_config.use_online_continual")
    if strategy in ("loss_topk", "hybrid") and not is_alone:
        why = f"a choice by loss ({strategy}) is for the stage sft alone, and without replay"
        return Refusal(why, "Set `coreset_strategy` to diversity or random.")
    return {"size": size, "strategy": strategy}


def _replay(values: Values) -> Any:
    if not values.get("sft_config.use_online_continual"):
        return Without("`use_online_continual` is not set")
    ratio, buffer = (values.get(f"sft_config.continual_{name}") for name in ("replay_ratio", "buffer_size"))
    return {"ratio": 0.25 if ratio is None else ratio, "buffer": 2048 if buffer is None else buffer}


def _batch(section: str, size: int, steps: int) -> Callable[[Values], Any]:
    """Samples per step; the numbers are SAGE's defaults."""

    def made(values: Values) -> Any:
        both = values.get(f"{section}.batch_size", size), values.get(f"{section}.gradient_accumulation", steps)
        is_whole = all(type(each) is int for each in both)
        return both[0] * both[1] if is_whole else Refusal("it is no whole number", "Correct it.")

    return made


def _warmup_steps(values: Values) -> Any:
    ratio = values["sft_config.warmup_ratio"]
    if isinstance(ratio, int | float) and 0 <= ratio < 1:
        return ratio
    return Refusal(f"{ratio} is no share of the steps", "Set it to a number from 0 to below 1.")


def _rubric(values: Values) -> Any:
    """The name of the rubric, if its numbers can be used."""
    for name, possible in _parts().items():
        given, sign, without = values.get(f"reward_config.{name}", {}), 1, ""
        if name == "penalties":
            sign, without = -1, NO_PART
        if not isinstance(given, Mapping):
            return Refusal(f"`{name}` is no mapping", "Correct it.")
        for part, number in given.items():
            if part not in possible and part != without:
                return Refusal(f"there is no {part}", f"These can have a number: {', '.join(possible)}.")
            if type(number) not in (int, float) or not 0 <= number * sign < math.inf:
                return Refusal(f"{part} is {number}", "A weight is a number from 0 on, a penalty one up to 0.")
    total = sum(values.get("reward_config.weights", {"every": 1}).values())
    if abs(total - 1) > SMALL:
        return Refusal(f"`weights` add up to {total:g}", "Let them add up to 1: a score is divided by their sum.")
    seconds = values.get("reward_config.timeout_seconds", 1)
    if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
        return Refusal(f"{seconds} is no number of seconds above 0", "Correct it.")
    return RUBRIC


SAGE: Final = Table(
    "sage",
    USED,
    made={
        "training.stages": _stages,
        "filter.rubric": _rubric,
        "sources": _sources,
        "training.task_weights": _task_weights,
        "model.trainer_quantization": _quantization,
        "training.precision":
            lambda values: "bfloat16" if values["sft_config.bf16"] else Without("`training.precision` is auto"),
        "training.coreset": _coreset,
        "training.replay": _replay,
        "training.sft.batch_size": _batch("sft_config", 1, 16),
        "training.dpo.batch_size": _batch("rl_config", 2, 8),
        "training.sft.warmup_steps": _warmup_steps,
        "tracking.report_to": lambda values: [values["sft_config.report_to"]],
    },
    only=ONLY,
    refused=REFUSED,
    unused=UNUSED,
    closed=("sft_config.", "rl_config.", "reward_config.", "warmup."),
)  # fmt: skip


def _shipped() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((shipped_folder() / RUBRIC).read_text())
    return made


def _parts() -> dict[str, list[str]]:
    """The criteria that can have a number in each section of `reward_config`."""
    weights = {each["id"]: each["weight"] for each in _shipped()["criteria"]}
    return {
        "weights": [part for part, weight in weights.items() if weight > SMALL],
        "penalties": [part for part, weight in weights.items() if weight < 0],
    }


def rubrics_in(raw: Any) -> dict[str, dict[str, Any]]:
    """The rubric that `reward_config` of a file stands for, by the name of its file: the shipped one with its
    numbers, without parts that have none; empty without the section."""
    given = raw.get("reward_config") if isinstance(raw, Mapping) else None
    if not isinstance(given, Mapping):
        return {}
    made = _shipped()
    numbers = {
        part: given[name].get(part, 0)
        for name, parts in _parts().items()
        if isinstance(given.get(name), Mapping)
        for part in parts
    }
    made["criteria"] = [
        {**each, "weight": numbers.get(each["id"], each["weight"])}
        for each in made["criteria"]
        if numbers.get(each["id"], True)
    ]
    for each in made["criteria"]:
        if each["id"] == "timeout" and given.get("timeout_seconds") is not None:
            each["value"] = given["timeout_seconds"]
    return {RUBRIC: made}


def rows_of(raw: Mapping[str, Any], *, alone: bool = True) -> tuple[list[Row], dict[str, Any]]:
    """The rows of such options, and the file without them. Where they do not stand `alone`, in a file of AgentJet's,
    a preset, a warm-up and most names at the root are what a workflow reads."""
    found, rest = list[tuple[str, str, Any]](), dict(raw)
    for section, of in CLASSES.items():
        if section in rest and (alone or section.endswith("_config")):
            leaves = SAGE.leaves({of: rest.pop(section)})
            found += ((section + key.removeprefix(of), key, value) for key, value in leaves)
    at_root = [key for key in rest if key not in SECTIONS and (alone or key in NAMES)]
    names = {key: found_in for key in at_root if (found_in := _classes(key))}
    certain = [possible[0] for possible in names.values() if len(possible) == 1]
    for key, possible in names.items():
        left = [each for each in possible if len(possible) == 1 or each in certain]
        above = left[0] if len(left) == 1 else ""
        leaves = SAGE.leaves({above + key: rest.pop(key)})
        found += ((each.removeprefix(above), each, value) for each, value in leaves)
    for root in ROOTS:
        if isinstance(below := rest.get(root), Mapping):
            named = {key: below[key] for key in NAMES if key in below}
            leaves = SAGE.leaves({"rl_config": named})
            found += ((root + key.removeprefix("rl_config"), key, value) for key, value in leaves)
            rest[root] = {key: value for key, value in below.items() if key not in named}
            found.append((f"{root}.{ESTIMATOR}", "rl_config.algorithm", value_at(below, ESTIMATOR)))
    return [*_rows([each for each in found if each[2] is not None], raw)], rest


def _classes(key: str) -> list[str]:
    """How the names begin that an option at the root may stand for; no beginning is that of the whole pipeline."""
    every = SAGE.names | SAGE.refused.keys()
    found = [of for of in ("sft_config.", "rl_config.") if f"{of}{key}" in every or f"{of}{key}" in STAGE_OF]
    return [""] if key in SAGE.names else found


def _rows(found: list[tuple[str, str, Any]], raw: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of options, after what they say together: which stages there are."""
    given, own = {key: value for _, key, value in found}, value_at(raw, "training.stages")
    last = {key: place for place, key, _ in found}
    sections = [section for section in STAGE_OF if any(key.startswith(f"{section}.") for key in given)]
    is_pipeline = any(key.startswith("run_") for key in given)
    classes = [key.partition(".")[0] for key in given] + [key for key in raw if raw[key] == {}]
    has_sft, has_rl = "sft_config" in classes, "rl_config" in classes
    # Of RL, SAGE's default is DPO, unless another stage alone has settings.
    implied = STAGE_OF[sections[0]] if len(sections) == 1 else "dpo" if has_rl or is_pipeline else ""
    rl = str(given.get("rl_config.algorithm", implied))
    stages = ["sft"] if given.get("run_sft", has_sft or is_pipeline) else []
    stages += [rl] if rl and given.get("run_rl", True) else []
    if isinstance(own, list):
        stages = [next(iter(each), "") if isinstance(each, Mapping) else str(each) for each in own]
        rl = next((each for each in stages if each != "sft"), "")
    elif stages and given.keys().isdisjoint(("rl_config.algorithm", "run_warmup", "run_sft", "run_rl")):
        of = "rl_config" if has_rl else "sft_config" if has_sft else ""
        place = next((each[0] for each in found if each[1].startswith(f"{of}.")), of)
        name = "rl_config.algorithm" if rl == "ppo" else "class"
        found.append((place.rpartition(".")[0] or place, name, rl or "sft"))
    left, unused = list[tuple[str, str, Any]](), list[Row]()
    for place, key, value in found:
        section, option = key.rpartition(".")[0], key.replace("rl_config", rl)
        key = option if option in SAGE.names else key  # noqa: PLW2901
        use = SAGE.uses.get(key, "")
        if key == "reward_config.penalties" and isinstance(value, Mapping) and NO_PART in value:
            why = "a call of a tool that does not exist is a `format_error`"
            unused.append(Row(f"{place}.{NO_PART}", value[NO_PART], "without effect", why=why))
        if STAGE_OF.get(section, rl) != rl or section == "rl_config.ppo_config":
            why = f"{STAGE_OF[section]} is not the stage that is trained"
            unused.append(Row(place.rpartition(".")[0], None, "without effect", why=why))
        elif (use and has(raw, use) and f"{key}={value}" not in SAGE.refused) or last.get(key, place) != place:
            why = f"{use if has(raw, use) else last[key]} counts"
            unused.append(Row(place, value, "without effect", why=why, note=why))
        else:
            left.append((place, key, value))
    yield from (row for at, row in enumerate(unused) if row not in unused[:at])
    if all(section in raw for section in PRESETS):
        why = f"`{'` and `'.join(PRESETS)}` are two presets, and a configuration is one"
        yield Row(PRESETS[1], raw[PRESETS[1]], "refused", why=why, hint="Remove one of them.")
    yield from (rows := SAGE.rows(left, {"stages": stages}))
    yield from served(rows, raw)


def served(rows: Iterable[Row], own: Mapping[str, Any]) -> list[Row]:
    """The row that lets the server take adapters of the rank in `rows`, where Flywheel's `own` settings do not say
    what it takes."""
    ranks = [row for row in rows if row.use == "training.lora.r" and isinstance(row.made, int) and row.made > SERVED]
    return [row._replace(outcome="replaced by", use=RANK) for row in ranks if not has(own, RANK)]
