"""What answers are worth: shares with their intervals over the phrases of what was asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, Final

CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Share:
    """A mean over phrases with its confidence interval (`CONFIDENCE`)."""

    mean: float
    lower: float
    upper: float
    phrases: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.lower:.2f} to {self.upper:.2f})"

    def as_json(self) -> dict[str, Any]:
        return {"mean": round(self.mean, 4), "interval": [round(self.lower, 4), round(self.upper, 4)]}


def share(values: Sequence[tuple[str, float]]) -> Share:
    """Of pairs of a phrase and a value in 0…1: the mean of the phrases' means, Student's t interval over phrases.

    Answers to the same phrase are not independent, so the phrases are what is counted. At least two are needed.
    """
    by_phrase: dict[str, list[float]] = {}
    for phrase, value in values:
        by_phrase.setdefault(phrase, []).append(value)
    found = interval([fmean(several) for several in by_phrase.values()])
    return replace(found, lower=max(0.0, found.lower), upper=min(1.0, found.upper))


def interval(means: Sequence[float]) -> Share:
    """The mean of what was found for each of several phrases, with Student's t interval over the phrases."""
    from scipy import stats

    mean = fmean(means)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(means) - 1)) * stdev(means) / len(means) ** 0.5
    return Share(mean, mean - reach, mean + reach, len(means))


def mean_gain(pairs: Iterable[tuple[Mapping[str, float], Mapping[str, float]]]) -> Share:
    """By how much the first of several pairs are better, from each one's value by phrase: the mean over pairs of each
    phrase's difference, with its interval over phrases."""
    differences: dict[str, list[float]] = {}
    for better, worse in pairs:
        for phrase, value in better.items():
            differences.setdefault(phrase, []).append(value - worse[phrase])
    return interval([fmean(each) for each in differences.values()])


@dataclass(frozen=True, slots=True)
class Result:
    """How good answers are: shares by name, and of an answer with fields how often each is right."""

    shares: dict[str, Share]
    answers: int
    by_field: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        shares = {name: each.as_json() for name, each in self.shares.items()}
        phrases = max(each.phrases for each in self.shares.values())
        by_field = {name: round(value, 4) for name, value in self.by_field.items()}
        return {**shares, "by_field": by_field, "answers": self.answers, "phrases": phrases}
