"""Texts of a rubric that hardly any answer holds, since a backslash means something else than was meant.

In double quotes YAML makes a backspace of a backslash and a b, so that "boxed" behind a backslash loses both. A
regular expression takes the same two for the beginning of a word, which then goes on with "oxed".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

_ESCAPES: Final = {
    "\0": "0", "\a": "a", "\b": "b", "\x1b": "e", "\f": "f", "\v": "v", "\x85": "N", "\u2028": "L", "\u2029": "P",
}  # fmt: skip
"""What YAML makes of a backslash and a letter in double quotes; tabs and line ends may be meant."""
_MADE: Final = re.compile(f"[{re.escape(''.join(_ESCAPES))}]")
_COMMAND: Final = re.compile(
    r"(?<!\\)(?:\\\\)*(?P<command>\\(?:boxed|begin|beta|binom|bmod|bullet|fbox|frac|forall|dfrac|delta|dots|neq|nabla|right"
    r"|rightarrow|rangle|rho|sqrt|sigma|subset|text|textbf|textit|textrm|times|theta|vec|varphi|alpha|approx|angle|wedge"
    r"|Delta|Sigma))(?![A-Za-z])"
)
"""LaTeX commands whose first letter means something behind a backslash in a regular expression."""


def doubts(type_: str, value: Any) -> Iterator[str]:
    """What is strange about the value of a criterion of this type, in words that follow its name."""
    for is_pattern, text in _texts(value, type_ in ("regex", "not-regex")):
        for character in dict.fromkeys(_MADE.findall(text)):
            letter = _ESCAPES[character]
            code = f"U+{ord(character):04X}"
            yield (
                f"holds the control character {code}, which hardly any text has: in double quotes YAML makes it of"
                f' "\\{letter}". Use single quotes, or write \\\\{letter}'
            )
        for found in _COMMAND.finditer(text) if is_pattern else ():
            command = found["command"]
            yield (
                f"can hardly match: in a regular expression {command[:2]} has a meaning of its own, and {command[2:]}"
                f" follows it. Write \\{command} for the LaTeX command"
            )


def _texts(value: Any, is_pattern: bool) -> Iterator[tuple[bool, str]]:
    """The texts in a value, and whether each is a pattern: in a JSON Schema, what is below `pattern`."""
    if isinstance(value, str):
        yield is_pattern, value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, is_pattern)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(each, key == "pattern")
