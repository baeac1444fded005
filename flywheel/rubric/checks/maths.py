"""Whether the boxed result of an answer equals the reference, as math-verify sees it."""

from __future__ import annotations

import re
from typing import Final

from flywheel.errors import CheckError
from flywheel.rubric import Criterion, Rubric
from flywheel.rubric.checks.found import Found, found
from flywheel.rubric.checks.maths_process import MathsProcess
from flywheel.rubric.length import seen
from flywheel.verdict import Exchange

SECONDS: Final = 10.0
"""What one comparison may take."""
LONGEST: Final = 2000
"""Characters of a result that is compared: what is longer is no result."""
_BRACES: Final = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\(?!\\(?:boxed|fbox)\s*\{).|(?P<open>\{)|(?P<close>\})", re.DOTALL
)
"""What of a text matters for braces: those, and what a backslash is before, which is none."""
_GROUPED: Final = re.compile(r"(?<=\d)(?:[ \u00a0\u2009\u202f]|\\[,; ]|~|\{,\})(?=\d{3}(?!\d))")
_NARROW: Final = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}
"""Digits and signs as wide as a Chinese character, for those that are not."""
_process = MathsProcess()


def boxed(text: str) -> str | None:
    r"""What the last \boxed{…} holds, its braces balanced; None without one. Escaped braces are no braces."""
    opened: list[int | None] = []
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match["box"] or match["open"]:
            opened.append(match.end() if match["box"] else None)
        elif match["close"] and opened:
            begin = opened.pop()
            if begin is not None and (last is None or begin > last[0]):
                last = begin, match.start()
    return None if last is None else text[slice(*last)].strip()


def equals_reference(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> Found:
    wanted = reference_of(criterion, exchange)
    given = boxed(exchange.answer)
    if given is None:
        return found(False, "the answer has no \\boxed{…}")
    given, wanted = (seen(text).translate(_NARROW) for text in (given, wanted))
    if not given or len(given) > LONGEST:
        return found(False, "the answer's \\boxed{…} holds no result")
    holds = _plain(given) == _plain(wanted) or _process.equal(
        _GROUPED.sub("", given), _GROUPED.sub("", wanted), SECONDS
    )
    if holds is None:
        raise CheckError(
            f"decide criterion {criterion.id}",
            f"comparing {given[:80]!r} with {wanted[:80]!r} took longer than {SECONDS:g} s or too much memory",
            "The task is judged again later.",
        )
    return found(holds, f"{given[:80]} {'equals' if holds else 'is not'} {wanted[:80]}")


def reference_of(criterion: Criterion, exchange: Exchange) -> str:
    """The right answer: the rubric's, the task's, or the accepted answer that a rollout is compared with.

    Raises CheckError when there is none.
    """
    metadata = exchange.line.get("metadata")
    told = metadata.get("reference") if isinstance(metadata, dict) else None
    known = told if isinstance(told, str | int | float) and not isinstance(told, bool) else ""
    for text in (criterion.right_answer, str(known), exchange.reference):
        inside = boxed(text)
        if wanted := (inside if inside is not None else text).strip().strip("$").strip():
            return wanted[:LONGEST]
    raise CheckError(
        f"decide criterion {criterion.id}",
        "there is no reference answer",
        "Give the task a metadata.reference, or the criterion a value.",
    )


def _plain(text: str) -> str:
    return re.sub(r"\s+", "", text)
