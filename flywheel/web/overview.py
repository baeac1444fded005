"""The overview: how far replies come, what the next round waits for, acceptance, conditions, the judge's usage."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final
from urllib.parse import urlencode

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from flywheel.config import Config
from flywheel.states import DeploymentState
from flywheel.store import acceptance, deployments, funnel, judge_errors, supplies
from flywheel.web import time_plot
from flywheel.web.site import site_of

PERIODS: Final = 30
SWAPS: Final = 50
GROUPS: Final = 12
"""Sources and agents that are shown, those with the most replies."""
ERROR_HOURS: Final = 48
ERRORS: Final = 8
"""Different errors of the judge that are shown, the most frequent ones."""


async def show(request: Request) -> Response:
    site = site_of(request)
    return site.page("overview.html", **await site.read(_overview, site.config))


def _overview(conn: Connection, config: Config) -> dict[str, Any]:
    # Imported here: it takes longer than the rest of the pages.
    from flywheel.daemon.status import snapshot

    total, by_source, by_agent = funnel.funnels(conn, config.takes.train)
    active = (DeploymentState.ACTIVE, DeploymentState.DRAINING, DeploymentState.RETIRED)
    swaps = [
        (datetime.fromisoformat(row.activated_at), row.adapter or "base")
        for row in reversed(deployments.history(conn, config.model.alias, SWAPS))
        if row.state in active and row.activated_at
    ]
    periods = acceptance.over_time(conn, config.models_of(None), PERIODS)
    return {
        "now": snapshot(conn, config),
        "total": total,
        "by_source": _most(by_source),
        "by_agent": _most(by_agent),
        "groups": GROUPS,
        "plot": time_plot.time_plot(periods, swaps),
        "drawing": time_plot,
        "supplies": supplies.newest(conn),
        "error_hours": judge_errors.by_hour(conn, ERROR_HOURS),
        "errors": judge_errors.recent(conn, ERROR_HOURS, ERRORS),
        "tasks_with": tasks_with,
    }


def _most(groups: dict[str, funnel.Funnel]) -> list[tuple[str, funnel.Funnel]]:
    return sorted(groups.items(), key=lambda each: -each[1].replies)


def tasks_with(**values: str) -> str:
    """The address of the list of tasks with these values."""
    return f"/tasks?{urlencode({name: value for name, value in values.items() if value})}"
