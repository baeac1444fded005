"""Checks of Flywheel's own state (directory, permissions, disk, schema, daemon, task file), of the clock, and of what
the state has for rounds: samples, held-out tasks, and tasks that rounds exclude."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from flywheel.cli.doctor.finding import Finding, Result
from flywheel.cli.doctor.sources import file_system, is_network
from flywheel.config import Config
from flywheel.daemon.rounds.free_samples import OVER, AvailableSamplesCache
from flywheel.daemon.rounds.gate_planning import next_test
from flywheel.errors import FlywheelError
from flywheel.records.exclusion import WORDS, Exclusion
from flywheel.records.states import TaskState
from flywheel.store import splits
from flywheel.store.kernel.bulk import count_rows
from flywheel.store.kernel.database import found_version, read_once
from flywheel.store.kernel.schema import SCHEMA_VERSION, tasks
from flywheel.store.samples import count_held_out, count_left_out, count_prompts
from flywheel.system.lock import holder
from flywheel.system.terminal import byte_size, quantity

MIN_FREE: Final = 200 << 20
"""Bytes. With less, the next transaction or the next round's log may fail."""
LOW_FREE: Final = 5 << 30
"""Bytes that a few rounds take with their adapters and logs."""
SKEW_SECONDS: Final = 120.0
_RELEASED: Final = 1_735_689_600.0
"""2025-01-01 in seconds since 1970."""
_NAMED: Final = 3
_ELSEWHERE: Final = "Set state.dir (or $FLYWHEEL_HOME) to a directory that you can write to."
_SHARES: Final = "Set `widen: true` for `influence` in {chain}, or larger shares."
_HELD: Final = "List them with `flywheel tasks --state held`, then release or reject them."
_SPLIT: Final = "Collect conversations that begin differently; ingest.train_ratio must leave some for both splits."


def check_state(config: Config) -> Iterator[Finding]:
    """Directory, permissions, disk, schema, daemon and task file."""
    try:
        directory = config.state_dir
    except FlywheelError as error:
        yield Finding.of("state", error)
        return
    existing = _existing(directory)
    yield Finding("state", *_directory(directory, existing))
    if existing == directory and existing.is_dir():
        yield _permissions(directory)
    yield _disk(existing)
    yield _schema(directory)
    pid = holder(directory)
    text = "not running: no process holds the state" if pid is None else f"process {pid} holds the state"
    yield Finding("daemon", Result.OK, text, figures={} if pid is None else {"pid": pid})
    file = config.task_file
    parent = _existing(file.absolute().parent)
    if not (_may(file, os.W_OK) if file.exists() else parent.is_dir() and _may(parent, os.W_OK | os.X_OK)):
        remedy = "Set ingest.output to a file that you can write to."
        yield Finding("task file", Result.FAILED, f"{file} cannot be written by this user", remedy)


def _existing(path: Path) -> Path:
    """The path, or the nearest parent that exists."""
    return next((each for each in (path, *path.absolute().parents) if os.path.lexists(each)), Path("/"))


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _directory(directory: Path, existing: Path) -> tuple[Result, str, str]:
    if not existing.is_dir():
        return Result.FAILED, f"{existing} is not a directory", _ELSEWHERE
    if not _may(existing, os.W_OK | os.X_OK):
        return Result.FAILED, f"{existing} cannot be written by this user", _ELSEWHERE
    for file in (directory / name for name in ("state.db", "state.db-wal", "lock")):
        if file.exists() and not _may(file, os.R_OK | os.W_OK):
            why = f"{file} cannot be written by this user: another user created it"
            return Result.FAILED, why, f"Run Flywheel as its owner, or change the owner: chown -R USER {directory}."
    if is_network(kind := file_system(existing)):
        why = f"{directory} is on {kind}, where SQLite's write-ahead log and locks are not reliable"
        return Result.WARNING, why, "Set state.dir to a directory on a disk of this machine."
    missing = "" if existing == directory else " (does not exist yet: the first command that writes creates it)"
    return Result.OK, f"{directory}{missing}", ""


def _permissions(directory: Path) -> Finding:
    """Early versions left the permissions of files to the umask."""
    wide = []
    for path in (directory, *sorted(directory.rglob("*"))):
        with suppress(OSError):
            mode = path.lstat().st_mode
            wide += [path] if mode & 0o077 and not stat.S_ISLNK(mode) else []
    if not wide:
        return Finding("permissions", Result.OK, f"only its user can read {directory} and the files in it")
    more = f" and {len(wide) - _NAMED} more" if wide[_NAMED:] else ""
    why = f"other users can read conversations: {', '.join(map(str, wide[:_NAMED]))}{more}"
    return Finding("permissions", Result.WARNING, why, f"chmod -R go= {directory}", figures={"wide": len(wide)})


def _disk(existing: Path) -> Finding:
    try:
        free = shutil.disk_usage(existing).free
        inodes = os.statvfs(existing)
    except OSError as error:
        return Finding("disk", Result.FAILED, f"{existing}: {error.strerror}", "Check the disk.")
    result, text, remedy = Result.OK, f"{byte_size(free)} free at {existing}", ""
    if inodes.f_files and not inodes.f_favail:
        result, text = Result.FAILED, f"{existing} is out of inodes: no more files can be created"
        remedy = "Delete files there, or move state.dir."
    elif free < LOW_FREE:
        result = Result.FAILED if free < MIN_FREE else Result.WARNING
        remedy = "Free space: `flywheel prune --dry-run` shows what old rounds take."
    return Finding("disk", result, text, remedy, figures={"free_bytes": free})


def _schema(directory: Path) -> Finding:
    try:
        version = found_version(directory)
    except FlywheelError as error:
        return Finding.of("schema", error)
    if not version:
        return Finding("schema", Result.OK, f"no state yet; it will be created in version {SCHEMA_VERSION}")
    return Finding("schema", Result.OK, f"state.db has version {version}", figures={"schema_version": version})


def check_clock(config: Config, server_time: float | None) -> Finding:
    """The clock against the state's last change and `server_time`, which the judge's endpoint reported (seconds
    since 1970)."""
    now = time.time()
    newest = 0.0
    with suppress(OSError, FlywheelError):
        newest = (config.state_dir / "state.db").stat().st_mtime
    result, text = Result.OK, _utc(now)
    if now < _RELEASED:
        result, text = Result.FAILED, f"it shows {text}, which is before this program was released"
    elif newest > now + SKEW_SECONDS:
        result, text = Result.FAILED, f"it shows {text}; the state was written at {_utc(newest)}"
    elif server_time is not None and abs(server_time - now) > SKEW_SECONDS:
        result, text = Result.WARNING, f"it shows {text}; the judge's endpoint reports {_utc(server_time)}"
    remedy = "" if result is Result.OK else "Set the clock (timedatectl set-ntp true): replies depend on it."
    return Finding("clock", result, text, remedy)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


async def check_left_out(config: Config) -> Finding:
    """Whether rounds exclude tasks, above all because agents are sent a message that their traces do not show."""
    try:
        counts = await read_once(config.state_dir, count_left_out, config.takes)
        prompts = await read_once(config.state_dir, count_prompts)
    except FlywheelError as error:
        # Another check reports a state that cannot be read.
        return Finding("prompts", Result.SKIPPED, f"cannot {error.attempted}: {error.why}")
    text = "; ".join(f"{quantity(number, 'task')} excluded: {WORDS[each].why}" for each, number in counts.items())
    text = text or "no task is excluded from rounds"
    if prompts.tasks:
        share = f"{prompts.exact:,} of {quantity(prompts.tasks, 'task')} ({prompts.exact / prompts.tasks:.0%})"
        text = f"{share} have an exact prompt; {text}"
    figures = {f"{each.value}_tasks": number for each, number in counts.items()}
    figures = {"tasks": prompts.tasks, "exact": prompts.exact, **figures} if prompts.tasks else figures
    remedy = next((WORDS[each].remedy for each in (Exclusion.HIDDEN, *counts) if each in counts), "")
    result = Result.WARNING if Exclusion.HIDDEN in counts else Result.OK
    return Finding("prompts", result, text, remedy, figures=figures)


async def check_samples(config: Config) -> Finding:
    """Whether a round of the settings' target could be filled now."""
    try:
        if not found_version(config.state_dir):
            return Finding("samples", Result.SKIPPED, "there is no state yet")
        return await read_once(config.state_dir, _samples, config)
    except FlywheelError as error:
        return Finding.of("samples", error)


def _samples(conn: Connection, config: Config) -> Finding:
    available = AvailableSamplesCache(config).now(conn)
    wanted = config.trigger.min_held_out or config.gate.min_tasks
    held_out = count_held_out(conn, config.takes.gate)
    shortfall = next_test(conn, config).shortfall(config.gate)
    judged = f"{held_out} of {wanted} held-out tasks are judged"
    text = "; ".join(filter(None, (available.summary, judged, shortfall)))
    figures = {
        "usable": available.usable,
        "needed": available.needs,
        "over_share": available.waiting.get(OVER, 0),
        "held_out": held_out,
        "held_out_needed": wanted,
    }
    # What more traces of the same kind would not solve, each with its remedy.
    obstacles = []
    if available.usable < available.needs:
        if available.waiting.get(OVER, 0) >= available.needs - available.usable:
            obstacles.append(("", _SHARES.format(chain=config.filter.chain)))
        if held := count_rows(conn, tasks, tasks.c.state == TaskState.HELD.value):
            obstacles.append((f"; {quantity(held, 'task')} of bursts wait for a person", _HELD))
    if empty := splits.empty_split(conn, config.ingest.train_ratio):
        obstacles.append((f"; {empty}", _SPLIT))
    for why, remedy in obstacles[:1]:
        told = f"no round could be filled: {text}{why}"
        return Finding("samples", Result.WARNING, told, remedy, config.target, figures)
    is_enough = available.usable >= available.needs and held_out >= wanted and not shortfall
    text = f"{'a round could be filled' if is_enough else 'not enough for a round yet'}: {text}"
    told = "; ".join(filter(None, (text, available.notice)))
    return Finding("samples", Result.OK, told, subject=config.target, figures=figures)
