"""The file of judge calls whose verdicts are not stored yet: a kill -9 must not lose what they used."""

from __future__ import annotations

import os
import struct
import threading
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final

from flywheel.files import private
from flywheel.judge_usage import Purpose, Used

IN_FLIGHT_FILE: Final = "calls-in-flight"
_SLOT: Final = struct.Struct("<3q8x")
"""Day (ordinal), calls and prompt tokens. The size divides that of a page: a slot is written whole or not at all."""


class CallsInFlight:
    """The judge calls whose verdicts are not stored yet, in a file of the state directory. Thread-safe.

    Each call is counted before it is sent, in a slot of the thread that sends it. After a kill -9 the next process
    books what the file holds. The file is not flushed to disk: after a power failure the count can be lost.
    """

    def __init__(self, state_dir: Path) -> None:
        """The caller holds the instance lock."""
        self._path = state_dir / IN_FLIGHT_FILE
        self._file: int | None = None
        self._slots = 0
        self._free: list[int] = []
        self._thread = threading.local()
        self._changing = threading.Lock()

    def add(self, prompt_tokens: int) -> None:
        """Count one call that this thread is about to send, with its estimated tokens."""
        slot, calls, tokens = getattr(self._thread, "calls", None) or (self._new_slot(), 0, 0)
        self._write(slot, calls + 1, tokens + prompt_tokens)

    def forget(self) -> None:
        """The verdict of this thread is stored, with what its calls have used."""
        if counted := getattr(self._thread, "calls", None):
            self._write(counted[0], 0, 0)
            self._thread.calls = None
            self._free.append(counted[0])

    def _new_slot(self) -> int:
        with self._changing:
            if self._file is None:
                self._file = private(self._path, os.O_RDWR | os.O_CREAT)
            if self._free:
                return self._free.pop()
            self._slots += 1
            return self._slots - 1

    def _write(self, slot: int, calls: int, tokens: int) -> None:
        assert self._file is not None
        self._thread.calls = slot, calls, tokens
        os.pwrite(self._file, _SLOT.pack(datetime.now(UTC).toordinal(), calls, tokens), slot * _SLOT.size)

    def read(self) -> list[Used]:
        """What a process that died has left in the file."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        whole = content[: len(content) - len(content) % _SLOT.size]
        return [
            Used(date.fromordinal(day).isoformat(), Purpose.FILTER, calls, tokens, 0)
            for day, calls, tokens in _SLOT.iter_unpack(whole)
            if calls
        ]

    def reset(self) -> None:
        """What `read` returned is booked."""
        self._path.unlink(missing_ok=True)
