"""What all pages share: the configuration, reading the state, and templates with every text escaped."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import jinja2
from sqlalchemy import Connection
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse

from flywheel import __version__
from flywheel.config import Config
from flywheel.store.kernel.database import Reader
from flywheel.system.terminal import duration
from flywheel.web import text

MOST_DIGITS: Final = 18
"""Of numbers that the database can hold."""


def is_number(given: str) -> bool:
    return given.isascii() and given.isdigit() and len(given) <= MOST_DIGITS


def position(query: QueryParams, name: str) -> int | None:
    """The number of a row from which a list goes on; None for its begin. Raises HTTPException."""
    given = query.get(name, "")
    if not given:
        return None
    if not is_number(given):
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"There is no such part of the list: {given[:100]}.")
    return int(given)


P = ParamSpec("P")
T = TypeVar("T")

PAGES: Final = (
    ("/", "Overview"),
    ("/tasks", "Tasks"),
    ("/labels", "Labels"),
    ("/rounds", "Rounds"),
    ("/rollouts", "Rollouts"),
    ("/gate", "Gate"),
    ("/lineage", "Lineage"),
    ("/dead-letters", "Dead letters"),
)
"""What the navigation links to."""


class Site:
    """The pages of one state. `csrf` is the token that every form carries."""

    def __init__(self, config: Config, *, is_read_only: bool = False) -> None:
        self.config = config
        self._reader = Reader(config.state_dir)
        self.csrf = secrets.token_urlsafe(32)
        self._environment = jinja2.Environment(
            loader=jinja2.PackageLoader("flywheel.web"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters |= {
            "visible": text.visible, "excerpt": text.excerpt, "moment": text.moment, "score": text.score,
            "percent": text.percent, "plain": text.plain, "as_json": text.as_json, "arguments": text.arguments,
            "money": text.money, "compact": text.compact, "duration": duration, "urlencode": text.quoted,
        }  # fmt: skip
        self._environment.globals |= {
            "version": __version__, "shown": text.SHOWN, "pages": PAGES, "csrf_token": self.csrf,
            "is_read_only": is_read_only,
        }  # fmt: skip

    async def read(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function on the state as it is now. Raises StoreError."""
        return await self._reader.read(function, *args, **kwargs)

    def page(self, template: str, status: int = HTTPStatus.OK, **values: Any) -> HTMLResponse:
        return HTMLResponse(self._environment.get_template(template).render(values), status)


def site_of(request: Request) -> Site:
    found: Site = request.app.state.site
    return found
