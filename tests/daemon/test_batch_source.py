"""A daemon with a folder of batch files: what waits, what comes later, a restart between."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection

from flywheel.config.file import Config, parse
from flywheel.store.kernel.database import Reader
from flywheel.store.ledger import counts_by_source
from tests.factories.batches import failed, request, response
from tests.factories.config import JUDGE
from tests.factories.state import running_daemon
from tests.factories.trace import write_lines
from tests.waiting import until


def outcomes(conn: Connection) -> tuple[int, int, int]:
    """How many replies are tasks, pending and skipped."""
    counts = counts_by_source(conn).values()
    skipped = sum(sum(each.skipped.values()) for each in counts)
    return sum(each.tasks for each in counts), sum(each.pending for each in counts), skipped


async def reached(config: Config, wanted: tuple[int, int, int]) -> None:
    async def is_so() -> bool:
        return await Reader(config.state_dir).read(outcomes) == wanted

    await until(is_so, f"the outcomes {wanted}")


async def test_a_daemon_joins_what_comes_while_it_runs_and_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "batch"
    folder.mkdir()
    # Only events of the file system make a pass.
    sections = {"ingest": {"poll_seconds": 3600, "settle_seconds": 3600}, "serving": {"call_log": False}}
    source = {"type": "jsonl", "path": str(folder)}
    config = parse({"sources": [source], "state": {"dir": "state"}, "judge": JUDGE, **sections}, "test", tmp_path)
    async with running_daemon(config):
        write_lines(folder / "out-1.jsonl", response(1))
        await reached(config, (0, 1, 0))
        write_lines(folder / "out-2.jsonl", response(2))
        await reached(config, (0, 2, 0))
    async with running_daemon(config):
        write_lines(folder / "in.jsonl", request(1), request(2), request(3), request(4))
        await reached(config, (2, 2, 0))
    async with running_daemon(config):
        write_lines(folder / "out-3.jsonl", response(3), failed(4))
        await reached(config, (3, 0, 1))
