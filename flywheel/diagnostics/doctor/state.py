"""Where Flywheel keeps its own: whether it can be written to, has room, is of this version, and who works on it."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flywheel.config import Config
from flywheel.daemon.lock import holder
from flywheel.diagnostics.doctor.finding import Finding, Result, size
from flywheel.diagnostics.doctor.resources import file_system, is_network
from flywheel.errors import FlywheelError
from flywheel.store.database import found_version
from flywheel.store.schema import SCHEMA_VERSION

MIN_FREE: Final = 200 << 20
"""Bytes without which the next transaction or the next round's log may fail."""
LOW_FREE: Final = 5 << 30
"""Bytes that some rounds, with their adapters and logs, take."""
_ELSEWHERE: Final = "Set state.dir (or $FLYWHEEL_HOME) to a directory that you may write."
_SKEW_SECONDS: Final = 120.0


def state(config: Config) -> Iterator[Finding]:
    """Directory, disk, schema and daemon."""
    try:
        directory = config.state_dir
    except FlywheelError as error:
        yield Finding.of("state", error)
        return
    existing = _existing(directory)
    yield _directory(directory, existing)
    if existing == directory and existing.is_dir():
        yield _permissions(directory)
    yield _disk(existing)
    yield _schema(directory)
    yield _daemon(directory)
    if not may_write(config.task_file):
        yield Finding(
            "task file",
            Result.FAILED,
            f"{config.task_file} may not be written by this user",
            "Set ingest.output to a file that you may write, or leave it out.",
        )


def _directory(directory: Path, existing: Path) -> Finding:
    if not existing.is_dir():
        return Finding("state", Result.FAILED, f"{existing} is no directory", _ELSEWHERE)
    if not _may(existing, os.W_OK | os.X_OK):
        return Finding("state", Result.FAILED, f"{existing} may not be written by this user", _ELSEWHERE)
    for name in ("state.db", "state.db-wal", "lock"):
        file = directory / name
        if existing == directory and file.exists() and not _may(file, os.R_OK | os.W_OK):
            return Finding(
                "state",
                Result.FAILED,
                f"{file} may not be written by this user: another one made it",
                f"Run Flywheel as the user who owns it, or give it away: chown -R USER {directory}.",
            )
    if is_network(kind := file_system(existing)):
        return Finding(
            "state",
            Result.WARNING,
            f"{directory} is on {kind}, where SQLite's write-ahead log and its locks may not hold",
            "Set state.dir to a directory on a disk of this machine.",
        )
    there = "" if existing == directory else " (not there yet: the first command that writes makes it)"
    return Finding("state", Result.OK, f"{directory}{there}")


def _permissions(directory: Path) -> Finding:
    """What was made when the umask decided: newer files are for their user alone."""
    wide = [path for path in (directory, *sorted(directory.rglob("*"))) if _is_wide(path)]
    if not wide:
        return Finding("permissions", Result.OK, f"{directory} and all in it is for its user alone")
    more = f" and {len(wide) - _NAMED} more" if wide[_NAMED:] else ""
    told = f"others may look at what users said: {', '.join(map(str, wide[:_NAMED]))}{more}"
    remedy = f"chmod -R go= {directory}"
    return Finding("permissions", Result.WARNING, told, remedy, figures={"wide": len(wide)})


_NAMED: Final = 3


def _is_wide(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return not stat.S_ISLNK(mode) and bool(mode & 0o077)


def may_write(file: Path) -> bool:
    """Whether this user may write to a file, or make it."""
    if file.exists():
        return _may(file, os.W_OK)
    existing = _existing(file.absolute().parent)
    return existing.is_dir() and _may(existing, os.W_OK | os.X_OK)


def _existing(path: Path) -> Path:
    """A path, or the next one above it that is there."""
    return next((each for each in (path, *path.absolute().parents) if os.path.lexists(each)), Path("/"))


def _may(path: Path, how: int) -> bool:
    return os.access(path, how, effective_ids=os.access in os.supports_effective_ids)


def _disk(existing: Path) -> Finding:
    try:
        free = shutil.disk_usage(existing).free
        nodes = os.statvfs(existing)
    except OSError as error:
        return Finding("disk", Result.FAILED, f"{existing}: {error.strerror}", "Check the disk.")
    figures = {"free_bytes": free}
    if nodes.f_files and not nodes.f_favail:
        told = f"no more file can be made at {existing}: it is out of inodes"
        return Finding("disk", Result.FAILED, told, "Delete files there, or move state.dir.", figures=figures)
    told = f"{size(free)} free at {existing}"
    if free < LOW_FREE:
        result = Result.FAILED if free < MIN_FREE else Result.WARNING
        return Finding(
            "disk",
            result,
            told,
            "Free space: `flywheel prune --dry-run` tells what old rounds take of it.",
            figures=figures,
        )
    return Finding("disk", Result.OK, told, figures=figures)


def _schema(directory: Path) -> Finding:
    name = "schema"
    try:
        version = found_version(directory)
    except FlywheelError as error:
        return Finding.of(name, error)
    if not version:
        return Finding(name, Result.OK, f"no state yet; it will be made in version {SCHEMA_VERSION}")
    figures = {"schema_version": version}
    if version > SCHEMA_VERSION:
        told = f"state.db is of version {version}: a newer Flywheel made it"
        remedy = "Use that one, or another state.dir."
        return Finding(name, Result.FAILED, told, remedy, figures=figures)
    if version < SCHEMA_VERSION:
        told = f"state.db is of version {version}, not {SCHEMA_VERSION}"
        remedy = "The daemon's next start, or one `flywheel ingest`, brings it up to date."
        return Finding(name, Result.WARNING, told, remedy, figures=figures)
    return Finding(name, Result.OK, f"state.db is of version {version}", figures=figures)


def _daemon(directory: Path) -> Finding:
    pid = holder(directory)
    if pid is None:
        return Finding("daemon", Result.OK, "not running: nobody holds the state")
    return Finding("daemon", Result.OK, f"process {pid} holds the state", figures={"pid": pid})


def clock(config: Config, told_seconds: float | None) -> Finding:
    """The clock against what is known of the time; `told_seconds` is what the judge's endpoint says, since 1970."""
    now = time.time()
    remedy = "Set the clock (timedatectl set-ntp true): times order replies, retries and rounds."
    if now < _RELEASED:
        return Finding("clock", Result.FAILED, f"it says {_utc(now)}, which is before this program was made", remedy)
    try:
        newest = (config.state_dir / "state.db").stat().st_mtime
    except (OSError, FlywheelError):
        newest = 0.0
    if newest > now + _SKEW_SECONDS:
        return Finding(
            "clock", Result.FAILED, f"it says {_utc(now)}; the state was written at {_utc(newest)}", remedy
        )
    if told_seconds is not None and abs(told_seconds - now) > _SKEW_SECONDS:
        told = f"it says {_utc(now)}; the judge's endpoint says {_utc(told_seconds)}"
        return Finding("clock", Result.WARNING, told, remedy)
    return Finding("clock", Result.OK, _utc(now))


_RELEASED: Final = 1_735_689_600.0
"""The beginning of 2025."""


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
