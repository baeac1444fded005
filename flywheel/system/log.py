"""Logging: one line per event on stderr, with the time in UTC, or with priorities for systemd's journal.

A line is text for people, or one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TextIO

from flywheel.secrets import redact_secrets
from flywheel.system.terminal import escape_terminal

LOG_SECONDS: Final = 60.0
"""Shortest time between two warnings of the same kind that clients cause."""
_logged: Final[dict[str, float]] = {}
"""When each message was logged last."""
_PRIORITIES: Final = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))
"""Priorities of syslog(3) by the lowest level that they stand for."""


def log_rarely(log: logging.Logger, message: str, *values: object) -> None:
    """Log a warning, at most once in LOG_SECONDS for each `message`, whatever its values."""
    if _is_due(message):
        log.warning(message, *values)


def is_no_repetition(record: logging.LogRecord) -> bool:
    """A filter of loggers that lets each warning pass at most once in LOG_SECONDS, and all that is more or less."""
    return record.levelno != logging.WARNING or _is_due(str(record.msg))


def _is_due(message: str) -> bool:
    now = time.monotonic()
    is_due = now - _logged.get(message, -LOG_SECONDS) >= LOG_SECONDS
    if is_due:
        _logged[message] = now
    return is_due


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escape_terminal(redact_secrets(super().format(record)))


class _JsonLines(logging.Formatter):
    """One object per event. JSON escapes control characters and line breaks, and keeps the exact text."""

    def format(self, record: logging.LogRecord) -> str:
        time_of = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time_of.replace("+00:00", "Z"), "level": record.levelname, "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return redact_secrets(json.dumps(line))


class _JournalLines(logging.Formatter):
    """With the priority prefix of sd-daemon(3) for `journalctl -p`. To the journal each line is an entry."""

    def __init__(self, lines: logging.Formatter) -> None:
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        level = next(number for least, number in _PRIORITIES if record.levelno >= least)
        return "\n".join(f"<{level}>{line}" for line in self._lines.format(record).split("\n"))


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the stderr of the moment: rich replaces it while it draws a bar, so that lines are above that."""

    def emit(self, record: logging.LogRecord) -> None:
        # Unlike `setStream`, this does not flush the one before, which may be closed.
        self.stream = sys.stderr
        super().emit(record)


def setup(level: str = "INFO", *, as_json: bool = False) -> None:
    """Log to stderr. systemd's journal adds the time itself."""
    text = "%(levelname)-7s %(name)s: %(message)s"
    # The variable alone does not tell: child processes inherit it, and a round's worker writes elsewhere.
    is_journal = False
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found = os.fstat(sys.stderr.fileno())
        is_journal = os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
    formatter: logging.Formatter = _JsonLines()
    if not as_json:
        dated = text if is_journal else f"%(asctime)s.%(msecs)03dZ {text}"
        formatter = _Lines(dated, "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
    if is_journal:
        formatter = _JournalLines(formatter)
    handler = _Stderr()
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("flywheel").setLevel(level)


@contextlib.contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Redirect all output of this process and its children to the log, including that of native code."""
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with log.open("ab") as file:
        for number, _ in kept:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)
