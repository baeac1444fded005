"""Checks of the sources: can each be read, what does it hold, and are changes to it noticed."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from flywheel.cli.doctor.finding import Finding, Result
from flywheel.config import CallsSource, Config, JsonlSource, OtlpSource, StudioSource
from flywheel.config.ingest import host_and_port
from flywheel.errors import FlywheelError
from flywheel.sources.jsonl.file import JsonlFile, files_of, is_listed
from flywheel.sources.otlp.inbox import inbox_of
from flywheel.sources.studio.database import Database
from flywheel.sources.studio.schema import schema_of
from flywheel.system.lock import holder
from flywheel.system.server_limits import is_loopback
from flywheel.system.terminal import byte_size

NETWORK: Final = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|9p|ceph|glusterfs|lustre|afs|fuse\.(sshfs|s3fs|glusterfs|rclone)"
)
"""File system types on which other machines write without an event on this one."""
_JOURNALS: Final = {1: "rollback journal", 2: "WAL"}
_CONNECT_SECONDS: Final = 5.0
_UNPRIVILEGED_PORT: Final = 1024
_NETWORK_STUDIO: Final = "Run Flywheel on the machine that writes it: SQLite's locks may not hold over a network."


def check_sources(config: Config) -> Iterator[Finding]:
    """One finding for each source."""
    if not config.sources:
        yield Finding("source", Result.WARNING, "none is configured: nothing is read", "Name one in `sources`.")
    for source in config.sources:
        match source:
            case OtlpSource():
                subject = source.listen
            case CallsSource():
                subject = str(inbox_of(source, config.state_dir))
            case _:
                subject = str(source.path.absolute())
        try:
            match source:
                case CallsSource() if not Path(subject).exists():
                    yield Finding("source", Result.OK, "no reply was found in recorded calls yet", subject=subject)
                case CallsSource():
                    yield _studio(Path(subject))
                case StudioSource():
                    yield _studio(source.path.absolute())
                case JsonlSource():
                    yield _jsonl(source.path.absolute())
                case OtlpSource():
                    yield Finding("source", *_receiver(config, source), subject)
        except FlywheelError as error:
            yield Finding.of("source", error, subject=subject)


def _studio(path: Path) -> Finding:
    with Database(path) as database:
        database.identity()
        schema, _ = schema_of(database)
        spans = database.last_rowid()
    with path.open("rb") as file:
        journal = _JOURNALS.get(int.from_bytes(file.read(20)[18:19]), "unknown journal")
    text = f"{schema.name}, about {spans:,} spans, {byte_size(path.stat().st_size)}, {journal}"
    figures = {"spans": spans, "bytes": path.stat().st_size}
    empty = "" if spans else "Let an agent send its traces to Studio."
    return _file_finding(path, text, empty, _NETWORK_STUDIO, figures)


def _jsonl(path: Path) -> Finding:
    files = files_of(path)
    for file in files:
        if not is_listed(file):
            JsonlFile(file).close()
    total = sum(file.stat().st_size for file in files)
    empty = "" if files else "Put *.jsonl files there, or correct the path."
    network = "Expect a delay of ingest.poll_seconds: no event reports a change."
    text = f"task lines, {len(files):,} files, {byte_size(total)}"
    return _file_finding(path, text, empty, network, {"files": len(files), "bytes": total})


def _file_finding(path: Path, text: str, empty: str, network: str, figures: dict[str, int]) -> Finding:
    """`empty` and `network` say what to do if nothing is in it, and if it is on a network file system."""
    result, text, remedy = Result.OK, f"{text}, {stat.filemode(path.stat().st_mode)}", ""
    if is_network(kind := file_system(path)):
        result, text, remedy = Result.WARNING, f"{text}; on {kind}", network
    elif empty:
        result, text, remedy = Result.WARNING, f"{text}: nothing is in it yet", empty
    return Finding("source", result, text, remedy, str(path), figures)


def _receiver(config: Config, source: OtlpSource) -> tuple[Result, str, str]:
    host, port = host_and_port(source.listen)
    if source.token_env is not None and not os.environ.get(source.token_env):
        why = f"the variable {source.token_env}, which token_env names, is not set"
        return Result.FAILED, why, "Put a long random text into it, here and for the daemon."
    is_running, is_served = holder(config.state_dir) is not None, False
    try:
        with suppress(ConnectionRefusedError), socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            is_served = True
    except OSError as error:
        why = f"cannot receive spans at {source.listen}: {error.strerror or error}"
        return Result.FAILED, why, "Name an address of this machine, usually 127.0.0.1."
    if is_served and not is_running:
        return Result.FAILED, "another program listens there", "Stop it, or choose another port."
    if is_running and not is_served:
        return Result.FAILED, "the daemon runs, but nothing listens there", "Look at the daemon's log."
    if not is_running and 0 < port < _UNPRIVILEGED_PORT and os.geteuid() != 0:
        return Result.WARNING, f"this user cannot listen at port {port}", "Choose a port above 1023."
    text = "receives spans" if is_served else "free to receive spans at"
    if not is_loopback(host):
        text = f"{text}; open to senders with the token in {source.token_env}"
    return Result.OK, text, ""


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the file system that a path is on; empty if it is not known."""
    kinds = {}
    with suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            _, mount, kind, *_ = line.split(" ")
            # Of two mounts at one path the later one hides the earlier one.
            kinds[re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount)] = kind
    real = Path(os.path.realpath(path))
    return next((kinds[str(each)] for each in (real, *real.parents) if str(each) in kinds), "")


def is_network(kind: str) -> bool:
    """Whether other machines can write to a file system of this type."""
    return NETWORK.fullmatch(kind) is not None
