"""How settings name a function of the user: `FILE.py:function`, `package.module:function`, or AgentJet's
`package.module->Class`.

It runs in the user's interpreter, too: only the standard library is imported.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class FunctionName(NamedTuple):
    """`where` is a file or a module; `mark` is `:` for a function, `->` for a class."""

    where: str
    mark: str
    name: str

    @property
    def is_class(self) -> bool:
        return self.mark == "->"

    @property
    def is_in_file(self) -> bool:
        """Whether `where` is a path, not a module."""
        return self.where.endswith(".py")

    def __str__(self) -> str:
        return "".join(self)


def parsed(text: str) -> FunctionName | None:
    """The parts of a name; None if it is of another form."""
    found = re.fullmatch(r"(?P<where>.+?)(?P<mark>:|->)(?P<name>\w+)", text, re.DOTALL)
    return FunctionName(*found.group("where", "mark", "name")) if found is not None else None
