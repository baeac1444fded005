"""Private temporary folders that end with their process: what a killed one leaves is removed by the next, and by
`flywheel forget`, because they can hold texts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

from flywheel.system.files import remove

PREFIX: Final = "fw-process-"
LOCK: Final = ".lock"
"""The file on which the process of a folder holds a lock, which is free when it has ended."""


def remove_left(parent: Path) -> None:
    """Remove the folders in another one that no process holds."""
    for left in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (left / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock goes last: after a kill -9 it is found again.
            for each in sorted(left.iterdir(), key=lambda path: path.name == LOCK):
                remove(each)
            left.rmdir()


def copies_in(state_dir: Path) -> Path | None:
    """Where copies of texts belong: in the state directory, where `flywheel forget` finds what a killed process left.
    None, for the folder of temporary files, if there is none that this user may write."""
    return state_dir if os.access(state_dir, os.W_OK) else None


class ProcessFolder:
    """A new folder, `path`, in another one; by default in `$TMPDIR`, or where temporary files are."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        remove_left(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        unnamed = self.path / f"{LOCK}.new"
        self._lock = unnamed.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Other processes look at the folder from now on.
        unnamed.rename(self.path / LOCK)
        # Also at the end of a process that does not remove it.
        self._removal = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        self._removal()
        self._lock.close()
