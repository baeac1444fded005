"""What the clock does: polls, retries, reconciling, and the window in which a round may start with fewer samples."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from flywheel.config import parse
from flywheel.daemon.service import Service
from flywheel.store.kernel.database import Store


async def test_a_cron_window_wakes_the_rounds_once(tmp_path: Path) -> None:
    raw = {"sources": [], "state": {"dir": str(tmp_path / "state")}, "trigger": {"cron": "0 3 * * *"}}
    config = parse(raw, "test", tmp_path)
    store = await Store.open(config.state_dir)
    service = Service(config, store)
    seen: list[bool] = []

    async def start_due(*, window: bool = False) -> bool:
        seen.append(window)
        return False

    service._rounds.start_due = start_due  # type: ignore[method-assign]
    scheduler = service._schedule()
    try:
        jobs = {job.id: job for job in scheduler.get_jobs()}
        periodic = {
            "poll",
            "judge",
            "rounds",
            "sources",
            "prune",
            "retention",
            "reconcile",
            "memory",
            "metrics",
            "requests",
        }
        assert set(jobs) == {*periodic, "cron"}
        night = jobs["cron"].trigger.get_next_fire_time(None, datetime(2026, 1, 1, 12, tzinfo=UTC))
        assert night == datetime(2026, 1, 2, 3, tzinfo=UTC)
        assert not service._round.wake.is_set()
        await jobs["cron"].func()
        assert service._round.wake.is_set()
        await service._do_round()
        await service._do_round()
        assert seen == [True, False]
    finally:
        await service._ingestion.close()
        await store.close()
