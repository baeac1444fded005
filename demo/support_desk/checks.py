"""What an answer is worth: exact checks of its fields, and intervals over the customers' phrases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import fmean, stdev
from typing import Any, Final

from scipy import stats

from demo.support_desk.messages import Message, Ticket

FIELDS: Final = tuple(field.name for field in fields(Ticket))
CONFIDENCE: Final = 0.95


def right_fields(answer: str, ticket: Ticket) -> dict[str, bool]:
    """Field → whether the answer has its value. No field is right of an answer that is not one JSON object."""
    try:
        read = json.loads(answer)
    except ValueError:
        read = None
    given = read if isinstance(read, dict) else {}
    # The type counts, too: 1 is not true.
    return {
        name: type(given.get(name)) is type(value) and given[name] == value for name, value in asdict(ticket).items()
    }


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
    mean = fmean(means)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(means) - 1)) * stdev(means) / len(means) ** 0.5
    return Share(mean, mean - reach, mean + reach, len(means))


@dataclass(frozen=True, slots=True)
class Result:
    """How good answers are: `exact` is the share of those with all fields right, `right` that of right fields."""

    exact: Share
    right: Share
    by_field: dict[str, float]
    answers: int

    def as_json(self) -> dict[str, Any]:
        by_field = {name: round(value, 4) for name, value in self.by_field.items()}
        shares = {"exact": self.exact.as_json(), "fields": self.right.as_json()}
        return {**shares, "by_field": by_field, "answers": self.answers, "phrases": self.exact.phrases}


def result(messages: Sequence[Message], answers: Sequence[str]) -> Result:
    """Check one answer to each message."""
    checked = [right_fields(answer, message.ticket) for message, answer in zip(messages, answers, strict=True)]
    phrases = [message.phrase for message in messages]
    return Result(
        exact=share([(phrase, float(all(each.values()))) for phrase, each in zip(phrases, checked, strict=True)]),
        right=share([(phrase, fmean(each.values())) for phrase, each in zip(phrases, checked, strict=True)]),
        by_field={name: fmean(each[name] for each in checked) for name in FIELDS},
        answers=len(answers),
    )
