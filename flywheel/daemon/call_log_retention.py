"""Removes old calls from the call logs of a state directory by hand. Servers and daemon prune theirs regularly."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from flywheel.config import Config
from flywheel.serving.calls.call_log import CallLog
from flywheel.sources.calls.mirror import mirror_path


@dataclass(frozen=True, slots=True)
class PrunedLog:
    """`calls` were removed (or are too old, in a dry run), `size` bytes are in use, `above` of them too many."""

    path: Path
    calls: int
    size: int
    above: int


def prune_call_logs(config: Config, *, dry_run: bool) -> list[PrunedLog]:
    """Apply `serving.call_log` to the logs of the servers and to the daemon's mirror. Nothing is removed if it is
    false. Raises CallLogError."""
    settings = config.serving.call_log
    if settings is None:
        return []
    before_ns, max_bytes = time.time_ns() - settings.keep_ns, settings.max_bytes
    paths = [*sorted((config.state_dir / "serving").glob("calls-*.db")), mirror_path(config.state_dir)]
    done = []
    for path in paths:
        if path.is_file():
            with CallLog(path) as log:
                calls = log.older(before_ns) if dry_run else log.prune(before_ns, max_bytes)
                size = log.live_bytes()
            done.append(PrunedLog(path, calls, size, max(0, size - max_bytes)))
    return done
