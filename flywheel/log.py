"""How Flywheel logs: one line per event, to stderr, with the time in UTC, or with levels for the journal."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Final

from flywheel.known_secrets import redact_secrets
from flywheel.terminal import escape_terminal


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escape_terminal(redact_secrets(super().format(record)))


class _JournalLines(_Lines):
    """With sd-daemon(3)'s prefix, by which `journalctl -p warning` finds them. To the journal a line is an entry."""

    def format(self, record: logging.LogRecord) -> str:
        level = next(number for least, number in _PRIORITIES if record.levelno >= least)
        return "\n".join(f"<{level}>{line}" for line in super().format(record).split("\n"))


_PRIORITIES: Final = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))
"""syslog(3)'s numbers of the levels."""


def setup(level: str = "INFO") -> None:
    """Log to stderr. Where that is systemd's journal the time is left to it."""
    text = "%(levelname)-7s %(name)s: %(message)s"
    if _is_journal():
        formatter: logging.Formatter = _JournalLines(text)
    else:
        formatter = _Lines(f"%(asctime)s.%(msecs)03dZ {text}", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("flywheel").setLevel(level)


def _is_journal() -> bool:
    """Whether stderr goes to the journal. The variable alone is inherited by whatever a service starts, and a round's
    worker, or a shell, writes elsewhere."""
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
