"""The paired comparison of two adapters on the same tasks with the same seeds. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import stats

from flywheel.round import Comparison, Score

RESAMPLES: Final = 9999


@dataclass(frozen=True, slots=True)
class Paired:
    """The rewards of one task, each side with as many samples as the other; None where the judge gave no score."""

    task_id: str
    candidate: tuple[float | None, ...]
    deployed: tuple[float | None, ...]


def compare(tasks: Sequence[Paired], *, samples: int, confidence: float, seed: int) -> Comparison:
    """Means, gain and its confidence interval over tasks.

    A task with an undecided answer on either side is left out of everything and counted: its missing half may well
    depend on how the answer was. The interval is the bias-corrected and accelerated bootstrap (BCa; Efron 1987) of
    the mean of the paired differences; tasks are resampled, not answers, because answers to one task are alike.
    """
    scores = [score for task in tasks if (score := _score(task)) is not None]
    gains = np.array([score.candidate - score.deployed for score in scores])
    lower, upper, method = _interval(gains, confidence, seed)
    return Comparison(
        tasks=len(scores),
        samples=samples,
        undecided=len(tasks) - len(scores),
        candidate_mean=_mean([score.candidate for score in scores]),
        deployed_mean=_mean([score.deployed for score in scores]),
        gain=_mean(gains.tolist()),
        lower=lower,
        upper=upper,
        confidence=confidence,
        method=method,
        scores=scores,
    )


def _score(task: Paired) -> Score | None:
    candidate = [reward for reward in task.candidate if reward is not None]
    deployed = [reward for reward in task.deployed if reward is not None]
    complete = len(candidate) == len(task.candidate) and len(deployed) == len(task.deployed)
    if not complete or not candidate or not deployed:
        return None
    return Score(task_id=task.task_id, candidate=_mean(candidate), deployed=_mean(deployed))


def _interval(gains: np.ndarray, confidence: float, seed: int) -> tuple[float, float, str]:
    """Bounds and the method's name. Rewards are in 0…1, so a difference is in -1…1: what is known without data."""
    if len(gains) < 2:
        return -1.0, 1.0, "none: fewer than two tasks"
    if np.ptp(gains) == 0:
        # Resampling equal values gives the value itself; BCa divides by their spread.
        return float(gains[0]), float(gains[0]), "none: all differences are equal"
    for method, name in (("BCa", "paired bootstrap, BCa"), ("percentile", "paired bootstrap, percentile")):
        interval = stats.bootstrap(
            (gains,), np.mean, confidence_level=confidence, n_resamples=RESAMPLES, method=method, rng=seed
        ).confidence_interval
        if math.isfinite(interval.low) and math.isfinite(interval.high):
            return float(interval.low), float(interval.high), name
    raise AssertionError("percentiles of finite numbers are finite")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
