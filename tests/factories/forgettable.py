"""A state directory in which every store has texts of one conversation, and of another one."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, insert, select

from flywheel.judge.prompt import parse_sections
from flywheel.records.states import Label
from flywheel.serving.calls.call_log import CallLog, RecordedCall, call_log_copy_path
from flywheel.sources.otlp.inbox import COLUMNS, Inbox, inbox_path
from flywheel.store import labels
from flywheel.store.kernel import schema
from flywheel.system.files import append_jsonl, write_json
from flywheel.system.process_folder import LOCK
from tests.factories.config import write_config, write_rubric
from tests.factories.judge_server import JudgeServer
from tests.factories.planted import WORDS
from tests.factories.round import put_adapter, put_round, round_spec
from tests.factories.state import write_state
from tests.factories.task import round_task
from tests.factories.trace import write_lines

CONVERSATION: Final = f"conversation {WORDS[0]} {WORDS[2]}"
USER: Final = f"user {WORDS[1]}"
BEGAN: Final = time.time_ns() - 3600 * 10**9
LISTEN: Final = "127.0.0.1:4399"
PLANTED: Final = " ".join(WORDS)
UNREAD: Final = f"{WORDS[1]} in a line that is broken"
OTHER_UNREAD: Final = '{"main_query": "another broken line", "messages": 5}'
LEFT_BY_KILLED: Final = (
    ".tasks.jsonl.0123abcd", "datasets/.sums.jsonl.0123abcd", "rounds/r0002/.spec.json.0123abcd",
    "fw-process-left/database.sqlite", "datasets/fw-process-left/lines.jsonl", ".restoring/state.db",
)  # fmt: skip
"""What processes leave that are killed while they write a file, read a copy or restore a backup."""
OTHER: Final = "What is 20 plus 3?"
LEFT: Final = {"rounds/r0001/rollouts/0001.jsonl", "evaluations/e1/answers.jsonl", "tasks.jsonl"}
"""Files that still have the other conversation."""


class QuotingJudge(JudgeServer):
    """Accepts all, and gives the question as its reason."""

    def __init__(self) -> None:
        super().__init__(lambda _question, _answer: True)

    def content(self, request: dict[str, Any]) -> dict[str, Any]:
        said = super().content(request)
        quoted = parse_sections(request["messages"][-1]["content"])["QUESTION"]
        for criterion in said["criteria"].values():
            criterion["reason"] = quoted
        return said


def lines() -> list[dict[str, Any] | str]:
    """Of a task file: three replies of the conversation, and one of another. Three lines cannot be read: two name the
    conversation, and say what no reply says."""
    named = json.dumps({"conversation_id": CONVERSATION, "user_id": USER})
    return [
        # Its ids are beyond what a dead letter shows of a line.
        f'{{"main_query": "{UNREAD} 1", "more": "{"x" * 3000}", "messages": 5, "metadata": {named}}}',
        f'{{"main_query": "{UNREAD} 2", "messages": ["torn": {{}}], "metadata": {named}',
        OTHER_UNREAD,
        *(
            {
                "task_id": f"line {number}",
                "main_query": f"{PLANTED}: question {number}",
                "answer": f"{PLANTED} \\boxed{{{number}}}",
                "metadata": {"conversation_id": CONVERSATION, "user_id": USER},
            }
            for number in range(3)
        ),
        {"task_id": "other", "main_query": OTHER, "answer": "\\boxed{23}", "metadata": {"conversation_id": "other"}},
    ]


def spans() -> list[dict[str, Any]]:
    """Of the inbox: an agent's reply in the conversation."""
    said = [{"role": "user", "parts": [{"type": "text", "content": f"{PLANTED} by a span"}]}]
    answered = [{"role": "assistant", "parts": [{"type": "text", "content": f"{PLANTED} \\boxed{{5}}"}]}]
    attributes = {
        "gen_ai": {
            "operation": {"name": "invoke_agent"},
            "agent": {"name": "Tutor"},
            "conversation": {"id": CONVERSATION},
            "input": {"messages": said},
            "output": {"messages": answered},
        },
        "user": {"id": USER},
    }
    row = {
        "id": "5" * 16, "traceId": "5" * 32, "spanId": "5" * 16, "parentSpanId": "", "name": "invoke_agent Tutor",
        "kind": 1, "startTimeUnixNano": "1795238600000000000", "endTimeUnixNano": "1795238601000000000",
        "attributes": json.dumps(attributes), "events": "[]", "links": "[]", "status": '{"code": 1}',
        "resource": "{}", "scope": "{}", "statusCode": 1, "operationName": "invoke_agent",
        "conversationId": CONVERSATION, "latencyNs": 1e9,
    }  # fmt: skip
    return [row]


def calls() -> list[RecordedCall]:
    """Of the call logs: two calls of the conversation, the second with the first in its history, and another one."""

    def call(number: int, answered: str, *said: str, **named: str) -> RecordedCall:
        roles = ["system", *("user", "assistant") * 5]
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
        body = {"model": "agent", "messages": messages, **({"user": named["user"]} if "user" in named else {})}
        answer = {"choices": [{"message": {"role": "assistant", "content": answered}}]}
        return RecordedCall(
            f"fw-{number:032d}", "/v1/chat/completions", "base", started_ns=BEGAN + number,
            ended_ns=BEGAN + number + 1, status=200, is_complete=True,
            media_type="application/json", request=json.dumps(body).encode(),
            response=json.dumps(answer).encode(), **named,
        )  # fmt: skip

    first, answered = ("You do sums.", f"{PLANTED} in a call"), f"{PLANTED} answered"
    return [
        call(1, answered, *first, conversation=CONVERSATION, user=USER),
        call(2, f"{PLANTED} again", *first, answered, f"{PLANTED} asked again", user=USER),
        call(3, "23", "You do sums.", OTHER),
    ]


def data_set() -> list[dict[str, Any] | str]:
    """Of the copy of a data set: a reply of the conversation between two lines that cannot be read."""
    row = {"question": f"{PLANTED} in a data set?", "answer": f"{PLANTED} \\boxed{{7}}"}
    torn = f'{{"question": "{UNREAD} 3", "metadata": {{"conversation_id": {json.dumps(CONVERSATION)}'
    return [torn, {**row, "metadata": {"conversation_id": CONVERSATION}}, OTHER_UNREAD]


def write_forgettable(folder: Path, judge: JudgeServer) -> Path:
    """The configuration; `finish` does the rest when its sources are ingested and judged."""
    state = folder / "state"
    write_lines(folder / "lines.jsonl", *lines())
    (state / "datasets").mkdir(parents=True)
    # As Flywheel wrote them: of one that is a source, and of one that was.
    for name in ("sums", "before"):
        write_lines(state / "datasets" / f"{name}.jsonl", *data_set())

    async def fill() -> None:
        inbox = Inbox(inbox_path(state, LISTEN))
        await inbox.store([[row.get(column) for column in COLUMNS] for row in spans()])
        await inbox.close()

    asyncio.run(fill())
    (state / "serving").mkdir(parents=True, exist_ok=True)
    for path in (call_log_copy_path(state), state / "serving" / "calls-8000.db"):
        with CallLog(path) as log:
            log.append(calls())
    return write_config(
        folder,
        sources=[
            {"type": "jsonl", "path": "lines.jsonl"},
            {"type": "jsonl", "dataset": {"path": "./sums"}},
            {"type": "otlp", "listen": LISTEN},
        ],
        filter={"rubric": write_rubric(folder).name},
        judge={"base_url": judge.base_url, "model": "judge"},
        trigger={"min_samples": 100_000},
    )


def finish(folder: Path) -> list[str]:
    """Add a label, a round with its files, and an evaluation; the keys of the conversation's tasks."""
    state = folder / "state"
    keys, other = write_state(state, _put_rest, state)
    tasks = [round_task(key, f"{PLANTED} in a round") for key in keys] + [round_task(other, OTHER)]
    answers = [
        {
            "task_id": each.task_id,
            "answer": each.exchange.query,
            "samples": [{"token_ids": [ord(c) for c in each.exchange.query]}],
        }
        for each in tasks
    ]
    for directory, name in (
        (state / "rounds" / "r0001", "rollouts/0001.jsonl"),
        (state / "evaluations" / "e1", "answers.jsonl"),
    ):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(directory / "spec.json", round_spec(train=tasks).model_dump(mode="json"))
        append_jsonl(directory / name, answers)
        (directory / "worker.log").write_text(f"it failed at {PLANTED}\n")
    for name in LEFT_BY_KILLED:
        (state / name).parent.mkdir(exist_ok=True)
        (state / name).write_text(PLANTED)
    for parent in (state, state / "datasets"):
        (parent / "fw-process-left" / LOCK).touch()
    return keys


def _put_rest(conn: Connection, state: Path) -> tuple[list[str], str]:
    rows = conn.execute(select(schema.tasks.c.id, schema.tasks.c.key, schema.tasks.c.conversation_id)).all()
    keys = [row.key for row in rows if row.conversation_id == CONVERSATION]
    (other,) = (row.key for row in rows if row.conversation_id != CONVERSATION)
    labels.add(conn, keys[0], Label.ACCEPT, "ann", comment=f"{PLANTED} in a comment")
    put_round(conn, 1, path=state / "rounds" / "r0001")
    put_adapter(conn, 1, state / "rounds" / "r0001" / "adapter")
    for row in rows:
        values = {"round_id": 1, "task_id": row.id, "split": "train"}
        conn.execute(insert(schema.round_samples).values(**values))
    arguments = {"task_id": keys[0], "label": "accept", "comment": f"{PLANTED} in a request"}
    conn.execute(
        insert(schema.requests).values(
            kind="label", arguments=arguments, requested_by="ann", state="done", created_at="2026-01-01"
        )
    )
    return keys, other
