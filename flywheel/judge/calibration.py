"""Calibration: labelled replies are judged by a rubric, and the judge's agreement with people is measured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.judge.agreement import Confusion, Kappa, confusion, kappa_of
from flywheel.judge.budget import Budget
from flywheel.judge.grader import Grader
from flywheel.judge.labels import Label
from flywheel.judge.thread_pool import grade_all
from flywheel.records.verdict import Outcome, Verdict

WORST: Final = 10
"""How many disagreements are reported."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A reply on which judge and person differ; `margin` is the distance of its score from the threshold."""

    label: Label
    verdict: Verdict
    margin: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The outcome.

    Attributes:
        undecided: Replies that count in no figure, with the reason.
        consistency: The share of equal pairs among the repeats of a reply; None without repeats.
        unanimous: The share of replies whose repeats are all equal; None without repeats.
        worst: The disagreements with the largest margins.
    """

    confusion: Confusion
    kappa: Kappa
    undecided: tuple[tuple[Label, str], ...]
    consistency: float | None
    unanimous: float | None
    worst: tuple[Disagreement, ...]
    repeats: int
    calls: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def n(self) -> int:
        return self.confusion.n


def calibrate(
    grader: Grader,
    labels: Sequence[Label],
    max_thread: int,
    *,
    repeats: int = 1,
    on_verdict: Callable[[Verdict], None] | None = None,
    stop: threading.Event | None = None,
    budget: Budget | None = None,
) -> Calibration | None:
    """Judge every label `repeats` times; the majority of the decided verdicts counts.

    None if `stop` was set meanwhile, which begins no other call. Raises JudgeError when the judge cannot be asked,
    and BudgetSpentError when the budget does not suffice.
    """
    verdicts: list[list[Verdict]] = [[] for _ in labels]
    # Repeats of one reply are not adjacent: a server that answers adjacent twins alike would look consistent.
    items = ((place, label.exchange) for _ in range(repeats) for place, label in enumerate(labels))
    for place, verdict in grade_all(grader, items, max_thread, stop, budget=budget):
        verdicts[place].append(verdict)
        if on_verdict is not None:
            on_verdict(verdict)
    if stop is not None and stop.is_set():
        return None
    return _summary(labels, verdicts, grader.rubric.threshold, repeats)


def _summary(
    labels: Sequence[Label], verdicts: Sequence[Sequence[Verdict]], threshold: float, repeats: int
) -> Calibration:
    people: list[bool] = []
    judge: list[bool] = []
    undecided = []
    worst = []
    decisions = []
    for label, given in zip(labels, verdicts, strict=True):
        decided = [verdict for verdict in given if verdict.outcome is not Outcome.UNDECIDED]
        accepts = [verdict.outcome is Outcome.ACCEPTED for verdict in decided]
        decisions.append(accepts)
        if 2 * sum(accepts) == len(accepts):
            undecided.append((label, given[0].error or "its repeats do not agree"))
            continue
        accept = 2 * sum(accepts) > len(accepts)
        people.append(label.accept)
        judge.append(accept)
        if accept is not label.accept:
            verdict = decided[accepts.index(accept)]
            worst.append(Disagreement(label, verdict, abs((verdict.score or 0.0) - threshold)))
    worst.sort(key=lambda each: each.margin, reverse=True)
    everything = [verdict for given in verdicts for verdict in given]
    repeated = [accepts for accepts in decisions if len(accepts) > 1]
    table = confusion(people, judge)
    return Calibration(
        confusion=table,
        kappa=kappa_of(table),
        undecided=tuple(undecided),
        consistency=consistency(decisions),
        unanimous=sum(len(set(accepts)) == 1 for accepts in repeated) / len(repeated) if repeated else None,
        worst=tuple(worst[:WORST]),
        repeats=repeats,
        calls=sum(verdict.calls for verdict in everything),
        prompt_tokens=sum(verdict.prompt_tokens for verdict in everything),
        completion_tokens=sum(verdict.completion_tokens for verdict in everything),
    )


def consistency(repeats: Sequence[Sequence[bool]]) -> float | None:
    """The share of equal pairs among the repeats of the same reply; None without a pair."""
    equal = pairs = 0
    for decisions in repeats:
        n, accepted = len(decisions), sum(decisions)
        pairs += n * (n - 1) // 2
        equal += accepted * (accepted - 1) // 2 + (n - accepted) * (n - accepted - 1) // 2
    return equal / pairs if pairs else None
