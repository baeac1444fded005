"""Finds where the values of a JSON text begin and end. Standard library only, because the server uses it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

MAX_DEPTH: Final = 100
"""Maximum nesting depth of a body. vLLM and chat templates recurse through objects and lists, and fail with a 500 at
Python's recursion limit."""
MAX_CONTAINERS: Final = 50_000
"""Maximum number of objects and lists in a body. A message has two to five; vLLM takes up to a second to refuse
10,000 that are none."""

_key = json.JSONDecoder().raw_decode
_space = re.compile(r"[ \t\n\r]*").match
# The first alternative is for strings without an escaped quotation mark, and takes a tenth of the time.
_STRING: Final = r'(?:"[^"]*+"(?<!\\")|"[^"\\]*+(?:\\.[^"\\]*+)*+")'
_string = re.compile(_STRING, re.DOTALL).match
_scalar = re.compile(r'[^][{}",:\s]++').match
_to_bracket = re.compile(rf'(?:[^][{{}}"]++|{_STRING})*+[][{{}}]', re.DOTALL).match


class TooComplexError(ValueError):
    """A JSON text that is nested too deeply, or holds too many objects and lists."""


class JsonScan:
    """Finds where the values of a JSON text begin and end, without building them. Only brackets take steps of Python.

    Texts that are not JSON are not always noticed. The methods raise TooComplexError, and ValueError or IndexError
    for what cannot be JSON.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._containers = 0

    def members(self, at: int = 0) -> Iterator[tuple[str, int, int]]:
        """Key, start and end of the values of the object that begins there; none of another value."""
        at = self.skip_space(at)
        if self._text[at] != "{":
            self._end(at)
            return
        at = self.skip_space(at + 1)
        while self._text[at] != "}":
            if self._text[at] != '"':
                raise ValueError("expected a key")
            key, at = _key(self._text, at)
            at = self.skip_space(at)
            if self._text[at] != ":":
                raise ValueError("expected a colon")
            start = self.skip_space(at + 1)
            end = self._end(start)
            yield key, start, end
            at = self._next(end)

    def skip_space(self, at: int) -> int:
        found = _space(self._text, at)
        return found.end() if found else at

    def _next(self, at: int) -> int:
        """The position after white space and a comma."""
        at = self.skip_space(at)
        return self.skip_space(at + 1) if self._text[at] == "," else at

    def _end(self, at: int) -> int:
        """Where the value that begins there ends."""
        if self._text[at] not in "[{":
            found = _string(self._text, at) or _scalar(self._text, at)
            if found is None:
                raise ValueError("expected a value")
            return found.end()
        depth = 1  # of the object around it
        while found := _to_bracket(self._text, at):
            at = found.end()
            if self._text[at - 1] in "[{":
                depth += 1
                self._containers += 1
                if depth > MAX_DEPTH:
                    raise TooComplexError(f"is nested more than {MAX_DEPTH} levels deep")
                if self._containers > MAX_CONTAINERS:
                    raise TooComplexError(f"has more than {MAX_CONTAINERS:,} objects and lists")
            else:
                depth -= 1
                if depth == 1:
                    return at
        raise ValueError("the text is cut off")
