"""How far two raters agree: the figures, without anybody who rates."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

RESAMPLES: Final = 9999
SEED: Final = 0
_CELLS: Final = 5_000_000
"""Entries of one batch of resamples: memory stays bounded however many labels there are."""


@dataclass(frozen=True, slots=True)
class Confusion:
    """Pairs of decisions: the first word is the person's, the second the judge's."""

    accept_accept: int
    accept_reject: int
    reject_accept: int
    reject_reject: int

    @property
    def n(self) -> int:
        return self.accept_accept + self.accept_reject + self.reject_accept + self.reject_reject

    @property
    def agreement(self) -> float:
        """The share on which both decide alike."""
        return (self.accept_accept + self.reject_reject) / self.n

    @property
    def base_rate(self) -> float:
        """The share that people accept."""
        return (self.accept_accept + self.accept_reject) / self.n

    @property
    def judge_rate(self) -> float:
        """The share that the judge accepts."""
        return (self.accept_accept + self.reject_accept) / self.n


def confusion(people: Sequence[bool], judge: Sequence[bool]) -> Confusion:
    pairs = list(zip(people, judge, strict=True))
    return Confusion(*(pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))))


def kappa(people: NDArray[np.bool_], judge: NDArray[np.bool_], axis: int = -1) -> Any:
    """Cohen's kappa (Cohen 1960, "A coefficient of agreement for nominal scales"): (p_o - p_e) / (1 - p_e).

    p_o is the observed agreement, p_e that of raters who decide by chance at their own rates. NaN where p_e is 1:
    when both always say the same, nothing is known about agreement.
    """
    observed = np.mean(people == judge, axis=axis)
    first, second = np.mean(people, axis=axis), np.mean(judge, axis=axis)
    expected = first * second + (1 - first) * (1 - second)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(expected < 1, (observed - expected) / (1 - expected), np.nan)


@dataclass(frozen=True, slots=True)
class Kappa:
    """The estimate with its 95 % interval; None where it is not defined."""

    value: float | None
    low: float | None
    high: float | None


def kappa_of(people: Sequence[bool], judge: Sequence[bool]) -> Kappa:
    """Kappa with a percentile bootstrap interval over the pairs (9,999 resamples, a fixed seed).

    A resample in which both always say the same counts as 0: it shows no agreement beyond chance.
    """
    first, second = np.asarray(people, bool), np.asarray(judge, bool)
    if not len(first) or np.isnan(value := kappa(first, second)):
        return Kappa(None, None, None)
    if len(first) < 2:
        return Kappa(float(value), None, None)
    with warnings.catch_warnings():
        # All resamples may be alike: the interval is a point then, and no matter to warn of.
        warnings.simplefilter("ignore")
        interval = bootstrap(
            (first, second),
            lambda a, b, axis: np.nan_to_num(kappa(a, b, axis)),
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            batch=max(1, _CELLS // len(first)),
            method="percentile",
            rng=np.random.default_rng(SEED),
        ).confidence_interval
    return Kappa(float(value), float(interval.low), float(interval.high))


def consistency(repeats: Sequence[Sequence[bool]]) -> float | None:
    """The share of repeats of the same reply that agree with each other, over all pairs; None without a pair."""
    alike = pairs = 0
    for decisions in repeats:
        n, accepted = len(decisions), sum(decisions)
        pairs += n * (n - 1) // 2
        alike += accepted * (accepted - 1) // 2 + (n - accepted) * (n - accepted - 1) // 2
    return alike / pairs if pairs else None
