"""The round worker's process: start, wait, adopt after a restart, stop. Processes are addressed by id only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import orjson
from pydantic import ValidationError

from flywheel.errors import TrainError
from flywheel.records.round import ERROR_FILE, LOG_FILE, RESULT_FILE, SPEC_FILE, RoundResult, RoundSpec
from flywheel.secrets import redact_secrets
from flywheel.sources.jsonl.data_set import answer_of
from flywheel.system.files import PRIVATE, make_private, private, write_atomic
from flywheel.system.heartbeat import beat
from flywheel.system.yaml_file import explain
from flywheel.training.data.round_directory import changes
from flywheel.training.data.round_progress import PROGRESS_FILE
from flywheel.training.packages import missing_of

log = logging.getLogger(__name__)

STOP_SECONDS = 20.0
POLL_SECONDS: Final = 0.1
ADOPTED_POLL_SECONDS = 1.0
LOG_END_BYTES: Final = 4096
_BEGIN: Final = "=== worker started:"


class WorkerProcess:
    """`python -m flywheel.training.worker ROUND_DIR`, leader of a process group of its own."""

    def __init__(self, round_dir: Path, pid: int, process: subprocess.Popen[bytes] | None) -> None:
        self.dir = round_dir
        self.pid = pid
        self._process = process

    @classmethod
    async def start(
        cls,
        round_dir: Path,
        spec: RoundSpec,
        prepare: Callable[[], Awaitable[object]] | None = None,
        *,
        python: Path | None = None,
    ) -> WorkerProcess:
        """Write the specification and start the worker in the interpreter `python`, after `prepare`. Raises
        TrainError when that fails."""
        try:
            make_private(round_dir)
            if prepare is not None:
                await prepare()
            for name in (RESULT_FILE, ERROR_FILE, PROGRESS_FILE):
                (round_dir / name).unlink(missing_ok=True)
            if changed := await asyncio.to_thread(changes, round_dir, spec):
                log.warning("%s starts over: since its last attempt, these have changed: %s", spec.round_id, changed)
            write_atomic(round_dir / SPEC_FILE, spec.model_dump_json(indent=1).encode(), mode=PRIVATE)
            with os.fdopen(private(round_dir / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "wb", 0) as file:
                # Lines before this one are those of an earlier worker.
                file.write(
                    f"{_BEGIN} attempt {spec.attempt}, {datetime.now(UTC).isoformat(timespec='seconds')}\n".encode()
                )
                # Not a process of asyncio, which may kill it when the event loop is collected (Python 3.12): it may
                # outlive the daemon.
                process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                    [python or sys.executable, "-m", "flywheel.training.worker", str(round_dir)],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
        except OSError as error:
            raise TrainError(
                f"start the worker of {round_dir}",
                error.strerror or str(error),
                "Free space or memory, or move state.dir; the round is retried.",
                retryable=True,
            ) from error
        return cls(round_dir, process.pid, process)

    @classmethod
    def adopt(cls, round_dir: Path, pid: int | None) -> WorkerProcess | None:
        """The worker that an earlier daemon started, if it still runs; a reused process id is recognised."""
        if pid is None or not _is_worker(pid, round_dir):
            return None
        return cls(round_dir, pid, None)

    @classmethod
    def strays(cls, round_dir: Path) -> list[WorkerProcess]:
        """Workers of a round without a recorded worker: their daemon was killed before it recorded them."""
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [cls(round_dir, pid, None) for pid in pids if _is_worker(pid, round_dir)]

    async def wait(self) -> int | None:
        """Wait for its end; its exit code, or minus the signal's number. None for a worker that an earlier daemon
        started: only a parent gets the exit code."""
        own = self._process
        while _is_worker(self.pid, self.dir) if own is None else own.poll() is None:
            beat()
            await asyncio.sleep(ADOPTED_POLL_SECONDS if own is None else POLL_SECONDS)
        return None if own is None else own.returncode

    async def stop(self) -> None:
        """Send SIGTERM, and after STOP_SECONDS SIGKILL to its process group."""
        self._signal(signal.SIGTERM, group=False)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), STOP_SECONDS)
        self._signal(signal.SIGKILL, group=True)
        await self.wait()

    def _signal(self, number: signal.Signals, *, group: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            if group:
                os.killpg(self.pid, number)
            elif self._process is not None:
                self._process.send_signal(number)
            elif _is_worker(self.pid, self.dir):
                os.kill(self.pid, number)


def _is_worker(pid: int, round_dir: Path) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
    return not zombie and b"flywheel.training.worker" in words and str(round_dir).encode() in words


def result_of(round_dir: Path, code: int | None = None, *, name: str = "") -> RoundResult:
    """The result that the worker left. Raises TrainError with the worker's own error if it wrote one, else with the
    cause that its exit code shows and the last line of its log; it has the `name`, or that of the directory."""
    path = round_dir / RESULT_FILE
    attempted = f"finish {name or round_dir.name}"
    if path.exists():
        try:
            return RoundResult.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            # After an update, the worker of another version may have written it.
            why = error.strerror if isinstance(error, OSError) else explain(error, RoundResult)
            raise TrainError(
                attempted, f"{path} cannot be read ({why})", "The round is retried.", retryable=True
            ) from error
    with contextlib.suppress(OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        said = orjson.loads((round_dir / ERROR_FILE).read_bytes())
        hint, retryable = said.get("hint", ""), bool(said.get("retryable"))
        failure = TrainError(attempted, str(said["error"]), hint, retryable=retryable)
        # That of a judge that does not answer, for example.
        failure.exit_code = int(said.get("exit_code", failure.exit_code))
        raise failure
    last = last_line(round_dir / LOG_FILE)
    raise TrainError(
        attempted,
        f"its worker died{_cause(code)}{f' ({last})' if last else ''}",
        f"See {round_dir / LOG_FILE}.",
        retryable=True,
    )


def _cause(code: int | None) -> str:
    if code is None:
        return ""
    # A worker that handles a signal exits with 128 plus its number.
    number = -code if code < 0 else code - 128
    if number not in {each.value for each in signal.Signals}:
        return f" with exit code {code}"
    often = ", often because memory ran out," if number == signal.SIGKILL else ""
    return f" of {signal.Signals(number).name}{often}"


def missing_in(python: Path, packages: Collection[str], attempted: str) -> list[str]:
    """Those of the packages that an interpreter of workers lacks. Raises TrainError if it cannot run Flywheel."""
    if python == Path(sys.executable):
        return missing_of(packages)
    missing: list[str] = answer_of(python, "flywheel.training.packages", {"packages": [*packages]}, attempted)[
        "missing"
    ]
    return missing


def last_line(path: Path) -> str:
    """The last line of the log of a worker, or of another process; empty without one."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_END_BYTES))
            # Before the line is shortened: part of a key would not be recognised as a secret.
            lines = redact_secrets(log.read().decode(errors="replace")).splitlines()
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return "" if last.startswith(_BEGIN) else last[-300:]
