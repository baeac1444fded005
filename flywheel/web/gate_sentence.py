"""The gate's decision on a round, in one sentence; and why the next test is not done now."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from flywheel.records.round import Comparison, CriterionComparison, DecisionReason, GateDecision, SuiteComparison
from flywheel.records.states import RoundState
from flywheel.store.deployments import BY_HAND, ServingPeriod, rollback_cause
from flywheel.store.views.round_list import RoundFacts
from flywheel.system.terminal import percent, quantity
from flywheel.training.gate.gate import of_tripwire

_ROLLED_BACK: Final = "; rolled back since"
_NOT_DEPLOYED: Final = "not deployed: "


def sentence(outcome: RoundFacts) -> str:
    """What was decided about a round, and why."""
    name, reason = outcome.name, outcome.reason.rstrip(". ")
    seen, decision = outcome.comparison, outcome.decision
    match outcome.state:
        case RoundState.PROMOTED if seen is not None:
            return f"{name} was promoted: {_better(outcome, seen, decision)}."
        case RoundState.PROMOTED:
            return f"{name} was promoted: {reason}."
        case RoundState.REJECTED if decision is not None and decision.promote:
            return f"{name} was better and was rejected: {_obstacle(reason, decision)}."
        case RoundState.REJECTED if seen is not None and decision is not None:
            return _rejected(outcome, seen, decision)
        case RoundState.REJECTED:
            return f"{name} was refused before its test: {reason}."
        case RoundState.FAILED if decision is not None and decision.promote:
            return f"{name} was better and was not promoted: {_obstacle(reason, decision)}."
        case RoundState.FAILED if outcome.is_spent:
            return f"{name} failed after its test: {reason}."
        case RoundState.FAILED:
            return f"{name} failed before its test: {reason}."
        case RoundState.EVALUATING | RoundState.PASSED if decision and decision.promote and seen is not None:
            then = "waits to be deployed" if outcome.state is RoundState.PASSED else "is being deployed"
            return f"{name} is better and {then}: {_better(outcome, seen, decision)}."
        case RoundState.EVALUATING:
            return f"{name} has ended its training and has not been decided about yet."
        case RoundState.TRAINING:
            return f"{name} is in training and has not been compared yet."
        case RoundState.ABANDONED:
            return f"The worker of {name} died; it has not been compared yet."
    return f"{name} has not begun."


def later(outcome: RoundFacts) -> str:
    """What happened to the adapter after the decision, in one sentence; empty if it never served."""
    if not outcome.services:
        return ""
    first, last = outcome.services[0], outcome.services[-1]
    by_hand = next((each for each in outcome.services if each.reason == BY_HAND), None)
    if by_hand is not None and outcome.state is not RoundState.PROMOTED:
        in_spite = {
            RoundState.REJECTED: "although the gate had rejected it",
            RoundState.FAILED: "although its round had failed",
        }.get(outcome.state, "before its round had ended")
        return f"It was deployed by hand at {_time(by_hand.activated_at)}, {in_spite}, and {_until(last)}."
    since = f"It has served as {first.alias} since {_time(first.activated_at)}"
    if len(outcome.services) == 1 and first.retired_at is None:
        return f"{since}."
    if len(outcome.services) == 1:
        return f"It served as {first.alias} from {_time(first.activated_at)} to {_time(first.retired_at)}."
    is_rollback = rollback_cause(last.reason) is not None
    again = "by a rollback" if is_rollback else "by hand" if last.reason == BY_HAND else "again"
    return (
        f"It served as {first.alias} from {_time(first.activated_at)}, was last deployed {again}, and {_until(last)}."
    )


def compared_with(outcome: RoundFacts) -> str:
    """The name of what served when the round began."""
    return outcome.parent or "the base model"


def level(alpha: float) -> str:
    """The level of a test, without an exponent: 0.000024."""
    return format(Decimal(f"{alpha:.2g}"), "f")


def interval(comparison: Comparison) -> str:
    return f"{percent(comparison.confidence)} interval {comparison.lower:+.3f} to {comparison.upper:+.3f}"


def _better(outcome: RoundFacts, seen: Comparison, decision: GateDecision | None) -> str:
    scores = (
        f"on {quantity(seen.tasks, 'held-out task')} it scored {seen.candidate_mean:.3f} and"
        f" {compared_with(outcome)} {seen.deployed_mean:.3f}"
    )
    bound = f", above {decision.min_gain:g}" if decision is not None else ""
    shown = f"{scores}, and the lower bound of the gain {seen.gain:+.3f} is {seen.lower:+.3f}{bound}"
    margins = [*decision.margins, *(f"suite {name}" for name in decision.suite_margins)] if decision else []
    kept = f"; {' and '.join(margins)} lost less than the margin" if margins else ""
    since = "; it has been rolled back since" if outcome.reason.endswith(_ROLLED_BACK) else ""
    return f"{shown}{kept}{since}"


def _rejected(outcome: RoundFacts, seen: Comparison, decision: GateDecision) -> str:
    name, other = outcome.name, compared_with(outcome)
    gain = f"the gain is {seen.gain:+.3f} ({interval(seen)})"
    total = f"{name} is better in total, with a gain of {seen.gain:+.3f} ({interval(seen)}), but was rejected"
    match decision.reason_code:
        case DecisionReason.FEW_TASKS:
            decided = f"{quantity(seen.tasks, 'held-out task')} {'was' if seen.tasks == 1 else 'were'} decided"
            return (
                f"{name} was rejected for too little evidence: {decided}, and gate.min_tasks is {decision.min_tasks}."
            )
        case DecisionReason.FEW_ON_CRITERION:
            found = _criterion(seen, decision)
            tasks = quantity(found.tasks if found is not None else 0, "task")
            margin = decision.margins.get(decision.criterion, 0.0)
            return (
                f"{total}: {decision.criterion} was evaluated on {tasks},"
                f" too few to show that it loses less than its margin of {margin:g} (gate.min_tasks is"
                f" {decision.min_tasks})."
            )
        case DecisionReason.WORSE_ON_CRITERION:
            found = _criterion(seen, decision)
            margin = decision.margins.get(decision.criterion, 0.0)
            bounds = f" ({found.gain:+.3f}, {found.lower:+.3f} to {found.upper:+.3f})" if found is not None else ""
            return f"{total}: {decision.criterion}{bounds} is not shown to lose less than its margin of {margin:g}."
        case DecisionReason.FEW_ON_SUITE:
            suite = _suite(seen, decision)
            tasks = quantity(suite.tasks if suite is not None else 0, "task")
            return (
                f"{total}: of the suite {decision.suite}, {tasks} decided are too few to show that it loses less than"
                f" its margin of {decision.suite_margins[decision.suite]:g} (gate.min_tasks is {decision.min_tasks})."
            )
        case DecisionReason.WORSE_ON_SUITE:
            suite = _suite(seen, decision)
            bounds = f" ({suite.gain:+.3f}, {suite.lower:+.3f} to {suite.upper:+.3f})" if suite is not None else ""
            margin = decision.suite_margins[decision.suite]
            return f"{total}: on the suite {decision.suite}{bounds} it may lose more than its margin of {margin:g}."
        case DecisionReason.HARMFUL:
            harm = next(each for each in seen.tripwires if each.criterion == decision.tripwire)
            return f"{total}: {of_tripwire(harm)}."
    if seen.upper < 0:
        return f"{name} was rejected because it is worse than {other}: {gain}, all of it below 0."
    if seen.gain <= 0:
        return f"{name} was rejected because it scored no better than {other}: {gain}."
    if seen.lower > 0:
        return (
            f"{name} was rejected because its gain is not shown to be above gate.min_gain, {decision.min_gain:g}: it"
            f" is better than {other}, and {gain}."
        )
    return (
        f"{name} was rejected for too little evidence: {gain} compared with {other}, and the lower bound is not above"
        f" {decision.min_gain:g}, so the difference can be chance."
    )


def _criterion(comparison: Comparison, decision: GateDecision) -> CriterionComparison | None:
    return next((each for each in comparison.criteria if each.criterion == decision.criterion), None)


def _suite(comparison: Comparison, decision: GateDecision) -> SuiteComparison | None:
    return next((each for each in comparison.suites if each.name == decision.suite), None)


def _obstacle(reason: str, decision: GateDecision) -> str:
    """Why a better candidate was not promoted: what the recorded reason has beyond the decision's."""
    found = reason.replace(decision.reason, "", 1).partition("but ")[2] or reason
    if not found.startswith(_NOT_DEPLOYED):
        return found
    return f"it could not be deployed: {found.removeprefix(_NOT_DEPLOYED)}"


def _until(last: ServingPeriod) -> str:
    if last.retired_at is None:
        return f"serves as {last.alias} since {_time(last.activated_at)}"
    return f"served until {_time(last.retired_at)}"


def _time(moment: str | None) -> str:
    return (moment or "")[:16].replace("T", " ")
