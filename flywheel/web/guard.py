"""Who may ask, and what a browser may do with an answer.

Requests by a name that is not this server's are refused: a web site could have its own name resolve to a loopback
address and read the page (DNS rebinding). An IP address as name cannot be abused so.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
LONGEST_FORM: Final = 4_096
REFUSAL_SECONDS: Final = 1.0
"""How long a wrong token waits for its answer."""


class Guard:
    """Checks the name of the server and the token, and sets the security headers."""

    def __init__(self, app: ASGIApp, site: Site, names: frozenset[str], token: str | None) -> None:
        """`names` are the host names of this server, besides IP addresses."""
        self._app = app
        self._site = site
        self._names = names
        self._token = token
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope, receive)
        answer = await self._answer(request)
        await (answer or self._app)(scope, receive, send_with_headers)

    async def _answer(self, request: Request) -> Response | None:
        """What is answered instead of the page; None if it may be seen."""
        host = request.headers.get("host", "")
        if not is_known(host, self._names):
            why = f"This server does not answer by the name {host!r}. Start it with --name to allow that."
            return PlainTextResponse(why, HTTPStatus.MISDIRECTED_REQUEST)
        if self._token is None or request.url.path.startswith("/static/"):
            return None
        if request.url.path == SIGN_IN:
            return await self._sign_in(request)
        if self._may_see(request):
            return None
        if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(SIGN_IN, HTTPStatus.SEE_OTHER)
        return PlainTextResponse("Give the token of this server.", HTTPStatus.UNAUTHORIZED)

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
        if not is_same_origin(request.headers):
            return PlainTextResponse("This form was sent by another site.", HTTPStatus.FORBIDDEN)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > LONGEST_FORM:
                return PlainTextResponse("The form is too long.", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if not self._is_token(parse_qs(body.decode(errors="replace")).get("token", [""])[0]):
            await asyncio.sleep(REFUSAL_SECONDS)
            return self._site.page("sign_in.html", HTTPStatus.UNAUTHORIZED, wrong=True)
        response = RedirectResponse("/", HTTPStatus.SEE_OTHER)
        is_encrypted = request.url.scheme == "https"
        response.set_cookie(COOKIE, self._session, httponly=True, samesite="strict", secure=is_encrypted)
        return response


def is_known(host: str, names: frozenset[str]) -> bool:
    """Whether a `Host` header names this server: one of its names or an IP address, with any port."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    name = name.removeprefix("[").removesuffix("]").lower().removesuffix(".")
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_same_origin(headers: Headers) -> bool:
    """Whether a form comes from this site. Browsers send at least one of the two headers; programs need none."""
    if (where := headers.get("sec-fetch-site")) is not None:
        return where in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")
