"""Settings of rounds: trigger, model, training, rollouts, gate, Ray cluster, and retention of files."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from flywheel.config.section import HubName, Section, Share, UserPath, WebUrl
from flywheel.records.program_run import LARGEST_REWARD
from flywheel.records.selection import TaskClass
from flywheel.secrets import without_secrets
from flywheel.system.files import expanded, tidied
from flywheel.system.yaml_file import PLAIN

log = logging.getLogger(__name__)
UNTRAINABLE: Final = {
    "lm_head": "log-probabilities are computed from the output layer's own weights, which would leave it untrained",
    "embed_tokens": "vLLM takes such adapters for some models only, and each step would write the whole layer",
}
"""Layers that cannot have an adapter.

vLLM 0.32 takes adapters of all linear layers, and of those that the model's class names (`embedding_modules`): of
`lm_head` and `embed_tokens` for Qwen and Llama, of neither for Mistral. But TRL refuses one on `lm_head`. PEFT writes
the base layer's weights beside an adapter on `embed_tokens`, and on a CPU vLLM adds it to requests for the base model
of the same batch.
"""
POOL: Final = 4
"""Candidates of a choice by loss, as a multiple of its size."""
SAGE_CLASSES: Final[Mapping[str, TaskClass]] = {
    "tool_selection": TaskClass.ONE_TOOL,
    "multi_step_planning": TaskClass.SEVERAL_TOOLS,
    "timing_decision": TaskClass.NO_TOOLS,
    "tool_retrieval": TaskClass.ONE_TOOL,
}
"""The nearest class of each of SAGE's, which are found by words of the question."""
TRACKER_PACKAGES: Final[Mapping[str, str]] = {
    "tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "swanlab": "swanlab", "trackio": "trackio",
}  # fmt: skip
"""Experiment trackers, and the package that each needs. The other names of `Tracker` change nothing."""
ANSWERS: Final = 600


def _crontab(text: str) -> str:
    # Imported here: most configurations have no such setting.
    from flywheel.config.crontab import next_times

    if not next_times(text, 1, datetime.now(UTC)):
        raise ValueError("it never fires: no month that it names has such a day")
    return text


def _target_modules(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("it must be a list of names, one regular expression, or `all-linear`")
    return value


def _are_trainable(value: str | list[str]) -> str | list[str]:
    """PEFT's rule: a string is a regular expression of whole names, names of a list are the ends of whole names."""
    if isinstance(value, list):
        named = [name for name in UNTRAINABLE if any(name == each.rpartition(".")[2] for each in value)]
    else:
        try:
            expression = re.compile(value)
        except re.error as error:
            raise ValueError(f"it is not a regular expression: {error}") from None
        whole = {name: (name, f"model.{name}", f"model.language_model.{name}") for name in UNTRAINABLE}
        named = [name for name in UNTRAINABLE if any(map(expression.fullmatch, whole[name]))]
    if named:
        raise ValueError(f"{named[0]} cannot have an adapter: {UNTRAINABLE[named[0]]}; leave it out")
    return value


def _alias(name: str) -> str:
    if not name.strip() or name != name.strip() or not name.isprintable():
        raise ValueError("it must be a name: not empty, in one line, without spaces around it")
    if "@" in name:
        raise ValueError("it must not have an @: versions of it are served as ALIAS@rNNNN")
    return name


class TriggerSettings(Section):
    min_samples: int = Field(default=64, gt=0)
    """Number of free samples that starts a round."""
    max_samples: int = Field(default=2048, gt=0)
    """Maximum samples of a round: first those in the fewest finished rounds, then the oldest."""
    cron: Annotated[str, AfterValidator(_crontab)] | None = None
    """A schedule (crontab, UTC) on which a round also starts, with `cron_min_samples`. `@daily` and its kind work.
    Of restricted day of month and day of week, one suffices."""
    cron_min_samples: int = Field(default=8, gt=0)
    """Minimum samples for a scheduled round."""
    min_held_out: int | None = Field(default=None, gt=0)
    """Judged held-out tasks that a round waits for. Default: `gate.min_tasks`; lower values are refused."""

    @property
    def next_cron_times(self) -> list[str]:
        """The next three times of `cron` in ISO format, in UTC; none without it."""
        if self.cron is None:
            return []
        from flywheel.config.crontab import next_times

        return [at.isoformat() for at in next_times(self.cron, 3, datetime.now(UTC))]


Quantization = Literal["4bit", "8bit"]


class ModelSettings(Section):
    base: HubName = "Qwen/Qwen3-4B"
    """The base model: a local directory or a hub name."""
    alias: Annotated[str, AfterValidator(_alias)] = "my-agent"
    """The stable model name that agents call, without an `@`. Versions are `ALIAS@rNNNN`. With `targets`, each has
    its own."""
    trainer_quantization: Quantization | None = None
    """Hold the trainer's frozen base model in `4bit` or `8bit` (extra `quantized`), to save GPU memory. The round
    fails if the first step's `logprob_gap` is above 0.2. Experimental."""


class TargetSettings(Section):
    """An agent of its own among several: its tasks, alias, rounds and gate."""

    alias: Annotated[str, AfterValidator(_alias)] | None = None
    """The model name that this agent calls. Default: the target's name."""
    agents: list[str] | None = None
    """Names of agents in traces whose replies belong to this target. Default: its name. Replies under the target's
    alias belong to it, too."""
    rubric: UserPath | None = None
    """Path of its rubric. Default: `filter.rubric`."""
    min_samples: int | None = Field(default=None, gt=0)
    """Free samples that start a round. Default: `trigger.min_samples`."""


class LoraSettings(Section):
    """Configuration of new adapters. A round that continues from an adapter keeps the adapter's configuration."""

    model_config = ConfigDict(allow_inf_nan=False)

    r: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Rank, one of those that vLLM supports. A round keeps the deployed adapter's configuration; changes take effect
    after `flywheel rollback --to base`."""
    alpha: float = Field(default=32, gt=0)
    """Scale: the adapter's output is multiplied by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input. Above 0, the trainer's log-probabilities differ from the engine's."""
    target_modules: Annotated[str | list[str], BeforeValidator(_target_modules), AfterValidator(_are_trainable)] = (
        "all-linear"
    )
    """Layers with an adapter: names, a regular expression, or `all-linear` (all but the output layer). `lm_head` and
    `embed_tokens` cannot have one."""


Stage = Literal["sft", "dpo", "grpo"]
Answering = Literal["policy", "auxiliary", "refuse"]
Precision = Literal["auto", "float32", "bfloat16"]
Scheduler = Literal["linear", "cosine", "constant"]


class SftSettings(Section):
    """Supervised fine-tuning on accepted replies (`training.stages` with `sft`)."""

    model_config = ConfigDict(allow_inf_nan=False)

    reasoning: Literal["leave-out", "empty"] = "leave-out"
    """Replies without recorded reasoning, where the chat template writes reasoning. `leave-out`: not trained on.
    `empty`: trained on without reasoning, which teaches the model not to reason."""
    batch_size: int = Field(default=8, gt=0)
    """Replies per optimizer step."""
    epochs: int = Field(default=3, gt=0)
    """How often each reply is trained on."""
    learning_rate: float = Field(default=2e-4, gt=0)
    """Peak learning rate."""
    scheduler: Scheduler = "linear"
    """How the learning rate decays to 0; `constant` keeps it."""
    warmup_steps: float = Field(default=0.0, ge=0)
    """Warm-up steps, fewer than all steps; below 1 a share of them."""


class DpoSettings(Section):
    """Direct preference optimization on pairs of a better and a worse reply (`training.stages` with `dpo`)."""

    model_config = ConfigDict(allow_inf_nan=False)

    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is kept near the one that the stage starts from."""
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """The loss: `sigmoid` (DPO), `hinge` (SLiC) or `ipo` (IPO)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs in the wrong order (conservative DPO), for `sigmoid` alone."""
    margin: float = Field(default=0.1, gt=0, le=1)
    """Smallest difference between the rewards or scores of a pair."""
    batch_size: int = Field(default=8, gt=0)
    """Pairs per optimizer step."""
    epochs: int = Field(default=1, gt=0)
    """How often each pair is trained on."""
    learning_rate: float = Field(default=5e-6, gt=0)
    """Peak learning rate."""
    scheduler: Scheduler = "linear"
    """As of `training.sft`."""
    warmup_steps: float = Field(default=0.0, ge=0)
    """As of `training.sft`."""


class CoresetSettings(Section):
    """A selection of the free samples for a round; no text twice while there are others."""

    size: int = Field(gt=0)
    """New samples of a round, as far as `trigger.max_samples` and the steps allow."""
    strategy: Literal["random", "diversity", "loss_topk", "hybrid"] = "random"
    """`random`: of those in the fewest finished rounds. `diversity`: questions with the fewest words in common.
    `loss_topk` (SFT): the least likely replies of a pool four times as large, but its top 1 %. `hybrid` (SFT): 60 %
    by `loss_topk`, the rest by `diversity`."""

    @property
    def is_by_loss(self) -> bool:
        """Whether the worker chooses, of a pool."""
        return self.strategy in ("loss_topk", "hybrid")

    @property
    def candidates(self) -> int:
        """The most samples that a round reserves for it."""
        return POOL * self.size if self.is_by_loss else self.size


class ReplaySettings(Section):
    """Tasks of earlier promoted rounds that a round trains on again, so that the policy does not forget them."""

    model_config = ConfigDict(allow_inf_nan=False)

    ratio: float = Field(default=0.3, gt=0, le=1)
    """Replayed tasks for each new one."""
    buffer: int = Field(default=4096, gt=0)
    """They are drawn among so many tasks of the last promoted rounds."""


def nearest_class(name: str) -> TaskClass | None:
    """The nearest class of one of SAGE's, by its name or a part of that, such as `planning`; None for other names."""
    return next((near for whole, near in SAGE_CLASSES.items() if f"_{name}_" in f"_{whole}_"), None)


def _task_weights(given: object) -> object:
    names = list(given) if isinstance(given, Mapping) else []
    for name in names:
        if (near := nearest_class(str(name))) is not None:
            raise ValueError(
                f"{name} is a class of SAGE, by words; classes here are by structure, the nearest: {near}"
            )
        if name not in set(TaskClass):
            raise ValueError(f"there is no class {name}; the classes are {', '.join(TaskClass)}")
    return given


def _some_weight(weights: Mapping[TaskClass, float]) -> Mapping[TaskClass, float]:
    if weights and not any(weights.values()):
        raise ValueError("all weights are 0: a round would have no samples")
    return weights


class GrpoSettings(Section):
    """Group relative policy optimization on rollouts of the policy (`training.stages` with `grpo`)."""

    model_config = ConfigDict(allow_inf_nan=False)

    steps: int = Field(default=50, gt=0)
    """Number of steps of GRPO. Each generates a batch of rollouts and trains on it."""
    prompts_per_step: int = Field(default=8, gt=0)
    """Different prompts per step, at most the tasks of the round."""
    group_size: int = Field(default=8, ge=4)
    """Rollouts per prompt. A group with fewer than 4 rewards, or with rewards within 0.02 (times
    `rollout.reward.range`), is not trained on."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    scheduler: Scheduler = "linear"
    """As of `training.sft`."""
    warmup_steps: float = Field(default=0.0, ge=0)
    """As of `training.sft`."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the policy the round starts from; 0 needs no reference model."""
    updates_per_batch: int = Field(default=1, gt=0)
    """Optimizer steps on each batch of rollouts."""
    clip_epsilon: float = Field(default=0.2, gt=0)
    """Lower clip range of the probability ratio; effective from the second update on a batch."""
    clip_epsilon_high: float = Field(default=0.28, gt=0)
    """Upper clip range, likewise."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """`dapo` (or `bnpo`): mean over all trained tokens of a step. `grpo`: mean per rollout, then over rollouts.
    `dr_grpo`: each rollout's sum divided by the maximum length."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What advantages are divided by: the standard deviation of the `group`'s or the `batch`'s rewards, at least 0.1
    (times `rollout.reward.range`), or nothing."""
    importance: Literal["truncated", "engine"] = "truncated"
    """How differences between engine and trainer log-probabilities are corrected. `truncated`: each token's loss is
    multiplied by its ratio, at most `importance_cap`. `engine`: the engine's are the old policy."""
    importance_cap: float = Field(default=3.0, ge=1)
    """Upper limit of that ratio."""
    mask_truncated: bool = False
    """Whether rollouts that a limit of tokens, turns or time cut are left out of the loss. Their rewards count in
    their groups in either case."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum gradient norm."""


def _without_defaults(schema: dict[str, Any]) -> None:
    schema["properties"].pop("margin", None)  # refused, see `OwnStage`
    for each in schema["properties"].values():
        each.pop("default", None)


class GivenSettings(Section):
    """Settings of which only those that are given count. The dump has no others."""

    model_config = ConfigDict(json_schema_extra=_without_defaults)

    @model_serializer(mode="wrap")
    def _given(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in whole(self).items() if name in self.model_fields_set}


class OwnSettings(GivenSettings):
    """Settings of one stage, each in the place of the default of its kind."""

    samples: int | None = Field(default=None, gt=0)
    """The largest number of tasks that the stage trains on. Default: its part of those of the round."""


class OwnSft(OwnSettings, SftSettings):
    """Of a stage of SFT."""


class OwnDpo(OwnSettings, DpoSettings):
    """Of a stage of DPO."""


class OwnGrpo(OwnSettings, GrpoSettings):
    """Of a stage of GRPO."""


class OwnStage(GivenSettings):
    """The name of a stage, with its own settings below it."""

    sft: OwnSft = OwnSft()
    dpo: OwnDpo = OwnDpo()
    grpo: OwnGrpo = OwnGrpo()

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("it must be one stage: sft, dpo or grpo, with its settings below it")
        if "margin" in self.dpo.model_fields_set:
            raise ValueError("dpo.margin: pairs are chosen for the round, by training.dpo.margin")
        return self


StageEntry = Annotated[
    Annotated[Stage, Tag(PLAIN)] | Annotated[OwnStage, Tag("own")],
    Discriminator(lambda given: PLAIN if isinstance(given, str) else "own"),
]


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage of a round, with the settings in effect for it.

    Attributes:
        number: Its place in `training.stages`, counted from 1.
        name: Its kind; with its number where the round has the kind more than once, such as `sft 2`.
        samples: The largest number of tasks that it trains on; None if there is no limit.
        training: Those of all stages, with its own in their place.
    """

    number: int
    kind: Stage
    name: str
    samples: int | None
    training: TrainingSettings


class TasksSettings(Section):
    """The stages of a round, and which tasks they train on."""

    model_config = ConfigDict(allow_inf_nan=False)

    stages: Annotated[list[StageEntry], Field(min_length=1)] = ["grpo"]
    """The stages of a round in order: `sft` trains on accepted replies, `dpo` on pairs, `grpo` on rollouts. Each
    starts from the adapter before; the gate tests the last. One may have settings of its own, such as `sft:
    {samples: 1000, epochs: 1}`: keys of `training.sft`, of `training.dpo` (but `margin`), or for `grpo` those from
    `steps` to `max_grad_norm`. `samples` is its largest number of tasks."""
    prompts: Literal["accepted", "decided"] = "accepted"
    """Which tasks rollouts are made of: those with an `accepted` reply, or all that the judge has `decided`. A task
    with a rejected reply is used by at most `max_uses` rounds, and by none after a promoted one."""
    task_weights: Annotated[
        dict[TaskClass, Annotated[float, Field(ge=0)]], BeforeValidator(_task_weights), AfterValidator(_some_weight)
    ] = {}
    """Relative numbers of tasks of each class: `several_turns`, `several_tools`, `one_tool`, `no_tools`; the first
    that fits. Classes that are not named are left out. Default: classes do not matter."""
    coreset: CoresetSettings | None = None
    """Default: the samples that were in the fewest finished rounds, and of these the oldest."""
    replay: ReplaySettings | None = None
    """Default: a round trains on no task of an earlier promoted one."""


class TrainingSettings(GrpoSettings, TasksSettings):
    micro_batch_size: int = Field(default=8, gt=0)
    """Rollouts of maximum length per forward and backward pass; more if they are shorter."""
    micro_batch_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens, with padding, per pass. A step that runs out of memory is repeated with fewer. Default:
    `micro_batch_size` × `rollout.max_model_len`."""
    workers: int = Field(default=1, gt=0)
    """Trainer processes, each with the whole model and a part of each step's samples. Each needs a GPU, which it may
    share with an engine. Not yet run on several GPUs."""
    overlap: Literal[0, 1] = 0
    """`1`: the next step's rollouts are generated and judged while a step is judged and trained on. They are one
    update old, which `importance` corrects."""
    save_steps: int = Field(default=10, gt=0)
    """Steps between checkpoints. A restarted round goes on from the last of two."""
    max_undecided_share: Share = 0.5
    """A round fails in a step with a larger share of undecided rewards or failed agent runs, or in a gate with more
    undecided answers."""
    judge_wait_seconds: float = Field(default=3600.0, ge=0)
    """How long a round waits for an unreachable judge. Then the waiting rollouts are undecided."""
    min_spread_share: Share = 0.0
    """A round is refused if at most this share of groups in its first two steps has different rewards."""
    images: Literal["leave-out", "text-only"] = "leave-out"
    """Tasks with an image in the question: `leave-out` excludes them, `text-only` uses their text, as `flywheel
    train` does."""
    inexact_prompts: Literal["leave-out", "use"] = "leave-out"
    """Tasks whose prompt is known not to be verbatim: `leave-out` excludes them from training and gate, `use` uses
    them, as `flywheel train` does."""
    on_collapse: Literal["refuse", "gate"] = "refuse"
    """A collapse under GRPO: for three steps the reward has fallen, and entropy is below a fifth or lengths changed
    threefold. `refuse` ends the round and frees its samples; `gate` tests the last checkpoint before."""
    max_uses: int = Field(default=3, gt=0)
    """Maximum compared rounds that use a sample. A rejected round frees samples that were used less often. A
    promoted one frees those of them without a gradient."""
    debug_prompts: int | None = Field(default=None, gt=0)
    """Prompts per step of `flywheel round --debug`. Default: `prompts_per_step`."""
    seed: int = Field(default=42, ge=0, lt=2**31)
    """Seed of a round, together with its number."""
    precision: Precision = "auto"
    """Numbers of the trainer's base model: `auto`, `float32` or `bfloat16`. `auto` keeps the checkpoint's; on a CPU
    with bfloat16 it computes in bfloat16. Adapter and optimizer are float32."""
    sft: SftSettings = SftSettings()
    dpo: DpoSettings = DpoSettings()
    lora: LoraSettings = LoraSettings()

    @model_validator(mode="before")
    @classmethod
    def _has_moved(cls, given: object) -> object:
        if isinstance(given, Mapping) and "tensorboard" in given:
            raise ValueError("tensorboard: use tracking.dir, with tracking.report_to: [tensorboard]")
        return given

    @property
    def planned(self) -> list[PlannedStage]:
        """The stages in their order."""
        given: list[tuple[Any, dict[str, Any]]] = [
            next(iter(each.model_dump().items())) if isinstance(each, OwnStage) else (each, {})
            for each in self.stages
        ]
        kinds, found = [kind for kind, _ in given], []
        for number, (kind, own) in enumerate(given, 1):
            name, samples = f"{kind} {number}" if kinds.count(kind) > 1 else kind, own.pop("samples", None)
            changes = own if kind == "grpo" else {kind: getattr(self, kind).model_copy(update=own)}
            found.append(PlannedStage(number, kind, name, samples, self.model_copy(update=changes)))
        return found

    @property
    def kinds(self) -> list[Stage]:
        """Those of the stages."""
        return [each.kind for each in self.planned]

    @property
    def of_grpo(self) -> list[TrainingSettings]:
        """The settings of each stage of GRPO, as those of a round of that stage alone; these if there is none."""
        found = [each.training for each in self.planned if each.kind == "grpo"]
        return [each.model_copy(update={"stages": ["grpo"]}) for each in found] or [self]

    def fitted(self, tasks: int, epochs: int | None = None) -> Self:
        """These for a round on so many tasks. A step of a stage asks no more prompts than there are tasks; with
        `epochs`, a stage of GRPO has as many steps as ask each of its tasks so often. Not checked: warm-up steps may
        not be below these."""

        def of(training: TrainingSettings, samples: int | None = None) -> dict[str, int]:
            count = min(tasks, samples or tasks)
            prompts = min(training.prompts_per_step, count)
            steps = training.steps if epochs is None else math.ceil(epochs * count / prompts)
            return {"prompts_per_step": prompts, "steps": steps}

        whole, stages = of(self), list(self.stages)
        for place, stage in enumerate(self.planned):
            if isinstance(entry := stages[place], OwnStage) and stage.kind == "grpo":
                own = of(stage.training, stage.samples)
                stages[place] = OwnStage(grpo=entry.grpo.model_copy(update=own))
        return self.model_copy(update={"stages": stages, **whole})

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        for stage in self.planned:
            each, where = stage.training, "" if stage.training == self else f"stages: {stage.name}: "
            if each.warmup_steps >= each.steps:
                why = f"warmup_steps {each.warmup_steps:g} is not below steps {each.steps}"
                raise ValueError(f"{where}{why}: the learning rate would never be reached")
            if each.dpo.label_smoothing and each.dpo.loss_type != "sigmoid":
                why = f"only the loss sigmoid has it, and loss_type is {each.dpo.loss_type}"
                raise ValueError(f"{where}dpo.label_smoothing: {why}")
        if self.prompts == "decided" and {*self.kinds} == {"sft"}:
            raise ValueError("prompts: sft trains on accepted replies; decided is for rollouts of grpo and dpo")
        if self.coreset is not None and self.coreset.is_by_loss:
            if self.kinds != ["sft"]:
                why = "a loss is that of a recorded reply: it is for stages [sft]; use diversity or random"
                raise ValueError(f"coreset: strategy {self.coreset.strategy}: {why}")
            if (samples := self.planned[0].samples) is not None:
                why = f"the stage takes its size, not samples {samples}: remove these, or use diversity or random"
                raise ValueError(f"coreset: strategy {self.coreset.strategy}: {why}")
            if self.replay is not None:
                raise ValueError(f"coreset: strategy {self.coreset.strategy} has no replay; use diversity or random")
        return self


Tracker = Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio", "console", "none"]


class TrackingSettings(Section):
    """Where the numbers of each step go besides `metrics.jsonl`, which always has them."""

    report_to: list[Tracker] = []
    """Trackers, which get one run per round with steps, settings and the gate's decision: `tensorboard`, `wandb`,
    `mlflow`, `swanlab`, `trackio`. Their own variables configure them. `console` and `none` change nothing."""
    project: str = Field(default="flywheel", min_length=1)
    """The project of the runs; MLflow calls it experiment."""
    dir: UserPath | None = None
    """Directory of what trackers write, with a folder for each round. Default: `tracking` in the state directory, or
    of a round on files."""

    def of_round(self, round_id: str, folder: Path) -> TrackingSettings:
        """The settings with the directory of a round, by default below `folder`."""
        return self.model_copy(update={"dir": (self.dir or folder / "tracking") / round_id})

    @property
    def trackers(self) -> list[str]:
        """The names in `report_to` that are trackers."""
        return [name for name in dict.fromkeys(self.report_to) if name in TRACKER_PACKAGES]


class ToolSettings(Section):
    """How tools answer in rollouts of `agent: recorded`."""

    share: Literal["agreeing", "off"] = "agreeing"
    """Results of other traces. `agreeing`: a result that at least two conversations have for the same call and none
    contradicts. `off`: the task's own trace alone. Training never uses held-out traces."""
    on_miss: Literal["end", "error"] = "end"
    """A call without a recorded result: `end` ends the rollout without a reward, `error` answers with an error. The
    gate always ends."""
    uncalled: Literal["leave-out", "use"] = "leave-out"
    """Training tasks that were offered tools and made no call: no recording can answer one. `leave-out`, or `use`
    them. The gate asks them if their answers were accepted."""


def _function(text: str, info: ValidationInfo) -> str:
    """`FILE.py:function`, `package.module:function`, or AgentJet's `FILE.py->Class` and `package.module->Class`, with
    an absolute path."""
    found = re.fullmatch(r"(?P<where>[^\n]+?)(?P<mark>:|->)(?P<name>[A-Za-z_]\w*)", text.strip())
    if found is None:
        raise ValueError("it must be `FILE.py:function` or `package.module:function`")
    where, mark, name = found.group("where", "mark", "name")
    if where.endswith(".py"):
        path = (info.context or Path()) / expanded(Path(where))
        where = str(tidied(path) if ".." in path.parts else path)
    elif not all(part.isidentifier() for part in where.split(".")):
        raise ValueError("it must be `FILE.py:function` or `package.module:function`")
    return f"{where}{mark}{name}"


Function = Annotated[str, AfterValidator(_function)]


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError("it must be the name of an environment variable")
    if name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"):
        raise ValueError("each rollout sets it for the policy; give the agent another variable")
    return name


class AgentProgramSettings(Section):
    """The user's own agent as what acts in a rollout: `workflow` or `command`."""

    workflow: Function | None = None
    """`async def run(task, model, auxiliary_models=None, logger=None)`, as `FILE.py:function` or
    `package.module:function`, or an AgentJet workflow as `package.module->Class`."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """A program and its arguments. It gets the task as JSON on standard input, and `OPENAI_BASE_URL`,
    `OPENAI_API_KEY`, `OPENAI_MODEL`. It prints JSON with `response`, `reward` and `metrics`."""
    python: UserPath | None = None
    """The Python interpreter that runs `workflow`. Default: that of the round."""
    folder: UserPath = Field(default=Path(), validate_default=True)
    """Working directory of its processes. Default: the folder of the configuration file."""
    isolation: Literal["process", "run"] = "process"
    """`process`: a process runs many rollouts in turn; variables, umask, `sys.path` and working directory are
    restored, globals are not. `run`: each has a new process."""
    config: Annotated[dict[str, Any], AfterValidator(without_secrets)] = {}
    """AgentJet's settings (`ajet: …`), over its defaults, which its classes get as `config`. What looks like a
    secret is left out."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.workflow is None) == (self.command is None):
            raise ValueError("it needs either `workflow` or `command`")
        if self.command is not None and self.python is not None:
            raise ValueError("python is for a workflow; a command names its own interpreter")
        return self


def _agent(given: object) -> object:
    if given is None or _kind_of_agent(given) == "program" or given in ("reply", "recorded"):
        return given
    raise ValueError("it must be reply, recorded, or a mapping with either `workflow` or `command`")


def _kind_of_agent(given: object) -> str:
    return "program" if isinstance(given, Mapping | AgentProgramSettings) else "name"


class AuxiliaryModelSettings(Section):
    """A model that the user's agent may ask besides the policy. It is never trained."""

    base_url: WebUrl
    """An OpenAI-compatible endpoint."""
    model: str
    """Name of the model."""
    api_key_env: str | None = None
    """Environment variable with its key. Default: no key."""


class RewardSettings(Section):
    """The reward of a rollout: the mean of the rubric's score and of the workflow's own reward by these weights."""

    model_config = ConfigDict(allow_inf_nan=False)

    rubric: float = Field(default=1.0, ge=0, le=1e6)
    """Weight of the rubric's score. With 0, rounds do not ask the judge."""
    workflow: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of the reward that the agent returns, or of `rollout.reward_function`. Without `rollout.reward` it is
    1, and the rubric's 0, if a round's first run returns a number and no response."""
    range: float = Field(default=1.0, gt=0, le=2 * LARGEST_REWARD)
    """Largest minus smallest reward that the agent or `reward_function` gives. It scales the limits 0.02 (equal
    rewards) and 0.1 (smallest divisor of advantages)."""

    @model_validator(mode="after")
    def _is_some(self) -> Self:
        if not self.rubric and not self.workflow:
            raise ValueError("rubric and workflow are both 0: nothing would be rewarded")
        if self.range != 1 and not self.workflow:
            raise ValueError("range is that of the workflow's reward, which has no weight: set workflow, too")
        return self


class RolloutSettings(Section):
    model_config = ConfigDict(allow_inf_nan=False)

    agent: Annotated[
        Annotated[
            Annotated[Literal["reply", "recorded"], Tag("name")] | Annotated[AgentProgramSettings, Tag("program")],
            Discriminator(_kind_of_agent),
        ]
        | None,
        BeforeValidator(_agent),
    ] = None
    """Who acts in a rollout. `reply`: one message of the policy; tasks with tools are then excluded from training
    and gate. `recorded`: a loop of policy and recorded tools. `{workflow: …}` or `{command: […]}`: your own agent.
    Default: `recorded` for tasks that were offered tools, else `reply`."""
    workers: int = Field(default=8, gt=0)
    """Processes per engine that run your agent, each with one rollout at a time."""
    agent_timeout_seconds: float = Field(default=600.0, gt=0)
    """Timeout of one rollout of your agent."""
    agent_memory_gb: float = Field(default=4.0, gt=0)
    """Maximum memory of a process of your agent, with what it starts, in GB (1,000,000,000 bytes)."""
    agent_environment: list[Annotated[str, AfterValidator(_variable)]] = []
    """Environment variables that your agent needs although they are named like secrets (`…_API_KEY`, `…_TOKEN`,
    `…_PASSWORD`). Others of such names do not reach it."""
    setup: Function | None = None
    """A function without parameters, `FILE.py:function`, that runs once in each such process."""
    auxiliary_models: dict[str, AuxiliaryModelSettings] = {}
    """Further models of the user's agent by name, which are never trained."""
    models: dict[str, Answering] = {}
    """Who answers where your agent asks for another model. `policy`: it answers and is trained on that. `auxiliary`:
    the model of `auxiliary_models` with this key or `model`. `refuse`: an error. Default: the auxiliary model, else
    the policy, with a warning."""
    reward: RewardSettings | None = None
    """Default: the first run of your own agent in a round decides."""
    reward_function: Function | None = None
    """`async def judge(task, response, auxiliary_models=None, logger=None)`, or an AgentJet judge as
    `package.module->Class`. Its reward replaces the workflow's."""
    loop_reward: float | None = Field(default=0.0, ge=-LARGEST_REWARD, le=LARGEST_REWARD)
    """Highest reward of a rollout in which a message repeats itself until its limit of tokens. `null`: no limit."""
    max_turns: int = Field(default=16, gt=0)
    """Maximum messages of the policy in a rollout with tools or of your agent. It then ends as truncated."""
    finish_tools: list[str] = ["generate_response"]
    """Tools whose call ends a rollout, with its argument as the answer, besides those of AgentScope and Pydantic
    AI."""
    tools: ToolSettings = ToolSettings()
    oversample: float = Field(default=1.0, ge=1, le=8)
    """Prompts that a step asks, as a multiple of `training.prompts_per_step`. Groups that cannot be trained on are
    dropped; at most `prompts_per_step` are kept."""
    engines: int = Field(default=1, gt=0)
    """vLLM engines of a round, one Ray actor each."""
    tensor_parallel: int = Field(default=1, gt=0)
    """GPUs of one engine (vLLM's `tensor_parallel_size`), on one node. Above 1, the trainer needs a GPU of its own.
    Not yet run on several GPUs."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of rollouts."""
    max_completion_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of a training rollout. Default: the 99th percentile of the traced replies; for your agent
    `max_model_len`. The gate has the server's limits."""
    max_turn_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of one message in a training rollout. Default: what is left of the rollout."""
    max_model_len: int = Field(default=4096, gt=0)
    """Maximum tokens of prompt and rollout or recorded reply together. Longer ones are excluded from training."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Timeout of one batch of rollouts, for your agent at least what its own timeout gives all runs. A longer answer
    of the gate is cut and graded."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory for an engine. Default: 0.9 on a GPU of its own, 0.45 if two processes share it, and
    so on."""
    cpu_kv_cache_gib: int = Field(default=1, gt=0)
    """Key-value cache of an engine without a GPU, in GiB."""

    @model_validator(mode="after")
    def _is_for_the_agent(self) -> Self:
        if not isinstance(self.agent, AgentProgramSettings):
            given = {
                "reward.workflow": self.weights.workflow,
                "reward_function": self.reward_function,
                "setup": self.setup,
                "agent_environment": self.agent_environment,
                "auxiliary_models": self.auxiliary_models,
                "models": self.models,
            }
            if found := next((name for name, value in given.items() if value), None):
                raise ValueError(f"{found} is for your own agent: set agent to {{workflow: …}} or {{command: […]}}")
        elif self.reward_function is not None and not self.weights.workflow:
            raise ValueError("reward_function has no effect while reward.workflow is 0: give it a weight")
        known = {*self.auxiliary_models, *(each.model for each in self.auxiliary_models.values())}
        for name, who in self.models.items():
            if who == "auxiliary" and name not in known:
                raise ValueError(f"models: {name}: auxiliary_models has no model of that name: add one")
        return self

    @property
    def weights(self) -> RewardSettings:
        """What `reward` says, or its default as long as no run has decided."""
        return self.reward or RewardSettings()

    def prompts_asked(self, prompts_per_step: int) -> int:
        """Number of prompts that a step asks to train on so many. 1.1 times 10 are 11, also in floating point."""
        return math.ceil(round(prompts_per_step * self.oversample, 6))


FEWEST_ANSWERS, MOST_ANSWERS = 3, 8
"""Number of answers per adapter, and bounds per task, if `samples` is not set."""


class SuiteSettings(Section):
    """A fixed set of tasks on which a candidate is compared as well, so that it does not forget what they ask for."""

    file: UserPath
    """The tasks, in any form that `flywheel train sft --data` reads. Rounds do not train on them, nor on tasks that
    begin nearly alike."""
    rubric: UserPath | None = None
    """Path of their rubric. Default: that of the round."""
    margin: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest acceptable loss in score (0…1): the lower bound of the gain, at `gate.confidence`, must be above minus
    it. Sets with too few tasks for that are refused. Default: the set is only reported."""


class GateSettings(Section):
    mode: Literal["auto", "manual"] = "auto"
    """When a candidate passes, `auto` deploys it. With `manual` it waits for `flywheel deploy` or the web page, at
    most `deploy.approval_days`; other rounds go on."""
    max_tasks: int = Field(default=200, gt=0)
    """Maximum held-out tasks that both adapters answer, the newest."""
    min_tasks: int = Field(default=8, gt=0)
    """Minimum judged held-out tasks. No round starts with fewer."""
    samples: int | None = Field(default=None, gt=0)
    """Answers per task and adapter. Default: about 600 per adapter, 3 to 8 per task."""
    temperature: float | None = Field(default=None, gt=0, le=2)
    """Sampling temperature of these answers; use that of the agent's requests. Default: the server's."""
    alpha: float = Field(default=0.004, gt=0, lt=0.5)
    """One-sided error budget of all rounds on the same held-out conversations. With the default, at most 5 % of runs
    of 20 useless rounds promote anything."""
    min_gain: float = Field(default=0.0, ge=0)
    """A candidate is promoted if the lower bound of its gain is above this value."""
    min_power: float = Field(default=0.3, ge=0, lt=1)
    """No round starts whose gate would detect a gain of 0.1 with a smaller probability. 0: every round starts."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of intervals of single criteria and suites. They use nothing of `alpha`."""
    non_inferiority_margins: dict[str, Annotated[float, Field(gt=0, le=1)]] = {}
    """Criteria that must not get worse, with the largest acceptable loss (0…1): the lower bound of each gain must be
    above minus it."""
    tripwires: bool = True
    """Whether shown harm that a mean hides prevents a promotion: answers twice or half as long, cut answers, failed
    tool calls, invalid formats."""
    suites: dict[str, SuiteSettings] = {}
    """Fixed sets of tasks that candidate and deployed adapter also answer, by name (letters, digits and `_.-`)."""

    @model_validator(mode="after")
    def _has_names(self) -> Self:
        for name in self.suites:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
                raise ValueError(f"suites: `{name}` is no name of a suite: use letters, digits and `_.-`")
        return self

    def samples_for(self, tasks: int) -> int:
        """Number of answers per adapter and task, for this number of tasks."""
        return self.samples or max(FEWEST_ANSWERS, min(MOST_ANSWERS, ANSWERS // max(tasks, 1)))


class RaySettings(Section):
    address: str | None = None
    """Address of an existing Ray cluster. Default: a local one during the round."""
    working_dir: UserPath | None = None
    """Folder that Ray copies to each node: that of your own agent. Default: its files must be at the same paths on
    all nodes."""
    placement_seconds: float = Field(default=300.0, gt=0)
    """How long a round waits for the cluster's resources. Then it fails, and may be tried again."""

    @model_validator(mode="after")
    def _is_for_a_cluster(self) -> Self:
        if self.working_dir is not None and self.address is None:
            raise ValueError("working_dir is for nodes of a cluster: set address, or remove it")
        return self


class RetentionSettings(Section):
    model_config = ConfigDict(allow_inf_nan=False)

    keep_days: float | None = Field(default=90.0, ge=0, le=36_500)
    """Days that adapter, rollouts and log of a finished round are kept. Specification, results and adapters in use
    are always kept. `null` keeps everything."""
    keep_served: int = Field(default=5, ge=0)
    """Number of last served adapters that are kept regardless of age."""
