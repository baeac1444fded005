"""Agreement of two deciders on the same replies: the confusion matrix, and Cohen's kappa with its interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

RESAMPLES: Final = 9999
SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Confusion:
    """Counts of pairs of decisions: first the person's, then the judge's."""

    accept_accept: int
    accept_reject: int
    reject_accept: int
    reject_reject: int

    @property
    def n(self) -> int:
        return self.accept_accept + self.accept_reject + self.reject_accept + self.reject_reject

    @property
    def agreement(self) -> float:
        """The share of equal decisions."""
        return (self.accept_accept + self.reject_reject) / self.n

    @property
    def base_rate(self) -> float:
        """The share that people accept."""
        return (self.accept_accept + self.accept_reject) / self.n

    @property
    def judge_rate(self) -> float:
        """The share that the judge accepts."""
        return (self.accept_accept + self.reject_accept) / self.n


@dataclass(frozen=True, slots=True)
class Kappa:
    """The estimate with its 95 % interval; None where it is not defined."""

    value: float | None
    low: float | None
    high: float | None


def confusion(people: Sequence[bool], judge: Sequence[bool]) -> Confusion:
    counts = Counter(zip(people, judge, strict=True))
    return Confusion(*(counts[pair] for pair in ((True, True), (True, False), (False, True), (False, False))))


def kappa_of(table: Confusion) -> Kappa:
    """Cohen's kappa (Cohen 1960, "A coefficient of agreement for nominal scales"): (p_o - p_e) / (1 - p_e).

    p_o is the observed agreement, p_e that of raters who decide by chance at their own rates. Where p_e is 1, both
    always decide the same, and nothing is known about agreement. The interval is the percentile bootstrap over the
    pairs (9,999 resamples, a fixed seed); resampling pairs means drawing the four counts from a multinomial
    distribution. A resample in which both always decide the same counts as 0: it shows no agreement beyond chance.
    """
    # Imported here: pages and commands that show no agreement need no numpy.
    import numpy as np

    def kappas(counts: Any) -> Any:
        accept_accept, accept_reject, reject_accept, reject_reject = counts.T / table.n
        people, judge = accept_accept + accept_reject, accept_accept + reject_accept
        expected = people * judge + (1 - people) * (1 - judge)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(expected < 1, (accept_accept + reject_reject - expected) / (1 - expected), np.nan)

    counts = np.array([table.accept_accept, table.accept_reject, table.reject_accept, table.reject_reject])
    if not table.n or np.isnan(value := kappas(counts)):
        return Kappa(None, None, None)
    if table.n < 2:
        return Kappa(float(value), None, None)
    resampled = np.random.default_rng(SEED).multinomial(table.n, counts / table.n, RESAMPLES)
    low, high = np.percentile(np.nan_to_num(kappas(resampled)), (2.5, 97.5))
    return Kappa(float(value), float(low), float(high))


def agreement_json(people: Sequence[bool], judge: Sequence[bool]) -> dict[str, Any]:
    """What `labels --json` says of the decisions of two; `agreement` is None without any."""
    table = confusion(people, judge)
    kappa = kappa_of(table)
    return {
        "n": table.n,
        "agreement": table.agreement if table.n else None,
        "kappa": {"value": kappa.value, "low": kappa.low, "high": kappa.high},
        "confusion": {
            "accept": {"accepted": table.accept_accept, "rejected": table.accept_reject},
            "reject": {"accepted": table.reject_accept, "rejected": table.reject_reject},
        },
    }
