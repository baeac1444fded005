"""A sequential test: whether a new version's replies succeed less often than the old one's, while both serve.

Units, such as conversations, get one of two arms at random and count once. Under the hypothesis that the new version
is not worse, arm and outcome are independent, or point the other way. Each unit multiplies an e-value by

    q(arm | outcome) / π(arm)

π is the probability of the arm when the unit was assigned, and q follows by Bayes' rule from estimates of both
success rates, which come from earlier units alone: (½ + successes) / (1 + units), and the pooled rate for both where
the new version's is higher or one of them has no unit yet. The expected factor is at most 1 whatever came before, so
the e-value is a nonnegative supermartingale, and the probability that it ever reaches a limit is at most 1 / limit
(Ville's inequality; Ramdas, Grünwald, Vovk and Shafer, 2023, "Game-Theoretic Statistics and Safe Anytime-Valid
Inference"). It may be looked at after every unit, and rates may drift, since the arms of one moment share them.

There are two tests: whether outcomes are worse, and whether more of them are missing. They share the false alarms, at
most one in twenty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

QUALITY_LIMIT: Final = 20 / 0.8
"""The e-value of outcomes at which the new version is taken to be worse."""
PRESENCE_LIMIT: Final = 20 / 0.2
"""The same, of whether outcomes are missing."""
SPREAD: Final = 1.5
"""How far the logarithm of the e-value is expected above the limit where four of five tests have reached it."""


@dataclass(slots=True)
class SequentialTest:
    """`share` is the probability of the new version's arm. Lists have the old version first."""

    share: float
    limit: float
    units: list[int] = field(default_factory=lambda: [0, 0])
    successes: list[int] = field(default_factory=lambda: [0, 0])
    log_e: float = 0.0
    log_most: float = 0.0
    """The logarithm of the largest e-value so far."""

    def add(self, *, is_new: bool, success: bool) -> None:
        """Count the outcome of one unit."""
        old, new = self._rates()
        chances = [(1 - self.share) * (old if success else 1 - old), self.share * (new if success else 1 - new)]
        prior = self.share if is_new else 1 - self.share
        self.log_e += math.log(chances[is_new] / math.fsum(chances) / prior)
        self.log_most = max(self.log_most, self.log_e)
        self.units[is_new] += 1
        self.successes[is_new] += success

    @property
    def e_value(self) -> float:
        return math.exp(min(self.log_e, 700.0))

    @property
    def shows_harm(self) -> bool:
        """Whether the e-value has reached the limit at any time."""
        return self.log_most >= math.log(self.limit)

    def _rates(self) -> tuple[float, float]:
        """Estimated rates in (0, 1), the old one not below the new one."""
        done, all_ = [0.5 + each for each in self.successes], [1.0 + each for each in self.units]
        old, new = (mine / total for mine, total in zip(done, all_, strict=True))
        return (old, new) if new <= old and all(self.units) else (sum(done) / sum(all_),) * 2


class WatchTest:
    """The two tests of a watch. `share` is the probability of the new version's arm."""

    def __init__(self, share: float) -> None:
        self.quality, self.presence = SequentialTest(share, QUALITY_LIMIT), SequentialTest(share, PRESENCE_LIMIT)

    def add(self, *, is_new: bool, success: bool | None) -> None:
        """Count the outcome of one unit; None if it is missing."""
        self.presence.add(is_new=is_new, success=success is not None)
        if success is not None:
            self.quality.add(is_new=is_new, success=success)

    @property
    def shows_harm(self) -> bool:
        return self.quality.shows_harm or self.presence.shows_harm


def sample_ratio_p_value(old: int, new: int, share: float) -> float:
    """The probability that chance makes two arms with so many units at least as uneven, if each unit gets the new one
    with the probability `share`: twice the smaller tail of the binomial distribution, at most 1. A small one is known
    as a sample ratio mismatch."""
    units, few, chance = old + new, new, share
    if new > units * share:
        few, chance = old, 1 - share
    log_chance = math.lgamma(units + 1) - math.lgamma(few + 1) - math.lgamma(units - few + 1)
    term = math.exp(log_chance + few * math.log(chance) + (units - few) * math.log1p(-chance))
    tail = term
    for count in range(few, 0, -1):
        # From the probability of `count` to that of one less. Terms fall at least geometrically below the mean.
        term *= count * (1 - chance) / ((units - count + 1) * chance)
        tail += term
        if term <= tail * 1e-12:
            break
    return min(1.0, 2 * tail)


def detectable_loss(units: int, share: float, rate: float) -> float | None:
    """The loss of the success rate, 0…1, that so many units would have shown with a probability of about 80 %;
    None if they could show none. `share` is that of the new version among them.

    The logarithm of the e-value grows by the mutual information of arm and outcome with each unit, less about
    ½ ln n for estimating the rates. It must exceed that of the limit by `SPREAD`; `benchmarks.watch` checks the 80 %.
    """
    if not units or not 0 < share < 1 or not 0 < rate <= 1:
        return None
    needed = (math.log(QUALITY_LIMIT) + 0.5 * math.log(units) + SPREAD) / units
    if information(share, rate, 0.0) < needed:
        return None
    low, high = 0.0, rate  # of the new version's rate
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if information(share, rate, middle) >= needed else (low, middle)
    return rate - low


def information(share: float, old: float, new: float) -> float:
    """The mutual information of arm and outcome in nats, for the success rates of both arms."""
    whole = (1 - share) * old + share * new
    parts = [
        (1 - share, old, whole),
        (share, new, whole),
        (1 - share, 1 - old, 1 - whole),
        (share, 1 - new, 1 - whole),
    ]
    return math.fsum(weight * own * math.log(own / mean) for weight, own, mean in parts if own > 0)
