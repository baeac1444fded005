"""Where a file of a state stands in the list of places that `flywheel forget` goes through."""

from __future__ import annotations

import re

from flywheel.daemon.erasure import PLACES, WITHOUT_TEXTS


def place_of(file: str) -> list[str]:
    """What a file of a state is, by that list."""
    known = {pattern: place.what for place in PLACES for pattern in place.files}
    known |= dict.fromkeys(WITHOUT_TEXTS, "no texts")
    return sorted({what for pattern, what in known.items() if re.fullmatch(translated(pattern), file)})


def translated(pattern: str) -> str:
    """The regular expression of a pattern."""
    parts = re.split(r"(\*\*|\*)", pattern)
    return "".join({"**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)
