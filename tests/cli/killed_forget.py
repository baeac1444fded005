"""A `flywheel forget` that kills itself: `python -m tests.cli.killed_forget N CONFIG CONVERSATION` dies at the n-th
step that changes a file or a database. The product knows nothing of the steps: its functions are wrapped here."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from flywheel.cli import main
from flywheel.daemon import erasure
from flywheel.serving.calls.call_log import CallLog
from flywheel.sources.otlp import inbox
from flywheel.store.kernel.database import Store


def trapped(last: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    arrivals = itertools.count(1)

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any, **values: Any) -> Any:
            if next(arrivals) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **values)

        return stepped

    return wrap


if __name__ == "__main__":
    number, config, conversation = sys.argv[1:]
    trap = trapped(int(number))
    os.replace, os.rename, os.unlink = trap(os.replace), trap(os.rename), trap(os.unlink)  # type: ignore[assignment]
    # A temporary file is whole then, and has no other name.
    os.fsync = trap(os.fsync)
    Store.write = trap(Store.write)  # type: ignore[method-assign]
    CallLog.erase = trap(CallLog.erase)  # type: ignore[method-assign]
    inbox.erase = trap(inbox.erase)
    erasure.purge = trap(erasure.purge)
    sys.argv = ["flywheel", "forget", "--conversation", conversation, "-c", config]
    main()
