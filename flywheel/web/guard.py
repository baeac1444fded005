"""Who may ask for what, and what a browser may do with an answer.

Every form carries a token that only pages of this server contain, so another site cannot send one (cross-site request
forgery). Requests by a name that is not this server's are refused (`Limited`).
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs, quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flywheel.store.kernel.database import STATE_FILE, is_missing
from flywheel.system.server_limits import Limited, ServerLimits, refuse_in_text
from flywheel.web.actions import LONGEST_NAME, NAME_COOKIE
from flywheel.web.figures import Figures
from flywheel.web.site import Site

COOKIE: Final = "flywheel_web"
SIGN_IN: Final = "/sign-in"
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
LIMITS: Final = ServerLimits(host_hint="Start it with --name to allow that.", body_bytes=65_536)
"""Forms are short."""
LONGEST_ADDRESS: Final = 8192
"""Characters of a path and a query."""
SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
REFUSAL_SECONDS: Final = 1.0
"""How long a wrong token waits for its answer."""


class Guard:
    """Checks the name of the server and the token, and sets the security headers."""

    def __init__(
        self, app: ASGIApp, site: Site, names: frozenset[str], token: str | None, *, is_read_only: bool = False
    ) -> None:
        """`names` are the host names of this server, besides IP addresses."""
        self._app = app
        self._limited = Limited(self._guarded, replace(LIMITS, hosts=names), refuse_in_text)
        self._site = site
        self._token = token
        self._is_read_only = is_read_only
        self._session = secrets.token_urlsafe(32)
        self.figures: Sequence[Figures[Any]] = ()
        """Those that pages show."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._limited(scope, receive, send_with_headers)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer = await self._answer(request) or self._without_state(request)
        await (answer or self._app)(scope, receive, send)

    def _without_state(self, request: Request) -> Response | None:
        """What is answered to everything while there is no state: what to do. Nothing is stored then."""
        config = self._site.config
        if request.scope["path"].startswith("/static/") or not is_missing(config.state_dir):
            return None
        if request.method in SAFE_METHODS and "text/html" in request.headers.get("accept", ""):
            return self._site.page("no_state.html", config=config, exists=os.path.exists, quote=shlex.quote)
        why = f"There is no state at {config.state_dir / STATE_FILE} yet: nothing was read."
        return JSONResponse({"error": why}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def _answer(self, request: Request) -> Response | None:
        """What is answered instead of the page; None if it may be seen."""
        # Not the path of `request.url`, which some versions of Starlette take from the `Host` header.
        path = request.scope["path"]
        if len(path) + len(request.scope["query_string"]) > LONGEST_ADDRESS:
            why = f"The address is longer than {LONGEST_ADDRESS:,} characters."
            return self._site.page("error.html", HTTPStatus.REQUEST_URI_TOO_LONG, message=why)
        is_sign_in = self._token is not None and path == SIGN_IN
        if request.method not in SAFE_METHODS and (refused := await self._take_form(request, is_sign_in)):
            return refused
        if is_sign_in:
            return await self._sign_in(request)
        if self._token is None or path.startswith("/static/") or self._may_see(request):
            return None
        if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(SIGN_IN, HTTPStatus.SEE_OTHER)
        return PlainTextResponse("This server requires its token.", HTTPStatus.UNAUTHORIZED)

    async def _take_form(self, request: Request, is_sign_in: bool) -> Response | None:
        """Read the fields of a form into `request.state.form`; the refusal of what did not come from a page."""
        if self._is_read_only and not is_sign_in:
            return PlainTextResponse("This server is read-only.", HTTPStatus.FORBIDDEN)
        fields = parse_qs((await request.body()).decode(errors="replace"), keep_blank_values=True)
        given = fields.pop("csrf", [""])[0]
        if not is_same_origin(request.headers) or not hmac.compare_digest(given.encode(), self._site.csrf.encode()):
            why = "This form does not come from a page of this server, or the server was restarted: reload the page."
            return PlainTextResponse(why, HTTPStatus.FORBIDDEN)
        request.state.form = fields
        return None

    def _may_see(self, request: Request) -> bool:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(given.strip()):
            return True
        return hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), self._session.encode())

    def _is_token(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())

    async def _sign_in(self, request: Request) -> Response:
        if request.method != "POST":
            return self._site.page("sign_in.html", wrong=False)
        if not self._is_token(request.state.form.get("token", [""])[0]):
            await asyncio.sleep(REFUSAL_SECONDS)
            return self._site.page("sign_in.html", HTTPStatus.UNAUTHORIZED, wrong=True)
        response = RedirectResponse("/", HTTPStatus.SEE_OTHER)
        is_encrypted = request.scope["scheme"] == "https"
        response.set_cookie(COOKIE, self._session, httponly=True, samesite="strict", secure=is_encrypted)
        name = request.state.form.get("name", [""])[0].strip()[:LONGEST_NAME]
        response.set_cookie(NAME_COOKIE, quote(name), httponly=True, samesite="strict", secure=is_encrypted)
        return response


def is_same_origin(headers: Headers) -> bool:
    """Whether a form comes from this site. Browsers send at least one of the two headers; programs need none."""
    if (where := headers.get("sec-fetch-site")) is not None:
        return where in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")
