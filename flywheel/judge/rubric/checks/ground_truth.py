"""The checks `expected-tools` and `optimal-steps`: a reply's calls against the ground truth of its task.

The verdict is not known yet, so `optimal-steps` cannot ask whether the rubric accepts, as the metric does.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from flywheel.errors import CheckError, ConfigError
from flywheel.judge.agent_metrics import own_calls, plan_success_rate, step_efficiency, tool_selection_accuracy
from flywheel.judge.rubric.checks.tool_calls import Steps, calls_of, listed
from flywheel.judge.rubric.criterion import Example, Files, Reward
from flywheel.records.ground_truth import KEY, GroundTruth, ground_truth_of
from flywheel.records.verdict import Exchange


class AgainstTruth(Steps):
    """A check against the ground truth of a task."""

    weight: Reward = 1.0
    needed: ClassVar = ""
    """The part of the ground truth that it needs."""

    def is_decided(self, example: Example) -> bool:
        return super().is_decided(example) and (example.ground_truth or {}).get(self.needed) is not None

    def truth(self, exchange: Exchange) -> GroundTruth:
        """Raises CheckError if the task has not what the criterion needs, or something else in its place."""
        attempted = f"decide criterion {self.id}"
        try:
            truth = ground_truth_of(exchange.line)
        except ConfigError as error:
            raise CheckError(attempted, error.why, error.hint) from error
        if getattr(truth, self.needed) is None:
            why = f"the task has no metadata.{KEY}.{self.needed}"
            raise CheckError(attempted, why, "Give it one, or leave the criterion out.")
        return truth


class ExpectedTools(AgainstTruth):
    """The tools that the task's ground truth names were called: the F1 of both sets, or in that order."""

    type: Literal["expected-tools"] = "expected-tools"
    order: Literal["any", "as-listed"] | None = Field(default=None, exclude_if=lambda value: value is None)
    """Whether the sets of names are compared (`any`, the default), or all are required in their order, without
    error."""
    needed: ClassVar = "target_tools"

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        targets = self.truth(exchange).target_tools or ()
        calls = own_calls(calls_of(exchange), targets)
        names = [call.name for call in calls]
        if self.order == "as-listed":
            value = plan_success_rate(calls, targets)
            names = [f"{call.name} (failed)" if call.failed else call.name for call in calls]
        else:
            value = tool_selection_accuracy(names, targets)
        return value, f"{listed(names)}; expected: {', '.join(targets) or 'none'}"[:300]


class OptimalSteps(AgainstTruth):
    """The smallest number of calls, by the task's ground truth, divided by that of the reply; at most 1."""

    type: Literal["optimal-steps"] = "optimal-steps"
    needed: ClassVar = "optimal_steps"

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        truth = self.truth(exchange)
        targets, optimal = truth.target_tools or (), truth.optimal_steps or 0
        calls = own_calls(calls_of(exchange), targets)
        reason = f"{len(calls)} calls, {optimal} are enough"
        missing = sorted(set(targets) - {call.name for call in calls if not call.failed})
        if missing:
            reason += f"; not called without error: {', '.join(missing)}"
        elif not calls and optimal:
            reason += "; none was made"
        successful = not missing and bool(calls or not optimal)
        return step_efficiency(len(calls), optimal, successful=successful), reason[:300]
