"""Runs `replies.extract` in a child process while a long history is read, so that two cores are used.

Parsing holds the interpreter. In the process that reads and stores, it would delay both. The child ends when its
connection closes, so a parent that was killed leaves no process behind.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import msgspec
from msgspec import Struct

from flywheel.errors import StudioError
from flywheel.records.task import Batch
from flywheel.records.trace import ReplySelection
from flywheel.secrets import environment_without_secrets
from flywheel.sources.spans.replies import extract
from flywheel.system.child_process import ChildProcess, python_command, serve
from flywheel.system.process import tune_process

SECONDS: Final = 600.0
"""Longest extraction of one batch."""


class ExtractionRequest(Struct, array_like=True, frozen=True):
    """The arguments of `extract`."""

    batch: Batch
    schema: str
    selection: ReplySelection
    source: str


class ExtractionResult(Struct, array_like=True, frozen=True):
    """The result of `extract`, or why it failed."""

    batch: Batch | None
    error: str = ""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_request: Final = msgspec.msgpack.Decoder(ExtractionRequest).decode
_decode_result: Final = msgspec.msgpack.Decoder(ExtractionResult).decode


class ExtractionProcess:
    """A child process that extracts one batch after the other."""

    def __init__(self) -> None:
        self._child = ChildProcess(python_command(__name__), environment_without_secrets())
        # Sending and receiving both block, and each must go on while the other does.
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="extraction")
        self._receiver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="extraction")

    @property
    def pid(self) -> int:
        return self._child.pid

    def extract(self, batch: Batch, schema: str, selection: ReplySelection, source: str) -> Future[Batch]:
        """As `replies.extract`, later. One thread may call it.

        The future raises StudioError if the child has died or extraction failed.
        """
        try:
            question = _encode(ExtractionRequest(batch, schema, selection, source))
        except (OverflowError, UnicodeEncodeError, RecursionError):
            # A recorded call has numbers beyond 64 bits, lone surrogates or very deep values.
            here: Future[Batch] = Future()
            here.set_result(extract(batch, schema, selection, source))
            return here
        # If it cannot be sent, the receiver finds the connection closed.
        self._sender.submit(self._child.send, question)
        return self._receiver.submit(self._receive, source)

    def _receive(self, source: str) -> Batch:
        try:
            answer = _decode_result(self._child.receive(time.monotonic() + SECONDS))
        except (EOFError, TimeoutError):
            self.kill()
            answer = ExtractionResult(None, "the process that parses them has died")
        if answer.batch is None:
            raise StudioError(
                f"extract replies of {source}",
                answer.error,
                "It is retried at the next pass. If it fails again, look at the system log and report it.",
                retryable=True,
            )
        return answer.batch

    def kill(self) -> None:
        """End the child at once, from any thread. Whoever waits for it gets an error. It has nothing to lose."""
        self._child.kill()

    def close(self) -> None:
        """End the child. Batches that it has not extracted are lost."""
        self.kill()
        for thread in (self._sender, self._receiver):
            thread.shutdown(cancel_futures=True)
        self._child.end()


def main() -> None:
    """The child process."""
    tune_process()
    serve(_answer)


def _answer(request: bytes) -> bytes:
    try:
        question = _decode_request(request)
        answer = ExtractionResult(extract(question.batch, question.schema, question.selection, question.source))
    except Exception as error:
        # A defect costs its own batch; the parent reports it.
        answer = ExtractionResult(None, f"{type(error).__name__}: {error}")
    return _encode(answer)
