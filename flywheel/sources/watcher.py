"""Waking up when a source changes: file system events from its directory, where they come.

Polling remains the backstop: network mounts send no events, and a queue of events can overflow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import ObservedWatch

log = logging.getLogger(__name__)


class _Directory(FileSystemEventHandler):
    """What happens in one directory, told to those who watch a file in it."""

    def __init__(self, path: Path, tell: Callable[[Callable[[], object]], None]) -> None:
        self.wakes: dict[str, Callable[[], object]] = {}
        self.was_deleted = False
        """Its watch is dead then, even where a directory of the same number has taken its place."""
        self.is_polled = False
        self._path = str(path)
        self._tell = tell

    def on_any_event(self, event: FileSystemEvent) -> None:
        # Reading makes events too ("opened", "closed_no_write"): they would wake us for our own looking.
        if event.event_type not in ("created", "modified", "moved", "deleted"):
            return
        if event.event_type == "deleted" and event.src_path == self._path:
            self.was_deleted = True
        names = {Path(str(path)).name for path in (event.src_path, getattr(event, "dest_path", "")) if path}
        for watched, wake in list(self.wakes.items()):
            # SQLite writes beside the file: NAME-journal, NAME-wal. An empty name stands for the whole directory.
            if any(name.startswith(watched) for name in names):
                self._tell(wake)


class Watcher:
    """Watches files through their directories, as both come and go."""

    def __init__(self) -> None:
        self._directories: dict[Path, _Directory] = {}
        self._scheduled: dict[Path, tuple[tuple[int, int], ObservedWatch]] = {}
        self._observer = Observer()
        self._loop = asyncio.get_running_loop()
        self._observer.start()

    def watch(self, path: Path, wake: Callable[[], object]) -> None:
        """Call `wake` in the event loop after anything happens to a file, or to what a link leads to."""
        for place in {path, path.resolve()}:
            self._in(place.parent).wakes[place.name] = wake
        self.refresh()

    def watch_directory(self, path: Path, wake: Callable[[], object]) -> None:
        """Call `wake` in the event loop after anything happens to any file in a directory."""
        self._in(path).wakes[""] = wake
        self.refresh()

    def _in(self, directory: Path) -> _Directory:
        return self._directories.setdefault(directory, _Directory(directory, self._tell))

    def _tell(self, wake: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed in the meantime
            self._loop.call_soon_threadsafe(wake)

    def refresh(self) -> None:
        """Watch directories that have appeared or were made anew, and forget those that went away."""
        for path, directory in self._directories.items():
            identity = _identity(path)
            if path in self._scheduled and (self._scheduled[path][0] != identity or directory.was_deleted):
                directory.was_deleted = False
                _, watch = self._scheduled.pop(path)
                with contextlib.suppress(KeyError, OSError):
                    self._observer.unschedule(watch)
            if identity is None or path in self._scheduled:
                continue
            try:
                self._scheduled[path] = (identity, self._observer.schedule(directory, str(path)))
            except OSError as error:
                if not directory.is_polled:
                    log.warning("no file system events from %s (%s): polling only", path, error)
                directory.is_polled = True
                continue
            directory.is_polled = False
            # What happened before the watch began was not seen.
            for wake in directory.wakes.values():
                self._tell(wake)

    def stop(self) -> None:
        self._observer.stop()
        if self._observer.is_alive():
            self._observer.join(timeout=5)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if path.is_dir() else None
