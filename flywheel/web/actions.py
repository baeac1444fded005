"""What people do on the pages: a form becomes a request, and the page says what became of it."""

from __future__ import annotations

import getpass
import os
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote

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
from flywheel.web.site import is_number, quoted, site_of

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
    return await ask(request, RequestKind(verb), {"tasks": [key]}, f"/tasks/{quoted(key)}")


async def decide_round(request: Request) -> Response:
    """Deploy or refuse the waiting candidate of a round, and show the round again."""
    name, verb = request.path_params["round"], request.path_params["verb"]
    if verb not in (RequestKind.DEPLOY, RequestKind.REFUSE):
        raise HTTPException(HTTPStatus.NOT_FOUND)
    arguments = {"round": name, "max_uses": site_of(request).config.training.max_uses}
    return await ask(request, RequestKind(verb), arguments, f"/rounds/{quoted(name)}")


async def ask(request: Request, kind: RequestKind, arguments: Mapping[str, Any], then: str) -> Response:
    """Have an action done, and lead to the page `then`, which says what became of it."""
    done = await perform(site_of(request).config, kind, arguments, who(request))
    return RedirectResponse(f"{then}?asked={done.id}", HTTPStatus.SEE_OTHER)


def asked(conn: Connection, number: str) -> tuple[requests.Request, str] | None:
    """The request that led to this page, and what became of it; the macro `outcome` shows them."""
    found = requests.find(conn, int(number)) if is_number(number) else None
    return (found, told(found)) if found is not None else None


def told(request: requests.Request, units: int | None = None) -> str:
    """What became of a request. `units` is of how many it did something, where its result is not there."""
    if request.error is not None:
        return str(request.error)
    if request.state is RequestState.OPEN:
        return "It waits for the daemon, or for the next `flywheel run`."
    if units is not None:
        return quantity(units, "dead letter")
    return "; ".join(_done(name, value) for name, value in (request.result or {}).items())


def _done(name: str, value: Any) -> str:
    if name == "deploys":
        return f"the daemon, or the next `flywheel run`, deploys {value}"
    if not isinstance(value, list):
        return "stored"
    if name != "retried":
        return f"{len(value):,} {name}"
    counts = Counter(each["next"] for each in value)
    then = "; ".join(f"{count:,} × {dead_letters.AFTER_RETRY[Next(after)]}" for after, count in counts.items())
    return f"{len(value):,} retried. {then}" if value else "none was open"
