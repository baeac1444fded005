"""The debug round: the same prompts, engines, rollouts and rewards as a round, and no optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flywheel.config import Config
from flywheel.round import RoundSpec
from flywheel.training.collector import Collector
from flywheel.training.metrics import Metrics
from flywheel.training.progress_meter import Meter
from flywheel.training.prompts import Prompt, schedule
from flywheel.training.rollout import LoadedAdapter, add_usage
from flywheel.training.rollout_lines import append_rollouts
from flywheel.training.trainer import FIRST_LOOK, step_requests


@dataclass(frozen=True, slots=True)
class DebugRun:
    steps: int
    reward_first: float | None
    reward_last: float | None
    summary: str
    usage: dict[str, int]


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
    plan = schedule(len(prompts), per_step=training.prompts_per_step, steps=steps, seed=spec.seed)
    metrics = Metrics(directory)
    meter.enter("training", training.prompts_per_step * training.group_size, steps=steps)
    usage: dict[str, int] = {}
    means: list[float | None] = []
    groups = spread = undecided = 0
    for step, indices in enumerate(plan):
        requests = step_requests([prompts[index] for index in indices], step, spec, settings, adapter)
        batch = collector.collect(requests)
        append_rollouts(directory, step + 1, batch, training.scale_rewards)
        figures = batch.summary()
        meter.stepped(step + 1, figures["reward_mean"], collecting_seconds=sum(batch.seconds.values()))
        temperature = settings.rollout.temperature
        metrics.step(step + 1, steps, {**figures, "temperature": temperature, "seconds": batch.seconds})
        usage = add_usage(usage, batch.usage())
        means.append(figures["reward_mean"])
        groups, spread = groups + batch.groups, spread + batch.groups_with_spread
        undecided += batch.undecided
    return DebugRun(
        steps,
        means[0],
        means[-1],
        f"{spread} of {groups} groups have rewards that differ; {undecided} rollouts are undecided",
        usage,
    )
