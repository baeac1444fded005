"""The statistical power of the gate's next test: its tasks, its level, and the conversations that are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.config.training import GateSettings
from flywheel.records.round import GateTest
from flywheel.store import gate_tests
from flywheel.system.terminal import quantity
from flywheel.training.gate.gate import alpha_of, expected_spread, following_test, power

CONSIDERED: Final = 10
"""Tasks that are considered, as a multiple of `gate.max_tasks`: conversations have several."""
PAST: Final = 10
"""The newest comparisons, from which the variance of scores is estimated."""


@dataclass(frozen=True, slots=True)
class NextTest:
    """`tasks` are the numbers of the test's tasks, of `conversations` conversations. `power` is the probability of
    showing a gain of ten points; `missing` is the number of conversations until that suffices, None where no number
    suffices; `shortfall` says why no round may start yet, and is empty when one may."""

    test: GateTest
    tasks: list[int]
    conversations: int
    power: float
    missing: int | None
    shortfall: str


def next_test(conn: Connection, config: Config) -> NextTest:
    """The test of a round that starts now."""
    gate = config.gate
    most, takes = CONSIDERED * gate.max_tasks, config.takes.gate
    past = gate_tests.spent(conn, PAST, takes.target)
    last = past[0] if past else None
    fresh = gate_tests.candidates(conn, most, takes)
    never_tested = len({conversation for _, conversation in fresh})
    test = following_test(gate.alpha, last, never_tested)
    own = [] if test.number == 1 else gate_tests.candidates(conn, most, takes, test.epoch)
    asked = _spread_out([*own, *fresh])[: gate.max_tasks]
    conversations = len({conversation for _, conversation in asked})

    def power_of(conversations: int, alpha: float, tasks: int) -> float:
        return power(conversations, expected_spread(gate.samples_for(tasks), past), alpha)

    now = power_of(conversations, test.alpha, len(asked))
    missing: int | None = 0
    if now < gate.min_power:
        most_asked = range(1, gate.max_tasks + 1)
        ways = []
        if (needed := _first(most_asked, lambda n: power_of(n, test.alpha, n) >= gate.min_power)) is not None:
            ways.append(needed - conversations)
        first = alpha_of(gate.alpha, 1)
        if last is not None and (needed := _first(most_asked, lambda n: power_of(n, first, n) >= gate.min_power)):
            ways.append(max(needed, last.conversations) - never_tested)
        # With several tasks per conversation each gets fewer samples: at least one conversation is missing.
        missing = max(1, min(ways)) if ways else None
    shortfall = _shortfall(gate, conversations, now, missing)
    return NextTest(test, [number for number, _ in asked], conversations, now, missing, shortfall)


def _shortfall(gate: GateSettings, conversations: int, share: float, missing: int | None) -> str:
    if missing == 0:
        return ""
    required = f"for {gate.min_power:.0%} power (gate.min_power) to detect a gain of 0.10; now {share:.0%}"
    if missing is None:
        return f"gate.max_tasks {gate.max_tasks} is too low {required}"
    more = quantity(missing, "more held-out conversation")
    return f"waiting for {more} ({conversations:,} of {conversations + missing:,}, {required})"


def _spread_out(tasks: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Ordered so that one task of every conversation comes first, then a second one, …: independent tasks first."""
    seen: Counter[str] = Counter()
    ranked = []
    for number, conversation in tasks:
        ranked.append((seen[conversation], number, conversation))
        seen[conversation] += 1
    return [(number, conversation) for _, number, conversation in sorted(ranked, key=lambda each: each[0])]


def _first(numbers: Iterable[int], fits: Callable[[int], bool]) -> int | None:
    return next((number for number in numbers if fits(number)), None)
