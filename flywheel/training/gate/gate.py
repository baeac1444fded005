"""The gate: at which level it tests a candidate, what such a test would show, whether it promotes the candidate.

Plain arithmetic, because the daemon calls it often and must not import a scientific library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType
from typing import Final

from flywheel.config.training import GateSettings
from flywheel.records.round import (
    Comparison,
    CriterionComparison,
    DecisionReason,
    GateDecision,
    GateTest,
    SpentTest,
    SuiteComparison,
)
from flywheel.system.terminal import percent, quantity

GAIN: Final = 0.1
"""The gain for which power is computed: ten points of a score in 0…1."""
PRIOR_CONVERSATIONS: Final = 50
"""Weight of the prior spread, in conversations, relative to past comparisons."""
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True)
class Tripwire:
    """What is measured so that more is better, the loss beyond which it is harm, and how the harm is told."""

    label: str
    margin: float
    harm: str


TRIPWIRES: Final[Mapping[str, Tripwire]] = MappingProxyType(
    {
        # The median ratio is beyond 2, or below ½, if that of more than half of the prompts is.
        "longer": Tripwire("not twice as long", 0.5, "most answers are more than twice as long"),
        "shorter": Tripwire("not half as long", 0.5, "most answers are less than half as long"),
        # A user gets these answers as they are: one more in twenty is noticed.
        "cut": Tripwire("not cut", 0.05, "more answers are cut"),
        "invalid_format": Tripwire("valid format", 0.05, "more answers have an invalid format"),
        # An agent may try a call again.
        "failed_calls": Tripwire("calls that work", 0.1, "more tool calls fail"),
    }
)
"""The tripwires by what they measure (`flywheel.training.gate.tripwires`)."""


def alpha_of(alpha: float, number: int) -> float:
    """The one-sided level of test `number` (1, 2, …) of an epoch: alpha · 6 / (π² number²). They sum to alpha."""
    return alpha * 6 / (math.pi * number) ** 2


def begins_epoch(last: SpentTest | None, never_tested: int) -> bool:
    """Whether the next test gets a new budget: as many untested conversations exist as the last test used."""
    return last is None or never_tested >= max(last.conversations, 1)


def following_test(alpha: float, last: SpentTest | None, never_tested: int) -> GateTest:
    """Epoch, number and level of the next test."""
    epoch, number = (last.epoch, last.number + 1) if last is not None else (1, 1)
    if last is not None and begins_epoch(last, never_tested):
        epoch, number = last.epoch + 1, 1
    return GateTest(epoch=epoch, number=number, alpha=alpha_of(alpha, number))


def expected_spread(samples: int, past: Iterable[SpentTest] = ()) -> float:
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


def power_on_suite(conversations: int, tasks: int, margin: float, gate: GateSettings) -> float:
    """The probability that a candidate that is as good passes the non-inferiority test of a suite with so many tasks;
    0 if they are fewer than `gate.min_tasks`.

    Its interval has two artificial conversations (`compare_criterion`), one with the gain 1 and one with the loss 1.
    """
    if tasks < gate.min_tasks:
        return 0.0
    whole = conversations + 2
    variance = (conversations * expected_spread(gate.samples_for(tasks)) ** 2 + 2) / whole
    return power(whole, math.sqrt(variance), (1 - gate.confidence) / 2, gain=margin)


def _t_quantile(z: float, freedom: int) -> float:
    """Student's quantile for the normal quantile z."""
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom ** (place + 1) for place, term in enumerate(terms))


def decide(comparison: Comparison, gate: GateSettings) -> GateDecision:
    """Promote only if the lower bound of the gain's interval is above `min_gain`.

    A criterion or suite with a margin must also be shown to be worse by less than the margin. A tripwire blocks only
    if it is shown to be worse by more than its margin.
    """
    figures = (
        f"gain {comparison.gain:+.3f}, {percent(comparison.confidence)} interval {comparison.lower:+.3f} to"
        f" {comparison.upper:+.3f}; candidate {comparison.candidate_mean:.3f}, deployed"
        f" {comparison.deployed_mean:.3f}, on {_count(comparison.tasks)}"
    )
    if comparison.undecided:
        figures += f", {comparison.undecided} more undecided"
    if comparison.candidate_undecided or comparison.deployed_undecided:
        answers = quantity(comparison.candidate_undecided, "answer")
        figures += (
            f"; {answers} of the candidate and {comparison.deployed_undecided:,} of the deployed are undecided, which"
            " the lower bound counts at their worst"
        )
    if missed := misses_of(comparison):
        figures += f"; {missed}"

    def decision(reason_code: DecisionReason, reason: str, **about: str) -> GateDecision:
        return GateDecision(
            promote=reason_code is DecisionReason.BETTER,
            reason=reason,
            reason_code=reason_code,
            min_tasks=gate.min_tasks,
            min_gain=gate.min_gain,
            confidence=gate.confidence,
            margins=gate.non_inferiority_margins,
            suite_margins=_suite_margins(gate),
            **about,
        )

    if comparison.tasks < gate.min_tasks:
        why = f"not enough evidence: fewer than {_count(gate.min_tasks)} decided ({figures})"
        return decision(DecisionReason.FEW_TASKS, why)
    every: list[CriterionComparison | SuiteComparison] = [*comparison.criteria, *comparison.suites]
    if worse := [each for each in every if each.upper < 0]:
        figures += f"; worse in {', '.join(_of_criterion(each) for each in worse)}"
    if comparison.lower <= gate.min_gain:
        needed = "0" if gate.min_gain == 0 else f"{gate.min_gain:g}"
        why = f"not shown to be better: the lower bound is not above {needed} ({figures})"
        return decision(DecisionReason.NOT_BETTER, why)
    for reason_code, why, about in _objections(comparison, gate):
        return decision(reason_code, f"{why} ({figures})", **about)
    return decision(DecisionReason.BETTER, f"better: {figures}")


def harm_of(comparison: Comparison) -> CriterionComparison | None:
    """The first tripwire that shows harm."""
    return next((each for each in comparison.tripwires if each.upper < -TRIPWIRES[each.criterion].margin), None)


def of_tripwire(found: CriterionComparison) -> str:
    """The harm that a tripwire shows."""
    wire = TRIPWIRES[found.criterion]
    gain = f"gain {found.gain:+.3f}, {found.lower:+.3f} to {found.upper:+.3f}, all of it below {-wire.margin:g}"
    return f"{wire.harm}: {wire.label} {found.deployed_mean:.3f} before and {found.candidate_mean:.3f} now, {gain}"


def misses_of(comparison: Comparison) -> str:
    """How many answers ended at a call without a recorded result, or because the user's agent failed, and what that
    means; empty if there are none."""
    parts = [
        f"{why} {quantity(candidate, 'answer')} of the candidate (scored 0) and {deployed:,} of the deployed"
        for why, candidate, deployed in (
            ("calls without a recorded result ended", comparison.candidate_missed, comparison.deployed_missed),
            ("the agent failed in", comparison.candidate_failed, comparison.deployed_failed),
        )
        if candidate or deployed
    ]
    found = "; ".join(parts)
    if not found or comparison.lower_at_bound is None:
        return found
    return (
        f"{found} (scored as its others' mean; the lower bound is {comparison.lower_at_bound:+.3f} if they score 1)"
    )


def _suite_margins(gate: GateSettings) -> dict[str, float]:
    return {name: suite.margin for name, suite in gate.suites.items() if suite.margin is not None}


def _objections(comparison: Comparison, gate: GateSettings) -> Iterator[tuple[DecisionReason, str, dict[str, str]]]:
    """Why a candidate that is better is not promoted, and what each reason is about: criteria and suites whose
    non-inferiority is not shown, then the first tripwire that shows harm."""
    criteria = {each.criterion: each for each in comparison.criteria}
    for name, margin in gate.non_inferiority_margins.items():
        found, about = criteria.get(name), {"criterion": name}
        tasks = found.tasks if found is not None else 0
        if found is None or tasks < gate.min_tasks:
            few = f"it has verdicts on {_count(tasks)}, fewer than {gate.min_tasks}"
            yield DecisionReason.FEW_ON_CRITERION, f"not enough evidence on {name}: {few}", about
        elif found.lower <= -margin:
            why = f"not shown to be no worse in {_of_criterion(found)}: the lower bound is not above {-margin:g}"
            yield DecisionReason.WORSE_ON_CRITERION, why, about
    suites = {each.name: each for each in comparison.suites}
    for name, margin in _suite_margins(gate).items():
        of_suite, about = suites.get(name), {"suite": name}
        if of_suite is None or of_suite.tasks < gate.min_tasks:
            tasks, undecided = (of_suite.tasks, of_suite.undecided) if of_suite is not None else (0, 0)
            why = f"not enough evidence on suite {name}: fewer than {quantity(gate.min_tasks, 'task')} decided"
            yield DecisionReason.FEW_ON_SUITE, f"{why} ({tasks}, {undecided} more undecided)", about
        elif of_suite.lower <= -margin:
            lost = "lost" if of_suite.upper < 0 else "may have lost"
            gain = f"gain {of_suite.gain:+.3f}, {of_suite.lower:+.3f} to {of_suite.upper:+.3f}"
            why = f"suite {name} {lost}: {gain}: the lower bound is not above {-margin:g}"
            yield DecisionReason.WORSE_ON_SUITE, why, about
    if gate.tripwires and (harm := harm_of(comparison)) is not None:
        yield DecisionReason.HARMFUL, of_tripwire(harm), {"tripwire": harm.criterion}


def _of_criterion(found: CriterionComparison | SuiteComparison) -> str:
    name = found.criterion if isinstance(found, CriterionComparison) else f"suite {found.name}"
    return f"{name} ({found.gain:+.3f}, {found.lower:+.3f} to {found.upper:+.3f})"


def _count(tasks: int) -> str:
    return f"{tasks} held-out task" if tasks == 1 else f"{tasks} held-out tasks"
