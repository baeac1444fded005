"""The debug round: the same prompts, engines, rollouts and rewards as a round, and no optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flywheel.config import Config
from flywheel.records.round import RoundSpec
from flywheel.system.terminal import quantity
from flywheel.training.data.metrics import Metrics
from flywheel.training.data.progress_meter import Meter
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.refusal import FIRST_LOOK
from flywheel.training.data.rollout import Batch, LoadedAdapter, add_usage
from flywheel.training.data.rollout_lines import append_rollouts
from flywheel.training.optim.collector import Collector
from flywheel.training.optim.round_steps import RoundSteps


@dataclass(frozen=True, slots=True)
class DebugRun:
    steps: int
    reward_first: float | None
    reward_last: float | None
    summary: str
    usage: dict[str, int]
    system_prompts: Mapping[str, int]


def roll_out_only(
    spec: RoundSpec,
    settings: Config,
    directory: Path,
    prompts: Sequence[Prompt],
    collector: Collector,
    adapter: LoadedAdapter | None,
    meter: Meter,
) -> DebugRun:
    """The first steps of a round, as many as it needs to see whether anything can be learned."""
    training = settings.training
    steps = min(FIRST_LOOK, training.steps)
    round_steps = RoundSteps(spec, settings, prompts, collector)
    metrics = Metrics(directory)
    meter.enter("training", round_steps.asked * training.group_size, steps=steps)
    usage: dict[str, int] = {}
    system_prompts: Counter[str] = Counter()
    means: list[float | None] = []
    batches: list[Batch] = []
    for step in range(steps):
        batch = round_steps.collect(step, adapter)
        batches.append(batch)
        append_rollouts(directory, step + 1, batch, training.scale_rewards)
        figures = batch.summary()
        meter.stepped(step + 1, figures["reward_mean"], collecting_seconds=sum(batch.seconds.values()))
        temperature = settings.rollout.temperature
        metrics.step(step + 1, steps, {**figures, "temperature": temperature, "seconds": batch.seconds})
        usage = add_usage(usage, batch.usage())
        system_prompts += batch.system_prompts
        means.append(figures["reward_mean"])
    return DebugRun(steps, means[0], means[-1], _summary(batches), usage, system_prompts)


def _summary(batches: Sequence[Batch]) -> str:
    """How many groups a round would train on, and what happened to the others."""

    def total(figure: Callable[[Batch], int]) -> int:
        return sum(map(figure, batches))

    spread, groups = total(lambda batch: batch.groups_with_spread), total(lambda batch: batch.groups)
    undecided, missed = total(lambda batch: batch.undecided), total(lambda batch: batch.missed)
    dropped = total(lambda batch: list(batch.dropped.values()).count("misses"))
    parts = [f"{spread} of {groups} groups have rewards that differ", f"{undecided} rollouts are undecided"]
    if missed:
        parts.append(
            f"{missed} of {total(lambda batch: len(batch.rollouts))} ended at a call without a recorded result,"
            f" which drops {quantity(dropped, 'group')}"
        )
    if failed := total(lambda batch: batch.failed.total()):
        parts.append(f"the agent failed in {failed}")
    return "; ".join(parts)
