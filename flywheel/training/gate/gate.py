"""The gate: decides from a comparison whether a candidate is promoted."""

from __future__ import annotations

from flywheel.config import GateSettings
from flywheel.records.round import Comparison, CriterionComparison, DecisionReason, GateDecision
from flywheel.system.terminal import percent, quantity


def decide(comparison: Comparison, gate: GateSettings) -> GateDecision:
    """Promote only if the lower bound of the gain's interval is above `min_gain`.

    A criterion with a margin must also be shown to be worse by less than the margin.
    """
    figures = (
        f"gain {comparison.gain:+.3f}, {percent(comparison.confidence)} interval {comparison.lower:+.3f} to"
        f" {comparison.upper:+.3f}; candidate {comparison.candidate_mean:.3f}, deployed"
        f" {comparison.deployed_mean:.3f}, on {_count(comparison.tasks)}"
    )
    if comparison.undecided:
        figures += f", {comparison.undecided} more undecided"
    if missed := misses_of(comparison):
        figures += f"; {missed}"

    def decision(reason_code: DecisionReason, reason: str, criterion: str = "") -> GateDecision:
        return GateDecision(
            promote=reason_code is DecisionReason.BETTER,
            reason=reason,
            reason_code=reason_code,
            criterion=criterion,
            min_tasks=gate.min_tasks,
            min_gain=gate.min_gain,
            confidence=gate.confidence,
            margins=gate.non_inferiority_margins,
        )

    if comparison.tasks < gate.min_tasks:
        why = f"not enough evidence: fewer than {_count(gate.min_tasks)} decided ({figures})"
        return decision(DecisionReason.FEW_TASKS, why)
    if worse := [each for each in comparison.criteria if each.upper < 0]:
        figures += f"; worse in {', '.join(_of_criterion(each) for each in worse)}"
    if comparison.lower <= gate.min_gain:
        needed = "0" if gate.min_gain == 0 else f"{gate.min_gain:g}"
        why = f"not shown to be better: the lower bound is not above {needed} ({figures})"
        return decision(DecisionReason.NOT_BETTER, why)
    for criterion, margin in gate.non_inferiority_margins.items():
        if objection := _objection(comparison, criterion, margin, gate.min_tasks):
            reason_code, why = objection
            return decision(reason_code, f"{why} ({figures})", criterion)
    return decision(DecisionReason.BETTER, f"better: {figures}")


def misses_of(comparison: Comparison) -> str:
    """How many answers ended at a call without a recorded result, or because the user's agent failed, and what that
    means; empty if there are none."""
    parts = [
        f"{why} {quantity(candidate, 'answer')} of the candidate (scored 0) and {deployed:,} of the deployed"
        for why, candidate, deployed in (
            ("calls without a recorded result ended", comparison.candidate_missed, comparison.deployed_missed),
            ("the agent failed in", comparison.candidate_failed, comparison.deployed_failed),
        )
        if candidate or deployed
    ]
    found = "; ".join(parts)
    if not found or comparison.lower_at_bound is None:
        return found
    return (
        f"{found} (scored as its others' mean; the lower bound is {comparison.lower_at_bound:+.3f} if they score 1)"
    )


def _objection(
    comparison: Comparison, criterion: str, margin: float, min_tasks: int
) -> tuple[DecisionReason, str] | None:
    """Why non-inferiority of a criterion is not shown; None if it is."""
    found = next((each for each in comparison.criteria if each.criterion == criterion), None)
    tasks = found.tasks if found is not None else 0
    if found is None or tasks < min_tasks:
        why = f"not enough evidence on {criterion}: it was looked at on {_count(tasks)}, fewer than {min_tasks}"
        return DecisionReason.FEW_ON_CRITERION, why
    if found.lower > -margin:
        return None
    why = f"not shown to be no worse in {_of_criterion(found)}: the lower bound is not above {-margin:g}"
    return DecisionReason.WORSE_ON_CRITERION, why


def _of_criterion(found: CriterionComparison) -> str:
    return f"{found.criterion} ({found.gain:+.3f}, {found.lower:+.3f} to {found.upper:+.3f})"


def _count(tasks: int) -> str:
    return f"{tasks} held-out task" if tasks == 1 else f"{tasks} held-out tasks"
