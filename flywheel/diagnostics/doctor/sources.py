"""The sources: whether each can be read, what it is, and whether what happens to it will be noticed."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flywheel.config import Config, JsonlSource, OtlpSource, StudioSource
from flywheel.config.ingest import host_and_port, is_loopback
from flywheel.daemon.lock import holder
from flywheel.diagnostics.doctor.finding import Finding, Result, size
from flywheel.diagnostics.doctor.resources import file_system, is_network
from flywheel.errors import FlywheelError
from flywheel.sources.jsonl.file import JsonlFile, files_of, is_listed
from flywheel.sources.studio.database import Database
from flywheel.sources.studio.table import schema_of

_JOURNALS: Final = {1: "rollback journal", 2: "WAL"}
_CONNECT_SECONDS: Final = 5.0


def sources(config: Config) -> Iterator[Finding]:
    """One finding for each source."""
    if not config.sources:
        yield Finding("source", Result.WARNING, "none is configured: nothing is read", "Name one in `sources`.")
    for source in config.sources:
        match source:
            case StudioSource():
                yield _studio(source.path.absolute())
            case JsonlSource():
                yield _lines(source.path.absolute())
            case OtlpSource():
                yield _receiver(config, source)


def _studio(path: Path) -> Finding:
    name, subject = "source", str(path)
    try:
        with Database(path) as database:
            database.identity()
            schema, _ = schema_of(database)
            spans = database.last_rowid()
    except FlywheelError as error:
        return Finding.of(name, error, subject=subject)
    mode, journal = _mode(path), _journal(path)
    figures = {"spans": spans, "bytes": path.stat().st_size}
    told = f"{schema.name}, about {spans:,} spans, {size(figures['bytes'])}, {journal}, {mode}"
    if is_network(kind := file_system(path)):
        return Finding(name, Result.WARNING, f"{told}; on {kind}", _NETWORK, subject, figures)
    if not spans:
        remedy = "Let an agent send its traces to Studio."
        return Finding(name, Result.WARNING, f"{told}: nothing is in it yet", remedy, subject, figures)
    return Finding(name, Result.OK, told, subject=subject, figures=figures)


_NETWORK: Final = (
    "Run Flywheel on the machine that writes it: over a network no event tells of a change, SQLite's locks may not "
    "hold, and a reader can make the writer wait."
)


def _journal(path: Path) -> str:
    with path.open("rb") as file:
        return _JOURNALS.get(int.from_bytes(file.read(20)[18:19]), "unknown journal")


def _mode(path: Path) -> str:
    return stat.filemode(path.stat().st_mode)


def _lines(path: Path) -> Finding:
    name, subject = "source", str(path)
    try:
        files = files_of(path)
        for file in files:
            if not is_listed(file):
                JsonlFile(file).close()
    except FlywheelError as error:
        return Finding.of(name, error, subject=subject)
    total = sum(file.stat().st_size for file in files)
    figures = {"files": len(files), "bytes": total}
    told = f"task lines, {len(files):,} files, {size(total)}, {_mode(path)}"
    if is_network(kind := file_system(path)):
        remedy = "Nothing, if a delay of ingest.poll_seconds is right: no event tells of a change."
        return Finding(name, Result.WARNING, f"{told}; on {kind}", remedy, subject, figures)
    if not files:
        remedy = "Put *.jsonl files there, or correct the path."
        return Finding(name, Result.WARNING, f"{told}: nothing is in it yet", remedy, subject, figures)
    return Finding(name, Result.OK, told, subject=subject, figures=figures)


def _receiver(config: Config, source: OtlpSource) -> Finding:
    listen = source.listen
    name, subject = "source", listen
    host, port = host_and_port(listen)
    if source.token_env is not None and not os.environ.get(source.token_env):
        why = f"the variable {source.token_env}, which token_env names, is not set"
        return Finding(name, Result.FAILED, why, "Put a long random text into it, here and for the daemon.", subject)
    is_served = False
    try:
        running = holder(config.state_dir) is not None
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            is_served = True
    except ConnectionRefusedError:
        pass
    except FlywheelError as error:
        return Finding.of(name, error, subject=subject)
    except OSError as error:
        why = f"receive spans at {listen}: {error.strerror or error}"
        remedy = "Name an address of this machine, usually 127.0.0.1."
        return Finding(name, Result.FAILED, f"cannot {why}", remedy, subject)
    if is_served and not running:
        remedy = "Stop the program that listens there, often a collector, or choose another port."
        return Finding(name, Result.FAILED, "another program listens there", remedy, subject)
    if running and not is_served:
        remedy = "Look at the daemon's log; start it again if it has another configuration."
        return Finding(name, Result.FAILED, "the daemon runs and nobody listens there", remedy, subject)
    if not running and port and port < _FREE_PORTS and os.geteuid() != 0:
        why = f"this user may not listen at port {port} ({os.strerror(errno.EACCES)})"
        return Finding(name, Result.WARNING, why, "Choose a port above 1023.", subject)
    told = "receives spans" if is_served else "free to receive spans at"
    if not is_loopback(host):
        told = f"{told}; open to others who know the token in {source.token_env}"
    return Finding(name, Result.OK, told, subject=subject)


_FREE_PORTS: Final = 1024
