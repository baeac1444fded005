"""Configurations of SAGE's agent training, and the stage that ASTuner's trainer names: what becomes of each option.

The classes `AgentSFTConfig`, `RLTrainingConfig` and `AgentRewardConfig` are the sections `sft_config`, `rl_config`
and `reward_config`, a preset is `development` or `production`, and names of the first two classes may stand at
the root, as those of `TrainingPipelineConfig` do. They become stages of a round, their settings, and a rubric.
`sage-options.tsv` of the reference has them with their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Final

import yaml
from pydantic import ConfigDict, Field, ValidationError

from flywheel.config.foreign import SECTIONS, Made, Only, Refusal, Row, Table, Without
from flywheel.config.section import Section, has, value_at
from flywheel.config.serving import ServingSettings
from flywheel.config.training import nearest_class
from flywheel.records.selection import TaskClass
from flywheel.system.files import shipped_folder
from flywheel.system.yaml_file import explain

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
NAMING: Final = ("rl_config.algorithm", "run_warmup", "run_sft", "run_rl")
"""Options that say which stages there are."""
WARM_UP: Final = 1000
"""Samples of a warm-up that does not say how many."""
LINES: Final = (".jsonl", ".ndjson")
Option = tuple[str, str, Any]
"""The path of an option in a file, its name in the table, and its value."""
Values = Mapping[str, Any]


class Rewards(Section):
    """The options of `AgentRewardConfig` that a rubric has."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    weights: dict[str, Annotated[float, Field(ge=0)]] = {}
    penalties: dict[str, Annotated[float, Field(le=0)]] = {}
    timeout_seconds: Annotated[float, Field(gt=0)] | None = None


def _staged(values: Values) -> list[Any] | Refusal:
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
    given = {key.removeprefix("reward_config."): values[key] for key in values if key.startswith("reward_config.")}
    try:
        found = Rewards.model_validate({name: given[name] for name in Rewards.model_fields if name in given})
    except ValidationError as error:
        hint = "Correct it: a weight is a number from 0 on, a penalty one up to 0."
        return Refusal(explain(error, Rewards), hint)
    for name in ("weights", "penalties"):
        parts = [each["id"] for each in _shipped()["criteria"] if _section_of(each) == name]
        if unknown := getattr(found, name).keys() - {*parts, NO_PART if name == "penalties" else ""}:
            return Refusal(f"there is no {min(unknown)}", f"These can have a number: {', '.join(parts)}.")
    total = sum(found.weights.values())
    if "weights" in given and abs(total - 1) > SMALL:
        return Refusal(f"`weights` add up to {total:g}", "Let them add up to 1: a score is divided by their sum.")
    return RUBRIC


STAGED: Final = Made("training.stages", _staged)
SAGE: Final = Table("migrate", {
    "rl_config.algorithm": Only(("dpo", "grpo"), "of SAGE's stages of RL, a round has these", STAGED),
    "run_warmup run_sft run_rl warmup.enabled warmup.samples": STAGED,
    "seed sft_config.seed": "training.seed",
    "wandb_project": "tracking.project",
    "reward_config.weights reward_config.penalties reward_config.timeout_seconds": Made("filter.rubric", _rubric),
    "sft_config.base_model": "model.base",
    "sft_config.train_data sft_config.dev_data": Made("sources", _sources),
    "sft_config.task_weights": Made("training.task_weights", _task_weights),
    "sft_config.max_train_samples": "trigger.max_samples",
    "sft_config.max_length": "rollout.max_model_len",
    "sft_config.load_in_8bit sft_config.load_in_4bit": Made("model.trainer_quantization", _quantization),
    "sft_config.bf16": Made(
        "training.precision",
        lambda values: "bfloat16" if values["sft_config.bf16"] else Without("`training.precision` is auto"),
    ),
    "sft_config.use_coreset_selection sft_config.coreset_target_size sft_config.coreset_strategy":
        Made("training.coreset", _coreset),
    "sft_config.use_online_continual sft_config.continual_buffer_size sft_config.continual_replay_ratio":
        Made("training.replay", _replay),
    "sft_config.lora_r": "training.lora.r",
    "sft_config.lora_alpha": "training.lora.alpha",
    "sft_config.lora_dropout": "training.lora.dropout",
    "sft_config.lora_target_modules": "training.lora.target_modules",
    "sft_config.num_epochs": "training.sft.epochs",
    "sft_config.batch_size sft_config.gradient_accumulation":
        Made("training.sft.batch_size", _batch("sft_config", 1, 16)),
    "sft_config.learning_rate": "training.sft.learning_rate",
    "sft_config.warmup_ratio": Made("training.sft.warmup_steps", _warmup_steps),
    "sft_config.lr_scheduler": Only(
        ("linear", "cosine", "constant"), "learning rates here have no other course", "training.sft.scheduler"
    ),
    "sft_config.save_steps": "training.save_steps",
    "sft_config.report_to": Made("tracking.report_to", lambda values: [values["sft_config.report_to"]]),
    "rl_config.dpo_config.beta": "training.dpo.beta",
    "rl_config.dpo_config.label_smoothing": "training.dpo.label_smoothing",
    "rl_config.dpo_config.loss_type": "training.dpo.loss_type",
    "rl_config.grpo_config.beta": "training.beta",
    "rl_config.num_samples_per_prompt rl_config.grpo_config.group_size": "training.group_size",
    "rl_config.num_epochs": "training.dpo.epochs",
    "rl_config.batch_size rl_config.gradient_accumulation":
        Made("training.dpo.batch_size", _batch("rl_config", 2, 8)),
    "rl_config.learning_rate": "training.dpo.learning_rate",
    "grpo.learning_rate": "training.learning_rate",
    "rl_config.dpo_config.reference_free": Only(
        (False,),
        "the reference is always the policy that the stage starts from: without it, nothing keeps the trained one"
        " near",
    ),
    "rl_config.grpo_config.use_advantage": Only((True,), "the loss of GRPO is made of advantages"),
    "sft_config.use_dora": Only((False,), "vLLM cannot serve DoRA"),
    "sft_config.use_lora_plus": Only((False,), "both matrices have one learning rate"),
    "rl_config.algorithm=ppo rl_config.algorithm=gae":
        Refusal(PPO, "Use `training.stages: [grpo]`, or remove it."),
    "num_epochs batch_size gradient_accumulation learning_rate output_dir":
        Refusal("an option of two classes of SAGE", "Put it below `sft_config` or `rl_config`."),
    "rl_config.sft_model_path": Refusal(
        "an adapter to go on from: a round goes on from the deployed one, and each stage from the stage before",
        "Remove it, and train both stages in one round: `training.stages: [sft, dpo]`.",
    ),
    "rl_config.reference_model_path":
        Refusal("another reference than the policy that the stage starts from, and there is none", "Remove it."),
    "run_eval": Without("a round always ends at the gate"),
    "experiment_name output_base_dir rl_config.output_dir sft_config.output_dir":
        Without("rounds have numbers, and `state.dir` has their files"),
    "wandb_run_name": Without("a run has the name of its round"),
    "warmup.data_source": Without("the samples of a stage are of the same `sources`"),
    "warmup.focus": Without("samples are chosen by structure, not by words: `training.task_weights`"),
    "reward_config.max_steps": Without("`rollout.max_turns` is the limit of a rollout"),
    "sft_config.max_eval_samples": Without("the gate asks at most `gate.max_tasks` held-out tasks"),
    "sft_config.fp16": Without("the checkpoint's own numbers need no loss scaling: `training.precision`"),
    "sft_config.gradient_checkpointing": Without("it is always on where there is a GPU"),
    "sft_config.optim": Without("adapter and optimizer are float32, and small"),
    "sft_config.output_format sft_config.padding_strategy sft_config.padding_side":
        Without("the model's own chat template, as the server renders it, is the only format"),
    "sft_config.shuffle_train sft_config.shuffle_eval": Without("each epoch's order follows from `training.seed`"),
    "sft_config.dataloader_num_workers": Without("the samples of a round are in memory"),
    "sft_config.coreset_metric_key": Without("a sample has one loss, the mean negative log-likelihood of its reply"),
    "sft_config.lora_plus_lr_ratio": Without("both matrices have one learning rate"),
    "sft_config.logging_steps": Without("`metrics.jsonl` has each step"),
    "sft_config.save_total_limit sft_config.eval_steps sft_config.eval_strategy sft_config.load_best_model "
    "sft_config.metric_for_best_model sft_config.greater_is_better":
        Without("a round writes its adapter at its end, and the gate decides whether it is used"),
    "grpo.num_epochs": Without("`training.steps` is the length of a round, each on new rollouts"),
    "grpo.batch_size grpo.gradient_accumulation":
        Without("a step has `training.prompts_per_step` prompts with `training.group_size` rollouts each"),
}, closed=("sft_config.", "rl_config.", "reward_config.", "warmup."))  # fmt: skip
"""`grpo` stands for `rl_config` where an option has another meaning with that stage."""


def _shipped() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((shipped_folder() / RUBRIC).read_text())
    return made


def _section_of(criterion: Mapping[str, Any]) -> str:
    """The section of `reward_config` that has the number of a criterion; empty if none has."""
    return "weights" if criterion["weight"] > SMALL else "penalties" if criterion["weight"] < 0 else ""


def rubrics_in(raw: Any) -> dict[str, dict[str, Any]]:
    """The rubric that `reward_config` of a file stands for, by the name of its file: the shipped one with its
    numbers, without parts that have none; empty without the section."""
    given = value_at(raw, "reward_config")
    if given is None and has(raw, "reward_config"):
        given = {}
    if not isinstance(given, Mapping):
        return {}
    made, criteria = _shipped(), list[dict[str, Any]]()
    for each in made["criteria"]:
        numbers = given.get(_section_of(each))
        if isinstance(numbers, Mapping):
            each["weight"] = numbers.get(each["id"], 0)
        if each["id"] == "timeout" and given.get("timeout_seconds") is not None:
            each["value"] = given["timeout_seconds"]
        if each["weight"]:
            criteria.append(each)
    return {RUBRIC: {**made, "criteria": criteria}}


def rows_of(raw: Mapping[str, Any], *, alone: bool = True) -> tuple[list[Row], dict[str, Any]]:
    """The rows of such options, and the file without them. Where they do not stand `alone`, in a file of AgentJet's,
    a preset, a warm-up and most names at the root are what a workflow reads, and `task_reader` names the sources."""
    found, rest = _options(raw, alone=alone)
    return [*rows_for(found, raw, alone=alone)], rest


def _options(raw: Mapping[str, Any], *, alone: bool) -> tuple[list[Option], dict[str, Any]]:
    """The options of a file, of two of one name the one that counts last, and the file without them."""
    at = [(key, of) for key, of in CLASSES.items() if key in raw and (alone or key.endswith("_config"))]
    names = {
        key: possible
        for key in raw
        if key not in SECTIONS and (alone or key in NAMES) and (possible := _classes(key))
    }
    certain = {possible[0] for possible in names.values() if len(possible) == 1}
    for key, possible in names.items():
        left = [each for each in possible if each in certain]
        at.append((key, f"{left[0] if len(left) == 1 else ''}{key}"))
    given, taken = [(place, of, raw[place]) for place, of in at], {place for place, _ in at}
    rest = {key: value for key, value in raw.items() if key not in taken}
    for root in ROOTS:
        if isinstance(below := rest.get(root), Mapping):
            given += [(f"{root}.{key}", f"rl_config.{key}", below[key]) for key in NAMES if key in below]
            given.append((f"{root}.{ESTIMATOR}", "rl_config.algorithm", value_at(below, ESTIMATOR)))
            rest[root] = {key: value for key, value in below.items() if key not in NAMES}
    found = [
        (place + key.removeprefix(of), key, value)
        for place, of, below in given
        for key, value in SAGE.leaves({of: below})
        if value is not None
    ]
    has_numbers = any(SAGE.uses.get(key) == "filter.rubric" for _, key, _ in found)
    if not has_numbers and isinstance(raw.get("reward_config", ""), Mapping | None):
        # All of its numbers are SAGE's.
        found.append(("reward_config", "reward_config.penalties", {}))
    return found, rest


def _classes(key: str) -> list[str]:
    """How the names begin that an option at the root may stand for; no beginning is that of the whole pipeline."""
    every = SAGE.entries.keys() | STAGE_OF.keys()
    return [""] if key in SAGE.names else [of for of in ("sft_config.", "rl_config.") if f"{of}{key}" in every]


def _stages(given: Mapping[str, Any], raw: Mapping[str, Any]) -> tuple[list[str], str]:
    """The stages that options stand for, without a warm-up, and the one of RL whose options count."""
    if isinstance(own := value_at(raw, "training.stages"), list):
        stages = [next(iter(each), "") if isinstance(each, Mapping) else str(each) for each in own]
        return stages, next((each for each in stages if each != "sft"), "")
    classes = {key.partition(".")[0] for key in given} | {key for key in raw if raw[key] == {}}
    is_pipeline = any(key.startswith("run_") for key in given)
    named = [stage for of, stage in STAGE_OF.items() if any(key.startswith(f"{of}.") for key in given)]
    # Of RL, SAGE's default is DPO, unless another stage alone has settings.
    implied = named[0] if len(named) == 1 else "dpo" if "rl_config" in classes or is_pipeline else ""
    rl = str(given.get("rl_config.algorithm", implied))
    stages = ["sft"] if given.get("run_sft", "sft_config" in classes or is_pipeline) else []
    return [*stages, *([rl] if rl and given.get("run_rl", True) else [])], rl


def rows_for(found: list[Option], raw: Mapping[str, Any], *, alone: bool = True) -> Iterator[Row]:
    """The rows of options that are `found` beside Flywheel's own keys in `raw`, after what they say together: which
    stages there are."""
    given = {key: value for _, key, value in found}
    stages, rl = _stages(given, raw)
    if stages and not has(raw, "training.stages") and given.keys().isdisjoint(NAMING):
        # The class names the stage.
        places = [(key, place) for place, key, _ in found] + [(f"{key}.", key) for key in raw if raw[key] == {}]
        of_class = [place for of in ("rl_config.", "sft_config.") for key, place in places if key.startswith(of)]
        place = of_class[0] if of_class else ""
        name = "rl_config.algorithm" if rl == "ppo" else "run_sft"
        found.append((place.rpartition(".")[0] or place, name, rl or "sft"))
    last, left, unused = {key: place for place, key, _ in found}, list[Option](), list[Row]()
    for place, key, value in found:
        section, option = key.rpartition(".")[0], key.replace("rl_config", rl)
        key = option if option in SAGE.names else key  # noqa: PLW2901
        counts, use = last.get(key, place), SAGE.uses.get(key, "")
        if has(raw, use) and not isinstance(SAGE.entries.get(f"{key}={value}"), Refusal):
            counts = use
        elif use == "sources" and not alone:
            counts = "task_reader"
        if key == "reward_config.penalties" and isinstance(value, Mapping) and NO_PART in value:
            why = "a call of a tool that does not exist is a `format_error`"
            unused.append(Row(f"{place}.{NO_PART}", value[NO_PART], "without effect", why=why))
        if STAGE_OF.get(section, rl) != rl or section == "rl_config.ppo_config":
            why = f"{STAGE_OF[section]} is not the stage that is trained"
            unused.append(Row(place.rpartition(".")[0], None, "without effect", why=why))
        elif counts != place:
            why = f"{counts} counts"
            unused.append(Row(place, value, "without effect", why=why, note=why))
        else:
            left.append((place, key, value))
    yield from (row for at, row in enumerate(unused) if row not in unused[:at])
    if all(section in raw for section in PRESETS):
        why = f"`{'` and `'.join(PRESETS)}` are two presets, and a configuration is one"
        yield Row(PRESETS[1], raw[PRESETS[1]], "refused", why=why, hint="Remove one of them.")
    yield from SAGE.rows(left, {"stages": stages})


def served(rows: Iterable[Row], own: Mapping[str, Any]) -> list[Row]:
    """The row that lets the server take adapters of the rank in `rows`, where Flywheel's `own` settings do not say
    what it takes."""
    ranks = [row for row in rows if row.use == "training.lora.r" and isinstance(row.made, int) and row.made > SERVED]
    return [row._replace(outcome="replaced by", use=RANK) for row in ranks if not has(own, RANK)]
