"""The gate's next test: whom it would ask, at which level, and whether it could show what a round is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection

from flywheel.config import Config, GateSettings
from flywheel.evaluation import alpha_spending
from flywheel.round import GateTest
from flywheel.store import gate_tests
from flywheel.terminal import quantity

LOOKED_AT: Final = 10
"""So many times `gate.max_tasks` tasks are looked at for those to ask: conversations have several."""
PAST: Final = 10
"""So many comparisons, the newest, tell how much scores vary."""


@dataclass(frozen=True, slots=True)
class NextTest:
    """The tasks that the test would ask, by number, of how many conversations; the probability that it would show a
    gain of ten points; and how many conversations are missing until that is enough, None where no number is."""

    test: GateTest
    tasks: list[int]
    conversations: int
    power: float
    missing: int | None

    def shortfall(self, gate: GateSettings) -> str:
        """Why no round may start yet; empty when one may."""
        if self.missing == 0:
            return ""
        why = (
            f"on {quantity(self.conversations, 'held-out conversation')}, test {self.test.number} of epoch"
            f" {self.test.epoch} (one-sided level {self.test.alpha:.2g}) would show a gain of ten points with"
            f" probability {self.power:.2f}, and gate.min_power is {gate.min_power:g}"
        )
        if self.missing is None:
            return f"gate.max_tasks {gate.max_tasks} is too low: {why}"
        return f"{quantity(self.missing, 'held-out conversation')} missing: {why}"

    def told(self, gate: GateSettings) -> dict[str, Any]:
        """As `status` tells it."""
        return {
            "epoch": self.test.epoch,
            "test": self.test.number,
            "alpha": self.test.alpha,
            "conversations": self.conversations,
            "power": round(self.power, 4),
            "missing": self.missing,
            "shortfall": self.shortfall(gate),
        }


def next_test(conn: Connection, config: Config) -> NextTest:
    """The test that a round which started now would be."""
    gate = config.gate
    most, takes = LOOKED_AT * gate.max_tasks, config.training.takes
    past = gate_tests.spent(conn, PAST)
    last = past[0] if past else None
    fresh = gate_tests.never_tested(conn, most, takes)
    never_tested = len({conversation for _, conversation in fresh})
    test = alpha_spending.next_test(gate.alpha, last, never_tested)
    own = [] if test.number == 1 else gate_tests.tested_in(conn, test.epoch, most, takes)
    asked = _spread_out([*own, *fresh])[: gate.max_tasks]
    conversations = len({conversation for _, conversation in asked})

    def power(conversations: int, alpha: float, tasks: int) -> float:
        return alpha_spending.power(conversations, alpha_spending.spread(gate.samples_for(tasks), past), alpha)

    now = power(conversations, test.alpha, len(asked))
    missing: int | None = 0
    if now < gate.min_power:
        most_asked = range(1, gate.max_tasks + 1)
        ways = []
        if (needed := _first(most_asked, lambda n: power(n, test.alpha, n) >= gate.min_power)) is not None:
            ways.append(needed - conversations)
        first = alpha_spending.alpha_of(gate.alpha, 1)
        if last is not None and (needed := _first(most_asked, lambda n: power(n, first, n) >= gate.min_power)):
            ways.append(max(needed, last.conversations) - never_tested)
        # Several tasks of a conversation are asked less often each: one more is missing at least.
        missing = max(1, min(ways)) if ways else None
    return NextTest(test, [number for number, _ in asked], conversations, now, missing)


def _spread_out(tasks: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """In an order that has one task of every conversation first, then a second one, …: together they show most."""
    seen: Counter[str] = Counter()
    ranked = []
    for number, conversation in tasks:
        ranked.append((seen[conversation], number, conversation))
        seen[conversation] += 1
    return [(number, conversation) for _, number, conversation in sorted(ranked, key=lambda each: each[0])]


def _first(numbers: Iterable[int], fits: Callable[[int], bool]) -> int | None:
    return next((number for number in numbers if fits(number)), None)
