"""The processes that send rounds to experiment trackers (`flywheel.training.data.tracking`): they are started, and
told of the gate's decision. Only a command that ends waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flywheel.config.training import TRACKER_PACKAGES, TrackingSettings
from flywheel.daemon.rounds.worker_process import last_line, missing_in
from flywheel.errors import ConfigError
from flywheel.system.files import make_private, private, write_json
from flywheel.training.data.tracking import DECISION_FILE, read_decision

log = logging.getLogger(__name__)

END_SECONDS = 60
"""How long a tracker may take for what is left at the end of a round."""
LOOK_SECONDS: Final = 0.5
FIGURES: Final = ("gain", "lower", "upper", "candidate_mean", "deployed_mean", "conversations")
"""What trackers get of a comparison."""


def require_trackers(tracking: TrackingSettings, attempted: str, python: Path) -> None:
    """Raises ConfigError if the package of a tracker is missing in the interpreter that trains."""
    packages = [TRACKER_PACKAGES[name] for name in tracking.trackers]
    if packages and (missing := missing_in(python, packages, attempted)):
        why = f"tracking.report_to needs {', '.join(missing)}, which {python} does not have"
        hint = f"Run: {python} -m pip install {' '.join(missing)}. Or remove it from the list."
        raise ConfigError(attempted, why, hint)


def decision_of(outcome: str, reason: str, result: Mapping[str, Any] | None) -> dict[str, Any]:
    """What trackers get of a decision; `result` is that of the round (`RoundResult`), of whatever version."""
    compared = (result or {}).get("comparison") or {}
    return {"outcome": outcome, "reason": reason, **{name: compared[name] for name in FIGURES if name in compared}}


class Trackers:
    """The processes for the rounds of a daemon or a command. A round's own `tracking` (`of_round`) names them."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self._running: dict[Path, subprocess.Popen[bytes]] = {}
        self._watched: set[asyncio.Task[None]] = set()
        self._failed: set[Path] = set()

    def begin(self, round_dir: Path, tracking: TrackingSettings) -> None:
        """Send the steps of a round that trains, while they are written."""
        for path in _logs(tracking):
            with contextlib.suppress(OSError):
                path.with_name(DECISION_FILE).unlink()
            self._start(round_dir, path)

    def end(self, round_dir: Path, tracking: TrackingSettings, decision: Mapping[str, Any]) -> None:
        """Send the decision on a round, if its steps were sent and it was not."""
        begun = [path for path in _logs(tracking) if path.exists()]
        try:
            if not begun or read_decision(begun[0].parent) == decision:
                return
            for path in begun:
                self._start(round_dir, path)
            # After their start: a daemon that dies before sends it again.
            write_json(begun[0].with_name(DECISION_FILE), decision)
        except (OSError, ValueError) as error:
            log.warning("the decision on %s is not sent to trackers: %s", round_dir.name, error)
        for path in begun:
            self._leave(path)

    async def close(self) -> None:
        """Wait until what is left is sent, but for no tracker longer than END_SECONDS."""
        for path in list(self._running):
            self._leave(path)
        await asyncio.gather(*self._watched)

    def _start(self, round_dir: Path, path: Path) -> None:
        """Start the process of a tracker, unless it runs; `path` is its log."""
        if path in self._running and self._running[path].poll() is None:
            return
        module = "flywheel.training.data.tracking"
        command: list[str | Path] = [self._python, "-P", "-m", module, round_dir, path.stem, str(END_SECONDS)]
        try:
            make_private(path.parent)
            with os.fdopen(private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "wb") as output:
                # Not a process of asyncio, for the same reason as the worker.
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
                )
        except OSError as error:
            log.warning("%s is not sent to %s: %s", path.parent.name, path.stem, error.strerror or error)
            return
        self._running[path] = process
        self._watched.add(task := asyncio.create_task(self._watch(path, process)))
        task.add_done_callback(self._watched.discard)

    def _leave(self, path: Path) -> None:
        """Let a process send what is left, and end."""
        if (process := self._running.pop(path, None)) is not None:
            assert process.stdin is not None
            process.stdin.close()

    async def _watch(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        """Warn if it fails, once for each round and tracker."""
        while (code := process.poll()) is None:  # noqa: ASYNC110 - a thread that waits would delay the end
            await asyncio.sleep(LOOK_SECONDS)
        if code and path not in self._failed:
            self._failed.add(path)
            why = f"no answer for {END_SECONDS} s" if code == -signal.SIGALRM else last_line(path)
            log.warning("%s was only partly sent to %s: %s. See %s", path.parent.name, path.stem, why, path)


def _logs(tracking: TrackingSettings) -> list[Path]:
    """What each tracker prints, in the directory of the round."""
    assert tracking.dir is not None
    return [tracking.dir / f"{name}.log" for name in tracking.trackers]
