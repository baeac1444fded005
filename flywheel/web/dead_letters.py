"""Dead letters by error: retry or drop them, and what people asked for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from sqlalchemy import Connection
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from flywheel.records.states import DeadLetterState
from flywheel.store import dead_letters, requests
from flywheel.store.requests import RequestKind
from flywheel.web import actions
from flywheel.web.actions import field
from flywheel.web.site import is_number, position, site_of

SHOWN: Final = 5
"""Dead letters of an error that the list shows; the page of the error has more."""
PER_PAGE: Final = 100
NEWEST: Final = 2_000
"""The newest dead letters, which the page groups."""
ERRORS: Final = 50
"""Errors that the page shows."""
REQUESTS: Final = 20
_NUMBER: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Dead letters whose errors differ only in numbers; `key` names the group in addresses."""

    key: str
    error: str
    ids: list[int]
    waiting: list[int]
    """Those that are open."""


def groups_of(letters: Sequence[tuple[int, str, bool]]) -> list[ErrorGroup]:
    """Dead letters by error, the largest group first."""
    found: dict[str, ErrorGroup] = {}
    for number, error, is_open in letters:
        alike = _NUMBER.sub("N", error)
        if (group := found.get(alike)) is None:
            key = hashlib.sha256(alike.encode("utf-8", "replace")).hexdigest()[:16]
            group = found[alike] = ErrorGroup(key, error, [], [])
        group.ids.append(number)
        if is_open:
            group.waiting.append(number)
    return sorted(found.values(), key=lambda group: (-len(group.ids), group.key))


async def show(request: Request) -> Response:
    """The dead letters by error, or those of one error."""
    site, query = site_of(request), request.query_params
    every, key = query.get("state") == "all", query.get("group", "")
    page = position(query, "page") or 1
    found = await site.read(partial(_page, every, key, page, query.get("asked", "")))
    return site.page("dead_letters.html", every=every, chosen=key, page=page, **found)


def _page(every: bool, key: str, page: int, asked: str, conn: Connection) -> dict[str, Any]:
    states = list(DeadLetterState) if every else [DeadLetterState.OPEN]
    found = dead_letters.errors_in(conn, states, NEWEST)
    groups = [group for group in groups_of(found) if key in ("", group.key)]
    first, last = ((page - 1) * PER_PAGE, page * PER_PAGE) if key else (0, SHOWN)
    shown = groups[:ERRORS]
    wanted = [number for group in shown for number in group.ids[first:last]]
    letters = {each.id: each for each in dead_letters.with_ids(conn, wanted)}
    return {
        "groups": [(group, [letters[number] for number in group.ids[first:last]]) for group in shown],
        "more_errors": len(groups) - len(shown),
        "newest": NEWEST if len(found) == NEWEST else None,
        "counts": dead_letters.count(conn),
        "has_more": bool(key) and any(len(group.ids) > last for group in groups),
        "asked": actions.asked(conn, asked),
        "requests": [
            (found, actions.told(found, units))
            for found, units in requests.recent(conn, (RequestKind.RETRY, RequestKind.DROP), REQUESTS)
        ],
    }


async def act(request: Request) -> Response:
    """Retry or drop one dead letter, or the open ones of an error."""
    verb, number, key = (field(request, name) for name in ("verb", "id", "group"))
    if verb not in (RequestKind.RETRY, RequestKind.DROP) or not (key or is_number(number)):
        raise HTTPException(HTTPStatus.BAD_REQUEST, "This form does not belong to this page.")
    if is_number(number):
        ids = [int(number)]
    else:
        ids = await site_of(request).read(partial(_ids, key))
        if not ids:
            raise HTTPException(HTTPStatus.CONFLICT, "None of these dead letters is still open.")
    return await actions.ask(request, RequestKind(verb), {"ids": ids}, "/dead-letters")


def _ids(key: str, conn: Connection) -> list[int]:
    found = dead_letters.errors_in(conn, [DeadLetterState.OPEN], NEWEST)
    return [number for group in groups_of(found) if group.key == key for number in group.waiting]
