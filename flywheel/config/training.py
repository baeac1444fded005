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
    """Maximum number of samples of a round: first those that were in the fewest finished rounds, then the oldest.
    `training.task_weights`, `training.coreset` and `training.replay` choose otherwise."""
    cron: Annotated[str, AfterValidator(_crontab)] | None = None
    """A schedule (crontab, UTC) on which a round also starts, with at least `cron_min_samples`. As in cron, 0 and 7
    are Sunday, `@daily` and its kind are taken, and where day of the month and day of the week are both restricted,
    one of them suffices. `flywheel config show` and `flywheel status` print the next times."""
    cron_min_samples: int = Field(default=8, gt=0)
    """Minimum number of samples for a scheduled round."""
    min_held_out: int | None = Field(default=None, gt=0)
    """Number of judged held-out tasks that a round waits for. Default: `gate.min_tasks`; lower values are refused,
    because such a round could only be rejected."""

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
    """The base model: a local directory or a hub name, as for vLLM and transformers."""
    alias: Annotated[str, AfterValidator(_alias)] = "my-agent"
    """The stable model name that agents call, without an `@`. Versions are served as `ALIAS@rNNNN`. With `targets`,
    each target's alias takes its place."""
    trainer_quantization: Quantization | None = None
    """Holds the trainer's frozen base model in `4bit` or `8bit` (bitsandbytes, the extra `quantized`), to save memory
    of its GPU. Engines, gate and server keep `base` as it is. A round is refused without a GPU, and fails if the
    first step's `logprob_gap` is above 0.2. Experimental: of rounds on a GPU, only its trainer has been run."""


class TargetSettings(Section):
    """An agent of its own among several: its tasks, alias, rounds and gate."""

    alias: Annotated[str, AfterValidator(_alias)] | None = None
    """The model name that this agent calls. Default: the target's name."""
    agents: list[str] | None = None
    """Names of the agents in traces whose replies are tasks of this target. Default: the target's name. A reply that
    was answered under the target's alias is one, too."""
    rubric: UserPath | None = None
    """Path of the rubric for its tasks. Default: `filter.rubric`."""
    min_samples: int | None = Field(default=None, gt=0)
    """Number of free samples that starts a round. Default: `trigger.min_samples`."""


class LoraSettings(Section):
    """Configuration of new adapters. A round that continues from an adapter keeps the adapter's configuration."""

    model_config = ConfigDict(allow_inf_nan=False)

    r: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Rank, one of those that vLLM supports. A round continues from the deployed adapter in its configuration;
    changes of this section take effect after `flywheel rollback --to base`."""
    alpha: float = Field(default=32, gt=0)
    """Scale: the adapter's output is multiplied by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input. Above 0, the trainer's logprobs differ from the engine's."""
    target_modules: Annotated[str | list[str], BeforeValidator(_target_modules), AfterValidator(_are_trainable)] = (
        "all-linear"
    )
    """Layers with an adapter: a list of names, one regular expression, or `all-linear`, which is all linear layers
    but the output layer. `lm_head` and `embed_tokens` cannot have one."""


Stage = Literal["sft", "dpo", "grpo"]
Answering = Literal["policy", "auxiliary", "refuse"]
Precision = Literal["auto", "float32", "bfloat16"]
Scheduler = Literal["linear", "cosine", "constant"]


class SftSettings(Section):
    """Supervised fine-tuning on accepted replies (`training.stages` with `sft`)."""

    model_config = ConfigDict(allow_inf_nan=False)

    reasoning: Literal["leave-out", "empty"] = "leave-out"
    """Replies whose reasoning was not recorded, where the chat template writes reasoning: `leave-out` does not train
    on them, `empty` trains on them without reasoning, which teaches the model not to reason."""
    batch_size: int = Field(default=8, gt=0)
    """Number of replies per optimizer step."""
    epochs: int = Field(default=3, gt=0)
    """How often each reply is trained on."""
    learning_rate: float = Field(default=2e-4, gt=0)
    """Peak learning rate."""
    scheduler: Scheduler = "linear"
    """How the learning rate decays to 0; `constant` keeps it."""
    warmup_steps: float = Field(default=0.0, ge=0)
    """Number of warm-up steps, fewer than there are steps; below 1 a share of all steps."""


class DpoSettings(Section):
    """Direct preference optimization on pairs of a better and a worse reply (`training.stages` with `dpo`)."""

    model_config = ConfigDict(allow_inf_nan=False)

    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is kept near the one that the stage starts from."""
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """The loss: of the DPO paper (`sigmoid`), of SLiC (`hinge`), or of IPO (`ipo`)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs in which the worse reply is the better one (conservative DPO); for `sigmoid` alone."""
    margin: float = Field(default=0.1, gt=0, le=1)
    """Smallest difference between the rewards, or the scores, of the two replies of a pair."""
    batch_size: int = Field(default=8, gt=0)
    """Number of pairs per optimizer step."""
    epochs: int = Field(default=1, gt=0)
    """How often each pair is trained on."""
    learning_rate: float = Field(default=5e-6, gt=0)
    """Peak learning rate."""
    scheduler: Scheduler = "linear"
    """How the learning rate decays to 0; `constant` keeps it."""
    warmup_steps: float = Field(default=0.0, ge=0)
    """Number of warm-up steps, fewer than there are steps; below 1 a share of all steps."""


class CoresetSettings(Section):
    """A selection of the free samples for a round; no text twice while there are others."""

    size: int = Field(gt=0)
    """New samples of a round, if so many fit into `trigger.max_samples` and into its steps."""
    strategy: Literal["random", "diversity", "loss_topk", "hybrid"] = "random"
    """`random`: of those that were in the fewest finished rounds. `diversity`: those whose questions have the fewest
    words in common with each other. `loss_topk`, for SFT: of a pool of four times as many, those replies that are the
    least likely to the policy, without the top 1 %, which are set aside: wrong labels are among them. `hybrid`, for
    SFT: 60 % by `loss_topk`, the rest by `diversity`."""

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
    """The tasks among which they are drawn: so many of the last promoted rounds."""


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
    """Number of steps of GRPO, each of which generates a batch of rollouts and trains on it."""
    prompts_per_step: int = Field(default=8, gt=0)
    """Number of different prompts per step, at most the tasks of the round."""
    group_size: int = Field(default=8, ge=4)
    """Number of rollouts per prompt, which GRPO compares with each other. A group with fewer than 4 rewards, or with
    rewards within 0.02 (times `rollout.reward.range`), is not trained on."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    scheduler: Scheduler = "linear"
    """How the learning rate decays to 0; `constant` keeps it."""
    warmup_steps: float = Field(default=0.0, ge=0)
    """Number of warm-up steps of the learning rate, fewer than there are steps; below 1 a share of all steps."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the policy the round starts from; 0 needs no reference model."""
    updates_per_batch: int = Field(default=1, gt=0)
    """Number of optimizer steps on each batch of rollouts."""
    clip_epsilon: float = Field(default=0.2, gt=0)
    """Lower clip range of the probability ratio; effective from the second update on a batch."""
    clip_epsilon_high: float = Field(default=0.28, gt=0)
    """Upper clip range of the probability ratio; effective from the second update on a batch."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """Aggregation of token losses over a step: `dapo` is the mean over all trained tokens (`bnpo` is the same),
    `grpo` the mean over each rollout's tokens and then over rollouts, `dr_grpo` each rollout's sum divided by the
    maximum length."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What advantages are divided by: the standard deviation of the group's rewards, or of the step's (`batch`), each
    at least 0.1 (times `rollout.reward.range`); or nothing."""
    importance: Literal["truncated", "engine"] = "truncated"
    """How the difference between the engine's and the trainer's log-probabilities is treated. `truncated`: each
    token's loss is multiplied by its ratio of trainer to engine, at most `importance_cap`. `engine`: the engine's
    log-probabilities are the old policy, and the clip range applies to them from the first update."""
    importance_cap: float = Field(default=3.0, ge=1)
    """Upper limit of that ratio (`importance: truncated`)."""
    mask_truncated: bool = False
    """Whether rollouts that a limit of tokens, turns or time cut are left out of the loss, other than one that your
    agent sets for its own call. Their rewards count in their groups in either case."""
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
    """The stages of a round in their order. `grpo` trains on rollouts of the policy, `sft` on accepted replies, `dpo`
    on pairs of a better and a worse reply. Each starts from the adapter of the one before; the gate tests the last.
    Stages of one round train on different conversations. One may have settings of its own, such as
    `sft: {samples: 1000, epochs: 1}`: those of `training.sft`, of `training.dpo` (but `margin`), or for `grpo` those
    from `steps` to `max_grad_norm` in this section, which are the defaults; and `samples`, the largest number of
    tasks that it takes."""
    prompts: Literal["accepted", "decided"] = "accepted"
    """Which tasks rollouts are made of: those with an `accepted` reply, or all on which the judge has `decided`.
    Policies fail more often on prompts with a rejected reply, so that more groups have rewards that differ. Such a
    task is used by at most `max_uses` rounds, and by none after a promoted one."""
    task_weights: Annotated[
        dict[TaskClass, Annotated[float, Field(ge=0)]], BeforeValidator(_task_weights), AfterValidator(_some_weight)
    ] = {}
    """Relative numbers of tasks of each class in a round: `several_turns`, `several_tools` (the reply called
    different tools), `one_tool` and `no_tools`; the first that fits. Classes that are not named are left out. If a
    class has too few, the others are scaled. Default: classes do not matter."""
    coreset: CoresetSettings | None = None
    """Default: the samples that were in the fewest finished rounds, and of these the oldest."""
    replay: ReplaySettings | None = None
    """Default: a round trains on no task of an earlier promoted one."""


class TrainingSettings(GrpoSettings, TasksSettings):
    micro_batch_size: int = Field(default=8, gt=0)
    """Rollouts of maximum length per forward and backward pass; more of them if they are shorter."""
    micro_batch_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens, with padding, per forward and backward pass; a longer sample has a pass of its own. A step that
    runs out of memory is repeated with fewer, which the following steps keep. Default: `micro_batch_size` ×
    `rollout.max_model_len`."""
    workers: int = Field(default=1, gt=0)
    """Number of processes of the trainer. Each has all of the model and takes a part of each step's samples, so that
    the step has the gradient of one process. With GPUs, each process needs one of its own, which it may share with an
    engine. It has not been run on several GPUs yet."""
    overlap: Literal[0, 1] = 0
    """`1`: the rollouts of the next step are generated and judged while those of a step are judged and trained on.
    They are then one update old, which `importance` corrects. The page of a round says how much time it would have
    saved."""
    save_steps: int = Field(default=10, gt=0)
    """Number of steps after which the trainer writes a checkpoint. A round that is started again goes on from the
    last one of two, and trains the steps behind it again from their stored rollouts, without engine and judge."""
    max_undecided_share: Share = 0.5
    """A step with a larger share of undecided rewards, or of failed runs of the user's agent, fails the round, and so
    does an adapter with more undecided answers in the gate. Rollouts that ended because a call has no recorded result
    are not undecided."""
    judge_wait_seconds: float = Field(default=3600.0, ge=0)
    """Seconds that a round waits for an unreachable judge. After that, the waiting rollouts are undecided."""
    min_spread_share: Share = 0.0
    """A round is refused if at most this share of the groups in its first two steps has different rewards, because
    there is nothing to learn."""
    images: Literal["leave-out", "text-only"] = "leave-out"
    """Tasks with an image in the question, which prompts of a round cannot include: `leave-out` excludes them from
    training and gate, `text-only` uses their text alone. `flywheel train` always does."""
    inexact_prompts: Literal["leave-out", "use"] = "leave-out"
    """Tasks whose prompt is known to differ from what the model received (`metadata.prompt_exact`): `leave-out`
    excludes them from training and gate, `use` uses them as they are. `flywheel train` uses all rows of its file."""
    on_collapse: Literal["refuse", "gate"] = "refuse"
    """What happens when the policy collapses while GRPO trains it: in three steps in a row its entropy is below a
    fifth of that of the first two, or its completions are three times longer or shorter, and the reward has fallen.
    `refuse` ends the round, and its samples are free again; `gate` tests the last checkpoint before these steps, if
    there is one."""
    max_uses: int = Field(default=3, gt=0)
    """Maximum number of compared rounds that use a sample: a rejected round releases samples that were used less
    often, a promoted one those of them that gave no gradient."""
    debug_prompts: int | None = Field(default=None, gt=0)
    """Number of prompts per step of `flywheel round --debug`. Default: `prompts_per_step`."""
    seed: int = Field(default=42, ge=0, lt=2**31)
    """Seed of a round, together with its number."""
    precision: Precision = "auto"
    """Numbers of the trainer's base model; adapter and optimizer are always float32. `float32` computes in it,
    `bfloat16` holds and computes in it. `auto` keeps the checkpoint's own numbers; of a half-precision one on a CPU
    with bfloat16 instructions it holds float32 and computes in bfloat16, which is faster than `float32`."""
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
    """Experiment trackers. Each gets one run per round: the figures of its steps, its settings, and at its end the
    gate's decision. Their packages must be installed where rounds train (`tensorboardX`, `wandb`, `mlflow`,
    `swanlab`, `trackio`). They are configured by their own environment variables, such as `WANDB_MODE=offline` and
    `MLFLOW_TRACKING_URI`. `console` and `none` change nothing."""
    project: str = Field(default="flywheel", min_length=1)
    """The project of the runs; MLflow calls it experiment."""
    dir: UserPath | None = None
    """The directory of what trackers write, with a folder for each round (`tensorboard --logdir DIR`). Default:
    `tracking` in the state directory; for a round on files, in its own directory."""

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
    """Results of other traces: `agreeing` uses a result that at least two conversations have for the same call and
    none differs from, up to 8 MiB of results in a round; `off` uses those of the task's own trace alone. Training
    never uses held-out traces."""
    on_miss: Literal["end", "error"] = "end"
    """What happens on a call without a recorded result: `end` ends the rollout without a reward, `error` lets the
    tool answer with an error. The gate always ends them."""
    uncalled: Literal["leave-out", "use"] = "leave-out"
    """Training tasks that were offered tools and made no call: no recording could answer one, so that rollouts
    without a call are the only ones that get a reward. `use` trains on them. The gate asks them if their answers were
    accepted."""


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
    """A function by the contract of AgentScope's tuner, `async def run(task, model, auxiliary_models=None,
    logger=None)`, as `FILE.py:function` (relative to the configuration file) or `package.module:function`, or an
    AgentJet workflow as `package.module->Class`."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """A program and its arguments. It gets the task as JSON on standard input, `OPENAI_BASE_URL`, `OPENAI_API_KEY`
    and `OPENAI_MODEL` in its environment, and writes one JSON object with `response`, `reward` and `metrics` to
    standard output."""
    python: UserPath | None = None
    """The Python interpreter that runs `workflow`, for an agent with an environment of its own. Default: the one of
    the round."""
    folder: UserPath = Field(default=Path(), validate_default=True)
    """The working directory of its processes. Default: the folder of the configuration file."""
    isolation: Literal["process", "run"] = "process"
    """With `process`, a process runs many rollouts, one after the other: environment variables, umask, `sys.path` and
    the working directory are restored after each, globals are not. With `run`, each has a process of its own, set up
    anew."""
    config: Annotated[dict[str, Any], AfterValidator(without_secrets)] = {}
    """AgentJet's settings (`ajet: …`), over its defaults, which AgentJet's classes get as `config`. Of its own
    configuration, all of them. What looks like a secret is left out."""

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
    """Name of the environment variable with its key. Default: no key."""


class RewardSettings(Section):
    """The reward of a rollout: the mean of the rubric's score and of the workflow's own reward by these weights."""

    model_config = ConfigDict(allow_inf_nan=False)

    rubric: float = Field(default=1.0, ge=0, le=1e6)
    """Weight of the rubric's score. With 0, rounds do not ask the judge."""
    workflow: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of the reward that the workflow or command returns, or of `rollout.reward_function`. Without
    `rollout.reward`, it is 1, and that of the rubric 0, if the first run of a round returns a number and no
    response."""
    range: float = Field(default=1.0, gt=0, le=2 * LARGEST_REWARD)
    """The largest minus the smallest reward that the workflow, command or `reward_function` gives. It multiplies the
    0.02 within which rewards of a group count as equal, and the 0.1 that advantages are at least divided by. With a
    weight of the rubric, whose scores have the range 1, the weighted mean of both does."""

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
    """Who acts in a rollout: `reply` is one message of the policy, `recorded` a loop of the policy and tools that
    answer from recordings, `{workflow: …}` or `{command: […]}` the user's own agent. Default: `recorded` for tasks
    that were offered tools, `reply` for the others. With `reply`, tasks with tools are excluded from training and
    gate."""
    workers: int = Field(default=8, gt=0)
    """Number of processes per engine that run the user's agent, each of which runs one rollout at a time."""
    agent_timeout_seconds: float = Field(default=600.0, gt=0)
    """Timeout in seconds of one rollout of the user's agent."""
    agent_memory_gb: float = Field(default=4.0, gt=0)
    """Maximum memory of a process that runs the user's agent, with what it starts, in GB (1,000,000,000 bytes)."""
    agent_environment: list[Annotated[str, AfterValidator(_variable)]] = []
    """Names of environment variables that the user's agent needs although they are named like secrets, for example
    the key of a search tool. Variables such as `…_API_KEY`, `…_TOKEN` and `…_PASSWORD` do not reach it otherwise."""
    setup: Function | None = None
    """A function without parameters, `FILE.py:function`, that runs once in each such process, before its first
    rollout."""
    auxiliary_models: dict[str, AuxiliaryModelSettings] = {}
    """Further models of the user's agent by name, which are never trained."""
    models: dict[str, Answering] = {}
    """Who answers where the agent asks the policy's address for a model of another name: `policy`, which is then
    trained on the answers, `auxiliary`, the model of `auxiliary_models` with this key or this `model`, or an error
    (`refuse`). Default: the auxiliary model of that name; for any other name the policy, with a warning."""
    reward: RewardSettings | None = None
    """Default: the first run of your own agent in a round decides."""
    reward_function: Function | None = None
    """A function by the contract of the tuner's judges, `async def judge(task, response, auxiliary_models=None,
    logger=None)`, or an AgentJet judge as `package.module->Class`. Its reward replaces that of the workflow."""
    loop_reward: float | None = Field(default=0.0, ge=-LARGEST_REWARD, le=LARGEST_REWARD)
    """Reward of a rollout in which a message loops that was cut off at its limit of tokens, whoever rewards it, where
    its own is not less. With `null`, it has its own. A loop that ended by itself is left to who rewards it."""
    max_turns: int = Field(default=16, gt=0)
    """Maximum messages of the policy in a rollout of `recorded` or of the user's agent; it then ends as truncated."""
    finish_tools: list[str] = ["generate_response"]
    """Tools whose call ends a rollout, with its argument as the answer, beside those of AgentScope
    (`generate_response`, `GenerateStructuredOutput`) and Pydantic AI (`final_result`)."""
    tools: ToolSettings = ToolSettings()
    oversample: float = Field(default=1.0, ge=1, le=8)
    """Prompts that a step asks, as a multiple of `training.prompts_per_step`. Groups that cannot be trained on are
    dropped, and at most `prompts_per_step` groups are kept."""
    engines: int = Field(default=1, gt=0)
    """Number of vLLM engines of a round, one Ray actor each."""
    tensor_parallel: int = Field(default=1, gt=0)
    """Number of GPUs of one engine, which share the base model's weights (vLLM's `tensor_parallel_size`). Above 1,
    engines × tensor_parallel GPUs and one for the trainer must be there, those of an engine on one node. It has not
    been run on several GPUs yet."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of rollouts."""
    max_completion_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of a training rollout. Default: the 99th percentile of the traced replies of the round's tasks,
    limited by `max_model_len`; for the user's agent `max_model_len`. The gate's answers have the server's limits."""
    max_turn_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of one message of the policy in a training rollout. Default: those that are left of the
    rollout."""
    max_model_len: int = Field(default=4096, gt=0)
    """Maximum tokens of prompt and rollout, or of prompt and recorded reply, together. Longer prompts and replies are
    excluded from training."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Timeout in seconds of one batch of rollouts. An answer of the gate that takes longer is cut and graded as it
    is. A batch of the user's agent has at least the time that `agent_timeout_seconds` gives all of its runs."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory for a rollout engine. Default: 0.9 on a GPU of its own, 0.45 if two processes share it
    (an engine and the trainer, or two engines), and so on."""
    cpu_kv_cache_gib: int = Field(default=1, gt=0)
    """Size of the key-value cache of a rollout engine without a GPU, in GiB."""

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
    """The tasks, in any form that `flywheel train sft --data` reads. Rounds train on none of them, nor on tasks that
    begin nearly alike."""
    rubric: UserPath | None = None
    """Path of the rubric for them. Default: that of the round."""
    margin: Annotated[float, Field(gt=0, le=1)] | None = None
    """The largest acceptable loss in score (0…1): a candidate is promoted only if the lower bound of its gain on the
    suite, at `gate.confidence`, is above minus the margin. Suites with too few tasks for that are refused. Default:
    the suite is reported and prevents nothing."""


class GateSettings(Section):
    mode: Literal["auto", "manual"] = "auto"
    """What follows when the gate has passed a candidate. `auto`: it is deployed. `manual`: its round waits in the
    state `passed` for `flywheel deploy` or the page of the round, at most `deploy.approval_days`; other rounds go
    on."""
    max_tasks: int = Field(default=200, gt=0)
    """Maximum number of held-out tasks that both adapters answer; the newest are used."""
    min_tasks: int = Field(default=8, gt=0)
    """Minimum number of decided held-out tasks. No round starts with fewer."""
    samples: int | None = Field(default=None, gt=0)
    """Number of answers per task and adapter. Default: about 600 per adapter, from 3 to 8 per task."""
    temperature: float | None = Field(default=None, gt=0, le=2)
    """Sampling temperature of these answers; set it to that of the agent's requests. Default: the server's. All other
    sampling parameters are always the server's."""
    alpha: float = Field(default=0.004, gt=0, lt=0.5)
    """One-sided error budget: the probability that all rounds on the same held-out conversations together promote an
    adapter that is not better. Test k gets 6 / (π² k²) of it. At 0.004, at most one in twenty sequences of twenty
    rounds without improvement promotes an adapter, however fast new conversations arrive."""
    min_gain: float = Field(default=0.0, ge=0)
    """A candidate is promoted if the lower bound of its gain, at the level of its test, is above this value."""
    min_power: float = Field(default=0.3, ge=0, lt=1)
    """Minimum power: no round starts whose gate would detect a gain of 10 points (0.1) with a smaller probability. 0:
    every round starts."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of the intervals of single criteria (`non_inferiority_margins`) and of suites; they use nothing of
    `alpha`."""
    non_inferiority_margins: dict[str, Annotated[float, Field(gt=0, le=1)]] = {}
    """Criteria that must not get worse, with the largest acceptable loss of each (0…1): a candidate is promoted only
    if the lower bound of each one's gain is above minus its margin. Default: none; the rubric's weights decide."""
    tripwires: bool = True
    """Whether harm that a mean score hides prevents a promotion: answers over twice or under half as long, cut
    answers, failed tool calls, invalid formats. Only harm that is shown does."""
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
    """Address of an existing Ray cluster. Default: a local one for the duration of the round."""
    working_dir: UserPath | None = None
    """A folder that Ray copies to each node of the cluster: that of your own agent (`rollout.agent`). Its files in
    there run from the copy. Default: they must be at the same paths on all nodes."""
    placement_seconds: float = Field(default=300.0, gt=0)
    """Seconds that a round waits for the cluster's resources for all its processes. Then it fails, and may be tried
    again."""

    @model_validator(mode="after")
    def _is_for_a_cluster(self) -> Self:
        if self.working_dir is not None and self.address is None:
            raise ValueError("working_dir is for nodes of a cluster: set address, or remove it")
        return self


class RetentionSettings(Section):
    model_config = ConfigDict(allow_inf_nan=False)

    keep_days: float | None = Field(default=90.0, ge=0, le=36_500)
    """Days that the adapter, rollouts and log of a round are kept after its end. Specification and results are always
    kept, and so are the deployed adapter, the one to roll back to, and the parent of the running round. `null` keeps
    everything."""
    keep_served: int = Field(default=5, ge=0)
    """Number of the last served adapters that are kept regardless of their age."""
