"""Rounds that ended long ago, with every file that a round can have."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import Connection

from flywheel.daemon.rounds.removal import STAYS
from flywheel.records.states import RoundState
from flywheel.system.files import write_json
from tests.factories.round import put_adapter, put_round
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm

LONG_AGO = (datetime.now(UTC) - timedelta(days=400)).isoformat(timespec="milliseconds")


def put(conn: Connection, directory: Path, number: int, *, adapter: bool, finished_at: str) -> None:
    times = {"created_at": finished_at, "finished_at": finished_at}
    put_round(conn, number, RoundState.REJECTED if adapter else RoundState.FAILED, directory, **times)
    if adapter:
        put_adapter(conn, number, directory / "adapter", base_model=BASE, probe=PROBE.model_dump(mode="json"))


def lay_out(directory: Path, server: FakeVllm, *, adapter: bool) -> None:
    (directory / "rollouts").mkdir(parents=True)
    for name in (*STAYS, "rollouts/0001.jsonl", "worker.log"):
        (directory / name).write_text("x" * 100)
    write_json(
        directory / "spec.json",
        {"round_id": directory.name, "train": [{"query": "?"}], "held_out": [1], "suites": [1]},
    )
    if adapter:
        (directory / "adapter").mkdir()
        (directory / "adapter" / "weights").write_text(directory.name)
        server.weights[str(directory / "adapter")] = PROBE.second.adapter
