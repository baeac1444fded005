"""The list of tasks, and one task with its conversation, its verdict and its history."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Self
from urllib.parse import urlencode

from sqlalchemy import Connection, select
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from flywheel.exclusion import Taken
from flywheel.request_id import BASE_VERSION
from flywheel.states import Split, TaskState
from flywheel.store import lineage, task_list, verdicts
from flywheel.store.schema import adapters, tasks
from flywheel.web.site import site_of

PER_PAGE: Final = 50
SEEN: Final = 500
"""The newest tasks and verdicts, whose agents and criteria are offered as choices."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tasks a list shows; the query string of its address. Empty texts select all."""

    state: str = ""
    criterion: str = ""
    lowest: str = ""
    highest: str = ""
    adapter: str = ""
    agent: str = ""
    split: str = ""
    text: str = ""
    before: str = ""

    @classmethod
    def of(cls, query: QueryParams) -> Self:
        return cls(**{field.name: query.get(field.name, "").strip() for field in fields(cls)})

    def address(self, **changes: object) -> str:
        """The address of the list with these tasks."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | changes
        found = urlencode({name: value for name, value in values.items() if value})
        return f"/tasks?{found}" if found else "/tasks"

    def conditions(self) -> task_list.Conditions:
        """Raises ValueError for a value that cannot be."""
        return task_list.conditions(
            TaskState(self.state) if self.state else None,
            self.adapter or None,
            self.criterion or None,
            self.text or None,
            agent=self.agent or None,
            split=Split(self.split) if self.split else None,
            lowest=float(self.lowest) if self.lowest else None,
            highest=float(self.highest) if self.highest else None,
            before=int(self.before) if self.before else None,
        )

    @property
    def is_narrowed(self) -> bool:
        """Whether more than a state and a place in the list was chosen."""
        own = ("state", "before")
        return any(getattr(self, field.name) for field in fields(self) if field.name not in own)


async def show_list(request: Request) -> Response:
    """The tasks of a selection, the newest first, a page of them."""
    site, wanted = site_of(request), Selection.of(request.query_params)
    try:
        conditions = wanted.conditions()
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"There is no such selection of tasks: {error}.") from None
    found = await site.read(partial(_page, wanted, conditions))
    return site.page("tasks.html", wanted=wanted, states=list(TaskState), splits=list(Split), **found)


def _page(wanted: Selection, conditions: task_list.Conditions, conn: Connection) -> dict[str, Any]:
    rows = task_list.listed(conn, conditions, PER_PAGE + 1)
    shown = rows[:PER_PAGE]
    total = None
    if not wanted.is_narrowed:
        # A count by anything but the state reads every task.
        total = task_list.count(conn, task_list.conditions(TaskState(wanted.state) if wanted.state else None))
    return {
        "found": [task_list.summary(row) for row in shown],
        "total": total,
        "older": shown[-1].id if len(rows) > PER_PAGE else None,
        "choices": _choices(conn),
    }


def _choices(conn: Connection) -> dict[str, list[str]]:
    """What can be chosen from; other values can be typed."""
    newest = select(tasks.c.agent).order_by(tasks.c.id.desc()).limit(SEEN).subquery()
    return {
        "agent": sorted(filter(None, conn.execute(select(newest.c.agent).distinct()).scalars())),
        "adapter": [BASE_VERSION, *conn.execute(select(adapters.c.name).order_by(adapters.c.id.desc())).scalars()],
        "criterion": sorted(verdicts.recent(conn, SEEN)["rejected_by"]),
    }


async def show(request: Request) -> Response:
    """One task."""
    site, key = site_of(request), request.path_params["key"]
    found = await site.read(partial(_task, key, site.config.takes))
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no task {key}.")
    return site.page("task.html", **found)


def _task(key: str, takes: Taken, conn: Connection) -> dict[str, Any] | None:
    rows = task_list.listed(conn, [tasks.c.key == key], 1)
    if not rows:
        return None
    number = rows[0].id
    beside = {
        name: conn.execute(
            select(tasks.c.key).where(condition).order_by(tasks.c.id.asc() if name == "newer" else tasks.c.id.desc())
            .limit(1)
        ).scalar_one_or_none()
        for name, condition in (("newer", tasks.c.id > number), ("older", tasks.c.id < number))
    }  # fmt: skip
    return {
        "task": task_list.detail(rows[0]),
        "story": lineage.task_story(conn, number, takes),
        "like": rows[0].like if rows[0].like != key else None,
        **beside,
    }
