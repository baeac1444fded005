"""Texts of other people made safe for a terminal: what would command it is shown instead.

Questions, answers, names and reasons come from traces and models. Printed as they are, an escape sequence in one of
them could clear the screen, rename the window or hide what stands beside it. Programs get them exact (`--json`).
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

T = TypeVar("T")

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_COMMANDS: Final = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"  # control characters but tab and line feed
    "\\u2028\\u2029"  # line and paragraph separators, which some terminals obey
    "\\u202a-\\u202e\\u2066-\\u2069"  # directions, which let a text stand where it is not
    "\\ud800-\\udfff]"  # halves of surrogate pairs, which cannot be written at all
)


def disarmed(value: T, *, one_line: bool = False) -> T:
    """A text without what commands a terminal, or a report with none in any of its texts.

    A control character becomes its picture, `␛` for an escape. Line feeds and tabs stay, unless a layout has
    `one_line` for each text.
    """
    return _disarmed(value, one_line)  # type: ignore[no-any-return]


def _disarmed(value: Any, one_line: bool) -> Any:
    if isinstance(value, str):
        text = _COMMANDS.sub(_shown, value)
        return " ".join(text.splitlines()).replace("\t", " ") if one_line else text
    if isinstance(value, dict):
        return {_disarmed(key, one_line): _disarmed(item, one_line) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_disarmed(item, one_line) for item in value]
    return value


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\N{SYMBOL FOR DELETE}" if code == 0x7F else REPLACEMENT
