"""What all pages share: the configuration, reading the state, and templates with every text escaped.

Questions, answers and reasons come from traces and models. Templates escape all markup; `visible` shows characters
that could reorder or hide a text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from urllib.parse import quote, urlencode

import jinja2
import orjson
from markupsafe import Markup, escape
from sqlalchemy import Connection
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse

from flywheel import __version__
from flywheel.config.file import Config
from flywheel.store.kernel.database import Reader
from flywheel.system.terminal import duration, excerpt, moment, score_text
from flywheel.system.terminal import percent as whole_percent

P = ParamSpec("P")
T = TypeVar("T")

MOST_DIGITS: Final = 18
"""Of numbers that the database can hold."""
PAGES: Final = (
    ("/", "Overview"),
    ("/tasks", "Tasks"),
    ("/criteria", "Criteria"),
    ("/labels", "Labels"),
    ("/rounds", "Rounds"),
    ("/rollouts", "Rollouts"),
    ("/gate", "Gate"),
    ("/dead-letters", "Dead letters"),
)
"""What the navigation links to."""
_UNSEEN: Final = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"  # control characters except tab and line feed
    "\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff"  # formatting, invisible
    "\\u115f\\u1160\\u3164\\uffa0\\ufff9-\\ufffb"  # fillers, which look like spaces, and marks of annotations
    "\\ud800-\\udfff"  # lone surrogates, which cannot be encoded
    "\\U000e0000-\\U000e0fff]"  # tags and supplementary variation selectors, which can carry a hidden text
)
EXCERPT: Final = 160
SHOWN: Final = 6_000
"""Characters of a text that are shown at once; the rest is folded."""


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
            "visible": visible, "excerpt": lambda text, most=EXCERPT: excerpt(text, most), "score": score_text,
            "moment": lambda text: moment(text) if text else "–", "percent": percent, "plain": plain,
            "as_json": as_json, "arguments": arguments, "money": money, "compact": compact, "duration": duration,
            "urlencode": quoted,
        }  # fmt: skip
        self._environment.globals |= {
            "version": __version__, "shown": SHOWN, "pages": PAGES, "csrf_token": self.csrf,
            "is_read_only": is_read_only, "tasks_with": tasks_with,
        }  # fmt: skip

    async def read(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function on the state as it is now. Raises StoreError."""
        return await self._reader.read(function, *args, **kwargs)

    def page(self, template: str, status: int = HTTPStatus.OK, **values: Any) -> HTMLResponse:
        return HTMLResponse(self._environment.get_template(template).render(values), status)


def site_of(request: Request) -> Site:
    found: Site = request.app.state.site
    return found


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS


def position(query: QueryParams, name: str) -> int | None:
    """The number of a row from which a list goes on; None for its begin. Raises HTTPException."""
    text = query.get(name, "")
    if not text:
        return None
    if not is_number(text):
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"There is no such part of the list: {text[:100]}.")
    return int(text)


def visible(value: object) -> Markup:
    """A text with markup escaped, in which each unseen character is a marked code such as `U+202E`."""
    shown = str(value)
    parts = [Markup("")]
    end = 0
    for match in _UNSEEN.finditer(shown):
        parts.append(escape(shown[end : match.start()]))
        parts.append(Markup('<span class="unseen">U+{:04X}</span>').format(ord(match[0])))
        end = match.end()
    parts.append(escape(shown[end:]))
    return Markup("").join(parts)


def percent(value: float | None) -> str:
    return "–" if value is None else whole_percent(value)


def compact(value: float | None) -> str:
    """A number of any size, to about three digits."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if value and abs(value) < 0.001 else f"{value:.3g}"


def money(price: dict[str, Any] | None) -> str:
    """An amount with its currency."""
    return "–" if price is None else f"{price['amount']:,.2f} {price['currency']}"


def plain(content: object) -> str:
    """The content of a message: text as it is, parts as their texts, everything else as JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [
            each["text"] if isinstance(each, dict) and isinstance(each.get("text"), str) else as_json(each)
            for each in content
        ]
        return "\n".join(parts)
    return "" if content is None else as_json(content)


def quoted(value: object) -> str:
    """A part of an address. Slashes are quoted as well: browsers would resolve `/../`."""
    return quote(str(value), safe="", errors="replace")


def tasks_with(path: str = "/tasks", **values: object) -> str:
    """The address of the list of tasks, or of another page, with these values; empty ones are left out. A list is
    given as several values."""
    several = {name: value if isinstance(value, list) else [value] for name, value in values.items() if value}
    query = urlencode([(name, each) for name, value in several.items() for each in value])
    return f"{path}?{query}" if query else path


def as_json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()


def arguments(call: dict[str, Any]) -> str:
    """The arguments of a tool call, which are JSON text or an object, as they were given."""
    value = (call.get("function") or call).get("arguments")
    return value if isinstance(value, str) else as_json(value)
