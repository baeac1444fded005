"""A state with tasks of every kind, and verdicts on them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert

from flywheel.records.states import Split, TaskState
from flywheel.records.task import task_line
from flywheel.records.trace import Reply
from flywheel.records.verdict import Outcome
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import tasks, verdicts
from flywheel.store.verdicts import point
from flywheel.store.views.task_list import ExportedTask
from tests.factories.trace import START, reply

SYSTEM = {"role": "system", "content": "You do sums."}
CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a unit.",
        "parameters": {"type": "object", "properties": {"unit": {"type": "string"}, "digits": {"type": "integer"}}},
    },
}


def call(number: int, name: str, arguments: str) -> dict[str, Any]:
    one = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [one]}


def result(number: int, name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": name, "content": text}


def with_tools(
    number: int, name: str = "calculate", arguments: str = '{"expression": "36 + 4"}', **more: Any
) -> Reply:
    steps = (call(number, name, arguments), result(number, name, "40"))
    values = {"query": f"What is 36 plus 4? ({number})", "answer": "\\boxed{40}", "tools": (CALCULATE, LOOK_UP)}
    return reply(number, **{**values, "trajectory": steps, **more})


def later_turn(number: int, **more: Any) -> Reply:
    said = ({"role": "user", "content": "What is 2 plus 2?"}, {"role": "assistant", "content": "\\boxed{4}"})
    return reply(number, **{"history": (SYSTEM, *said), "query": "Now double that.", "turn": 1, **more})


def after_tools(number: int, **more: Any) -> Reply:
    """A later turn whose history holds a tool call, as other sources than Studio tell it."""
    steps = (call(number, "calculate", '{"expression": "2+2"}'), result(number, "calculate", "4"))
    said = ({"role": "user", "content": "What is 2 plus 2?"}, *steps, {"role": "assistant", "content": "4"})
    return reply(number, **{"history": (SYSTEM, *said), "query": "And half?", "tools": (CALCULATE,), **more})


UNICODE = "日本語で: 2 × 3 = ? 🧮👩‍🔬 \u2028 «ж» \x00 \ud800"


def every_kind() -> list[Reply]:
    """Plain, later turn, tools, other tools, history with tools, unicode; then structured, image, empty, broken."""
    return [
        reply(0),
        later_turn(1),
        with_tools(2),
        with_tools(3, "look_up", '{"unit": "mile", "digits": 3}'),
        after_tools(4),
        reply(5, query=UNICODE, answer="六 🎉 \\boxed{6}"),
        reply(6, answer="The required structured output is generated.", structured={"answer": "4", "sure": 0.5}),
        reply(7, images=("https://example.com/triangle.png",)),
        reply(8, answer=" \n"),
        with_tools(9, arguments='{"expression": '),
    ]


@dataclass(frozen=True)
class Judged:
    """A reply and what became of it; a task without a score has no verdict."""

    reply: Reply
    state: TaskState = TaskState.ACCEPTED
    score: float | None = 1.0
    split: Split = Split.TRAIN


def good(told: Reply, score: float = 1.0) -> Judged:
    return Judged(told, TaskState.ACCEPTED, score)


def bad(told: Reply, score: float = 0.0) -> Judged:
    return Judged(told, TaskState.REJECTED, score)


def line(told: Reply) -> dict[str, Any]:
    """The task line of a reply, as it comes out of a JSON column."""
    made = task_line(told, "/studio")
    decoded: dict[str, Any] = json.loads(json.dumps(made))
    return decoded


async def fill(state_dir: Path, judged: Iterable[Judged]) -> list[str]:
    """A state that holds these tasks, in this order; their keys."""
    store = await Store.open(state_dir)

    def work(conn: Connection) -> list[str]:
        keys = []
        for one in judged:
            told = one.reply
            payload = task_line(told, "/studio")
            payload["metadata"]["split"] = one.split.value
            keys.append(payload["task_id"])
            number = conn.execute(
                insert(tasks).values(
                    key=keys[-1],
                    conversation_id=told.conversation_id,
                    agent=told.agent,
                    started_at=told.started_at.isoformat(),
                    split=one.split.value,
                    state=one.state.value,
                    payload=payload,
                    created_at=told.started_at.isoformat(),
                )
            ).inserted_primary_key[0]
            if one.score is not None:
                rejected = one.state is TaskState.REJECTED
                add_verdict(conn, number, Outcome.REJECTED if rejected else Outcome.ACCEPTED, one.score)
        return keys

    try:
        return await store.write(work)
    finally:
        await store.close()


def add_verdict(conn: Connection, task: int, outcome: Outcome, score: float | None, rubric: str = "rubric") -> None:
    conn.execute(
        insert(verdicts).values(
            task_id=task,
            rubric_hash=rubric,
            judge_hash="judge",
            outcome=outcome.value,
            score=score,
            results=[],
            created_at=START.isoformat(),
        )
    )
    point(conn, [task])


def exported(told: dict[str, Any], score: float = 1.0, results: Iterable[Any] = (), rubric: str = "") -> ExportedTask:
    """An accepted task with this line."""
    return ExportedTask(1, told, TaskState.ACCEPTED, None, Outcome.ACCEPTED, score, list(results), rubric)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
