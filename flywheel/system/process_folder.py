"""Private temporary folders that end with their process: what a killed one leaves is removed by the next."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "fw-process-"
LOCK: Final = ".lock"
"""The file on which the process of a folder holds a lock, which is free when it has ended."""


class ProcessFolder:
    """A new folder, `path`, in another one."""

    def __init__(self, parent: Path) -> None:
        for left in parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError), (left / LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        unnamed = self.path / f"{LOCK}.new"
        self._lock = unnamed.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Other processes look at the folder from now on.
        unnamed.rename(self.path / LOCK)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
