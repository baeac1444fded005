"""`flywheel forget` names what else has the trace ids of a conversation, before that is erased with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flywheel.sources.otlp.inbox import COLUMNS, Inbox, inbox_path
from tests.cli.conftest import Run
from tests.factories.config import write_config
from tests.factories.documented_json import compare, documented
from tests.factories.planted import planted_in
from tests.sources.studio.writer import agent

LISTEN = "127.0.0.1:4399"
TRACE, SPAN = "8" * 32, "7" * 16
HOUR = 3600


@pytest.mark.slow
def test_other_runs_of_its_traces_are_named_before_they_are_erased(flywheel: Run, tmp_path: Path) -> None:
    config = write_config(tmp_path, sources=[{"type": "otlp", "listen": LISTEN}])

    async def fill() -> None:
        inbox = Inbox(inbox_path(tmp_path / "state", LISTEN))
        for number, conversation in enumerate(("c0", "c1", "unknown", "c0")):
            run = agent(
                SPAN, f"plum {number}?", f"plum {number}", trace=TRACE, conversation=conversation,
                began=number * HOUR, ended=number * HOUR + 1,
            )  # fmt: skip
            await inbox.store([[run.get(column) for column in COLUMNS]])
        await inbox.close()

    asyncio.run(fill())
    assert flywheel("ingest", "-c", config).code == 0
    dry = flywheel("forget", "--conversation", "c0", "--dry-run", "--json", "-c", config).json
    compare(dry, documented("forget"), "forget")
    assert dry["replies"] == 4
    assert [(each["trace"], each["span"], each["conversation"]) for each in dry["other_runs"]] == [
        (TRACE, SPAN, "c1"),
        (TRACE, SPAN, "unknown"),
    ]
    ran = flywheel("forget", "--conversation", "c0", "-c", config)
    assert ran.code == 0, ran.err
    named, other, *_, last = ran.out.splitlines()
    assert named == f"its trace {TRACE} also has conversation c1 of 2026-11-21T06:23:20: it is erased as well"
    assert f"also has span {SPAN} of 2026-11-21T07:23:20" in other
    assert last.startswith("Flywheel cannot erase")
    assert planted_in(tmp_path / "state", ["plum"]).get("plum", ()) == ()
    assert flywheel("audit", "--deep", "-c", config).code == 0
