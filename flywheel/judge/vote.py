"""Several judgements of one exchange: the majority decides, and a vote without one decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from flywheel.verdict import Judgement, Outcome


def majority(judgements: Sequence[Judgement]) -> Judgement | None:
    """The judgement that speaks for more than half of all, also of those that could not be used; None if none does.

    It is the one with the middle score of its side: its results explain the outcome, and its score is on that side
    of the threshold.
    """
    for outcome in (Outcome.ACCEPTED, Outcome.REJECTED):
        side = sorted((each for each in judgements if each.outcome is outcome), key=lambda each: each.score or 0.0)
        if 2 * len(side) > len(judgements):
            return side[(len(side) - 1) // 2]
    return None


def tally(judgements: Sequence[Judgement]) -> str:
    """How they voted, for a person."""
    counts = {outcome.value: sum(each.outcome is outcome for each in judgements) for outcome in Outcome}
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)
