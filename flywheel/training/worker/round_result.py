"""What a round's result says of its training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flywheel.config.file import Config
from flywheel.records.round import LONGEST_SYSTEM_PROMPT, RoundSpec, Sampling, SystemPrompt
from flywheel.training.data.loss_selection import read_selection, why_set_aside
from flywheel.training.data.rollout import RolloutBatch
from flywheel.training.data.stages import Training
from flywheel.training.optim.stage_checks import found_to_learn

MOST_SYSTEM_PROMPTS: Final = 10


def figures_of(training: Training, spec: RoundSpec, settings: Config, directory: Path) -> dict[str, Any]:
    """The fields of the result of a round whose stages have ended. What was set aside is noted in `training`."""
    lines = read_selection(directory) if spec.pool is not None else []
    released = [line["task_id"] for line in lines if line["outcome"] == "released"]
    set_aside = {line["task_id"]: why_set_aside(line) for line in lines if line["outcome"] == "set aside"}
    others = training.with_gradient | set(released)
    training.left_out |= set_aside
    return {
        "stages": training.stages,
        "partly": training.partly,
        "reason": training.reason,
        "steps": sum(each.steps for each in training.stages),
        "sampling": sampling_of(training, settings) if training.rollout_steps else None,
        "released": released,
        "without_gradient": [
            *(task.task_id for task in spec.train if task.task_id not in others),
            *spec.left_out,
        ],
        "reward_first": training.reward_first,
        "reward_last": training.reward_last,
    }


def figures_of_look(batches: Sequence[RolloutBatch], training: Training, settings: Config) -> dict[str, Any]:
    """Those of a debug round, which has had these steps of rollouts and trains nothing."""
    for batch in batches:
        training.count(batch)
    means = [batch.summary()["reward_mean"] for batch in batches]
    training.rolled_out(len(batches), means[0], means[-1])
    return {
        "reason": found_to_learn(batches, settings.rollout),
        "steps": len(batches),
        "sampling": sampling_of(training, settings),
        "reward_first": means[0],
        "reward_last": means[-1],
    }


def sampling_of(training: Training, settings: Config) -> Sampling:
    """How the rollouts were sampled."""
    found = training.system_prompts
    most = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:MOST_SYSTEM_PROMPTS]
    return Sampling(
        temperature=settings.rollout.temperature,
        steps=training.rollout_steps,
        prompts=settings.rollout.prompts_asked(settings.training.prompts_per_step),
        group_size=settings.training.group_size,
        system_prompts=[
            SystemPrompt(text=text[:LONGEST_SYSTEM_PROMPT], rollouts=rollouts) for text, rollouts in most
        ],
        further_system_prompts=len(found) - len(most),
    )
