"""What the watch of a promotion has found so far: both versions, the test on them, and what may mislead."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct, convert
from sqlalchemy import Connection, Row

from flywheel.records.states import WatchState
from flywheel.store import watches
from flywheel.store.watches import ArmFigures, Result
from flywheel.system.terminal import percent, quantity
from flywheel.training.gate.sequential_test import (
    PRESENCE_LIMIT,
    QUALITY_LIMIT,
    WatchTest,
    detectable_loss,
    sample_ratio_p_value,
)

LARGE_UNIT: Final = 0.05
"""The share of the calls in one unit above which the units are unlikely to be conversations."""
MANY_FALLBACKS: Final = 0.5
MISMATCH: Final = 0.001
"""The probability below which chance does not explain how the units fell on the versions (sample ratio mismatch)."""
ANSWERED: Final = 0.8
"""The share of its units that each version must have answered itself."""
MIN_ANSWERED: Final = 10
"""Units of a version before that share is looked at: one that is just being loaded has a few."""


class WatchFigures(Struct, frozen=True):
    """What a watch has found. `e_value` is of the test on outcomes, `e_value_missing` of that on whether one is
    missing; `shows_harm` and `shows_missing` say whether they have shown that the new version is worse.
    `detectable_loss` is the smallest loss (0…1) that would probably have been noticed, None if none would. `doubts`
    say by their kind why a watch cannot end as kept before its days are over, `warnings` what else may mislead."""

    old: ArmFigures
    new: ArmFigures
    e_value: float
    e_value_missing: float
    detectable_loss: float | None
    units: int
    untested: int
    unmatched: int
    doubts: dict[str, str]
    warnings: list[str]
    shows_harm: bool
    shows_missing: bool

    @property
    def outcomes(self) -> int:
        return self.old.outcomes + self.new.outcomes

    def suffices(self, until_units: int, share: float) -> bool:
        """Whether so many units have an outcome, and at least half of the expected ones of each version, counting
        those that it answered itself."""
        arms = ((self.old, 1 - share), (self.new, share))
        own = all(arm.outcomes * (arm.answered or 0.0) >= until_units * part / 2 for arm, part in arms)
        return self.outcomes >= until_units and own

    @property
    def harm(self) -> str:
        """In which way the new version is worse; empty if that is not shown."""
        if self.shows_harm or not self.shows_missing:
            return self.summary if self.shows_harm else ""
        parts = (f"{arm.version} {arm.missing} of {quantity(arm.outcomes + arm.missing, 'conversation')}"
                 for arm in (self.new, self.old))  # fmt: skip
        limit = f"e-value {figure_text(self.e_value_missing)} of {PRESENCE_LIMIT:g}"
        return f"more of its replies are missing: {' against '.join(parts)}; {limit}"

    @property
    def summary(self) -> str:
        """The figures in one line."""
        parts = [f"{_counts(arm)}{f' ({about})' if (about := _besides(arm)) else ''}" for arm in (self.new, self.old)]
        return f"{' against '.join(parts)}; e-value {figure_text(self.e_value)} of {QUALITY_LIMIT:g}"

    @property
    def noticeable(self) -> str:
        """What would probably have been noticed by now."""
        if self.detectable_loss is None:
            return "no loss could have been noticed yet"
        return f"a loss of {self.detectable_loss * 100:.0f} points would probably have been detected by now"


def figure_text(value: float) -> str:
    return f"{value:,.0f}" if 10 <= value < 1e6 else f"{value:.2g}"


def _counts(arm: ArmFigures) -> str:
    rate = percent(arm.rate) if arm.rate is not None else "–"
    return f"{arm.version} {rate} of {quantity(arm.outcomes, 'conversation')}"


def _besides(arm: ArmFigures) -> str:
    """What else there is to say of the outcomes of a version; usually nothing."""
    missing = f"{arm.missing} missing" if arm.missing else ""
    answered = f"{percent(arm.answered)} answered by itself" if arm.answered not in (None, 1.0) else ""
    return ", ".join(filter(None, (missing, answered)))


def figures_of(conn: Connection, watch: Row[Any]) -> WatchFigures:
    """The figures of a watch that has not ended."""
    old, new = watches.by_arm(conn, watch)
    test = WatchTest(watch.share)
    for is_new, result in watches.results(conn, watch.id):
        test.add(is_new=is_new, success=None if result is Result.MISSING else result is Result.SUCCESS)
    shares = watches.call_shares(conn, watch.id)
    doubts = _doubts(old, new, watch.share)
    warnings = []
    if shares.largest > LARGE_UNIT and shares.units >= 1 / LARGE_UNIT:
        warnings.append(
            f"one conversation has {percent(shares.largest)} of the calls: clients that share one id, or none, count"
            " as one conversation"
        )
    if shares.fallback > MANY_FALLBACKS:
        warnings.append(
            f"{percent(shares.fallback)} of the conversations are identified by their first message only: let"
            " clients send x-flywheel-conversation"
        )
    done = old.outcomes + new.outcomes
    rate = (old.successes + new.successes) / done if done else 0.0
    loss = detectable_loss(done, new.outcomes / done if done else 0.0, rate)
    # Where a version answers for the other one, the two arms differ by less than the versions do.
    contrast = (new.answered or 0.0) + (old.answered or 0.0) - 1
    return WatchFigures(
        old=old,
        new=new,
        e_value=round(test.quality.e_value, 4),
        e_value_missing=round(test.presence.e_value, 4),
        detectable_loss=loss / contrast if loss is not None and loss <= rate * contrast else None,
        units=shares.units,
        untested=shares.untested,
        unmatched=watches.unmatched(conn, watch),
        doubts=doubts,
        warnings=[*doubts.values(), *warnings],
        shows_harm=test.quality.shows_harm,
        shows_missing=test.presence.shows_harm,
    )


def _doubts(old: ArmFigures, new: ArmFigures, share: float) -> dict[str, str]:
    found = {}
    p_value = sample_ratio_p_value(old.units, new.units, share)
    if p_value < MISMATCH:
        found["sample_ratio_mismatch"] = (
            f"{new.version} has {new.units} of {quantity(old.units + new.units, 'conversation')}, which chance does"
            f" not explain at a share of {percent(share)} (p = {p_value:.1g}): calls of one version may be lost"
        )
    for arm, other in ((new, old), (old, new)):
        if arm.units >= MIN_ANSWERED and arm.answered is not None and arm.answered < ANSWERED:
            found["not_answered" if arm is new else "old_not_answered"] = (
                f"{arm.version} answered {percent(arm.answered)} of its conversations, {other.version} the others: a"
                f" server lacks {arm.version}"
            )
    return found


def watch_status(conn: Connection, alias: str) -> dict[str, Any] | None:
    """The watch of an alias that has not ended, by the keys of `status --json`; None without one. `adapter` gets
    `share` of the conversations, `other` the rest; None is the base model."""
    if (watch := watches.current(conn, alias)) is None:
        return None
    known = {name: watch._mapping[name] for name in ("adapter", "other", "share", "state")}
    return known | {"since": watch.created_at, "figures": last_figures(conn, watch) or figures_of(conn, watch)}


def last_figures(conn: Connection, watch: Row[Any]) -> WatchFigures | None:
    """The figures of a watch: of one that has ended those of its end, None if it was replaced before."""
    if watch.state == WatchState.WATCHING:
        return figures_of(conn, watch)
    return convert(watch.figures, WatchFigures) if watch.figures is not None else None
