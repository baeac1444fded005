"""Whatever happens to a source, in whatever order: what the ledger holds is what a simple model says.

The model is a dictionary of the rows that are in the database. At every check the ledger must have each reply that is
there exactly once and as it is, and of those that were deleted none twice; the task file has each task once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import Connection, select

from flywheel.config.file import parse
from flywheel.records.states import ReplyState
from flywheel.sources import studio_connector
from flywheel.sources.ingestion import Ingestion
from flywheel.store import ledger
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import replies, sources, tasks
from flywheel.store.views import balance
from tests.sources.studio.writer import Studio, agent, chat, message, part

T = TypeVar("T")
Seen = tuple[str, str]
"""What a reply is known by here: its answer and the system prompt before it."""


class CrashError(Exception):
    """The process died between two batches."""


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    return connection


class Source(RuleBasedStateMachine):
    """A Studio database to which things happen, and Flywheel beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="flywheel-model-"))
        self.path = self.folder / "studio.sqlite"
        self.studio = Studio(self.path)
        self.config = parse(
            {
                "state": {"dir": str(self.folder / "state")},
                "sources": [{"path": str(self.path)}],
                "ingest": {"settle_seconds": 0},
            },
            "model",
            self.folder,
        )
        self.store: Store | None = None
        self.ingestion: Ingestion | None = None
        # So that the newest rows, which are looked at whenever something changes, are not all of them.
        self.recent, studio_connector.RECENT_ROWS = studio_connector.RECENT_ROWS, 2
        self.number = 0
        self.migrations = 0
        self.ever: dict[str, set[Seen]] = {}
        self.copies: list[Path] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @initialize()
    def begin(self) -> None:
        self.start()

    def start(self) -> None:
        self.store = self.run(Store.open(self.folder / "state"))
        self.ingestion = Ingestion(self.store, self.config)

    def end(self) -> None:
        assert self.ingestion is not None and self.store is not None
        self.run(self.ingestion.close())
        self.run(self.store.close())

    def teardown(self) -> None:
        if self.store is not None:
            self.end()
        studio_connector.RECENT_ROWS = self.recent
        self.loop.close()
        shutil.rmtree(self.folder)

    # What is in the database, as the model sees it.

    def there(self) -> dict[str, Seen]:
        """Answer and system prompt of the agents whose spans are in the database."""
        with sqlite3.connect(self.path) as database:
            rows = database.execute("SELECT id, operationName, traceId, attributes FROM span_table").fetchall()
        database.close()
        prompts: dict[str, str] = {}
        for _, operation, trace, attributes in rows:
            if operation == "chat":
                given = json.loads(attributes)["gen_ai"]["input"]["messages"]
                prompts[trace] = "".join(m["parts"][0]["content"] for m in given if m["role"] == "system")
        found = {
            span: (
                json.loads(attributes)["gen_ai"]["output"]["messages"][0]["parts"][0]["content"],
                prompts.get(trace, ""),
            )
            for span, operation, trace, attributes in rows
            if operation == "invoke_agent"
        }
        for span, seen in found.items():
            self.ever.setdefault(span, set()).add(seen)
        return found

    def execute(self, *statements: str) -> None:
        database = _connect(self.path)
        for statement in statements:
            database.execute(statement)
        database.close()

    # What happens to it.

    @rule(count=st.integers(1, 4), with_chat=st.booleans())
    def insert(self, count: int, with_chat: bool) -> None:
        rows = []
        for _ in range(count):
            self.number += 1
            name = f"{self.number}"
            if with_chat:
                asked = [message("system", part("s")), message("user", part(f"What is {name}?"))]
                rows.append(chat(f"c{name}", asked, f"is {name}", parent=f"a{name}", trace=f"t{name}"))
            rows.append(
                agent(f"a{name}", f"What is {name}?", f"is {name}", trace=f"t{name}", conversation=f"k{name}")
            )
        self.studio.write(*rows)

    @rule()
    def insert_child_only(self) -> None:
        self.number += 1
        name = f"{self.number}"
        asked = [message("user", part(f"What is {name}?"))]
        self.studio.write(chat(f"c{name}", asked, f"is {name}", parent=f"a{name}", trace=f"t{name}"))

    @rule(choice=st.integers(0, 10**6))
    def insert_what_is_missing(self, choice: int) -> None:
        """The agent span of a trace of which only a child has come, or a late child."""
        if not self.number:
            return
        name = f"{choice % self.number + 1}"
        with sqlite3.connect(self.path) as database:
            ids = {row[0] for row in database.execute("SELECT id FROM span_table WHERE traceId = ?", (f"t{name}",))}
        database.close()
        if f"a{name}" not in ids:
            self.studio.write(
                agent(f"a{name}", f"What is {name}?", f"is {name}", trace=f"t{name}", conversation=f"k{name}")
            )
        elif f"c{name}" not in ids:
            asked = [message("system", part("s")), message("user", part(f"What is {name}?"))]
            self.studio.write(chat(f"c{name}", asked, f"is {name}", parent=f"a{name}", trace=f"t{name}"))

    @precondition(lambda self: self.there())
    @rule(choice=st.integers(0, 10**6), version=st.integers(0, 9))
    def update(self, choice: int, version: int) -> None:
        """The same length, the same place: only the content differs."""
        ids = sorted(self.there())
        span = ids[choice % len(ids)]
        row = agent(span, f"What is {span[1:]}?", f"is {span[1:]}".replace("is", f"i{version}"))
        database = _connect(self.path)
        database.execute("UPDATE span_table SET attributes = ? WHERE id = ?", (row["attributes"], span))
        database.close()

    @rule(choice=st.integers(0, 10**6))
    def delete_conversation(self, choice: int) -> None:
        if self.number:
            self.execute(f"DELETE FROM span_table WHERE traceId = 't{choice % self.number + 1}'")

    @rule(count=st.integers(1, 5))
    def delete_newest(self, count: int) -> None:
        """Their places are given away again."""
        self.execute(
            "DELETE FROM span_table WHERE traceId IN "
            f"(SELECT traceId FROM span_table ORDER BY rowid DESC LIMIT {count})"
        )

    @rule()
    def vacuum(self) -> None:
        self.execute("VACUUM")

    @rule()
    def migrate(self) -> None:
        """Another schema in the running file: the table is made anew, its rows in another order."""
        self.migrations += 1
        self.execute(
            "CREATE TABLE other AS SELECT * FROM span_table ORDER BY id DESC",
            f"ALTER TABLE other ADD COLUMN extra{self.migrations} varchar",
            "DROP TABLE span_table",
            "ALTER TABLE other RENAME TO span_table",
        )

    @rule()
    def copy(self) -> None:
        target = self.folder / f"copy{len(self.copies)}"
        shutil.copyfile(self.path, target)
        self.copies.append(target)

    @precondition(lambda self: self.copies)
    @rule(choice=st.integers(0, 10**6), in_place=st.booleans())
    def restore(self, choice: int, in_place: bool) -> None:
        source = self.copies[choice % len(self.copies)]
        if in_place:
            self.path.write_bytes(source.read_bytes())
        else:
            shutil.copyfile(source, self.folder / "new")
            (self.folder / "new").replace(self.path)

    # What Flywheel does.

    @rule(final=st.booleans())
    def poll(self, final: bool) -> None:
        assert self.ingestion is not None
        self.there()
        for report in self.run(self.ingestion.run(final=final)):
            assert report.error is None, report.error

    @rule()
    def restart(self) -> None:
        self.end()
        self.start()

    @rule(after=st.integers(0, 3), before_commit=st.booleans())
    def crash(self, after: int, before_commit: bool) -> None:
        """Die at a commit of a pass, just before it or just after."""
        assert self.store is not None and self.ingestion is not None
        write: Callable[..., Any] = self.store.write
        left = after

        async def dying(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if function is ledger.record_batch:
                left -= 1
                if left < 0 and before_commit:
                    raise CrashError
            done = await write(function, *args, **kwargs)
            if function is ledger.record_batch and left < 0:
                raise CrashError
            return done

        self.there()
        self.store.write = dying  # type: ignore[method-assign]
        with contextlib.suppress(CrashError):
            self.run(self.ingestion.run())
        self.end()
        self.start()

    # What must hold.

    @rule(sweep=st.booleans())
    def check(self, sweep: bool) -> None:
        """All that is there is told. After a look at everything, it is told as it is."""
        assert self.ingestion is not None and self.store is not None
        present = self.there()
        for report in self.run(self.ingestion.run(final=True, sweep=sweep)):
            assert report.error is None, report.error
        found = self.run(self.store.read(_told))
        told = {span: seen for span, state, seen in found if state == ReplyState.CONVERTED}
        assert set(present) <= set(told) <= set(self.ever)
        for span, (answer, prompt) in told.items():
            assert answer in {seen[0] for seen in self.ever[span]}
            if span in present:
                # What was told before rows were lost stays as it was.
                assert prompt == present[span][1] or (prompt and not present[span][1])
                if sweep and prompt == present[span][1]:
                    assert answer == present[span][0]
        lines = [json.loads(line) for line in self.config.task_file.read_text().splitlines()] if told else []
        written = Counter(line["metadata"]["span_id"] for line in lines)
        assert set(written.values()) <= {1}
        assert set(written) >= set(told)

    @invariant()
    def balanced(self) -> None:
        if self.store is not None:
            books = self.run(self.store.read(balance.balance))
            assert books.balanced, books.problems


def _told(conn: Connection) -> list[tuple[str, str, Seen]]:
    rows = conn.execute(
        select(replies.c.span_id, replies.c.state, tasks.c.payload)
        .select_from(replies.join(sources).outerjoin(tasks, replies.c.task_id == tasks.c.id))
        .order_by(replies.c.id)
    ).all()
    spans = [row.span_id for row in rows]
    assert len(spans) == len(set(spans)), "a reply is in the ledger twice"
    return [(row.span_id, row.state, _seen(row.payload)) for row in rows]


def _seen(payload: dict[str, Any] | None) -> Seen:
    if payload is None:
        return "", ""
    return payload["answer"], "".join(m["content"] for m in payload["init_messages"] if m["role"] == "system")


Source.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
TestSource = pytest.mark.slow(Source.TestCase)
