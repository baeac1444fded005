"""Half a character, which JSON can hold and UTF-8 cannot, wherever a client puts it: nothing stops or is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from flywheel.store.kernel.schema import dead_letters, replies
from flywheel.store.views import balance
from tests.factories.config import make_config
from tests.factories.state import ingest, open_state
from tests.sources.studio.writer import Studio, agent, chat, message, part, span, tool

HALF = "\ud83d"
FAILED = [{"name": "exception", "attributes": {"exception": {"type": "ValueError", "message": f"no {HALF}"}}}]


GARBLED = {"gen_ai": {"output": {"messages": f"Msg(id='1', name='{HALF}', content=["}}}


def inner(**more: Any) -> list[dict[str, Any]]:
    return [
        agent("a"),
        chat("c", [message("user", part("What is 1 + 1?"))], "2", parent="a", **more),
    ]


@pytest.mark.parametrize(
    "spans",
    [
        [agent("a", name=f"Solver {HALF}")],
        [agent("a", f"What is {HALF}?")],
        [agent("a", answer=f"{HALF}")],
        [agent("a", answer=None, code=2, message=f"no {HALF}")],
        [agent("a", answer=None, code=2, events=FAILED)],
        inner(served=f"m@{HALF}"),
        [agent("a"), tool("t", "c1", f"look {HALF}", f"Error: {HALF}", parent="a")],
        [span("a", "invoke_agent", GARBLED)],
    ],
    ids=["agent", "question", "answer", "status", "exception", "adapter", "tool", "garbled"],
)
async def test_it_becomes_a_question_mark_and_costs_nothing_else(spans: list[dict[str, Any]], tmp_path: Path) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    studio.write(*spans, agent("after", trace="2", conversation="2"))
    config = make_config(tmp_path, sources=[{"path": str(studio.path)}])
    (report,) = await ingest(config)
    assert report.error is None
    assert report.counts.replies == 2
    async with open_state(config.state_dir) as store:
        assert (await store.read(balance.balance)).balanced
        told = await store.read(lambda conn: [tuple(row) for row in conn.execute(select(replies))])
        letters = await store.read(lambda conn: [tuple(row) for row in conn.execute(select(dead_letters))])
    lines = config.task_file.read_text().splitlines()
    assert len(lines) == report.counts.tasks
    assert "?" in f"{told} {letters} {lines}"
    assert all(json.loads(line)["task_id"] for line in lines)
