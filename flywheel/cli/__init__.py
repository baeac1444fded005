"""The command line: a file per group of commands. Nothing heavy is imported before a command needs it.

Nor is anything here: most of a second goes by until all that is needed is imported, and Ctrl-C may come in it.
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
    # Until something is begun that has to be ended in order, Ctrl-C just ends the process: as an exception it would
    # be told as a traceback, and some modules take one that comes while they are imported for something else. Who
    # starts us with the signal ignored (nohup, a shell's `&`) keeps it so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        from flywheel.cli import app

        app.main()
    finally:
        heed_interrupts()


def heed_interrupts() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt: what is begun is ended in order."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


__all__ = ["EXIT_INTERRUPTED", "heed_interrupts", "main"]
