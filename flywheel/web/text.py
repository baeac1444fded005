"""Texts for pages: characters that nobody sees are made visible; times, scores and messages get their form.

Questions, answers and reasons come from traces and models. Templates escape all markup; what is done here is about
characters that could reorder or hide a text.
"""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import quote

import orjson
from markupsafe import Markup, escape

from flywheel.system import terminal

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


def visible(value: object) -> Markup:
    """A text with markup escaped, in which each unseen character is a marked code such as `U+202E`."""
    found = str(value)
    parts = [Markup("")]
    end = 0
    for match in _UNSEEN.finditer(found):
        parts.append(escape(found[end : match.start()]))
        parts.append(Markup('<span class="unseen">U+{:04X}</span>').format(ord(match[0])))
        end = match.end()
    parts.append(escape(found[end:]))
    return Markup("").join(parts)


def excerpt(value: object, most: int = EXCERPT) -> str:
    """A text on one line, cut after `most` characters."""
    line = " ".join(str(value).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def moment(value: str | None) -> str:
    """A stored time (UTC) to the second."""
    return value[:19].replace("T", " ") if value else "–"


def score(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "–" if value is None else terminal.percent(value)


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


def as_json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()


def arguments(call: dict[str, Any]) -> str:
    """The arguments of a tool call, which are JSON text or an object, as they were given."""
    given = (call.get("function") or call).get("arguments")
    return given if isinstance(given, str) else as_json(given)
