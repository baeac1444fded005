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
        self._counted: dict[threading.Thread, tuple[int, int, int]] = {}  # slot, calls, prompt tokens
        self._free_slots: list[int] = []
        self._changing = threading.Lock()

    def add(self, prompt_tokens: int) -> None:
        """Count one call that this thread is about to send, with its estimated tokens."""
        thread = threading.current_thread()
        with self._changing:
            if self._file is None:
                self._file = private(self._path, os.O_RDWR | os.O_CREAT)
            if thread not in self._counted:
                self._counted[thread] = self._free_slots.pop() if self._free_slots else len(self._counted), 0, 0
            slot, calls, tokens = self._counted[thread]
            self._counted[thread] = slot, calls + 1, tokens + prompt_tokens
            content = _SLOT.pack(datetime.now(UTC).toordinal(), calls + 1, tokens + prompt_tokens)
            os.pwrite(self._file, content, slot * _SLOT.size)

    def forget(self) -> None:
        """Take back what this thread has counted: its verdict is stored, with the usage of its calls."""
        with self._changing:
            counted = self._counted.pop(threading.current_thread(), None)
            if counted is not None and self._file is not None:
                os.pwrite(self._file, bytes(_SLOT.size), counted[0] * _SLOT.size)
                self._free_slots.append(counted[0])

    def read(self) -> list[Used]:
        """The calls that a process which died left in the file."""
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
        """Remove the file, after what `read` returned is booked."""
        self._path.unlink(missing_ok=True)
