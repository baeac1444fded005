"""An erasure that kills itself: `python -m tests.daemon.rounds.killed_erasure N DIRECTORY` dies at the renaming or
removal of a file after N of them."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flywheel.daemon.rounds.erasure import erase_from_round
from tests.factories.erasure import ERASED


def trapped(after: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    done = itertools.count()

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(self: Path, *arguments: Any, **options: Any) -> Any:
            if next(done) == after:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(self, *arguments, **options)

        return counting

    return wrap


if __name__ == "__main__":
    trap = trapped(int(sys.argv[1]))
    Path.replace, Path.unlink = trap(Path.replace), trap(Path.unlink)  # type: ignore[method-assign]
    erase_from_round(Path(sys.argv[2]), ERASED)
