"""The overview: how far replies come, what the next round waits for, acceptance, conditions, the judge's usage."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from flywheel.config.file import Config
from flywheel.records.states import DeploymentState
from flywheel.store import deployments, judge_usage, samples
from flywheel.store.views import acceptance
from flywheel.store.views.task_counts import TaskCounts
from flywheel.web import criteria, plots
from flywheel.web.figures import Figures
from flywheel.web.site import site_of

if TYPE_CHECKING:
    from flywheel.daemon.status import Facts

PERIODS: Final = 30
SWAPS: Final = 50
GROUPS: Final = 12
"""Sources and agents that are shown, those with the most replies."""
ERROR_HOURS: Final = 48
ERRORS: Final = 8
"""Different errors of the judge that are shown, the most frequent ones."""


async def show(request: Request) -> Response:
    figures: Figures[dict[str, Any]] = request.app.state.overview
    counts: Figures[TaskCounts] = request.app.state.counts
    missed = criteria.missed_most(await counts.get())
    return site_of(request).page("overview.html", **await figures.get(), missed=missed, counted_at=figures.counted_at)


def overview(conn: Connection, config: Config) -> dict[str, Any]:
    # Imported here: it takes longer than the rest of the pages.
    from flywheel.daemon.status import servers, snapshot

    total, by_source, by_agent = acceptance.funnels(conn, config.takes.train)
    active = (DeploymentState.ACTIVE, DeploymentState.DRAINING, DeploymentState.RETIRED)
    histories = [deployments.history(conn, alias, SWAPS) for alias in config.aliases]
    swaps = [
        (datetime.fromisoformat(row.activated_at), row.adapter or "base")
        for history in histories
        for row in reversed(history)
        if row.state in active and row.activated_at
    ]
    now = snapshot(conn, config)
    periods = acceptance.over_time(conn, config.models_of(None), PERIODS)
    return {
        "now": now,
        "servers": servers(now),
        "total": total,
        "by_source": _most(by_source),
        "by_agent": _most(by_agent),
        "groups": GROUPS,
        "shown_errors": ERRORS,
        "share": acceptance.Share,
        "periods": PERIODS,
        "swaps_shown": SWAPS,
        "swaps_left_out": any(len(history) == SWAPS for history in histories),
        "title_of": criteria.title,
        "plot": plots.TimePlot(periods, swaps),
        "available": {name: samples.newest_available(conn, target=name) for name in config.by_target()},
        "not_yet": _not_yet(now),
        "error_hours": judge_usage.errors_by_hour(conn, ERROR_HOURS),
        "errors": judge_usage.recent_errors(conn, ERROR_HOURS, ERRORS + 1),
    }


def _not_yet(now: Facts) -> str:
    """Why no round starts, before the daemon has said so."""
    reasons = {}
    for name, own in now["targets"].items():
        free, needed = own["free_samples"], own["min_samples"]
        if not (reason := f"{free:,} of {needed:,} samples are free" if free < needed else own["gate"]["shortfall"]):
            return "A round can start: flywheel run plans it."
        reasons[name] = reason
    said = "; ".join(f"{name}: {reason}" if name else reason for name, reason in reasons.items())
    return f"No round starts now: {said}."


def _most(groups: dict[str, acceptance.Funnel]) -> list[tuple[str, acceptance.Funnel]]:
    return sorted(groups.items(), key=lambda each: -each[1].replies)
