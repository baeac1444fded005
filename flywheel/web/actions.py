"""What people do on the pages: a form becomes a request, and the page says what became of it."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote, unquote, urlencode

from sqlalchemy import Connection
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from flywheel.daemon.requests import perform
from flywheel.records.states import RequestState
from flywheel.store import dead_letters, requests
from flywheel.store.dead_letters import Next
from flywheel.store.requests import RequestKind
from flywheel.system.terminal import quantity
from flywheel.web.site import site_of

NAME_COOKIE: Final = "flywheel_name"
LONGEST_NAME: Final = 80


def who(request: Request) -> str:
    """The name that a person gave when signing in, else the user who runs the server."""
    if given := unquote(request.cookies.get(NAME_COOKIE, "")).strip():
        return given[:LONGEST_NAME]
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without an entry, as in containers
        return f"user {os.getuid()}"


def field(request: Request, name: str) -> str:
    """A field of the form that was sent; empty without one."""
    found: str = request.state.form.get(name, [""])[0]
    return found


async def decide(request: Request) -> Response:
    """Release or reject a held task, and show it again."""
    key, verb = request.path_params["key"], request.path_params["verb"]
    if verb not in (RequestKind.RELEASE, RequestKind.REJECT):
        raise HTTPException(HTTPStatus.NOT_FOUND)
    return await ask(request, RequestKind(verb), {"tasks": [key]}, f"/tasks/{quote(key, safe='')}")


async def decide_round(request: Request) -> Response:
    """Deploy or refuse the waiting candidate of a round, and show the round again."""
    name, verb = request.path_params["round"], request.path_params["verb"]
    if verb not in (RequestKind.DEPLOY, RequestKind.REFUSE):
        raise HTTPException(HTTPStatus.NOT_FOUND)
    arguments = {"round": name, "max_uses": site_of(request).config.training.max_uses}
    return await ask(request, RequestKind(verb), arguments, f"/rounds/{quote(name, safe='')}")


async def ask(request: Request, kind: RequestKind, arguments: Mapping[str, Any], then: str, **query: str) -> Response:
    """Have an action done, and lead to the page `then`, which says what became of it."""
    done = await perform(site_of(request).config, kind, arguments, who(request))
    return RedirectResponse(f"{then}?{urlencode({**query, 'asked': done.id})}", HTTPStatus.SEE_OTHER)


def asked(conn: Connection, number: str) -> dict[str, Any] | None:
    """What became of the request that led to this page, as the macro `outcome` shows it."""
    found = requests.find(conn, int(number)) if number.isascii() and number.isdigit() and len(number) < 16 else None
    return outcome(found) if found is not None else None


def outcome(request: requests.Request, units: int | None = None) -> dict[str, Any]:
    """A request for people. `units` is of how many it did something, where its result is not there."""
    if request.error is not None:
        text = str(request.error)
    elif request.state is RequestState.OPEN:
        text = "It waits for the daemon, or for the next `flywheel run`."
    elif units is not None:
        text = quantity(units, "dead letter")
    else:
        text = "; ".join(_done(name, value) for name, value in (request.result or {}).items())
    return {
        "id": request.id,
        "kind": request.kind.value,
        "state": request.state.value,
        "by": request.requested_by,
        "at": request.created_at,
        "text": text,
    }


def _done(name: str, value: Any) -> str:
    if name == "deploys":
        return f"the daemon, or the next `flywheel run`, deploys {value}"
    if not isinstance(value, list):
        return "stored"
    if name != "retried":
        return f"{len(value):,} {name}"
    counts: dict[str, int] = {}
    for each in value:
        counts[each["next"]] = counts.get(each["next"], 0) + 1
    then = "; ".join(f"{count:,} × {dead_letters.AFTER_RETRY[Next(after)]}" for after, count in counts.items())
    return f"{len(value):,} retried. {then}" if value else "none was open"
