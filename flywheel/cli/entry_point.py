"""The entry point of `flywheel`, and Ctrl-C while modules are imported.

This module imports almost nothing, so that Ctrl-C is handled while the rest is imported.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 130


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)


def main() -> None:
    """Run the command line and end the process with its exit code."""
    # During imports Ctrl-C ends the process at once: a KeyboardInterrupt would print a traceback, or some module
    # would take it for a failed import. An ignored signal (nohup, a shell's `&`) stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        from flywheel.cli import app

        app.main()
    finally:
        heed_interrupts()


def heed_interrupts() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, so that work in progress is cleaned up."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
