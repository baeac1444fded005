"""Databases as Studio writes them: the real tables of the fixtures, filled row by row or span by span."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flywheel.records.states import SkipReason

DATA = Path(__file__).parent.parent.parent / "data" / "studio"
NAMES = ("old", "new_v1", "new_v2", "new_oldclient", "migrated")
GENERATION = {"old": "generation 1"} | dict.fromkeys(NAMES[1:], "generation 2")
SECOND = 1_000_000_000
BEGAN = 1_795_238_600 * SECOND
"""2026-11-21 05:23:20 UTC."""


def labels(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.labels.jsonl").read_text().splitlines()]


def rows(name: str) -> list[tuple[Any, ...]]:
    """All rows of a fixture's span table, in the order they were stored."""
    with sqlite3.connect(f"file:{DATA / name}.sqlite?mode=ro", uri=True) as source:
        found = source.execute("SELECT * FROM span_table ORDER BY rowid").fetchall()
    source.close()
    return found


_NAMED = {"generation 1": (0, 1, 2, 12), "generation 2": (0, 1, 2, 4, 28)}
"""Where ids stand in a row: the span's, its trace's, its parent's, its conversation's."""


def renamed(name: str, cycle: int) -> list[tuple[Any, ...]]:
    """A fixture's rows under ids of their own."""
    places = _NAMED[GENERATION[name]]
    return [
        tuple(
            f"{value}-{cycle}" if place in places and value and isinstance(value, str) else value
            for place, value in enumerate(row)
        )
        for row in rows(name)
    ]


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    # Tests need commits, not their durability.
    connection.execute("PRAGMA synchronous = OFF")
    return connection


def empty_like(name: str, path: Path) -> Path:
    """A database with a fixture's tables and indexes and no row."""
    source = sqlite3.connect(f"file:{DATA / name}.sqlite?mode=ro", uri=True)
    made = source.execute(
        "SELECT sql FROM sqlite_master "
        "WHERE sql IS NOT NULL AND type IN ('table', 'index') AND name NOT LIKE 'sqlite_%'"
    ).fetchall()
    source.close()
    target = _connect(path)
    for (sql,) in made:
        target.execute(sql)
    target.commit()
    target.close()
    return path


def insert(path: Path, many: Iterable[Sequence[Any]]) -> None:
    """One commit."""
    target = _connect(path)
    for row in many:
        target.execute(f"INSERT INTO span_table VALUES ({','.join('?' * len(row))})", row)
    target.commit()
    target.close()


@dataclass
class Studio:
    """A generation 2 database under construction; one that is there already goes on."""

    path: Path

    def __post_init__(self) -> None:
        if not self.path.exists():
            empty_like("new_v2", self.path)

    def write(self, *spans: dict[str, Any]) -> None:
        """One commit of spans made with `span`."""
        target = _connect(self.path)
        for values in spans:
            columns = ", ".join(values)
            target.execute(
                f"INSERT INTO span_table ({columns}) VALUES ({','.join('?' * len(values))})", list(values.values())
            )
        target.commit()
        target.close()


def span(
    span_id: str,
    operation: str | None,
    attributes: Any,
    *,
    parent: str = "",
    trace: str = "trace",
    began: float = 0.0,
    ended: float = 1.0,
    conversation: str = "conversation",
    code: int = 1,
    message: str = "",
    events: Any = (),
) -> dict[str, Any]:
    """A row; times are seconds after BEGAN."""
    start, end = BEGAN + int(began * SECOND), BEGAN + int(ended * SECOND)
    return {
        "id": span_id,
        "traceId": trace,
        "spanId": span_id,
        "parentSpanId": parent,
        "name": operation or "application",
        "kind": 1,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(end),
        "attributes": attributes if isinstance(attributes, str | bytes) else json.dumps(attributes),
        "events": json.dumps(list(events)),
        "status": json.dumps({"code": code, "message": message}),
        "resource": "{}",
        "scope": "{}",
        "operationName": operation,
        "conversationId": conversation,
        "serviceName": "service",
        "latencyNs": float(end - start),
    }


def part(text: str) -> dict[str, str]:
    return {"type": "text", "content": text}


def message(role: str, *parts: dict[str, Any], name: str = "") -> dict[str, Any]:
    return {"role": role, "parts": list(parts), "name": name or role, "finish_reason": "stop"}


def agent(
    span_id: str,
    asked: Any = "What is 1 + 1?",
    answer: Any = "2",
    *,
    name: str = "Solver",
    **more: Any,
) -> dict[str, Any]:
    """An agent's row; `asked` and `answer` are text or whole `messages` values; an answer of None leaves it out."""
    gen_ai: dict[str, Any] = {"operation": {"name": "invoke_agent"}, "agent": {"name": name}}
    if asked is not None:
        gen_ai["input"] = {"messages": [message("user", part(asked))] if isinstance(asked, str) else asked}
    if answer is not None:
        gen_ai["output"] = {"messages": [message("assistant", part(answer))] if isinstance(answer, str) else answer}
    return span(span_id, "invoke_agent", {"gen_ai": gen_ai}, **more)


def chat(
    span_id: str, given: Any, said: Any = None, *, reasons: Sequence[str] = ("stop",), **more: Any
) -> dict[str, Any]:
    """A model call's row; `said` is text or a whole `messages` value."""
    gen_ai: dict[str, Any] = {
        "operation": {"name": "chat"},
        "request": {"model": "small"},
        "input": {"messages": given},
        "response": {"model": more.pop("served", "small"), "finish_reasons": list(reasons)},
        "usage": {"input_tokens": 10, "output_tokens": 3},
    }
    if said is not None:
        gen_ai["output"] = {"messages": [message("assistant", part(said))] if isinstance(said, str) else said}
    return span(span_id, "chat", {"gen_ai": gen_ai}, **more)


def tool(span_id: str, call_id: str, name: str, result: Any, x: int = 1, **more: Any) -> dict[str, Any]:
    call = {"id": call_id, "arguments": {"x": x}, "result": result}
    return span(span_id, "execute_tool", {"gen_ai": {"tool": {"name": name, "call": call}}}, **more)


def expected_skip(label: dict[str, Any]) -> SkipReason | None:
    if not label["span_in_db"]:
        return SkipReason.UNFINISHED
    if label["role"] == "nested":
        return SkipReason.NESTED
    if label["role"] == "pipeline_stage":
        return SkipReason.PIPELINE_STAGE
    if label["kind"] == "interrupted":
        return SkipReason.INTERRUPTED
    return SkipReason.ERROR if label["status"] == "ERROR" else None


RENUMBER = (
    "CREATE TABLE kept AS SELECT * FROM span_table",
    "DELETE FROM span_table",
    "INSERT INTO span_table SELECT * FROM kept",
    "DROP TABLE kept",
    "VACUUM",
)
"""What VACUUM may do, by SQLite's documentation, and its present versions mostly do not."""


def execute(path: Path, *statements: str) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        database.execute(statement)
    database.close()
