"""How Flywheel logs: one line per event, to stderr, with the time in UTC unless a service manager adds its own."""

from __future__ import annotations

import logging
import os
import sys
import time

from flywheel.disarmed import disarmed


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return disarmed(super().format(record))


def setup(level: str = "INFO") -> None:
    """Log to stderr. Under systemd (JOURNAL_STREAM is set) the time is left to the journal."""
    stamp = "" if "JOURNAL_STREAM" in os.environ else "%(asctime)s.%(msecs)03dZ "
    formatter = _Lines(f"{stamp}%(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("flywheel").setLevel(level)
