"""What was decided about a round: a phrase for its state and the stored reason; and when its adapter served."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from flywheel.records.states import RoundState
from flywheel.store.deployments import BY_HAND, rollback_cause
from flywheel.store.views.round_list import RoundFacts

_TESTED: Final = {
    RoundState.PROMOTED: "was promoted over {other}",
    RoundState.REJECTED: "was tested against {other} and rejected",
    RoundState.FAILED: "failed after its test against {other}",
    RoundState.PASSED: "passed its test against {other} and waits to be deployed",
    RoundState.EVALUATING: "passed its test against {other} and is being deployed",
}
_UNTESTED: Final = {
    RoundState.PROMOTED: "was promoted",
    RoundState.REJECTED: "was refused before its test",
    RoundState.FAILED: "failed before its test",
    RoundState.PASSED: "waits to be deployed",
    RoundState.EVALUATING: "has been trained; the gate has not decided yet",
    RoundState.TRAINING: "is in training and has not been compared yet",
    RoundState.ABANDONED: "has lost its worker and has not been compared yet",
    RoundState.PLANNED: "has not begun",
}
"""Before rewards of held-out answers were seen, or were decided about."""


def sentence(outcome: RoundFacts) -> str:
    """What was decided about a round, and why."""
    state, decision, reason = outcome.state, outcome.decision, outcome.reason
    if state is RoundState.EVALUATING:
        reason = decision.reason if decision is not None and decision.promote else ""
    is_tested = outcome.is_spent and bool(reason)
    phrase = _TESTED.get(state) if is_tested else None
    told = f": {reason.rstrip('. ')}" if reason and state in _TESTED else ""
    return f"{outcome.name} {(phrase or _UNTESTED[state]).format(other=compared_with(outcome))}{told}."


def later(outcome: RoundFacts) -> str:
    """When the adapter served, in one sentence; empty if it never did."""
    if not outcome.services:
        return ""
    first, last = outcome.services[0], outcome.services[-1]
    notes = []
    if outcome.state is not RoundState.PROMOTED and any(each.reason == BY_HAND for each in outcome.services):
        notes.append("deployed by hand, although the gate had not promoted it")
    if last is not first:
        is_rollback = rollback_cause(last.reason) is not None
        again = "by a rollback" if is_rollback else "by hand" if last.reason == BY_HAND else "again"
        notes.append(f"last deployed {again} at {_time(last.activated_at)}")
    about = f" ({'; '.join(notes)})" if notes else ""
    until = f"to {_time(last.retired_at)}" if last.retired_at is not None else "and still does"
    return f"It served as {first.alias} from {_time(first.activated_at)}{about} {until}."


def compared_with(outcome: RoundFacts) -> str:
    """The name of what served when the round began."""
    return outcome.parent or "the base model"


def level(alpha: float) -> str:
    """The level of a test, without an exponent: 0.000024."""
    return format(Decimal(f"{alpha:.2g}"), "f")


def _time(moment: str) -> str:
    return moment[:16].replace("T", " ")
