"""Reasons why tasks are left out, grouped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

MOST: Final = 3
"""Reasons in a sentence."""
_FIGURES: Final = re.compile(r"(?<!\S)[^\s`]*\d[^\s`]*")
"""Words with a digit, but for quoted names."""


def by_reason(reasons: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Task ids by reason, given pairs of both; that of the most tasks first. Reasons that differ only in their
    figures are one, in the words of the first."""
    found: dict[str, tuple[str, list[str]]] = {}
    for task, why in reasons:
        found.setdefault(_FIGURES.sub("0", why), (why, []))[1].append(task)
    return dict(sorted(found.values(), key=lambda each: -len(each[1])))


def in_one_clause(reasons: Mapping[str, str]) -> str:
    """The most frequent reasons by task, each with the number of its tasks if there are several."""
    found = by_reason(reasons.items())
    words = [f"{why} ({len(tasks):,})" if len(found) > 1 else why for why, tasks in found.items()]
    return "; ".join(words[:MOST] + ["…"] * (len(words) > MOST))
