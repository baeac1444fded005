"""The recorded run of `flywheel demo`: replies, and a round that is stored by the functions that store any round.

`make demo DEMO_ARGS='--record FILE'` makes a recording.
"""

from __future__ import annotations

import tarfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, Final

from sqlalchemy import Connection, Row, select

from flywheel.config.file import Config
from flywheel.errors import ExportError
from flywheel.records.round import (
    ADAPTER_DIR,
    Frozen,
    GateTest,
    RoundResult,
    RoundSelection,
)
from flywheel.records.states import DeploymentState, RoundState
from flywheel.store import deployments, gate_tests, rounds
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import tasks
from flywheel.store.kernel.transitions import move, recorded_at
from flywheel.system.files import PRIVATE, make_private, write_atomic
from flywheel.training.gate.gate import decide

ROUND_FILE: Final = "round.json"
REPLIES_FILE: Final = "replies.sql"
"""The Studio database as SQL: smaller than its file, which has the indexes too."""
FILES: Final = ("metrics.jsonl", "evaluation.jsonl", "rollouts/*.jsonl")
"""What the pages read of a round's directory, as patterns."""


class RecordedRound(Frozen):
    """A promoted round of another machine: what its worker and its server reported. What was made of that, as the
    gate's decision, is made again when the round is stored."""

    trigger: str
    base_model: str
    rubric_hash: str
    config_hash: str
    selection: RoundSelection | None
    test: GateTest
    train: tuple[str, ...]
    """Tasks, by key; so are those that were held out."""
    held_out: tuple[str, ...]
    result: RoundResult
    """Without the directory of the adapter, which is not recorded."""
    endpoints: tuple[str, ...]
    swap_report: Mapping[str, Any]
    """What the servers reported of the swap to its adapter."""
    round_times: Mapping[RoundState, str]
    """When the round came into each state (UTC, ISO 8601); of its deployment likewise."""
    deployment_times: Mapping[DeploymentState, str]


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded: the round, and the contents of all files by name."""

    round: RecordedRound
    files: Mapping[str, bytes]


def read(packed: IO[bytes]) -> Recording:
    """A recording in a compressed tar file."""
    with tarfile.open(fileobj=packed, mode="r:xz") as archive:
        members = {entry.name: content.read() for entry in archive if (content := archive.extractfile(entry))}
    return Recording(RecordedRound.model_validate_json(members[ROUND_FILE]), members)


def shipped() -> Recording:
    """The recording that comes with Flywheel."""
    with (files("flywheel.cli.demo") / "recorded.tar.xz").open("rb") as packed:
        return read(packed)


def store(conn: Connection, recorded: RecordedRound, config: Config) -> Row[Any]:
    """Store the round and the deployment of its adapter, as of the times at which they were recorded; returns the row
    of the round.

    The tasks that it used are stored, and those for training accepted. Raises ExportError if one is missing.
    """
    result = recorded.result
    assert result.adapter is not None and result.comparison is not None, "it was promoted"
    decision = decide(result.comparison, config.gate)
    directory = config.state_dir / "rounds"
    adapter = result.adapter.model_copy(update={"path": str(directory / result.round_id / ADAPTER_DIR)})
    result = result.model_copy(update={"adapter": adapter})
    name, at, deployed_at = adapter.name, recorded.round_times, recorded.deployment_times
    with recorded_at(at[RoundState.PLANNED]):
        row = rounds.plan(
            conn,
            directory,
            _ids(conn, recorded.train),
            _ids(conn, recorded.held_out),
            recorded.test,
            selection=recorded.selection and recorded.selection.model_dump(mode="json"),
            trigger=recorded.trigger,
            seed=config.training.seed,
            parent=None,
            config_hash=recorded.config_hash,
            rubric_hash=recorded.rubric_hash,
        )
    with recorded_at(at[RoundState.TRAINING]):
        move(conn, row.id, RoundState.PLANNED, RoundState.TRAINING, "worker started")
    with recorded_at(at[RoundState.EVALUATING]):
        rounds.store_result(conn, row.id, result)
        move(conn, row.id, RoundState.TRAINING, RoundState.EVALUATING, result.outcome)
        rounds.add_adapter(conn, row, result, recorded.base_model)
        gate_tests.record_decision(conn, row.id, decision)
    alias, why = config.model.alias, f"{name}: {decision.reason}"
    with recorded_at(deployed_at[DeploymentState.REQUESTED]):
        number = deployments.request(conn, alias, list(recorded.endpoints), name, why)
    for state in (DeploymentState.LOADING, DeploymentState.PROBING):
        with recorded_at(deployed_at[state]):
            deployments.advance(conn, number, state)
    with recorded_at(deployed_at[DeploymentState.ACTIVE]):
        deployments.activate(conn, number, alias, dict(recorded.swap_report))
    with recorded_at(at[RoundState.PROMOTED]):
        uses = config.training.max_uses
        rounds.finish(conn, row.id, RoundState.EVALUATING, RoundState.PROMOTED, decision.reason, max_uses=uses)
    stored = rounds.by_name(conn, row.name)
    assert stored is not None
    return stored


def write_files(recording: Recording, directory: Path) -> None:
    """Write the files of the round that its pages read into its directory."""
    for name in recording.files.keys() - {ROUND_FILE, REPLIES_FILE}:
        make_private((directory / name).parent)
        write_atomic(directory / name, recording.files[name], mode=PRIVATE)


def _ids(conn: Connection, keys: Collection[str]) -> list[int]:
    found = {row.key: row.id for row in rows_in(conn, select(tasks.c.key, tasks.c.id), tasks.c.key, list(keys))}
    if missing := sorted(set(keys) - found.keys()):
        why = f"{len(missing)} of its {len(keys)} tasks are not among the replies, as {missing[0]}"
        raise ExportError(
            "store the recorded round", why, "Record it again with `make demo DEMO_ARGS='--record FILE'`."
        )
    return [found[key] for key in keys]
