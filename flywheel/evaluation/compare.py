"""The paired comparison of two adapters on the same tasks with the same seeds. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import stats

from flywheel.round import Comparison, CriterionComparison, Score

RESAMPLES: Final = 9999
EXACT: Final = 13
"""Up to so many tasks every subset is looked at: not more than are drawn of larger numbers."""
ROUNDING: Final = 1e-9
"""Differences of rewards that are nearer to each other are equal: 0.65 - 0.5 is not quite 0.15."""


@dataclass(frozen=True, slots=True)
class Paired:
    """The rewards of one task, each side with as many samples as the other; None where the judge gave no score."""

    task_id: str
    candidate: tuple[float | None, ...]
    deployed: tuple[float | None, ...]


def compare(tasks: Sequence[Paired], *, samples: int, confidence: float, seed: int) -> Comparison:
    """Means, gain and its confidence interval over tasks.

    A task with an undecided answer on either side is left out of everything and counted: its missing half may well
    depend on how the answer was. The interval is the wider one, on either side, of two for the mean of the paired
    differences: the bias-corrected and accelerated bootstrap (BCa; Efron 1987), and the one that turning the signs of
    differences gives (Hartigan 1969). The bootstrap alone is too narrow for few tasks, and for many of which few
    differ: of candidates that were no better, it let twice as many pass as it should. Tasks are resampled, not
    answers, because answers to one task are alike.
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


def compare_criterion(
    criterion: str, tasks: Sequence[Paired], *, takes_away: bool, confidence: float, seed: int
) -> CriterionComparison:
    """The same for one criterion's values; those of one that `takes_away` are turned, so that more is better.

    Answers where it was not looked at are left out, and tasks without any on a side. The interval is that of the
    tasks and of two more, one as much better and one as much worse as can be (after Agresti and Min 2005, who add
    half of each). Without them, of candidates that were worse by 0.05 in what deployed always gets right, 37 % of
    intervals for 8 tasks and 12 % of those for 20 lay above -0.05: where no difference was seen, they have no width.
    """
    scores = [score for task in tasks if (score := _score(task, whole=False)) is not None]
    if takes_away:
        scores = [
            each.model_copy(update={"candidate": 1 - each.candidate, "deployed": 1 - each.deployed})
            for each in scores
        ]
    gains = [score.candidate - score.deployed for score in scores]
    lower, upper, _ = _interval(np.array([*gains, -1.0, 1.0]), confidence, seed)
    return CriterionComparison(
        criterion=criterion,
        tasks=len(scores),
        candidate_mean=_mean([score.candidate for score in scores]),
        deployed_mean=_mean([score.deployed for score in scores]),
        gain=_mean(gains),
        lower=lower,
        upper=upper,
    )


def _score(task: Paired, *, whole: bool = True) -> Score | None:
    candidate = [reward for reward in task.candidate if reward is not None]
    deployed = [reward for reward in task.deployed if reward is not None]
    lacking = len(candidate) < len(task.candidate) or len(deployed) < len(task.deployed)
    if not candidate or not deployed or (whole and lacking):
        return None
    return Score(task_id=task.task_id, candidate=_mean(candidate), deployed=_mean(deployed))


def _interval(gains: np.ndarray, confidence: float, seed: int) -> tuple[float, float, str]:
    """Bounds and the method's name. Rewards are in 0…1, so a difference is in -1…1: what is known without data."""
    if len(gains) < 2:
        return -1.0, 1.0, "none: fewer than two tasks"
    flips = _sign_flips(gains, confidence, seed)
    bootstrap, method = _bootstrap(gains, confidence, seed)
    return min(flips[0], bootstrap[0]), max(flips[1], bootstrap[1]), f"sign flips and {method}"


def _sign_flips(gains: np.ndarray, confidence: float, seed: int) -> tuple[float, float]:
    """The gains that a paired randomization test does not reject.

    Were the true gain g, each difference could as well be as far on the other side of it. Of all 2ⁿ ways to turn them
    about, those give no smaller mean for which the turned ones have a mean of at most g. So the bounds are quantiles
    of the means of subsets; without a subset to turn (n below 6 at 95 %) there is no bound but what is possible.
    """
    n = len(gains)
    if n <= EXACT:
        chosen = (np.arange(1, 2**n)[:, None] >> np.arange(n)) & 1  # (2ⁿ - 1, n): every subset but the empty one
    else:
        chosen = np.random.default_rng(seed).integers(0, 2, (RESAMPLES, n))
        chosen = chosen[chosen.any(axis=1)]
    means = np.sort(chosen @ gains / chosen.sum(axis=1))
    # The empty subset turns nothing, and counts among those that give no smaller mean, whatever the gain.
    rank = math.floor((1 - confidence) / 2 * (len(means) + 1)) - 1
    if rank < 0:
        return -1.0, 1.0
    return float(means[rank]), float(means[-1 - rank])


def _bootstrap(gains: np.ndarray, confidence: float, seed: int) -> tuple[tuple[float, float], str]:
    if np.ptp(gains) < ROUNDING:
        # Resampling equal values gives the value itself; BCa divides by their spread.
        return (float(gains[0]), float(gains[0])), "nothing else: all differences are equal"
    for method, name in (("BCa", "paired bootstrap, BCa"), ("percentile", "paired bootstrap, percentile")):
        interval = stats.bootstrap(
            (gains,), np.mean, confidence_level=confidence, n_resamples=RESAMPLES, method=method, rng=seed
        ).confidence_interval
        if math.isfinite(interval.low) and math.isfinite(interval.high):
            return (float(interval.low), float(interval.high)), name
    raise AssertionError("percentiles of finite numbers are finite")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
