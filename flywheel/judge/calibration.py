"""Calibration: labelled replies judged by a rubric, and how far judge and people agree."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flywheel.judge.agreement import Confusion, Kappa, confusion, consistency, kappa_of
from flywheel.judge.budget import Budget
from flywheel.judge.grader import Grader
from flywheel.judge.labels import Label
from flywheel.judge.pool import grade_all
from flywheel.verdict import Outcome, Verdict

WORST = 10


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A reply on which judge and person differ; `margin` is how far its score is from the threshold."""

    label: Label
    verdict: Verdict
    margin: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What came out. `undecided` replies count in no figure; `consistency` needs more than one repeat."""

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
    """Judge every label `repeats` times; the majority of what was decided is the judge's word.

    None if `stop` was set meanwhile, which begins no other call. Raises JudgeError when the judge cannot be asked,
    and BudgetSpentError when the budget does not suffice after all.
    """
    verdicts: list[list[Verdict]] = [[] for _ in labels]
    # Repeats of one reply are not neighbours: a server that answers twins alike would look consistent.
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
        said = [verdict.outcome is Outcome.ACCEPTED for verdict in decided]
        decisions.append(said)
        if 2 * sum(said) == len(said):
            undecided.append((label, given[0].error or "its repeats do not agree"))
            continue
        accept = 2 * sum(said) > len(said)
        people.append(label.accept)
        judge.append(accept)
        if accept is not label.accept:
            verdict = decided[said.index(accept)]
            worst.append(Disagreement(label, verdict, abs((verdict.score or 0.0) - threshold)))
    worst.sort(key=lambda each: each.margin, reverse=True)
    everything = [verdict for given in verdicts for verdict in given]
    repeated = [said for said in decisions if len(said) > 1]
    return Calibration(
        confusion=confusion(people, judge),
        kappa=kappa_of(people, judge),
        undecided=tuple(undecided),
        consistency=consistency(decisions),
        unanimous=sum(len(set(said)) == 1 for said in repeated) / len(repeated) if repeated else None,
        worst=tuple(worst[:WORST]),
        repeats=repeats,
        calls=sum(verdict.calls for verdict in everything),
        prompt_tokens=sum(verdict.prompt_tokens for verdict in everything),
        completion_tokens=sum(verdict.completion_tokens for verdict in everything),
    )
