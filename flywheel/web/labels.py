"""Labels: the panel beside a task, the queue of what to label next, and how far people and judge agree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Self

import orjson
from sqlalchemy import Connection, select
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from flywheel.daemon.requests import perform
from flywheel.records.states import Label
from flywheel.store import labels
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import tasks
from flywheel.store.labels import Opinion
from flywheel.store.requests import RequestKind
from flywheel.web.actions import field, who
from flywheel.web.site import is_number, position, quoted, site_of, tasks_with

PER_PAGE: Final = 50
SHOWN: Final = 20
"""Tasks of the queue that its page lists."""
PARTS: Final = {
    "disputed": "Disputed",
    "threshold": "Near the threshold",
    "random": "Random 10 %",
}
EVERYTHING: Final = "all"


@dataclass(frozen=True, slots=True)
class Place:
    """How a person goes through tasks: which part of the queue (empty: none), the place in it, and whether without
    seeing verdicts. It is the query string of addresses."""

    queue: str = ""
    at: int = 0
    is_blind: bool = False

    @classmethod
    def of(cls, given: Any) -> Self:
        """The place that an address or a form names; other values are as if there were none."""
        queue, at = given("queue"), given("at")
        is_queue = queue in (EVERYTHING, *PARTS)
        return cls(queue if is_queue else "", int(at) if is_queue and is_number(at) else 0, given("blind") == "1")

    def address(self, path: str, by: int = 0, **changes: object) -> str:
        """The address of a page at this place, or so many places further in the queue."""
        own = {"queue": self.queue, "at": max(0, self.at + by), "blind": int(self.is_blind)}
        return tasks_with(path, **(own | changes))


@dataclass(frozen=True, slots=True)
class Panel:
    """What the panel beside a task shows. `hides` says that the verdict is not to be seen yet."""

    place: Place
    who: str
    given: list[dict[str, Any]]
    mine: dict[str, Any] | None
    hides: bool


def place_of(request: Request) -> Place:
    return Place.of(lambda name: request.query_params.get(name, ""))


def panel(conn: Connection, task: int, place: Place, name: str) -> Panel:
    """The panel beside a task for a person."""
    given = labels.of_task(conn, task)
    mine = next((each for each in given if each["labelled_by"] == name and not each["criterion"]), None)
    return Panel(place, name, given, mine, place.is_blind and mine is None)


async def put(request: Request) -> Response:
    """Store a label from the panel, and go on in the queue, or show the task again."""
    site, key, name = site_of(request), request.path_params["key"], who(request)
    place = Place.of(partial(field, request))
    if (given := field(request, "label")) not in list(Label):
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"There is no such label: {given}.")
    arguments = {
        "task_id": key,
        "label": given,
        "criterion": field(request, "criterion"),
        "comment": field(request, "comment"),
        "is_blind": field(request, "hidden") == "1",
    }
    done = await perform(site.config, RequestKind.LABEL, arguments, name)
    if done.error is not None:
        raise HTTPException(HTTPStatus.CONFLICT, str(done.error))
    # A label on one criterion leaves the task in the queue, to be labelled as a whole.
    goes_on = place.queue and not arguments["criterion"]
    to = place.address("/labels/next" if goes_on else f"/tasks/{quoted(key)}")
    return RedirectResponse(to if goes_on else f"{to}#labels", HTTPStatus.SEE_OTHER)


async def go_on(request: Request) -> Response:
    """Lead to the task at a place of the queue, or to the page of labels at its end."""
    place = place_of(request)
    found = await site_of(request).read(partial(_queue, who(request), place.queue))
    if place.at >= len(found):
        return RedirectResponse(f"/labels?ended={place.queue or EVERYTHING}", HTTPStatus.SEE_OTHER)
    key, _ = found[place.at]
    return RedirectResponse(place.address(f"/tasks/{quoted(key)}"), HTTPStatus.SEE_OTHER)


def _queue(name: str, part: str, conn: Connection) -> list[tuple[str, str]]:
    """The ids of the tasks that a person should label next, each with its part."""
    found = labels.queue(conn, name, labels.threshold(conn))
    if part in PARTS:
        found = [(task, why) for task, why in found if why == part]
    rows = rows_in(conn, select(tasks.c.id, tasks.c.key), tasks.c.id, [task for task, _ in found])
    keys = {row.id: row.key for row in rows}
    return [(keys[task], why) for task, why in found]


async def show(request: Request) -> Response:
    """The queue, the agreement, and the labels, the newest first."""
    site, name = site_of(request), who(request)
    before = position(request.query_params, "before")
    differing = request.query_params.get("only") == "differing"
    found = await site.read(partial(_page, name, before, differing))
    ended = request.query_params.get("ended", "")
    return site.page(
        "labels.html",
        who=name,
        parts=PARTS,
        before=before,
        differing=differing,
        ended=ended in (EVERYTHING, *PARTS),
        **found,
    )


def _page(name: str, before: int | None, differing: bool, conn: Connection) -> dict[str, Any]:
    opinions = labels.listed(conn)
    queue = _queue(name, "", conn)
    shown = dict(queue[:SHOWN])
    texts = {row.key: row for row in rows_in(conn, _TEXTS, tasks.c.key, list(shown))}
    wanted = [each for each in opinions if before is None or each.id < before]
    if differing:
        wanted = [each for each in wanted if _differs(each)]
    pairs = labels.agreements(opinions)
    rows = [
        ("People and judge", pairs.judge),
        ("Of these, labelled blind", pairs.judge_blind),
        *((f"Criterion {name}", of) for name, of in sorted(pairs.criteria.items())),
        ("Two people", pairs.people),
    ]
    return {
        "queue": [(key, why, texts[key].payload) for key, why in shown.items()],
        "sizes": {part: sum(why == part for _, why in queue) for part in PARTS},
        "mine": sum(each.labelled_by == name and not each.criterion for each in opinions),
        "agreement": [(title, of.as_json()) for title, of in rows if of.n],
        "table": pairs.judge.as_json()["confusion"] if pairs.judge.n else None,
        "found": [(each, _differs(each)) for each in wanted[:PER_PAGE]],
        "older": wanted[PER_PAGE - 1].id if len(wanted) > PER_PAGE else None,
        "total": len(opinions),
        "has_tasks": conn.execute(select(tasks.c.id).limit(1)).first() is not None,
    }


_TEXTS: Final = select(tasks.c.key, tasks.c.payload)


def _differs(each: Opinion) -> bool:
    """Whether the judge's newest verdict contradicts a label."""
    return each.accepted is not None and each.label is (Label.REJECT if each.accepted else Label.ACCEPT)


async def export(request: Request) -> Response:
    """The file for `flywheel rubric calibrate`."""
    lines = await site_of(request).read(labels.label_file)
    data = b"".join(orjson.dumps(line) + b"\n" for line in lines)
    headers = {"Content-Disposition": 'attachment; filename="labels.jsonl"'}
    return Response(data, media_type="application/jsonl", headers=headers)
