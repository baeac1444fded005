"""Two targets, and accepted tasks of both."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.records.states import Split
from tests.factories.trace import replies_on
from tests.factories.verdict import put_judged

TARGETS: dict[str, Any] = {"planner": {}, "worker": {"alias": "work", "agents": ["Doer"], "min_samples": 2}}


def put_of(
    conn: Connection, config: Config, split: Split, count: int, agent: str, prefix: str, **values: Any
) -> None:
    """Accepted tasks of an agent; both agents answer in the same conversations."""
    replies = [
        replace(one, span_id=f"{prefix}-{one.span_id}") for one in replies_on(split, count, agent=agent, **values)
    ]
    put_judged(conn, *replies, models=config.models_of(None))


def both(conn: Connection, config: Config, planner_samples: int = 4, worker_samples: int = 2) -> None:
    put_of(conn, config, Split.TRAIN, planner_samples, "planner", "p")
    put_of(conn, config, Split.TRAIN, worker_samples, "Doer", "d")
    put_of(conn, config, Split.HELD_OUT, 3, "planner", "p")
    put_of(conn, config, Split.HELD_OUT, 2, "Doer", "d")
