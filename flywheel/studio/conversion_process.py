"""Conversion in a process of its own, while a long history is read: parsing then costs the reader no time.

The child reads its standard input and ends with it, so that a parent that was killed leaves nothing behind. Messages
are pickled: both ends are this program, on a pipe that nobody else has.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from flywheel.errors import StudioError
from flywheel.studio.conversion import Told, convert
from flywheel.trace import Selection

_LENGTH = 8


class ConversionProcess:
    """A child that converts what it is given. One thread at a time may use it."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "flywheel.studio.conversion_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def convert(
        self, schema: str, traces: Sequence[tuple[Mapping[int, bytes], bool]], selection: Selection, source: str
    ) -> Told:
        """As `conversion.convert`. Raises StudioError when the child has died."""
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            _send(self._child.stdin, (schema, traces, selection, source))
            answer = _receive(self._child.stdout)
        except OSError:
            answer = None
        if not isinstance(answer, Told):
            raise StudioError(
                f"convert traces of {source}",
                "the process that parses them has died" if answer is None else str(answer),
                "They are read again at the next pass; look for memory or the system log if it goes on.",
                retryable=True,
            )
        return answer

    def close(self) -> None:
        """End the child."""
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def _send(pipe: IO[bytes], message: object) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(len(data).to_bytes(_LENGTH, "big"))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    """The next message, None at the end."""
    head = pipe.read(_LENGTH)
    size = int.from_bytes(head, "big")
    data = pipe.read(size) if len(head) == _LENGTH else b""
    return pickle.loads(data) if size and len(data) == size else None


def main() -> None:
    """The child: answer until the input ends."""
    while (question := _receive(sys.stdin.buffer)) is not None:
        _send(sys.stdout.buffer, convert(*question))


if __name__ == "__main__":
    main()
