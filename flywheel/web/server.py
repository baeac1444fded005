"""The web server: routes, errors, and the socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from flywheel.config.file import Config
from flywheel.errors import FlywheelError
from flywheel.store.views.task_counts import task_counts
from flywheel.system.process import trim_malloc
from flywheel.system.server_limits import LOCAL_NAMES
from flywheel.system.web_server import web_server
from flywheel.web import (
    actions,
    criteria,
    dead_letters,
    gate,
    labels,
    lineage,
    overview,
    rollouts,
    rounds,
    tasks,
)
from flywheel.web.figures import Figures
from flywheel.web.guard import LIMITS, Guard
from flywheel.web.site import Site, site_of

GRACE_SECONDS = 2
TRIM_SECONDS: Final = 10.0


def application(
    config: Config,
    *,
    names: frozenset[str] = LOCAL_NAMES,
    token: str | None = None,
    is_read_only: bool = False,
) -> Guard:
    """The pages. `names` are the host names by which browsers reach them, besides IP addresses."""
    site = Site(config, is_read_only=is_read_only)
    app = Starlette(routes=ROUTES, exception_handlers={HTTPException: refuse, FlywheelError: explain})
    app.state.site = site
    app.state.overview = Figures(site, overview.overview)
    app.state.counts = Figures(site, lambda conn, config: task_counts(conn, config.takes.train))
    app.state.sending, app.state.reading = asyncio.Semaphore(tasks.EXPORTS), asyncio.Lock()
    pages = Guard(app, site, names, token, is_read_only=is_read_only)
    pages.figures = (app.state.counts, app.state.overview)
    return pages


async def refuse(request: Request, error: Exception) -> Response:
    """A page for what cannot be shown."""
    assert isinstance(error, HTTPException)
    detail = "There is no such page." if error.detail == HTTPStatus(error.status_code).phrase else error.detail
    page = site_of(request).page("error.html", error.status_code, message=detail)
    page.headers.update(error.headers or {})
    return page


async def explain(request: Request, error: Exception) -> Response:
    """A page for a state that cannot be read."""
    return site_of(request).page("error.html", HTTPStatus.SERVICE_UNAVAILABLE, message=str(error))


ROUTES: Final[Sequence[BaseRoute]] = (
    Route("/", overview.show),
    Route("/tasks", tasks.show_list),
    Route("/tasks.jsonl", tasks.export),
    # Keys may have slashes.
    Route("/tasks/{key:path}/label", labels.put, methods=["POST"]),
    Route("/tasks/{key:path}/{verb}", actions.decide, methods=["POST"]),
    Route("/tasks/{key:path}", tasks.show),
    Route("/criteria", criteria.show),
    Route("/criteria/{rubric:path}", criteria.show),
    Route("/labels", labels.show),
    Route("/labels/next", labels.go_on),
    Route("/labels/export", labels.export),
    Route("/dead-letters", dead_letters.show, methods=["GET"]),
    Route("/dead-letters", dead_letters.act, methods=["POST"]),
    Route("/rounds", rounds.show_list),
    Route("/rounds/overlay", rounds.overlay),
    Route("/rounds/{round}", rounds.show),
    Route("/rounds/{round}/{verb}", actions.decide_round, methods=["POST"]),
    Route("/rollouts", rollouts.show_list),
    Route("/rollouts/{round}", rollouts.show_list),
    Route("/rollouts/{round}/{group}", rollouts.show),
    Route("/gate", gate.show_list),
    Route("/gate/{round}", gate.show),
    Route("/gate/{round}/{task:path}", gate.show_pair),
    Route("/lineage", lineage.find),
    Route("/deployments/{number}", lineage.show_deployment),
    Mount("/static", StaticFiles(directory=str(files("flywheel.web") / "static"))),
)


async def serve(app: Guard, listening: socket.socket, announce: Callable[[], None]) -> None:
    """Serve the pages until the process is told to stop. The figures of a large state are counted before they are
    asked for."""
    server = web_server(app, LIMITS, stop_seconds=GRACE_SECONDS)
    announce()
    beside = [asyncio.create_task(_trim()), asyncio.create_task(_count(app.figures))]
    try:
        await server.serve([listening])
    finally:
        for each in beside:
            each.cancel()


async def _count(figures: Sequence[Figures[Any]]) -> None:
    # In turn: each takes memory.
    for each in figures:
        await each.renew()


async def _trim() -> None:
    """Return to the system what requests have freed: glibc keeps some megabytes of it."""
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim_malloc)
