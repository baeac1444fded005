"""What the watch of a promotion has found so far: both versions, the test on them, and what may mislead."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct, convert
from sqlalchemy import Connection, Row

from flywheel.records.states import WatchState
from flywheel.store import watches
from flywheel.store.watches import ArmFigures, Result
from flywheel.system.terminal import percent, quantity
from flywheel.training.gate.sequential_test import LIMIT, SequentialTest, detectable_loss

LARGE_UNIT: Final = 0.05
"""The share of the calls in one unit above which the units are unlikely to be conversations."""
MANY_FALLBACKS: Final = 0.5


class WatchFigures(Struct, frozen=True):
    """What a watch has found. `e_value` is of the test on outcomes, `e_value_missing` of the same test on whether an
    outcome is missing; `detectable_loss` is the smallest loss (0…1) that would probably have been noticed, None if
    none would. `warnings` say why the figures may mislead."""

    old: ArmFigures
    new: ArmFigures
    e_value: float
    e_value_missing: float
    detectable_loss: float | None
    units: int
    untested: int
    unmatched: int
    warnings: list[str]
    shows_harm: bool

    @property
    def outcomes(self) -> int:
        return self.old.outcomes + self.new.outcomes

    @property
    def summary(self) -> str:
        """The figures in one line."""
        parts = [
            f"{arm.version} {_rate(arm.rate)} of {quantity(arm.outcomes, 'conversation')}"
            f"{f' ({arm.missing} missing)' if arm.missing else ''}"
            for arm in (self.new, self.old)
        ]
        return f"{' against '.join(parts)}; e-value {figure_text(self.e_value)} of {LIMIT:g}"

    @property
    def noticeable(self) -> str:
        """What would probably have been noticed by now."""
        if self.detectable_loss is None:
            return "no loss could have been noticed yet"
        return f"a loss of {self.detectable_loss * 100:.0f} points would probably have been noticed by now"


def figure_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _rate(rate: float | None) -> str:
    return percent(rate) if rate is not None else "–"


def figures_of(conn: Connection, watch: Row[Any]) -> WatchFigures:
    """The figures of a watch that has not ended."""
    old, new = watches.by_arm(conn, watch)
    quality, presence = SequentialTest(watch.share), SequentialTest(watch.share)
    for is_new, result in watches.results(conn, watch.id):
        presence.add(is_new=is_new, success=result is not Result.MISSING)
        if result is not Result.MISSING:
            quality.add(is_new=is_new, success=result is Result.SUCCESS)
    shares = watches.call_shares(conn, watch.id)
    warnings = []
    if presence.shows_harm:
        warnings.append(f"more replies of {new.version} have no outcome than of {old.version}: see the reasons")
    if shares.largest > LARGE_UNIT and shares.units >= 1 / LARGE_UNIT:
        warnings.append(
            f"one conversation has {percent(shares.largest)} of the calls: clients that share one id, or none, count"
            " as one conversation"
        )
    if shares.fallback > MANY_FALLBACKS:
        warnings.append(
            f"{percent(shares.fallback)} of the conversations are told apart by their first message alone: let"
            " clients send x-flywheel-conversation"
        )
    done = old.outcomes + new.outcomes
    rate = (old.successes + new.successes) / done if done else 0.0
    return WatchFigures(
        old=old,
        new=new,
        e_value=round(quality.e_value, 4),
        e_value_missing=round(presence.e_value, 4),
        detectable_loss=detectable_loss(done, watch.share, rate),
        units=shares.units,
        untested=shares.untested,
        unmatched=watches.unmatched(conn, watch),
        warnings=warnings,
        shows_harm=quality.shows_harm,
    )


class WatchStatus(Struct, frozen=True):
    """A watch that has not ended: `adapter` gets `share` of the conversations, `other` the rest; None is the base
    model."""

    adapter: str | None
    other: str | None
    share: float
    since: str
    state: str
    figures: WatchFigures


def watch_status(conn: Connection, alias: str) -> WatchStatus | None:
    """The watch of an alias; None without one."""
    if (watch := watches.current(conn, alias)) is None:
        return None
    figures = last_figures(conn, watch) or figures_of(conn, watch)
    return WatchStatus(watch.adapter, watch.other, watch.share, watch.created_at, watch.state, figures)


def last_figures(conn: Connection, watch: Row[Any]) -> WatchFigures | None:
    """The figures of a watch: of one that has ended those of its end, None if it was replaced before."""
    if watch.state == WatchState.WATCHING:
        return figures_of(conn, watch)
    return convert(watch.figures, WatchFigures) if watch.figures is not None else None
