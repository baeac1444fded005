"""Worker processes that extract the traces of long histories: at most two for all sources, and none at rest.

Parsing holds the interpreter. In the process that scans and stores, it would delay both. A worker reads the rows
itself, so that only ids are sent to it. It ends when its connection closes, so a parent that was killed leaves no
process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from flywheel.errors import FlywheelError, SourceError, StudioError
from flywheel.records.trace import ReplySelection
from flywheel.secrets import environment_without_secrets
from flywheel.serving.calls.call_log import CallLog
from flywheel.sources.studio.database import Database
from flywheel.sources.studio.extraction import Extraction, TraceExtractor
from flywheel.sources.studio.schema import SCHEMAS
from flywheel.sources.studio.trace_completion import CompleteTrace
from flywheel.system.child_process import ChildEndedError, ChildPool, ChildProcess, python_command, serve
from flywheel.system.process import tune_process

WORKERS: Final = 2
"""Two keep up with the one thread that stores."""
TURNS: Final = 2
"""Long histories that are read at the same time. Others wait, so that few hold much memory."""
SECONDS: Final = 600.0
"""Longest extraction of the traces of one request."""
COLLECTED_OBJECTS: Final = 100_000
"""New objects before the next garbage collection in a worker."""
HINT: Final = "It is retried at the next pass. If it fails again, look at the system log and report it."


class ExtractionRequest(Struct, array_like=True, frozen=True):
    """Traces of one database. `file` is what is read of it: the database or its copy; `calls` the call log, empty
    without one. `scan` differs in each pass: a connection is not kept for the next one."""

    source: str
    file: str
    scan: int
    schema: str
    selection: ReplySelection
    calls: str
    traces: tuple[CompleteTrace, ...]


class ExtractionAnswer(Struct, array_like=True, frozen=True):
    """What the traces brought, or an error: why, what to do, the condition of the source, and whether a retry can
    succeed."""

    extraction: Extraction | None
    error: tuple[str, str, str, bool] = ("", "", "", False)


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_request: Final = msgspec.msgpack.Decoder(ExtractionRequest).decode
_decode_answer: Final = msgspec.msgpack.Decoder(ExtractionAnswer).decode


class Workers:
    """The worker processes of all sources, used by one event loop."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(TURNS)
        self._users = 0
        self._children: ChildPool[ChildProcess]
        self._threads: ThreadPoolExecutor

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """A turn of a long history. Processes may be started while there is one; they end with the last one."""
        async with self.turns:
            if not self._users:
                self._children = ChildPool(WORKERS)
                self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="extraction")
            self._users += 1
            try:
                yield
            finally:
                self._users -= 1
                if not self._users:
                    self._threads.shutdown(wait=False, cancel_futures=True)
                    self._children.close()

    def extract(self, request: ExtractionRequest, is_left: threading.Event) -> Future[Extraction]:
        """As `TraceExtractor.extract`, later. Once `is_left`, the process that works on it is ended.

        The future raises StudioError, also if the process has died or extraction failed.
        """
        return self._threads.submit(self._ask, self._children, request, is_left)

    def _ask(
        self, children: ChildPool[ChildProcess], request: ExtractionRequest, is_left: threading.Event
    ) -> Extraction:
        def watch() -> None:
            if is_left.is_set():
                raise _failure(request.source, "it was cancelled")

        watch()
        with children.child(_start) as child:
            try:
                answer = _decode_answer(child.ask(_encode(request), SECONDS, watch))
            except (ChildEndedError, TimeoutError) as error:
                why = f"the process that parses them has died ({error or 'it took too long'})"
                raise _failure(request.source, why) from error
        if answer.extraction is None:
            raise _failure(request.source, *answer.error)
        return answer.extraction


def _start() -> ChildProcess:
    return ChildProcess(python_command(__name__), environment_without_secrets())


def _failure(
    source: str, why: str, hint: str = HINT, condition: str = StudioError.condition, retry: bool = True
) -> StudioError:
    error = StudioError(f"extract replies of {source}", why, hint, retryable=retry)
    error.condition = condition
    return error


def main() -> None:
    """The worker process."""
    tune_process()
    # What is parsed has no cycles: each collection would look through it in vain.
    gc.freeze()
    gc.set_threshold(COLLECTED_OBJECTS)
    serve(_answer)


@lru_cache(maxsize=1)
def _extractor_of(
    source: str, file: str, scan: int, schema: str, selection: ReplySelection, calls: str
) -> TraceExtractor:
    database = Database(Path(source), file=Path(file))
    call_log = CallLog(Path(calls)) if calls else None
    return TraceExtractor(database, SCHEMAS[schema], selection, source, call_log)


def _answer(message: bytes) -> bytes:
    try:
        request = _decode_request(message)
        *of, traces = astuple(request)
        extractor = _extractor_of(*of)
        extraction = extractor.extract(traces)
        # The process may outlive the pass.
        extractor.database.rest()
        return _encode(ExtractionAnswer(extraction))
    except FlywheelError as error:
        condition = error.condition if isinstance(error, SourceError) else SourceError.condition
        return _encode(ExtractionAnswer(None, (error.why, error.hint, condition, error.retryable)))
    except Exception as error:
        # A defect costs its own traces; the parent reports it.
        return _encode(
            ExtractionAnswer(None, (f"{type(error).__name__}: {error}", HINT, StudioError.condition, True))
        )
