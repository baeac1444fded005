"""Whether the boxed result of an answer equals the reference, as math-verify sees it."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import re
import resource
import subprocess
import sys
import threading
from typing import Final

from flywheel.errors import CheckError
from flywheel.rubric import Criterion, Rubric
from flywheel.rubric.checks.found import Found, found
from flywheel.rubric.pattern import seen
from flywheel.user_code import command, has_come
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


MEMORY: Final = 4 << 30
"""Bytes of address space that the child may have."""
STARTING_SECONDS: Final = 120.0
"""What starting the child may take: it imports sympy."""


class MathsProcess:
    """A child that compares two results. Threads take turns; it is started when it is needed first."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def equal(self, given: str, wanted: str, seconds: float) -> bool | None:
        """Whether they are equal; None when the child had to be ended."""
        with self._turn:
            child = self._child or self._start()
            if child is not None:
                with contextlib.suppress(OSError, ValueError):
                    assert child.stdin is not None
                    child.stdin.write(json.dumps([given, wanted]) + "\n")
                    child.stdin.flush()
                    if (answer := _line(child, seconds)) is not None:
                        return bool(json.loads(answer))
            self._end()
            return None

    def _start(self) -> subprocess.Popen[str] | None:
        self._child = subprocess.Popen(
            command(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        atexit.register(self._end)
        return self._child if _line(self._child, STARTING_SECONDS) is not None else None

    def close(self) -> None:
        """End the child; the next comparison starts another."""
        with self._turn:
            self._end()

    def _end(self) -> None:
        child, self._child = self._child, None
        atexit.unregister(self._end)
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def _line(child: subprocess.Popen[str], seconds: float) -> str | None:
    """The next line of the child, which writes whole ones; None when it takes too long or has ended."""
    assert child.stdout is not None
    return child.stdout.readline() or None if has_come(child.stdout, seconds) else None


_process = MathsProcess()


def main() -> None:
    """The child: compare until the input ends."""
    import sympy  # noqa: F401 - before the limit: what is mapped at the start is no answer's doing
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    ways = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            given, wanted = (
                parse(f"\\boxed{{{text}}}", extraction_config=ways, parsing_timeout=None) for text in json.loads(line)
            )
            equal = bool(given and wanted and verify(wanted, given, timeout_seconds=None))
        except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError, RecursionError):
            equal = False
        print(json.dumps(equal), flush=True)
