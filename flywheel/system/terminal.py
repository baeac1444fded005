"""Text for people: numbers with their nouns, times, sizes and excerpts, and control characters made harmless.

Questions, answers, names and reasons come from traces and models. An escape sequence in one of them could clear the
screen, rename the window or hide other output. Programs get the exact text (`--json`).
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

T = TypeVar("T")

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_CONTROL: Final = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"  # control characters except tab and line feed
    "\\u2028\\u2029"  # line and paragraph separators, which some terminals obey
    "\\u202a-\\u202e\\u2066-\\u2069"  # directional formatting, which can reorder the text on screen
    "\\ud800-\\udfff]"  # lone surrogates, which cannot be encoded
)


def escape_terminal(value: T, *, one_line: bool = False) -> T:
    """A text, or every text in a nested report, with control characters replaced by visible symbols (`␛`).

    Line feeds and tabs stay, unless `one_line` asks for spaces in their place.
    """
    escaped: Any = value
    if isinstance(value, str):
        escaped = _CONTROL.sub(_symbol, value)
        if one_line:
            escaped = " ".join(escaped.splitlines()).replace("\t", " ")
    elif isinstance(value, dict):
        escaped = dict(escape_terminal(list(value.items()), one_line=one_line))
    elif isinstance(value, list | tuple):
        escaped = [escape_terminal(item, one_line=one_line) for item in value]
    return escaped  # type: ignore[no-any-return]


def _symbol(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\N{SYMBOL FOR DELETE}" if code == 0x7F else REPLACEMENT


def quantity(number: int, one: str, several: str = "") -> str:
    """A number with its noun: `1 call`, `1,200 calls`. `several` is the plural, by default `one` with an s."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def percent(share: float) -> str:
    """A share in whole percent: `94 %`. Next to 0 and 100, as many decimals as tell it from them: `99.8 %`."""
    for digits in range(5):
        text = f"{100 * share:.{digits}f}"
        if share in (0, 1) or 0.5 / 10**digits <= 100 * share < 100 - 0.5 / 10**digits:
            break
    return f"{text} %"


def duration(seconds: float) -> str:
    """Seconds in words: `8 s`, `2 min 5 s`, `3 h 20 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def byte_size(count: int) -> str:
    """Bytes in binary units: `512 bytes`, `1.5 GiB`."""
    amount = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:,.0f} {unit}" if unit == "bytes" or amount >= 100 else f"{amount:,.1f} {unit}"
        amount /= 1024
    return f"{amount:,.1f} TiB"


def excerpt(text: object, most: int | None = None) -> str:
    """A text on one line, cut after `most` characters."""
    line = " ".join(str(text).split())
    return line if most is None or len(line) <= most else f"{line[: most - 1]}…"


def moment(text: str) -> str:
    """A stored time (UTC) to the second."""
    return text[:19].replace("T", " ")


def score_text(score: float | None) -> str:
    return "–" if score is None else f"{score:.2f}"
