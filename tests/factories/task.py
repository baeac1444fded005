"""Tasks: those in a state, and those of a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection, select

from flywheel.records.round import RoundTask
from flywheel.records.verdict import Exchange
from flywheel.store.kernel.schema import tasks


def task_keys(conn: Connection) -> list[str]:
    """The ids of all tasks, the oldest first."""
    return list(conn.execute(select(tasks.c.key).order_by(tasks.c.id)).scalars())


def task_states(conn: Connection) -> list[str]:
    """The states of all tasks, the oldest first."""
    return list(conn.execute(select(tasks.c.state).order_by(tasks.c.id)).scalars())


def task_line(name: str = "t-1", query: str = "What is 3 plus 4?", **metadata: Any) -> dict[str, Any]:
    """A line of the task file."""
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": query}]
    return {"task_id": name, "main_query": query, "prompt": prompt, "metadata": metadata}


def round_task(name: str = "t-1", query: str = "What is 3 plus 4?", **values: Any) -> RoundTask:
    """A task of a round. `reference` is the traced answer; `history` and `tools` are parts of what the judge gets."""
    system = {"role": "system", "content": "Be brief."}
    judged = {"reference": "\\boxed{7}", "history": (system,)} | {
        key: values.pop(key) for key in ("reference", "history", "tools") if key in values
    }
    exchange = Exchange(query, "", **judged)
    prompt = [system, {"role": "user", "content": query}]
    return RoundTask(task_id=name, exchange=exchange, **{"prompt": prompt, **values})


def written_keys(path: Path) -> list[str]:
    """The ids of all tasks in a task file, if it is there."""
    return [orjson.loads(line)["task_id"] for line in path.read_bytes().splitlines()] if path.exists() else []
