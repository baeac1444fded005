"""The list of tasks, and one task with its conversation, its verdict and its history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Self

import orjson
from sqlalchemy import Connection, select
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from flywheel.records.exclusion import TaskScopes
from flywheel.records.states import Split, TaskState
from flywheel.store.kernel.schema import tasks, verdicts
from flywheel.store.views import acceptance, task_list
from flywheel.store.views.lineage import task_story
from flywheel.store.views.task_counts import FILTERS, TaskCounts
from flywheel.system.server_limits import RETRY_SECONDS
from flywheel.web import actions, criteria, labels, lineage
from flywheel.web.figures import Figures
from flywheel.web.site import position, site_of, tasks_with

PER_PAGE: Final = 50
OTHERS: Final = ("lowest", "highest", "text", "order", "after")
"""What an address of a list can have besides filters by which tasks are counted."""
Place = tuple[task_list.Order, task_list.Position | None]
SEARCH_SECONDS: Final = 0.05
"""After this time, a list shows what it has found; a link continues the search."""
EXPORTED_AT_ONCE: Final = 50
"""Tasks of an export that are read at a time: each may have megabytes."""
EXPORTS: Final = 8
"""Exports that are sent at a time; they read the state in turn."""
VALUES: Final = 200
"""Values of a filter that are offered."""


class TaskSelection(dict[str, str]):
    """Which tasks a list shows, and in which order: the query string of its address, without empty values."""

    @classmethod
    def of(cls, query: QueryParams) -> Self:
        """Names of agents and others are taken as they are, with white space around them."""
        given = {name: query.get(name, "") for name in FILTERS}
        given |= {name: query.get(name, "").strip() for name in OTHERS}
        return cls({name: value for name, value in given.items() if value})

    def address(self, path: str = "/tasks", **changes: object) -> str:
        """The address of the list, or of its export, with these tasks."""
        return tasks_with(path, **(self | changes))

    def conditions(self, takes: TaskScopes) -> task_list.Conditions:
        """Raises ValueError for a value that cannot be."""
        stages = acceptance.stages(takes.train)
        orders = list(task_list.Order)
        known = {"stage": stages, "state": list(TaskState), "split": list(Split), "order": orders}
        for name, values in known.items():
            if name in self and self[name] not in values:
                raise ValueError(f"{self[name]!r} is none of {', '.join(values)}")
        plain: dict[str, Any] = {name: self[name] for name in (*FILTERS, "text") if name in self and name != "stage"}
        bounds: dict[str, Any] = {name: _number(self[name]) for name in ("lowest", "highest") if name in self}
        of_stage = [stages[self["stage"]]] if "stage" in self else []
        return of_stage + task_list.conditions(**plain, **bounds)

    @property
    def place(self) -> Place:
        """The order, and where in it the list begins. Raises ValueError."""
        order = task_list.Order(self.get("order", task_list.Order.NEWEST))
        return order, task_list.Position.parse(self["after"]) if "after" in self else None


def _number(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


async def show_list(request: Request) -> Response:
    """The tasks of a selection, a page of them, and how many tasks each filter would select."""
    site = site_of(request)
    selection, conditions, (order, after) = _selected(request)
    figures: Figures[TaskCounts] = request.app.state.counts
    counts, chosen = await figures.get(), {name: selection[name] for name in FILTERS if name in selection}
    rows, following = await site.read(task_list.search, conditions, PER_PAGE, after, SEARCH_SECONDS, order)
    return site.page(
        "tasks.html",
        selection=selection,
        order=order,
        found=[task_list.summary(row) for row in rows],
        following=following,
        is_whole=following is None or len(rows) == PER_PAGE,
        counts=counts.by_filter(chosen),
        chosen=chosen,
        is_counted=selection.keys().isdisjoint(("lowest", "highest", "text")),
        values=VALUES,
        rubrics={each.hash: criteria.title(each) for each in counts.rubrics},
        counted_at=figures.counted_at,
    )


def _selected(request: Request) -> tuple[TaskSelection, task_list.Conditions, Place]:
    """What is asked for, as conditions, and its order with its place."""
    selection = TaskSelection.of(request.query_params)
    try:
        return selection, selection.conditions(site_of(request).config.takes), selection.place
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"There is no such selection of tasks: {error}.") from None


async def export(request: Request) -> Response:
    """All tasks of a selection as JSON lines, each as `flywheel show --json` prints it, in its order."""
    site = site_of(request)
    sending: asyncio.Semaphore = request.app.state.sending
    reading: asyncio.Lock = request.app.state.reading
    _, conditions, (order, after) = _selected(request)

    async def lines() -> AsyncIterator[bytes]:
        at = after
        while True:
            async with reading:
                found, at = await site.read(task_list.search, conditions, EXPORTED_AT_ONCE, at, order=order)
                part = b"".join(
                    orjson.dumps(task_list.detail(row), option=orjson.OPT_APPEND_NEWLINE) for row in found
                )
            del found
            yield part
            if at is None:
                return

    if sending.locked():
        why = f"{EXPORTS} exports are being sent already: try again when one has ended."
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, why, {"Retry-After": str(RETRY_SECONDS)})
    headers = {"content-disposition": 'attachment; filename="tasks.jsonl"'}
    return _Export(sending, lines(), media_type="application/jsonl", headers=headers)


class _Export(StreamingResponse):
    """An export, which counts while it is sent."""

    def __init__(self, sending: asyncio.Semaphore, lines: AsyncIterator[bytes], **more: Any) -> None:
        self._sending = sending
        super().__init__(lines, **more)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._sending:
            await super().__call__(scope, receive, send)


async def show(request: Request) -> Response:
    """One task."""
    site, key = site_of(request), request.path_params["key"]
    asked = request.query_params.get("asked", "")
    person = (labels.place_of(request), actions.who(request))
    after = position(request.query_params, "replies") or 0
    found = await site.read(partial(_task, key, site.config.takes, person, asked, after))
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no task {key}.")
    return site.page("task.html", **found)


def _task(
    key: str, takes: TaskScopes, person: tuple[labels.Place, str], asked: str, after: int, conn: Connection
) -> dict[str, Any] | None:
    rows = task_list.listed(conn, [tasks.c.key == key], 1)
    if not rows:
        return None
    number = rows[0].id
    keys = select(tasks.c.key).limit(1)
    task = task_list.detail(rows[0])
    return {
        "task": task,
        "reason": _own_reason(task["verdict"] or {}),
        "story": task_story(conn, number, takes),
        "judgements": _judgements(conn, number),
        "panel": labels.panel(conn, number, *person),
        "asked": actions.asked(conn, asked),
        "like": rows[0].like if rows[0].like != key else None,
        "newer": conn.execute(keys.where(tasks.c.id > number).order_by(tasks.c.id)).scalar(),
        "older": conn.execute(keys.where(tasks.c.id < number).order_by(tasks.c.id.desc())).scalar(),
        **lineage.of_task(conn, task, after),
    }


def _own_reason(verdict: Mapping[str, Any]) -> str:
    """The reason of a verdict without those of its criteria, which stand above it."""
    reason = verdict.get("reason") or ""
    for each in verdict.get("criteria", ()):
        reason = reason.replace(f"{each['criterion']}: {each['reason']}", "") if each["reason"] else reason
    return str(reason).strip("; ")


def _judgements(conn: Connection, number: int) -> list[dict[str, Any]]:
    """The single answers of the judge in all verdicts on a task, the newest verdict first."""
    query = select(verdicts.c.judgements).where(verdicts.c.task_id == number).order_by(verdicts.c.id.desc())
    return [each for found in conn.execute(query).scalars() for each in found]
