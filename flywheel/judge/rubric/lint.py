"""Warnings about texts of a rubric in which a backslash hardly has the meaning that was intended.

In double quotes, YAML reads a backslash and a b as a backspace, so that "\\boxed" loses both. A regular expression
takes the same two for a word boundary, before "oxed".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from flywheel.judge.rubric.criterion import MODEL_TYPE
from flywheel.judge.rubric.file import Problem, RubricFile, valid_criteria
from flywheel.judge.rubric.rubric import FLAT_ID

_ESCAPES: Final = {
    "\0": "0", "\a": "a", "\b": "b", "\x1b": "e", "\f": "f", "\v": "v", "\x85": "N", "\u2028": "L", "\u2029": "P",
}  # fmt: skip
"""Characters that YAML reads for a backslash and a letter in double quotes; tabs and line ends may be intended."""
_CONTROL_CHARACTER: Final = re.compile(f"[{re.escape(''.join(_ESCAPES))}]")
_LATEX_COMMAND: Final = re.compile(
    r"(?<!\\)(?:\\\\)*(?P<command>\\(?:boxed|begin|beta|binom|bmod|bullet|fbox|frac|forall|dfrac|delta|dots|neq|nabla|right"
    r"|rightarrow|rangle|rho|sqrt|sigma|subset|text|textbf|textit|textrm|times|theta|vec|varphi|alpha|approx|angle|wedge"
    r"|Delta|Sigma))(?![A-Za-z])"
)
"""LaTeX commands whose backslash and first letter mean something else in a regular expression."""


def warnings(file: RubricFile) -> list[Problem]:
    """The warnings about a rubric file, in the order of their positions."""
    if file.document is None or not isinstance(raw := file.document.value, dict):
        return []
    found = [
        Problem(*file.document.position(["criteria", index, "value"]), f"`criteria.{index}`: its value {warning}")
        for index, criterion in valid_criteria(raw)
        for warning in _warnings(criterion.type, criterion.value)
    ]
    found += [
        Problem(*file.document.position([FLAT_ID]), f"`{FLAT_ID}` {warning}")
        for warning in _warnings(MODEL_TYPE, raw.get(FLAT_ID))
    ]
    return sorted(found)


def _warnings(type_: str, value: Any) -> Iterator[str]:
    for is_pattern, text in _texts(value, type_ in ("regex", "not-regex")):
        for character in dict.fromkeys(_CONTROL_CHARACTER.findall(text)):
            letter = _ESCAPES[character]
            yield (
                f"holds the control character U+{ord(character):04X}, which texts hardly have: in double quotes YAML"
                f' reads "\\{letter}" as it. Use single quotes, or write \\\\{letter}'
            )
        for found in _LATEX_COMMAND.finditer(text) if is_pattern else ():
            command = found["command"]
            yield (
                f"can hardly match: in a regular expression {command[:2]} has a meaning of its own, and {command[2:]}"
                f" follows it. Write \\{command} for the LaTeX command"
            )


def _texts(value: Any, is_pattern: bool) -> Iterator[tuple[bool, str]]:
    """The texts in a value, and whether each is a pattern; in a JSON Schema, the values of `pattern` are."""
    if isinstance(value, str):
        yield is_pattern, value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, is_pattern)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(each, key == "pattern")
