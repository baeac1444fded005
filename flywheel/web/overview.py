"""The overview: how far replies come, what the next round waits for, acceptance, conditions, the judge's usage."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlencode

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from flywheel.config import Config
from flywheel.records.states import DeploymentState
from flywheel.store import deployments, judge_usage, samples
from flywheel.store.views import acceptance
from flywheel.web import plots
from flywheel.web.site import Site, site_of

PERIODS: Final = 30
SWAPS: Final = 50
GROUPS: Final = 12
"""Sources and agents that are shown, those with the most replies."""
SLOW_SECONDS: Final = 0.4
OLDER: Final = 10
"""Figures that took longer than `SLOW_SECONDS` are shown for so many times as long as they took."""
ERROR_HOURS: Final = 48
ERRORS: Final = 8
"""Different errors of the judge that are shown, the most frequent ones."""


class Figures:
    """The figures of the page. Of a state with 100,000 tasks they take a second: then they are up to ten old."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._computing = asyncio.Lock()
        self._found: dict[str, Any] = {}
        self._until = float("-inf")

    async def get(self) -> dict[str, Any]:
        async with self._computing:
            if time.monotonic() >= self._until:
                began = time.monotonic()
                self._found = await self._site.read(_overview, self._site.config)
                took = time.monotonic() - began
                self._until = time.monotonic() + (OLDER * took if took > SLOW_SECONDS else 0.0)
            return self._found


async def show(request: Request) -> Response:
    figures: Figures = request.app.state.overview
    return site_of(request).page("overview.html", **await figures.get())


def _overview(conn: Connection, config: Config) -> dict[str, Any]:
    # Imported here: it takes longer than the rest of the pages.
    from flywheel.daemon.status import snapshot

    total, by_source, by_agent = acceptance.funnels(conn, config.takes.train)
    active = (DeploymentState.ACTIVE, DeploymentState.DRAINING, DeploymentState.RETIRED)
    swaps = [
        (datetime.fromisoformat(row.activated_at), row.adapter or "base")
        for alias in config.aliases
        for row in reversed(deployments.history(conn, alias, SWAPS))
        if row.state in active and row.activated_at
    ]
    now = snapshot(conn, config)
    periods = acceptance.over_time(conn, config.models_of(None), PERIODS)
    return {
        "now": now,
        "total": total,
        "by_source": _most(by_source),
        "by_agent": _most(by_agent),
        "groups": GROUPS,
        "plot": plots.time_plot(periods, swaps),
        "drawing": plots,
        "available": {name: samples.newest_available(conn, target=name) for name in config.by_target()},
        "error_hours": judge_usage.errors_by_hour(conn, ERROR_HOURS),
        "errors": judge_usage.recent_errors(conn, ERROR_HOURS, ERRORS),
        "tasks_with": tasks_with,
    }


def _most(groups: dict[str, acceptance.Funnel]) -> list[tuple[str, acceptance.Funnel]]:
    return sorted(groups.items(), key=lambda each: -each[1].replies)


def tasks_with(**values: str) -> str:
    """The address of the list of tasks with these values."""
    return f"/tasks?{urlencode({name: value for name, value in values.items() if value})}"
