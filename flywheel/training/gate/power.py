"""The power of a gate test: the probability that it shows a gain, and the spread of scores that it depends on.

Plain arithmetic, because the daemon calls it often and must not import a scientific library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import NormalDist
from typing import Final

from flywheel.records.round import SpentTest

GAIN: Final = 0.1
"""The gain for which power is computed: ten points of a score in 0…1."""
PRIOR_CONVERSATIONS: Final = 50
"""Weight of the prior spread, in conversations, relative to past comparisons."""
_NORMAL: Final = NormalDist()


def spread(samples: int, past: Iterable[SpentTest] = ()) -> float:
    """The expected standard deviation of a conversation's difference, with this many answers per task and adapter.

    The prior variance is 0.32 / samples + 0.02: binary scores with a third of the variance between tasks (0.16 within
    a task, for each adapter), and effects that differ between conversations by 0.14. Past comparisons scale it by the
    ratio of their observed to their expected spread.
    """
    weight, total = float(PRIOR_CONVERSATIONS), float(PRIOR_CONVERSATIONS)
    for test in past:
        if test.spread is not None and test.samples is not None:
            weight += test.conversations
            total += test.conversations * test.spread**2 / _assumed(test.samples)
    return math.sqrt(_assumed(samples) * total / weight)


def _assumed(samples: int) -> float:
    return 0.32 / samples + 0.02


def power(conversations: int, spread: float, alpha: float, gain: float = GAIN) -> float:
    """The probability that a gain of this size passes a one-sided test at `alpha`.

    The power of the t test, by the approximations 26.7.5 and 26.7.10 in Abramowitz and Stegun (1964); 0 if the
    sign-flip test of so few conversations cannot reach the level.
    """
    if conversations < 2 or 2.0**-conversations > alpha:
        return 0.0
    freedom = conversations - 1
    needed = _t_quantile(-_NORMAL.inv_cdf(alpha), freedom)
    shown = gain * math.sqrt(conversations) / spread
    return 1 - _NORMAL.cdf((needed * (1 - 1 / (4 * freedom)) - shown) / math.sqrt(1 + needed**2 / (2 * freedom)))


def _t_quantile(z: float, freedom: int) -> float:
    """Student's quantile for the normal quantile z."""
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom ** (place + 1) for place, term in enumerate(terms))
