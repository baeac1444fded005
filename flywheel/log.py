"""Logging: one line per event on stderr, with the time in UTC, or with priorities for systemd's journal."""

from __future__ import annotations

import contextlib
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
    """With the priority prefix of sd-daemon(3) for `journalctl -p`. To the journal each line is an entry."""

    def format(self, record: logging.LogRecord) -> str:
        level = next(number for least, number in _PRIORITIES if record.levelno >= least)
        return "\n".join(f"<{level}>{line}" for line in super().format(record).split("\n"))


_PRIORITIES: Final = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))
"""Priorities of syslog(3) by the lowest level that they stand for."""


def setup(level: str = "INFO") -> None:
    """Log to stderr. systemd's journal adds the time itself."""
    text = "%(levelname)-7s %(name)s: %(message)s"
    # The variable alone does not tell: child processes inherit it, and a round's worker writes elsewhere.
    is_journal = False
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found = os.fstat(sys.stderr.fileno())
        is_journal = os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
    if is_journal:
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
