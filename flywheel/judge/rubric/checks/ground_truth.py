"""The checks `expected-tools` and `optimal-steps`: a reply's calls against the ground truth of its task.

The verdict is not known yet, so `optimal-steps` cannot ask whether the rubric accepts, as the metric does.
"""

from __future__ import annotations

from flywheel.errors import CheckError, ConfigError
from flywheel.judge.agent_metrics import own_calls, plan_success_rate, step_efficiency, tool_selection_accuracy
from flywheel.judge.rubric.checks.tool_calls import calls_of, listed
from flywheel.judge.rubric.rubric import AS_LISTED, KINDS, Criterion, Rubric
from flywheel.records.ground_truth import KEY, GroundTruth, ground_truth_of
from flywheel.records.verdict import Exchange


def check_expected_tools(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> tuple[float, str]:
    targets = _ground_truth(criterion, exchange).target_tools or ()
    calls = own_calls(calls_of(exchange), targets)
    names = [call.name for call in calls]
    if criterion.order == AS_LISTED:
        value = plan_success_rate(calls, targets)
        names = [f"{call.name} (failed)" if call.failed else call.name for call in calls]
    else:
        value = tool_selection_accuracy(names, targets)
    return value, f"{listed(names)}; expected: {', '.join(targets) or 'none'}"[:300]


def check_optimal_steps(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> tuple[float, str]:
    truth = _ground_truth(criterion, exchange)
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


def _ground_truth(criterion: Criterion, exchange: Exchange) -> GroundTruth:
    """Raises CheckError if the task has not what the criterion needs, or something else in its place."""
    attempted, key = f"decide criterion {criterion.id}", KINDS[criterion.type].needs_truth
    try:
        truth = ground_truth_of(exchange.line)
    except ConfigError as error:
        raise CheckError(attempted, error.why, error.hint) from error
    if getattr(truth, key) is None:
        why = f"the task has no metadata.{KEY}.{key}"
        raise CheckError(attempted, why, "Give it one, or leave the criterion out.")
    return truth
