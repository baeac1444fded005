"""Confidence intervals of a mean over tasks that are clustered in conversations. Arithmetic only.

Tasks of one conversation are correlated, so conversations are resampled. Each is given by the sum of its tasks'
differences and their number, arrays of shape (conversations,); the gain is the ratio of both sums.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from scipy import stats

FEWEST_RESAMPLES: Final = 9999
MOST_RESAMPLES: Final = 5_000_000
"""Maximum number of resamples; a level that needs more (minutes) uses the studentised interval alone."""
RESAMPLES_PER_TAIL: Final = 20
"""Number of resamples beyond a bound: at level 0.001 twenty of twenty thousand."""
EXACT: Final = 13
"""Up to this number of conversations all subsets are enumerated; for more, subsets are sampled."""
NUMBERS_AT_ONCE: Final = 4_000_000
ROUNDING: Final = 1e-9
"""Tolerance for equal gains: 0.65 - 0.5 is not exactly 0.15."""


class Interval(NamedTuple):
    lower: float
    upper: float
    method: str


def interval(
    sums: np.ndarray, sizes: np.ndarray, alpha: float, seed: int, *, needed: float | None = None
) -> Interval:
    """Bounds of the gain, each with error probability `alpha`: the widest of three methods.

    Student's t with the standard error over conversations; sign flips of conversations; and their bootstrap. If the
    first does not distinguish the gain from `needed`, the others cannot either and are skipped. Differences are
    limited to -1…1.
    """
    if len(sums) < 2:
        return Interval(-1.0, 1.0, "none: fewer than two conversations")
    student = _student(sums, sizes, alpha)
    resamples = max(FEWEST_RESAMPLES, math.ceil(RESAMPLES_PER_TAIL / alpha))
    if resamples > MOST_RESAMPLES or (needed is not None and student.lower <= needed <= student.upper):
        return _within(student)
    flips = _sign_flips(sums, sizes, alpha, resamples, seed)
    bootstrap = _bootstrap(sums, sizes, alpha, resamples, seed)
    found = (student, flips, bootstrap)
    return _within(
        Interval(
            min(each.lower for each in found),
            max(each.upper for each in found),
            ", ".join(each.method for each in found if each.method),
        )
    )


def standard_error(sums: np.ndarray, sizes: np.ndarray) -> float:
    """The cluster-robust standard error of the gain; needs at least two conversations."""
    count = len(sums)
    rests = sums - sizes * (sums.sum() / sizes.sum())
    return float(np.sqrt(count / (count - 1) * (rests @ rests)) / sizes.sum())


def _student(sums: np.ndarray, sizes: np.ndarray, alpha: float) -> Interval:
    gain = float(sums.sum() / sizes.sum())
    width = float(stats.t.isf(alpha, len(sums) - 1)) * standard_error(sums, sizes)
    return Interval(gain - width, gain + width, "studentised by conversation")


def _sign_flips(sums: np.ndarray, sizes: np.ndarray, alpha: float, resamples: int, seed: int) -> Interval:
    """The gains that a paired randomization test does not reject (Hartigan 1969).

    If the true gain is g, each conversation's deviation from g is as likely with the opposite sign. A sign flip gives
    no smaller gain if the flipped conversations have a gain of at most g, so the bounds are quantiles of the gains of
    subsets. If no quantile is beyond `alpha` (fewer than 9 conversations at 0.0024), the bound is the limit -1 or 1.
    """
    count = len(sums)
    values = np.column_stack([sums, sizes])
    if count <= EXACT:
        chosen = (np.arange(1, 2**count)[:, None] >> np.arange(count)) & 1  # (2ⁿ - 1, n): every subset but the empty
        totals = chosen @ values
    else:
        random, rows = np.random.default_rng(seed), NUMBERS_AT_ONCE // count
        totals = np.concatenate(
            [_subsets(random, min(rows, resamples - start), count) @ values for start in range(0, resamples, rows)]
        )
        totals = totals[totals[:, 1] > 0]
    gains = totals[:, 0] / totals[:, 1]
    # The empty subset flips nothing and always counts among those that give no smaller gain.
    rank = math.floor(alpha * (len(gains) + 1)) - 1
    if rank < 0:
        return Interval(-1.0, 1.0, "sign flips")
    gains = np.partition(gains, (rank, len(gains) - 1 - rank))
    return Interval(float(gains[rank]), float(gains[-1 - rank]), "sign flips")


def _subsets(random: np.random.Generator, subsets: int, count: int) -> np.ndarray:
    """Random subsets of `count` elements with probability 1/2 each; 0 and 1 of shape (subsets, count)."""
    packed = random.integers(0, 256, (subsets, -(-count // 8)), dtype=np.uint8)
    return np.unpackbits(packed, axis=1, count=count)


def _bootstrap(sums: np.ndarray, sizes: np.ndarray, alpha: float, resamples: int, seed: int) -> Interval:
    """Bias-corrected and accelerated (Efron 1987); percentiles where that is not defined."""
    gain = float(sums.sum() / sizes.sum())
    if np.ptp(sums - gain * sizes) < ROUNDING:
        # Resampling equal values gives the value itself; BCa divides by their spread.
        return Interval(gain, gain, "")
    for method in ("BCa", "percentile"):
        found = stats.bootstrap(
            (sums, sizes),
            lambda sums, sizes, axis=-1: sums.sum(axis) / sizes.sum(axis),
            paired=True,
            vectorized=True,
            confidence_level=1 - 2 * alpha,
            n_resamples=resamples,
            batch=max(1, NUMBERS_AT_ONCE // len(sums)),
            method=method,
            rng=seed,
        ).confidence_interval
        if math.isfinite(found.low) and math.isfinite(found.high):
            return Interval(float(found.low), float(found.high), f"bootstrap ({method})")
    raise AssertionError("percentiles of finite numbers are finite")


def _within(found: Interval) -> Interval:
    """Rounded, because a value equal to a bound must not exceed it by floating-point error."""
    return found._replace(lower=max(-1.0, round(found.lower, 12)), upper=min(1.0, round(found.upper, 12)))
