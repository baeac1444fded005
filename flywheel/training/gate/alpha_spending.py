"""The gate's error budget: the level of each test, and the start of a new budget. Plain arithmetic."""

from __future__ import annotations

import math

from flywheel.records.round import GateTest, SpentTest


def alpha_of(alpha: float, number: int) -> float:
    """The one-sided level of test `number` (1, 2, …) of an epoch: alpha · 6 / (π² number²). They sum to alpha."""
    return alpha * 6 / (math.pi * number) ** 2


def begins_epoch(last: SpentTest | None, never_tested: int) -> bool:
    """Whether the next test gets a new budget: as many untested conversations exist as the last test used."""
    return last is None or never_tested >= max(last.conversations, 1)


def next_test(alpha: float, last: SpentTest | None, never_tested: int) -> GateTest:
    """Epoch, number and level of the next test."""
    epoch, number = (last.epoch, last.number + 1) if last is not None else (1, 1)
    if last is not None and begins_epoch(last, never_tested):
        epoch, number = last.epoch + 1, 1
    return GateTest(epoch=epoch, number=number, alpha=alpha_of(alpha, number))
