"""Agreement of two deciders on the same replies: the confusion matrix, and Cohen's kappa with its interval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_Z: Final = 1.959964
"""Of a 95 % interval."""


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


def large_sample_kappa(table: Confusion) -> Kappa:
    """Cohen's kappa with the interval of its large-sample standard error, which takes no time to compute.

    `calibration.kappa_of` resamples instead, which holds for few labels too.

    Fleiss, Cohen and Everitt 1969, "Large sample standard errors of kappa and weighted kappa", for two categories.
    """
    if not table.n:
        return Kappa(None, None, None)
    observed, first, second = table.agreement, table.base_rate, table.judge_rate
    expected = first * second + (1 - first) * (1 - second)
    if expected >= 1:
        return Kappa(None, None, None)
    value = (observed - expected) / (1 - expected)
    if table.n < 2 or first in (0, 1) or second in (0, 1):
        # Where one side always decides alike, the formula gives no error at all.
        return Kappa(value, None, None)
    equal = ((table.accept_accept, first + second), (table.reject_reject, 2 - first - second))
    differ = (
        (table.accept_reject, second + 1 - first),
        (table.reject_accept, 1 - second + first),
    )
    spread = sum(count / table.n * ((1 - expected) - rates * (1 - observed)) ** 2 for count, rates in equal)
    spread += (1 - observed) ** 2 * sum(count / table.n * rates**2 for count, rates in differ)
    spread -= (observed * expected - 2 * expected + observed) ** 2
    error = math.sqrt(max(0.0, spread) / table.n) / (1 - expected) ** 2
    return Kappa(value, max(-1.0, value - _Z * error), min(1.0, value + _Z * error))


def agreement_json(people: Sequence[bool], judge: Sequence[bool]) -> dict[str, Any]:
    """What `labels --json` says of the decisions of two; `agreement` is None without any."""
    table = confusion(people, judge)
    kappa = large_sample_kappa(table)
    return {
        "n": table.n,
        "agreement": table.agreement if table.n else None,
        "kappa": {"value": kappa.value, "low": kappa.low, "high": kappa.high},
        "confusion": {
            "accept": {"accepted": table.accept_accept, "rejected": table.accept_reject},
            "reject": {"accepted": table.reject_accept, "rejected": table.reject_reject},
        },
    }
