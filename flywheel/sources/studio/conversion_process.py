"""Conversion in a process of its own, while a long history is read: parsing then costs the reader no time.

The child reads its standard input and ends with it, so that a parent that was killed leaves nothing behind. Several
questions may be on their way, so that it need not wait for the next one; they are answered in their order.
"""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import IO, Final

import msgspec
from msgspec import Struct

from flywheel.batch import Entry
from flywheel.errors import StudioError
from flywheel.process_tuning import tune_malloc
from flywheel.sources.studio.conversion import Told, convert
from flywheel.trace import DeadRow, Selection

_LENGTH: Final = 8
_PIPE_BYTES: Final = 1 << 20
"""What fits into a pipe, where the system lets it be chosen: a long message then takes few turns."""
_UNDER_WAY: Final = 3
"""Questions that are not answered yet, at most: each is as large as the rows that it is about."""


class Question(Struct, array_like=True, frozen=True):
    """What `conversion.convert` is given."""

    schema: str
    traces: list[tuple[dict[int, bytes], bool]]
    selection: Selection
    source: str


class Answer(Struct, array_like=True, frozen=True):
    """What `conversion.convert` tells, or why it could not."""

    entries: list[Entry] = []
    dead: list[DeadRow] = []
    kinds: dict[str, int] = {}
    error: str = ""


class ConversionProcess:
    """A child that converts what it is given."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "flywheel.sources.studio.conversion_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A terminal's Ctrl-C is for the parent, which ends it.
            process_group=0,
        )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._to_child, self._from_child = self._child.stdin, self._child.stdout
        for pipe in (self._to_child, self._from_child):
            _enlarge(pipe)
        # Both block, and each must go on while the other does.
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ask")
        self._receiver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answer")
        self._decoder = msgspec.msgpack.Decoder(Answer)
        self._free = BoundedSemaphore(_UNDER_WAY)
        self._asked = 0
        self._answered = 0

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def waiting(self) -> int:
        """Questions that are not answered yet."""
        return self._asked - self._answered

    def convert(
        self, schema: str, traces: Sequence[tuple[Mapping[int, bytes], bool]], selection: Selection, source: str
    ) -> Future[Told]:
        """As `conversion.convert`, later; it waits while many are under way. One thread may ask.

        The future raises StudioError if the child has died.
        """
        self._free.acquire()
        question = msgspec.msgpack.encode((schema, traces, selection, source))
        self._asked += 1
        sent = self._sender.submit(_send, self._to_child, question)
        return self._receiver.submit(self._told, sent, source)

    def _told(self, sent: Future[None], source: str) -> Told:
        try:
            sent.result()
            message = _receive(self._from_child)
        except OSError:
            message = None
        finally:
            self._answered += 1
            self._free.release()
        answer = Answer(error="the process that parses them has died")
        if message is not None:
            answer = self._decoder.decode(message)
        if answer.error:
            raise StudioError(
                f"convert traces of {source}",
                answer.error,
                "They are read again at the next pass; if it goes on, look at the system log, and report it.",
                retryable=True,
            )
        return Told(answer.entries, answer.dead, Counter(answer.kinds))

    def kill(self) -> None:
        """End the child at once, from any thread: what waits for it goes on. It has nothing to lose."""
        self._child.kill()

    def close(self) -> None:
        """End the child. What it has not answered is not answered any more."""
        self.kill()
        self._child.wait()
        for thread in (self._sender, self._receiver):
            thread.shutdown(cancel_futures=True)
        for pipe in (self._to_child, self._from_child):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _enlarge(pipe: IO[bytes]) -> None:
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        # The system may set a lower limit.
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(_LENGTH, "big"))
    pipe.write(message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """The next message, None at the end."""
    head = pipe.read(_LENGTH)
    size = int.from_bytes(head, "big")
    message = pipe.read(size) if len(head) == _LENGTH else b""
    return message if size and len(message) == size else None


def _answer(question: Question) -> bytes:
    try:
        told = convert(question.schema, question.traces, question.selection, question.source)
        return msgspec.msgpack.encode(Answer(told.entries, told.dead, told.kinds))
    except Exception as error:
        # A defect: the parent says which, and the questions behind this one are not lost with it.
        return msgspec.msgpack.encode(Answer(error=f"{type(error).__name__}: {error}"))


def _serve(decoder: msgspec.msgpack.Decoder[Question]) -> bool:
    """Answer the next question, and keep nothing of it; False at the end."""
    message = _receive(sys.stdin.buffer)
    if message is None:
        return False
    question = decoder.decode(message)
    del message
    _send(sys.stdout.buffer, _answer(question))
    return True


def main() -> None:
    """The child: answer until the input ends."""
    tune_malloc()
    decoder = msgspec.msgpack.Decoder(Question)
    while _serve(decoder):
        pass


if __name__ == "__main__":
    main()
