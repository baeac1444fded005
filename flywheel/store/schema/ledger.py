"""What was read: sources, their replies and traces, tasks, dead letters and events."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from flywheel.store.schema.base import metadata

sources = Table(
    "sources",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("path", Text, nullable=False, unique=True),
    Column("schema", Text, nullable=False, default=""),
    Column("identity", Text, nullable=False, default=""),
    Column("fingerprint", Text, nullable=False, default=""),
    Column("generation", Integer, nullable=False, default=0),
    Column("rowid_done", Integer, nullable=False, default=0),
    Column("anchor", Text, nullable=False, server_default=""),
    Column("type", Text, nullable=False, server_default="studio"),
    Column("condition", Text, nullable=False, server_default=""),
    Column("swept_at", Text),
    Column("open_traces", Integer, nullable=False, default=0),
    Column("longest_read_ms", Float, nullable=False, default=0.0),
    Column("error", Text, nullable=False, default=""),
    Column("warning", Text, nullable=False, default=""),
    Column("read_at", Text),
)

replies = Table(
    "replies",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("source_id", ForeignKey("sources.id"), nullable=False),
    Column("span_id", Text, nullable=False),
    Column("trace_id", Text, nullable=False, index=True),
    Column("conversation_id", Text, nullable=False, default=""),
    Column("agent", Text, nullable=False, default=""),
    Column("state", Text, nullable=False),
    Column("skip_reason", Text),
    Column("detail", Text, nullable=False, default=""),
    Column("task_id", ForeignKey("tasks.id"), index=True),
    Column("content", BigInteger),
    Column("created_at", Text, nullable=False),
    UniqueConstraint("source_id", "span_id"),
    Index("replies_by_state", "source_id", "state", "skip_reason"),
)
"""`content` is a hash of the reply as it was told, NULL where that is not known (an older state)."""

traces = Table(
    "traces",
    metadata,
    Column("source_id", ForeignKey("sources.id"), primary_key=True),
    Column("trace_id", Text, primary_key=True),
    Column("rowids", Text, nullable=False),
    Column("digest", BigInteger, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("is_open", Boolean, nullable=False),
    Index("traces_open", "source_id", sqlite_where=text("is_open"), postgresql_where=text("is_open")),
    sqlite_with_rowid=False,
)
"""What is remembered of every trace, see `flywheel.trace.Mark`; `rowids` are ranges such as `7-9,12`."""

conversations = Table(
    "conversations",
    metadata,
    Column("key", Text, primary_key=True),
    Column("split", Text, nullable=False),
    Column("like", Text, nullable=False),
    Column("words", LargeBinary, nullable=False),
    Column("exact", Boolean, nullable=False, server_default=text("0")),
    Index("conversations_joined", "like", sqlite_where=text('"like" <> key AND exact = 0')),
    sqlite_with_rowid=False,
)
"""Which side a conversation is on, for ever. `like` is the conversation it follows because it begins nearly or
exactly (`exact`) as that one does, else itself; `words` are the hashes of the words it begins with, none where it is
`exact`."""

openings, recent_openings = (
    Table(
        name,
        metadata,
        Column("band", BigInteger, primary_key=True),
        Column("key", ForeignKey("conversations.key"), primary_key=True),
        sqlite_with_rowid=False,
    )
    for name in ("openings", "recent_openings")
)
"""Where conversations that begin alike are found, see `flywheel.store.signature_bands`: bands of a MinHash signature,
and a hash of exactly what one begins with."""

openings_filter = Table(
    "openings_filter",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("stamp", BigInteger, nullable=False),
    Column("bands", BigInteger, nullable=False),
    Column("bits", LargeBinary, nullable=False),
)
"""The Bloom filter of the large table, see `flywheel.store.signature_filter`: one row, with how many bands are in it.
`stamp` is another number whenever it has changed."""

tasks = Table(
    "tasks",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("key", Text, nullable=False, unique=True),
    Column("conversation_id", Text, nullable=False),
    Column("agent", Text, nullable=False),
    Column("adapter", Text, nullable=False, default=""),
    Column("started_at", Text, nullable=False),
    Column("split", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("excluded", Text, nullable=False, server_default=text("''")),
    Column("model", Text, nullable=False, server_default=text("''")),
    Column("beginning", BigInteger),
    Column("payload", JSON, nullable=False),
    Column("retry_at", Text),
    Column("crashes", Integer, nullable=False, server_default=text("0")),
    Column("created_at", Text, nullable=False),
    Index("tasks_by_beginning", "beginning", sqlite_where=text("beginning IS NOT NULL")),
    Index("tasks_by_state", "state", "split"),
    Index("tasks_suspected", "crashes", sqlite_where=text("crashes > 0")),
    Index("tasks_for_rounds", "state", "split", "excluded"),
    Index("tasks_by_conversation", "conversation_id", "started_at"),
)
"""`excluded` says why rounds leave it out, see `flywheel.exclusion`; empty where nothing does. `model` is the one
that was asked, empty where that is not known or the response's id tells which version answered. `beginning` is a
hash of what its conversation begins with, of held-out tasks alone. `crashes` is how often in a row a process ended
while the task was in work."""

dead_letters = Table(
    "dead_letters",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("source_id", ForeignKey("sources.id")),
    Column("subject", Text, nullable=False),
    Column("error", Text, nullable=False),
    Column("excerpt", Text, nullable=False, default=""),
    Column("state", Text, nullable=False, server_default="open"),
    Column("attempts", Integer, nullable=False, server_default="1"),
    Column("created_at", Text, nullable=False),
    UniqueConstraint("kind", "source_id", "subject"),
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("old", Text),
    Column("new", Text, nullable=False),
    Column("detail", Text, nullable=False, default=""),
    Index("events_by_subject", "kind", "subject"),
)
