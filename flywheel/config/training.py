"""Rounds: when they start, what they train, how they are decided."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from apscheduler.triggers.cron import CronTrigger
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from flywheel.config.section import Section, Share
from flywheel.exclusion import Exclusion
from flywheel.files import expanded


def _crontab(text: str) -> str:
    try:
        CronTrigger.from_crontab(text, timezone="UTC")
    except ValueError:
        raise ValueError("it must be five fields of crontab(5), for example `0 3 * * *`") from None
    return text


def _target_modules(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("it must be a list of names, one regular expression, or `all-linear`")
    return value


def _model(name: str) -> str:
    return str(expanded(Path(name))) if name.startswith("~") else name


def _alias(name: str) -> str:
    if not name.strip() or name != name.strip() or not name.isprintable():
        raise ValueError("it must be a name: not empty, in one line, without spaces around it")
    if "@" in name:
        raise ValueError("it must not have an @: versions of it are served as ALIAS@rNNNN")
    return name


class TriggerSettings(Section):
    min_samples: int = Field(default=64, gt=0)
    """A round starts when this many accepted samples are free."""
    max_samples: int = Field(default=2048, gt=0)
    """A round takes this many samples at most: first those that were in fewest rounds without promotion, then the
    oldest."""
    cron: Annotated[str, AfterValidator(_crontab)] | None = None
    """A window (crontab, UTC) in which a round also starts, with at least `cron_min_samples`."""
    cron_min_samples: int = Field(default=8, gt=0)
    """Fewer samples than this never start a round."""
    min_held_out: int | None = Field(default=None, gt=0)
    """A round waits until this many held-out tasks are judged, for the gate to ask. Default: `gate.min_tasks`; fewer
    are refused, because such a round can only be rejected."""


class ModelSettings(Section):
    base: Annotated[str, AfterValidator(_model)] = "Qwen/Qwen3-4B"
    """The base model: a local directory or a hub name, as vLLM and transformers take it."""
    alias: Annotated[str, AfterValidator(_alias)] = "my-agent"
    """The stable model name that agents call, without an `@`. Versions are served as `ALIAS@rNNNN`."""


class LoraSettings(Section):
    """How an adapter is made. A round that goes on from one keeps its form."""

    model_config = ConfigDict(allow_inf_nan=False)

    r: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Rank. vLLM serves only these. A round goes on from the adapter that serves in the form that it has: to change
    this section takes effect after `flywheel rollback --to base`."""
    alpha: float = Field(default=32, gt=0)
    """Scale: the update is multiplied by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input. Above 0, the trainer's logprobs differ from the engine's."""
    target_modules: Annotated[str | list[str], BeforeValidator(_target_modules)] = "all-linear"
    """Which layers get an adapter: a list of names, one regular expression, or `all-linear`."""


class TrainingSettings(Section):
    model_config = ConfigDict(allow_inf_nan=False)

    steps: int = Field(default=50, gt=0)
    """Steps of one round: each makes a batch of rollouts and learns from it."""
    prompts_per_step: int = Field(default=8, gt=0)
    """Different prompts per step."""
    group_size: int = Field(default=8, gt=1)
    """Rollouts per prompt; GRPO compares them with each other."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate; it decays linearly to 0."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the policy the round starts from; 0 needs no reference model."""
    updates_per_batch: int = Field(default=1, gt=0)
    """Optimizer steps on each batch of rollouts."""
    clip_epsilon: float = Field(default=0.2, gt=0)
    """Lower clip range of the probability ratio; it matters from the second update on a batch."""
    clip_epsilon_high: float = Field(default=0.28, gt=0)
    """Upper clip range of the probability ratio; it matters from the second update on a batch."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """How TRL aggregates the token losses."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the advantages are divided by."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm."""
    micro_batch_size: int = Field(default=8, gt=0)
    """Rollouts per forward and backward pass; it must divide prompts_per_step × group_size."""
    max_undecided_share: Share = 0.5
    """A step with a larger share of undecided rewards fails the round."""
    judge_wait_seconds: float = Field(default=3600.0, ge=0)
    """How long a round waits for a judge that is away, in the middle of a step or of the comparison. After that, what
    it was to grade is undecided."""
    min_spread_share: Share = 0.0
    """A round whose first two steps have no more than this share of groups with different rewards is refused: nothing
    can be learned from it."""
    images: Literal["leave-out", "text-only"] = "leave-out"
    """Tasks whose question holds an image, which no prompt of a round can show: `leave-out` of training and gate, or
    take their text alone (`text-only`)."""
    inexact_prompts: Literal["leave-out", "use"] = "leave-out"
    """Tasks whose prompt is known not to be exactly what the model was sent (`metadata.prompt_exact`): `leave-out` of
    training and gate, or `use` them as they are."""
    max_uses: int = Field(default=3, gt=0)
    """A sample is used by so many rounds at most: a rejected round gives those back that fewer have used."""
    seed: int = Field(default=42, ge=0, lt=2**31)
    """Seed of a round, together with its number."""
    lora: LoraSettings = LoraSettings()

    @property
    def takes(self) -> frozenset[Exclusion]:
        """What does not exclude a task from rounds."""
        taken = {Exclusion.IMAGE} if self.images == "text-only" else set()
        if self.inexact_prompts == "use":
            taken |= {Exclusion.HIDDEN, Exclusion.INEXACT}
        return frozenset(taken)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompts_per_step * self.group_size) % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} does not divide prompts_per_step × group_size "
                f"= {self.prompts_per_step * self.group_size}"
            )
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} is not below steps {self.steps}: the learning rate would never be"
                " reached"
            )
        return self


class RolloutSettings(Section):
    engines: int = Field(default=1, gt=0)
    """vLLM engines of a round, one Ray actor each."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of rollouts."""
    max_completion_tokens: int | None = Field(default=None, gt=0)
    """Longest rollout that is trained on, in tokens. Default: what 99 of 100 traced replies of the round's tasks
    took, and never more than `max_model_len` leaves room for. The gate's answers have the server's limits."""
    max_model_len: int = Field(default=4096, gt=0)
    """Prompt and rollout together, at most. Longer prompts are left out of training."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for one batch of rollouts. An answer of the gate that takes longer is cut and graded as it is."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory that a rollout engine may take. Default: 0.9 where it has the GPU to itself, 0.45 where
    two share it (an engine and the trainer, or two engines), and so on."""
    cpu_kv_cache_gib: int = Field(default=1, gt=0)
    """Key-value cache of a rollout engine without a GPU, GiB."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_completion_tokens is not None and self.max_completion_tokens >= self.max_model_len:
            raise ValueError(
                f"max_completion_tokens {self.max_completion_tokens} leaves no room for a prompt in max_model_len"
                f" {self.max_model_len}"
            )
        return self


ANSWERS: Final = 600
FEWEST_ANSWERS, MOST_ANSWERS = 3, 8
"""How many answers of each adapter the gate asks for where `samples` is not set, and how many per task."""


class GateSettings(Section):
    max_tasks: int = Field(default=200, gt=0)
    """Held-out tasks that candidate and deployed adapter both answer, at most; the newest."""
    min_tasks: int = Field(default=8, gt=0)
    """Fewer decided tasks than this are not enough evidence. No round starts before so many are there."""
    samples: int | None = Field(default=None, gt=0)
    """Answers per task and adapter. Default: about 600 for each adapter, from 3 to 8 per task, so that few tasks are
    asked more often."""
    temperature: float | None = Field(default=None, gt=0, le=2)
    """Sampling temperature of these answers: the one that the agent's requests name. Default: the server's. What else
    decides how they are drawn is always the server's."""
    alpha: float = Field(default=0.004, gt=0, lt=0.5)
    """One-sided error budget: how often all rounds on the same held-out conversations together may promote something
    that is no better. Test k of them gets 6 / (π² k²) of it. At 0.004, of sequences of twenty rounds that bring
    nothing one in twenty promotes something, at most, however fast new conversations come."""
    min_gain: float = Field(default=0.0, ge=0)
    """A candidate is promoted when the lower bound of its gain, at the level of its test, is above this."""
    min_power: float = Field(default=0.3, ge=0, lt=1)
    """No round starts whose test would show a gain of ten points (0.1) with a smaller probability than this. 0: every
    round starts."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of the intervals of single criteria (`non_inferiority_margins`); they spend nothing of `alpha`."""
    non_inferiority_margins: dict[str, Annotated[float, Field(gt=0, le=1)]] = {}
    """Criteria that must not be traded for others, and what each may lose at most (0…1): a candidate is promoted only
    when the lower bound of each one's gain is above minus its margin. Default: none; the rubric's weights decide."""

    def samples_for(self, tasks: int) -> int:
        """Answers per adapter to each of so many tasks."""
        return self.samples or max(FEWEST_ANSWERS, min(MOST_ANSWERS, ANSWERS // max(tasks, 1)))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_tasks < self.min_tasks:
            raise ValueError(
                f"max_tasks {self.max_tasks} is below min_tasks {self.min_tasks}: nothing could ever be promoted"
            )
        return self


class RaySettings(Section):
    address: str | None = None
    """An existing Ray cluster. Default: a local one for the length of the round."""
    placement_seconds: float = Field(default=300.0, gt=0)
    """How long a round waits for room in the cluster for all its processes. Then it fails, and may be tried again."""


class RetentionSettings(Section):
    model_config = ConfigDict(allow_inf_nan=False)

    keep_days: float | None = Field(default=90.0, ge=0, le=36_500)
    """How long the adapter, rollouts and log of a round stay after it has ended. What it was told and what it
    measured stays for ever; so do, whatever their age, what serves, what a rollback goes back to and what the round
    under way goes on from. `null` keeps everything."""
    keep_served: int = Field(default=5, ge=0)
    """So many of the adapters that have served last stay besides, whatever their age."""
