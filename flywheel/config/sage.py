"""Configurations of SAGE's agent training, and the stage that ASTuner's trainer names: what becomes of each option.

The classes `AgentSFTConfig`, `RLTrainingConfig` and `AgentRewardConfig` are the sections `sft_config`, `rl_config`
and `reward_config`, a preset is `development` or `production`, and names of the first two classes may stand at
the root, as those of `TrainingPipelineConfig` do. They become stages of a round, their settings, and a rubric.
`flywheel docs sage` has them with their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import yaml

from flywheel.config.foreign import SECTIONS, Refusal, Row, Table, Without
from flywheel.config.section import has, value_at
from flywheel.config.serving import ServingSettings
from flywheel.config.training import SAGE_CLASSES
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
STAGE_OF: Final = {"dpo_config": "dpo", "grpo_config": "grpo", "ppo_config": "ppo"}
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
WARM_UP: Final = 1000
"""Samples of a warm-up that does not say how many."""
LINES: Final = (".jsonl", ".ndjson")
USED: Final[Mapping[str, str]] = {
    "algorithm run_warmup run_sft run_rl warmup.enabled warmup.samples": "training.stages",
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
    "dpo_config.beta": "training.dpo.beta",
    "dpo_config.label_smoothing": "training.dpo.label_smoothing",
    "dpo_config.loss_type": "training.dpo.loss_type",
    "grpo_config.beta": "training.beta",
    "rl_config.num_samples_per_prompt grpo_config.group_size": "training.group_size",
    "dpo.num_epochs": "training.dpo.epochs",
    "dpo.batch_size dpo.gradient_accumulation": "training.dpo.batch_size",
    "dpo.learning_rate": "training.dpo.learning_rate",
    "grpo.learning_rate": "training.learning_rate",
}  # fmt: skip
"""Flywheel's keys. `dpo` and `grpo` stand for `rl_config`, whose options are of the stage that `algorithm` names."""
ONLY: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "dpo_config.reference_free": (
        (False,),
        "the reference is always the policy that the stage starts from: without it, nothing keeps the trained one"
        " near",
    ),
    "grpo_config.use_advantage": ((True,), "the loss of GRPO is made of advantages"),
    "sft_config.lr_scheduler": (("linear", "cosine", "constant"), "learning rates here have no other course"),
    "sft_config.use_dora": ((False,), "vLLM cannot serve DoRA"),
    "sft_config.use_lora_plus": ((False,), "both matrices have one learning rate"),
}
REFUSED: Final[Mapping[str, tuple[str, str]]] = {
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
    made = [*(["sft"] if values["sft"] else []), *([values["rl"]] if values["rl"] else [])]
    if not made and ("run_sft" in values or "run_rl" in values):
        return Refusal("no stage is left to train", "Switch one on, or remove it.")
    warm_up = {"sft": {"samples": values.get("warmup.samples", WARM_UP), "epochs": 1}}
    return [*([warm_up] if values["warm_up"] else []), *(made or ["grpo"])]


def _sources(values: Values) -> Any:
    train, held_out = (values.get(f"sft_config.{name}_data") for name in ("train", "dev"))
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
        near = str(SAGE_CLASSES.get(str(name), ""))
        if near and isinstance(weight, int | float):
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


def _batch(section: str, size: int, accumulated: int) -> Callable[[Values], Any]:
    """Samples per step; the numbers are SAGE's defaults."""

    def made(values: Values) -> Any:
        both = [
            values.get(f"{section}.batch_size", size),
            values.get(f"{section}.gradient_accumulation", accumulated),
        ]
        if any(type(each) is not int for each in both):
            return Refusal("it is no whole number", "Correct it.")
        return both[0] * both[1]

    return made


def _warmup_steps(values: Values) -> Any:
    ratio = values["sft_config.warmup_ratio"]
    if isinstance(ratio, int | float) and 0 <= ratio < 1:
        return ratio
    return Refusal(f"{ratio} is no share of the steps", "Set it to a number from 0 to below 1.")


def _rubric(values: Values) -> Any:
    """The name of the rubric, if its numbers can be used."""
    known = _shipped()
    for name, sign in (("weights", 1), ("penalties", -1)):
        given = values.get(f"reward_config.{name}", {})
        if not isinstance(given, Mapping) or not all(type(each) in (int, float) for each in given.values()):
            return Refusal(f"`{name}` is no mapping to numbers", "Correct it.")
        possible = [each["id"] for each in known["criteria"] if each["weight"] * sign > 1e-6]
        if wrong := [each for each in given if each not in possible and (sign > 0 or each != "hallucination")]:
            return Refusal(f"there is no {wrong[0]}", f"These can have a number: {', '.join(possible)}.")
        if wrong := [each for each, number in given.items() if number * sign < 0]:
            return Refusal(f"{wrong[0]} has the wrong sign", "Weights are above 0, and penalties below.")
    total = sum(values.get("reward_config.weights", {}).values()) or 1
    if abs(total - 1) > 1e-6:
        return Refusal(f"`weights` add up to {total:g}", "Let them add up to 1: a score is divided by their sum.")
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
        "training.dpo.batch_size": _batch("dpo", 2, 8),
        "training.sft.warmup_steps": _warmup_steps,
        "tracking.report_to": lambda values: [values["sft_config.report_to"]],
    },
    only=ONLY,
    refused=REFUSED,
    unused=UNUSED,
    closed=("dpo_config.", "grpo_config.", *(f"{name}." for name in CLASSES)),
)  # fmt: skip


def _shipped() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((shipped_folder() / RUBRIC).read_text())
    return made


def rubrics_in(raw: Any) -> dict[str, dict[str, Any]]:
    """The rubric that `reward_config` of a file stands for, by the name of its file: the shipped one with its
    numbers; none without the section."""
    given = raw.get("reward_config") if isinstance(raw, Mapping) else None
    if not isinstance(given, Mapping):
        return {}
    made = _shipped()
    for name, sign in (("weights", 1), ("penalties", -1)):
        if isinstance(numbers := given.get(name), Mapping):
            # A part or penalty that is not named has none. The two criteria that only reject stay.
            made["criteria"] = [
                {**each, "weight": numbers[each["id"]]} if each["id"] in numbers else each
                for each in made["criteria"]
                if each["weight"] * sign <= 1e-6 or numbers.get(each["id"])
            ]
    if seconds := given.get("timeout_seconds"):
        made["criteria"] = [
            {**each, "value": seconds} if each["id"] == "timeout" else each for each in made["criteria"]
        ]
    return {RUBRIC: made}


class _Found(NamedTuple):
    """An option in a file: its path there, its name in the table, and its value."""

    place: str
    key: str
    value: Any


def rows_of(raw: Mapping[str, Any]) -> tuple[list[Row], dict[str, Any]]:
    """The rows of such options, and the file without them."""
    found, rest, rows = list[_Found](), dict(raw), list[Row]()
    for section, of in CLASSES.items():
        options = rest.pop(section, None)
        if isinstance(options, Mapping):
            found += _options(options, f"{section}.", of)
        elif options is not None:
            why = f"`{section}` is a {type(options).__name__}, not a mapping"
            rows.append(Row(section, options, "refused", why=why, hint="Correct it."))
    at_root = {key: of for key, value in rest.items() if key not in SECTIONS and (of := _classes(key, value))}
    certain = set[str]().union(*(possible for possible in at_root.values() if len(possible) == 1))
    for key, possible in at_root.items():
        value, either = rest.pop(key), possible if len(possible) == 1 else possible & certain
        if len(either) == 1:
            found += _options({key: value}, "", *either)
        else:
            why, hint = f"`{key}` may be of {' or '.join(sorted(possible))}", "Put it below one of them."
            rows.append(Row(key, value, "refused", why=why, hint=hint))
    for root in ROOTS:
        if isinstance(below := rest.get(root), Mapping):
            named = {key: value for key, value in below.items() if key in STAGE_OF or _is_algorithm(key, value)}
            found += _options(named, f"{root}.", "rl_config")
            rest[root] = {key: value for key, value in below.items() if key not in named}
            if (estimator := value_at(below, ESTIMATOR)) is not None:
                found.append(_Found(f"{root}.{ESTIMATOR}", "algorithm", estimator))
    if len(both := [section for section in PRESETS if isinstance(raw.get(section), Mapping)]) > 1:
        why = f"`{both[0]}` and `{both[1]}` are two presets, and a configuration is one"
        rows.append(Row(both[1], raw[both[1]], "refused", why=why, hint="Remove one of them."))
        found = [each for each in found if not each.place.startswith(f"{both[1]}.")]
    return [*rows, *_rows(found, raw)], rest


def _is_algorithm(key: str, value: Any) -> bool:
    """A mapping of that name is a section of Trinity's files."""
    return key == "algorithm" and isinstance(value, str)


def _is_known(key: str) -> bool:
    return key in SAGE.uses or key in SAGE.only or key in SAGE.refused or key in SAGE.reasons


def _classes(key: str, value: Any) -> set[str]:
    """The classes that have a name at the root; the empty one is that of the whole pipeline."""
    if key == "algorithm" or key in STAGE_OF:
        return {"rl_config"} if key in STAGE_OF or _is_algorithm(key, value) else set()
    found = {of for of in ("sft_config", "rl_config") if _is_known(f"{of}.{key}")}
    return {""} if _is_known(key) else found | ({"rl_config"} if _is_known(f"dpo.{key}") else set())


def _options(options: Mapping[str, Any], above: str, of: str) -> Iterator[_Found]:
    """The options of a class; `rl_config` stands for the stage that is not known yet. A stage's section is one, too,
    before those in it."""
    for key, value in options.items():
        is_stage = of == "rl_config" and (key in STAGE_OF or _is_algorithm(key, value))
        path = key if is_stage or not of else f"{of}.{key}"
        if key in STAGE_OF or not isinstance(value, Mapping) or path in SAGE.uses:
            yield _Found(above + key, path, value)
        if isinstance(value, Mapping) and path not in SAGE.uses:
            inner = SAGE.leaves(value, f"{key}.")
            yield from (_Found(above + name, name if is_stage else f"{of}.{name}", each) for name, each in inner)


def _rows(found: Sequence[_Found], raw: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of options, after what they say together: which stages there are."""
    found = [each for each in found if each.value is not None]
    given, own = {each.key: each.value for each in found}, value_at(raw, "training.stages")
    of_sft, of_rl = ([each for each in found if each.key.startswith(f"{of}_config.")] for of in ("sft", "rl"))
    sections = [each for each in found if each.key in STAGE_OF]
    named = [each for each in found if each.key == "algorithm"]
    is_pipeline = any(f"run_{name}" in given for name in ("warmup", "sft", "rl"))
    kinds = [each if isinstance(each, str) else next(iter(each), "") for each in own] if isinstance(own, list) else []
    rl = next((each for each in kinds if each in ("dpo", "grpo")), "")
    if not named and own is None and (sections or of_rl or is_pipeline):
        # SAGE's default, unless another one alone has settings.
        rl = STAGE_OF[sections[0].key] if len({each.key for each in sections}) == 1 else "dpo"
        named = [each._replace(value=rl) for each in sections[:1]]
    wrong = [*_wrong_stages(named, has_own=own is not None)]
    yield from wrong
    rl = "" if wrong else named[0].value if named else rl
    about = {
        "sft": given.get("run_sft", is_pipeline or bool(of_sft)),
        "rl": rl if given.get("run_rl", True) else "",
        "warm_up": given.get("run_warmup", given.get("warmup.enabled", False)),
    }
    about["stages"] = kinds or [kind for kind, has in (("sft", about["sft"]), (rl, about["rl"])) if has]
    left = list[_Found]()
    if not wrong and own is None:
        of_class = [_Found(each.place.partition(".")[0], "", rl or "sft") for each in (of_rl or of_sft)[:1]]
        left = [each._replace(key="algorithm") for each in (named or ([] if is_pipeline else of_class))]
    for place, key, value in found:
        stage, option = STAGE_OF.get(key.partition(".")[0], ""), f"{rl}.{key.removeprefix('rl_config.')}"
        key = option if key.startswith("rl_config.") and _is_known(option) else key  # noqa: PLW2901
        use, why = SAGE.uses.get(key, ""), ""
        if key in STAGE_OF and not isinstance(value, Mapping):
            why = f"`{place}` is a {type(value).__name__}, not a mapping"
            yield Row(place, value, "refused", why=why, hint="Correct it.")
        elif key in STAGE_OF and stage != about["rl"] and all(row.place != place for row in wrong):
            yield Row(place, value, "without effect", why=f"{stage} is not the stage that is trained")
        elif key in STAGE_OF or key == "algorithm" or (stage and stage != rl):
            continue  # said above, or by the row of the section
        elif key == "warmup.samples" and not about["warm_up"]:
            yield Row(place, value, "without effect", why="the warm-up is off")
        elif use == "sources" and "sources" in raw:
            yield Row(place, value, "without effect", why="`sources` of the file count")
        elif use and (has(raw, use) or any(each.key == key for each in left)):
            why = f"`{place}` and another key both set `{use}`"
            yield Row(place, value, "refused", why=why, hint="Remove one of them.")
        else:
            left.append(_Found(place, key, value))
    for row in SAGE.rows(left, about):
        yield row
        if row.use == "training.lora.r" and isinstance(row.made, int) and row.made > SERVED and not has(raw, RANK):
            yield row._replace(outcome="replaced by", use=RANK)


def _wrong_stages(named: Sequence[_Found], *, has_own: bool) -> Iterator[Row]:
    """Refused rows for what names a stage."""
    for place, _, stage in named:
        possible = ("grpo",) if place.endswith(ESTIMATOR) else ("dpo", "grpo")
        hint = "Remove one of them. `training.stages` lists several stages, each with Flywheel's keys."
        if stage in ("ppo", "gae"):
            why, hint = f"`{place}` is {stage}: {PPO}", "Use `training.stages: [grpo]`, or remove it."
        elif stage not in possible:
            why, hint = f"`{place}` is {stage}, which Flywheel does not take", f"Set it to {' or '.join(possible)}."
        elif other := next((each for each in named if each.value in ("dpo", "grpo") and each.value != stage), None):
            why = f"`{other.place}` is of {other.value} and `{place}` of {stage}"
        elif has_own:
            why = f"`{place}` and `training.stages` both say what is trained"
        else:
            continue
        yield Row(place, stage, "refused", why=why, hint=hint)
