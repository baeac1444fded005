"""Calibration: how far a judge agrees with people, as a confusion matrix and as Cohen's kappa with its interval."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from flywheel.records.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from flywheel.judge.grader import Grader
    from flywheel.judge.labels import LabelledReply
    from flywheel.judge.usage import Budget

RESAMPLES: Final = 9999
SEED: Final = 0
WORST: Final = 10
"""How many disagreements are reported."""


@dataclass(frozen=True, slots=True)
class Kappa:
    """The estimate with its 95 % interval; None where it is not defined."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """Decisions of two on the same replies, counted by both: first the person's, then the judge's or another
    person's."""

    counts: Counter[tuple[bool, bool]] = field(default_factory=Counter)

    @property
    def n(self) -> int:
        return self.counts.total()

    @property
    def share(self) -> float | None:
        """The share of equal decisions; None without any."""
        return (self.counts[True, True] + self.counts[False, False]) / self.n if self.n else None

    @property
    def base_rate(self) -> float:
        """The share that people accept."""
        return (self.counts[True, True] + self.counts[True, False]) / self.n

    @property
    def judge_rate(self) -> float:
        """The share that the judge accepts."""
        return (self.counts[True, True] + self.counts[False, True]) / self.n

    @property
    def kappa(self) -> Kappa:
        """Cohen's kappa (Cohen 1960, "A coefficient of agreement for nominal scales"): (p_o - p_e) / (1 - p_e).

        p_o is the observed agreement, p_e that of raters who decide by chance at their own rates. Where p_e is 1,
        both always decide the same, and nothing is known about agreement. The interval is the percentile bootstrap
        over the pairs (9,999 resamples, a fixed seed); resampling pairs means drawing the four counts from a
        multinomial distribution. A resample in which both always decide the same counts as 0: it shows no agreement
        beyond chance.
        """
        # Imported here: pages and commands that show no agreement need no numpy.
        import numpy as np

        def kappas(counts: Any) -> Any:
            accept_accept, accept_reject, reject_accept, reject_reject = counts.T / self.n
            people, judge = accept_accept + accept_reject, accept_accept + reject_accept
            expected = people * judge + (1 - people) * (1 - judge)
            with np.errstate(invalid="ignore", divide="ignore"):
                return np.where(expected < 1, (accept_accept + reject_reject - expected) / (1 - expected), np.nan)

        counts = np.array([self.counts[one, other] for one in (True, False) for other in (True, False)])
        if not self.n or np.isnan(value := kappas(counts)):
            return Kappa(None, None, None)
        if self.n < 2:
            return Kappa(float(value), None, None)
        resampled = np.random.default_rng(SEED).multinomial(self.n, counts / self.n, RESAMPLES)
        low, high = np.percentile(np.nan_to_num(kappas(resampled)), (2.5, 97.5))
        return Kappa(float(value), float(low), float(high))

    def as_json(self) -> dict[str, Any]:
        """The figures; `confusion` has the counts by the first decision, then by the second."""
        rows = (("accept", True), ("reject", False))
        return {
            "n": self.n,
            "agreement": self.share,
            "kappa": asdict(self.kappa),
            "confusion": {
                name: {"accepted": self.counts[said, True], "rejected": self.counts[said, False]}
                for name, said in rows
            },
        }


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A reply on which judge and person differ; `margin` is the distance of its score from the threshold."""

    label: LabelledReply
    verdict: Verdict
    margin: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The outcome.

    Attributes:
        agreement: Of people and judge, on the replies that are decided.
        undecided: Replies that count in no figure, with the reason.
        consistency: The share of equal pairs among the repeats of a reply; None without repeats.
        unanimous: The share of replies whose repeats are all equal; None without repeats.
        worst: The disagreements with the largest margins.
    """

    agreement: Agreement
    undecided: tuple[tuple[LabelledReply, str], ...]
    consistency: float | None
    unanimous: float | None
    worst: tuple[Disagreement, ...]
    repeats: int
    calls: int
    prompt_tokens: int
    completion_tokens: int


def calibrate(
    grader: Grader,
    labels: Sequence[LabelledReply],
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
    # Imported here: the pages only show what came of it.
    from flywheel.judge.thread_pool import grade_all

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
    labels: Sequence[LabelledReply], verdicts: Sequence[Sequence[Verdict]], threshold: float, repeats: int
) -> Calibration:
    agreement = Agreement()
    undecided = []
    worst = []
    decisions = []
    for label, repeated_verdicts in zip(labels, verdicts, strict=True):
        decided = [verdict for verdict in repeated_verdicts if verdict.outcome is not Outcome.UNDECIDED]
        accepts = [verdict.outcome is Outcome.ACCEPTED for verdict in decided]
        decisions.append(accepts)
        if 2 * sum(accepts) == len(accepts):
            undecided.append((label, repeated_verdicts[0].error or "its repeats do not agree"))
            continue
        accept = 2 * sum(accepts) > len(accepts)
        agreement.counts[label.accept, accept] += 1
        if accept is not label.accept:
            verdict = decided[accepts.index(accept)]
            worst.append(Disagreement(label, verdict, abs((verdict.score or 0.0) - threshold)))
    worst.sort(key=lambda disagreement: disagreement.margin, reverse=True)
    everything = [verdict for repeated_verdicts in verdicts for verdict in repeated_verdicts]
    repeated = [accepts for accepts in decisions if len(accepts) > 1]
    return Calibration(
        agreement=agreement,
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
