"""Waking up when a source changes: file system events from its directory, where they come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

log = logging.getLogger(__name__)


class _Wake(FileSystemEventHandler):
    def __init__(self, names: set[str], wake: Callable[[], None]) -> None:
        self._names = names
        self._wake = wake

    def on_any_event(self, event: FileSystemEvent) -> None:
        # Reading makes events too ("opened", "closed_no_write"): they would wake us for our own looking.
        if event.event_type not in ("created", "modified", "moved", "deleted"):
            return
        paths = (str(event.src_path), str(getattr(event, "dest_path", "")))
        if any(Path(path).name.startswith(name) for path in paths for name in self._names):
            self._wake()


class Watcher:
    """Watches the directories of `paths`, as the files themselves come and go; polling remains the backstop."""

    def __init__(self, paths: Iterable[Path], wake: asyncio.Event) -> None:
        self._by_directory: dict[Path, set[str]] = {}
        for path in paths:
            # SQLite writes beside the file: NAME-journal, NAME-wal.
            self._by_directory.setdefault(path.parent, set()).add(path.name)
        self._wake = wake
        self._observer = Observer()
        self._watched: set[Path] = set()

    def start(self) -> None:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed in the meantime
                loop.call_soon_threadsafe(self._wake.set)

        self._wake_loop = wake
        self._observer.start()
        self.refresh()

    def refresh(self) -> None:
        """Watch directories that have appeared since, and notice those that went away."""
        for directory, names in self._by_directory.items():
            there = directory.is_dir()
            if there and directory not in self._watched:
                try:
                    self._observer.schedule(_Wake(names, self._wake_loop), str(directory))
                except OSError as error:
                    log.warning("no file system events from %s (%s): polling only", directory, error)
                    continue
                self._watched.add(directory)
            elif not there:
                self._watched.discard(directory)

    def stop(self) -> None:
        self._observer.stop()
        if self._observer.is_alive():
            self._observer.join(timeout=5)
