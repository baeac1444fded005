"""The list of tasks, and one task with its conversation, its verdict and its history."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Self
from urllib.parse import urlencode

import orjson
from sqlalchemy import Connection, select
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from flywheel.records.exclusion import TaskScopes
from flywheel.records.states import Split, TaskState
from flywheel.store.kernel.bulk import count_rows
from flywheel.store.kernel.schema import tasks, verdicts
from flywheel.store.views import acceptance, lineage, task_list
from flywheel.web import actions, labels
from flywheel.web.site import position, site_of

PER_PAGE: Final = 50
SEARCH_SECONDS: Final = 0.05
"""After this time, a list shows what it has found; a link continues the search."""
EXPORTED_AT_ONCE: Final = 200


@dataclass(frozen=True, slots=True)
class TaskSelection:
    """Which tasks a list shows; the query string of its address. Empty texts select all."""

    stage: str = ""
    state: str = ""
    criterion: str = ""
    lowest: str = ""
    highest: str = ""
    adapter: str = ""
    agent: str = ""
    split: str = ""
    judge: str = ""
    source: str = ""
    target: str = ""
    text: str = ""
    before: str = ""

    @classmethod
    def of(cls, query: QueryParams) -> Self:
        return cls(**{field.name: query.get(field.name, "").strip() for field in fields(cls)})

    def address(self, path: str = "/tasks", **changes: object) -> str:
        """The address of the list, or of its export, with these tasks."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | changes
        query = urlencode({name: value for name, value in values.items() if value})
        return f"{path}?{query}" if query else path

    def conditions(self, takes: TaskScopes) -> task_list.Conditions:
        """Raises ValueError for a value that cannot be."""
        stages = acceptance.stages(takes.train)
        for value, known in ((self.stage, stages), (self.state, list(TaskState)), (self.split, list(Split))):
            if value and value not in known:
                raise ValueError(f"{value!r} is none of {', '.join(known)}")
        of_stage = [stages[self.stage]] if self.stage else []
        return of_stage + task_list.conditions(
            TaskState(self.state) if self.state else None,
            self.adapter or None,
            self.criterion or None,
            self.text or None,
            agent=self.agent or None,
            split=Split(self.split) if self.split else None,
            lowest=_number(self.lowest),
            highest=_number(self.highest),
            judge=self.judge or None,
            source=self.source or None,
            target=self.target or None,
        )

    @property
    def is_narrowed(self) -> bool:
        """Whether more than a state and a place in the list was chosen."""
        own = ("state", "before")
        return any(getattr(self, field.name) for field in fields(self) if field.name not in own)


def _number(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


async def show_list(request: Request) -> Response:
    """The tasks of a selection, the newest first, a page of them."""
    site = site_of(request)
    selection, conditions, before = _selected(request)
    found = await site.read(partial(_page, selection, conditions, before))
    return site.page(
        "tasks.html",
        selection=selection,
        states=list(TaskState),
        stages=list(acceptance.stages()),
        splits=list(Split),
        targets=list(site.config.targets),
        **found,
    )


def _selected(request: Request) -> tuple[TaskSelection, task_list.Conditions, int | None]:
    """What is asked for, as conditions, and before which task."""
    selection, before = TaskSelection.of(request.query_params), position(request.query_params, "before")
    try:
        return selection, selection.conditions(site_of(request).config.takes), before
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"There is no such selection of tasks: {error}.") from None


def _page(
    selection: TaskSelection, conditions: task_list.Conditions, before: int | None, conn: Connection
) -> dict[str, Any]:
    rows, older = task_list.search(conn, conditions, PER_PAGE, before, SEARCH_SECONDS)
    total = None
    if not selection.is_narrowed:
        # A count by anything but the state reads every task.
        total = count_rows(conn, tasks, *([tasks.c.state == selection.state] if selection.state else []))
    return {
        "found": [task_list.summary(row) for row in rows],
        "total": total,
        "older": older,
        "is_whole": older is None or len(rows) == PER_PAGE,
        "choices": task_list.choices(conn),
    }


async def export(request: Request) -> Response:
    """All tasks of a selection as JSON lines, each as `flywheel show --json` prints it, the newest first."""
    site = site_of(request)
    _, conditions, before = _selected(request)

    async def lines() -> AsyncIterator[bytes]:
        at = before
        while True:
            found, at = await site.read(task_list.search, conditions, EXPORTED_AT_ONCE, at)
            yield b"".join(orjson.dumps(task_list.detail(row), option=orjson.OPT_APPEND_NEWLINE) for row in found)
            if at is None:
                return

    headers = {"content-disposition": 'attachment; filename="tasks.jsonl"'}
    return StreamingResponse(lines(), media_type="application/jsonl", headers=headers)


async def show(request: Request) -> Response:
    """One task."""
    site, key = site_of(request), request.path_params["key"]
    asked = request.query_params.get("asked", "")
    person = (labels.place_of(request), actions.who(request))
    found = await site.read(partial(_task, key, site.config.takes, person, asked))
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no task {key}.")
    return site.page("task.html", **found)


def _task(
    key: str, takes: TaskScopes, person: tuple[labels.Place, str], asked: str, conn: Connection
) -> dict[str, Any] | None:
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
        "judgements": _judgements(conn, number),
        "panel": labels.panel(conn, number, *person),
        "asked": actions.asked(conn, asked),
        "like": rows[0].like if rows[0].like != key else None,
        **beside,
    }


def _judgements(conn: Connection, number: int) -> list[dict[str, Any]]:
    """The single answers of the judge in all verdicts on a task, the newest verdict first."""
    query = select(verdicts.c.judgements).where(verdicts.c.task_id == number).order_by(verdicts.c.id.desc())
    return [each for found in conn.execute(query).scalars() for each in found]
