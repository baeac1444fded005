"""The prompts of a round: its tasks, rendered by the engines, without those that cannot be asked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.records.reasons import in_one_clause
from flywheel.records.round import RoundSpec, RoundTask, Suite
from flywheel.training.data.prompts import Asked, Prompt, asked, asked_as_served
from flywheel.training.engine import ray_cluster
from flywheel.training.optim.held_out_evaluation import check_enough

log = logging.getLogger("flywheel.training.worker")


@dataclass(frozen=True, slots=True)
class PlannedPrompts:
    """What a round asks, and why it does not ask the other tasks.

    Attributes:
        held_out: All that the server would answer.
        compared: Those of them that the gate uses.
        refusal: Why the round cannot begin with these; empty if it can.
    """

    train: list[Prompt] = field(default_factory=list)
    held_out: list[Prompt] = field(default_factory=list)
    compared: list[Prompt] = field(default_factory=list)
    suites: list[tuple[Suite, list[Prompt]]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)
    inexact: dict[str, str] = field(default_factory=dict)
    refusal: str = ""


class RoundPrompts:
    """Of one round."""

    def __init__(self, spec: RoundSpec, settings: Config, engines: list[Any]) -> None:
        self._spec, self._settings, self._engines = spec, settings, engines

    def plan(self, context: int) -> PlannedPrompts:
        """Those of the round, given the context of its engines in tokens. Raises TrainError if there are too few."""
        spec, gate = self._spec, self._settings.gate
        train = self.to_train(spec.train) if spec.train else Asked([], {})
        held_out = Asked([], {}) if spec.debug else asked_as_served(*self._encoded(spec.held_out), context=context)
        left_out = spec.left_out | train.left_out
        for task, why in {**held_out.left_out, **left_out}.items():
            log.warning("%s is left out: %s", task, why)
        compared, inexact = held_out.prompts[-gate.max_tasks :], train.inexact | held_out.inexact
        is_compared = spec.test is not None and not spec.debug
        needed = gate.min_tasks if is_compared else 0
        refusal = ""
        if (train.inexact and not train.prompts) or (held_out.inexact and len(compared) < needed):
            # A result and not a failure: these tasks are marked, and the next round uses others.
            refusal = _too_few_exact(len(train.prompts), len(compared), inexact)
        elif not train.prompts and (spec.trains or spec.debug):
            raise TrainError(
                f"train {spec.round_id}",
                f"none of its {len(spec.train)} tasks can be trained on: {in_one_clause(train.left_out)}",
                "Raise rollout.max_model_len or lower rollout.max_completion_tokens.",
            )
        suites = []
        if is_compared and not refusal:
            # Checked before hours are spent on a candidate that could only be rejected.
            check_enough(compared, spec, needed)
            suites = [(suite, self._of_suite(suite, context)) for suite in spec.suites]
        if train.prompts:
            log.info("rollouts take up to %d tokens", max(prompt.max_tokens for prompt in train.prompts))
        return PlannedPrompts(
            train.prompts, held_out.prompts, compared, suites, left_out, held_out.left_out, inexact, refusal
        )

    def to_train(self, tasks: Sequence[RoundTask]) -> Asked:
        """The tasks that can be trained on: rendered by the model's template, short enough, without duplicates."""
        rollout, stages = self._settings.rollout, {*self._settings.training.kinds}
        return asked(
            *self._encoded(tasks),
            max_model_len=rollout.max_model_len,
            max_completion_tokens=rollout.max_completion_tokens,
            # No prompt is asked: two replies to one prompt are two examples.
            by_reply=stages == {"sft"} or ("grpo" not in stages and all(task.rejected for task in tasks)),
        )

    def _of_suite(self, suite: Suite, context: int) -> list[Prompt]:
        """The tasks of a suite that the server would answer. Raises TrainError if they are too few for its margin."""
        found = asked_as_served(*self._encoded(suite.tasks), context=context)
        for task, why in found.left_out.items():
            log.warning("%s is not asked: %s", task, why)
        if suite.margin is not None:
            check_enough(found.prompts, self._spec, self._settings.gate.min_tasks, suite)
        return found.prompts

    def _encoded(self, tasks: Sequence[RoundTask]) -> tuple[list[Prompt], dict[str, str]]:
        prompts, refused = ray_cluster.anywhere(
            self._engines, lambda engine: ray_cluster.wait([engine.encode.remote(list(tasks))])[0]
        )
        if tasks and len(refused) == len(tasks):
            first = next(f"{task}: {why}" for task, why in refused.items())
            raise TrainError(
                f"render the prompts of {self._spec.round_id}",
                f"the chat template refuses all {len(tasks)} tasks; the first: {first}",
                "Check the base model's chat template, and the one in serving.extra_args if there is one.",
            )
        return prompts, refused


def _too_few_exact(train: int, compared: int, inexact: dict[str, str]) -> str:
    task, first = next(iter(inexact.items()))
    return (
        f"the prompts of {len(inexact)} tasks are not what the model was sent, which leaves {train} for training and"
        f" {compared} for the gate; the first, {task}: {first}. They are left out from now on"
        " (training.inexact_prompts)"
    )
