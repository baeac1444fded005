"""math-verify in a process of its own: what runs away there is ended with it.

The library guards itself with signals, which work in main threads only, and a thread cannot be ended: 9^{9^{9^9}}
would compute for ever. The child ends with its standard input, so that a killed parent leaves nothing behind.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import resource
import subprocess
import sys
import threading
from typing import Final

from flywheel.python_process import command, has_come

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
