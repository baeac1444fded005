"""Records a run of `python -m demo` for `flywheel demo`: its replies and its first promoted round.

Owns what is kept of a run's folder, and that it names neither this machine nor its folders.
"""

from __future__ import annotations

import asyncio
import io
import re
import socket
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, select

from flywheel.cli.demo.recorded_round import FILES, REPLIES_FILE, ROUND_FILE, RecordedRound
from flywheel.config.file import load
from flywheel.records.round import RoundResult
from flywheel.records.states import DeploymentState, RoundState, Split
from flywheel.store import gate_tests, rounds
from flywheel.store.kernel.database import read_once
from flywheel.store.kernel.schema import deployments, events, tasks

MOST_BYTES: Final = 200_000
BASE_MODEL: Final = "demo/policy"
TRIGGER: Final = "recorded from make demo, without the adapter's files"
LZMA_PRESET: Final = 9


class RecordingError(Exception):
    """The run cannot be recorded; the text says why."""


def write(folder: Path, target: Path) -> int:
    """Record the run in `folder` as `target`, a compressed tar file, and return its size in bytes. Raises
    RecordingError, FlywheelError and OSError."""
    config = load(folder / "flywheel.yaml")
    recorded = asyncio.run(read_once(config.state_dir, recorded_round))
    directory = config.state_dir / "rounds" / recorded.result.round_id
    members = {
        REPLIES_FILE: _replies(config.sources[0].path),
        ROUND_FILE: recorded.model_dump_json(indent=1).encode(),
        **{
            path.relative_to(directory).as_posix(): path.read_bytes()
            for pattern in FILES
            for path in sorted(directory.glob(pattern))
        },
    }
    for name, content in members.items():
        _check(name, content.decode(), folder)
    packed = _packed(members)
    if len(packed) > MOST_BYTES:
        raise RecordingError(
            f"it has {len(packed):,} bytes, and {MOST_BYTES:,} at most are shipped: a shorter run has less"
        )
    target.write_bytes(packed)
    return len(packed)


def recorded_round(conn: Connection) -> RecordedRound:
    """The first promoted round of a state. Raises RecordingError without one."""
    promoted = [row for row in rounds.newest(conn, 1000) if row.state == RoundState.PROMOTED]
    if not promoted:
        raise RecordingError("no round was promoted")
    row = promoted[0]
    result, test = RoundResult.model_validate(row.result), gate_tests.of_round(conn, row.id)
    swap = conn.execute(select(deployments).where(deployments.c.adapter == row.name)).one()
    assert result.adapter is not None and test is not None
    return RecordedRound(
        trigger=TRIGGER,
        base_model=BASE_MODEL,
        rubric_hash=row.rubric_hash,
        config_hash=row.config_hash,
        selection=row.selection,
        test=test,
        train=_keys(conn, row.id, Split.TRAIN),
        held_out=_keys(conn, row.id, Split.HELD_OUT),
        result=result.model_copy(update={"adapter": result.adapter.model_copy(update={"path": ""})}),
        endpoints=tuple(swap.endpoints),
        swap_report=swap.report,
        round_times={RoundState(state): at for state, at in _times(conn, "rounds", row.id)},
        deployment_times={DeploymentState(state): at for state, at in _times(conn, "deployments", swap.id)},
    )


def _keys(conn: Connection, round_id: int, split: Split) -> tuple[str, ...]:
    ids = rounds.samples_of(conn, round_id, split)
    return tuple(conn.execute(select(tasks.c.key).where(tasks.c.id.in_(ids)).order_by(tasks.c.id)).scalars())


def _times(conn: Connection, kind: str, number: int) -> list[tuple[Any, ...]]:
    own = events.c.kind == kind, events.c.subject == str(number)
    return [tuple(row) for row in conn.execute(select(events.c.new, events.c.at).where(*own))]


def _replies(database: Path) -> bytes:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return "\n".join(connection.iterdump()).encode()


def _check(name: str, text: str, folder: Path) -> None:
    """Raises RecordingError if a text names this machine, or a place on it."""
    for word in {str(folder), str(Path.home()), str(Path.cwd()), socket.gethostname()} - {"/"}:
        if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text):
            raise RecordingError(f"{name} says {word}")


def _packed(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=LZMA_PRESET) as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
