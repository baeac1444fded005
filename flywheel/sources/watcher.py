"""File system events of sources: calls back when a file, or any file in a directory, changes.

Polling remains necessary: network mounts send no events, and an event queue can overflow.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

log = logging.getLogger(__name__)


class _Directory(FileSystemEventHandler):
    """Receives the events of one directory and forwards those of watched files. An empty name watches all files."""

    def __init__(self, path: Path, call: Callable[[Callable[[], object]], None]) -> None:
        self.callbacks: dict[str, Callable[[], object]] = {}
        self.was_deleted = False
        """The watch is dead then, even if a new directory has the same inode number."""
        self.is_polled = False
        self._path = str(path)
        self._call = call

    def on_any_event(self, event: FileSystemEvent) -> None:
        # Reading causes events too ("opened", "closed_no_write"): they would call back for our own reads.
        if event.event_type not in ("created", "modified", "moved", "deleted"):
            return
        if event.event_type == "deleted" and event.src_path == self._path:
            self.was_deleted = True
        names = {Path(str(path)).name for path in (event.src_path, getattr(event, "dest_path", "")) if path}
        for watched, callback in list(self.callbacks.items()):
            # SQLite writes beside the file: NAME-journal, NAME-wal.
            if any(name.startswith(watched) for name in names):
                self._call(callback)


class Watcher:
    """Watches files through their directories, since both can appear, disappear and be replaced."""

    def __init__(self) -> None:
        self._directories: dict[Path, _Directory] = {}
        self._watches: dict[Path, tuple[tuple[int, int], ObservedWatch]] = {}
        self._observer: BaseObserver | None = None
        self._has_warned = False
        self._loop = asyncio.get_running_loop()

    def watch(self, path: Path, callback: Callable[[], object]) -> None:
        """Call `callback` in the event loop after a change of the file, or of the file that a link points to."""
        for place in {path, path.resolve()}:
            self._directory(place.parent).callbacks[place.name] = callback
        self.refresh()

    def watch_directory(self, path: Path, callback: Callable[[], object]) -> None:
        """Call `callback` in the event loop after a change of any file in the directory."""
        self._directory(path).callbacks[""] = callback
        self.refresh()

    def _directory(self, path: Path) -> _Directory:
        return self._directories.setdefault(path, _Directory(path, self._call))

    def _call(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed in the meantime
            self._loop.call_soon_threadsafe(callback)

    def refresh(self) -> None:
        """Watch directories that appeared or were replaced, and drop the watches of those that disappeared."""
        if (observer := self._observing()) is None:
            return
        for path, directory in self._directories.items():
            identity = _identity(path)
            if path in self._watches and (self._watches[path][0] != identity or directory.was_deleted):
                directory.was_deleted = False
                _, watch = self._watches.pop(path)
                with contextlib.suppress(KeyError, OSError):
                    observer.unschedule(watch)
            if identity is None or path in self._watches:
                continue
            try:
                self._watches[path] = (identity, observer.schedule(directory, str(path)))
            except OSError as error:
                if not directory.is_polled:
                    log.warning("no file system events from %s: polling only. %s", path, _why(error))
                directory.is_polled = True
                continue
            directory.is_polled = False
            # Changes before the watch began caused no event.
            for callback in directory.callbacks.values():
                self._call(callback)

    def _observing(self) -> BaseObserver | None:
        """What receives the events; None while the system has nothing left for it."""
        if self._observer is None:
            try:
                observer = Observer()
                observer.start()
            except OSError as error:
                if not self._has_warned:
                    log.warning("no file system events: polling only. %s", _why(error))
                self._has_warned = True
                return None
            self._observer = observer
        return self._observer

    def stop(self) -> None:
        if self._observer is not None:
            self._observer.stop()
            if self._observer.is_alive():
                self._observer.join(timeout=5)


def _why(error: OSError) -> str:
    limits = {errno.EMFILE: "instances, or `LimitNOFILE=`", errno.ENOSPC: "watches"}
    limit = limits.get(error.errno or 0)
    return f"{error}: raise the sysctl fs.inotify.max_user_{limit}" if limit else str(error)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a directory; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if path.is_dir() else None
