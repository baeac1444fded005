"""A metric over tasks: mean, spread, and an interval by conversation as the gate computes it. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from flywheel.training.gate.paired_comparison import by_conversation, interval, with_artificial

CONFIDENCE: Final = 0.95
"""Of the intervals that are shown to people."""


@dataclass(frozen=True, slots=True)
class MetricValue:
    """The value of a metric for one answer to a task, 0…1; None where it could not be measured. A task without a
    `conversation` is its own conversation."""

    task_id: str
    value: float | None
    conversation: str = ""


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """A metric over tasks, each with the mean of its answers.

    Attributes:
        count: The number of tasks that were measured; of each, all answers.
        unmeasured: The number of the others. They are in no figure: a missing value may depend on the answer.
        conversations: Those of the measured tasks.
        mean: None if no task was measured, and so are `std` and the bounds.
        std: Of the tasks' values, with `count` as the denominator.
        lower: Lower bound of the mean's interval, with 1 - `confidence` as the error probability of both bounds.
    """

    count: int
    unmeasured: int
    conversations: int
    mean: float | None
    std: float | None
    lower: float | None
    upper: float | None
    confidence: float


def summarise(values: Sequence[MetricValue], *, confidence: float, seed: int) -> MetricSummary:
    """Several answers to a task have one `MetricValue` each.

    As those of the gate's criteria, the interval includes two artificial conversations, here with the values 0 and 1,
    so that it has a width where all values are equal. Fewer than two conversations say nothing: it is 0…1.
    """
    tasks: dict[str, list[MetricValue]] = {}
    for each in values:
        tasks.setdefault(each.task_id, []).append(each)
    found: dict[str, float] = {}
    for name, answers in tasks.items():
        known = [each.value for each in answers if each.value is not None]
        if len(known) == len(answers):
            found[name] = math.fsum(known) / len(known)
    sums, sizes = by_conversation([(tasks[name][0].conversation, name, value) for name, value in found.items()])
    unmeasured = len(tasks) - len(found)
    if not found:
        return MetricSummary(0, unmeasured, 0, None, None, None, None, confidence)
    lower, upper = 0.0, 1.0
    if len(sums) > 1:
        lower, upper, _ = interval(*with_artificial(sums, sizes, 0.0, 1.0), (1 - confidence) / 2, seed)
    every = list(found.values())
    mean = math.fsum(every) / len(every)
    return MetricSummary(
        count=len(every),
        unmeasured=unmeasured,
        conversations=len(sums),
        mean=mean,
        std=float(np.std(every)),
        lower=max(0.0, lower),
        upper=min(1.0, upper),
        confidence=confidence,
    )
