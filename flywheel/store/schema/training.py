"""Training rounds, what came of them, and what is deployed."""

from __future__ import annotations

from sqlalchemy import JSON, Column, Float, ForeignKey, Integer, Table, Text

from flywheel.store.schema.base import metadata

rounds = Table(
    "rounds",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("state", Text, nullable=False),
    Column("live", Integer, unique=True),
    Column("trigger", Text, nullable=False),
    Column("attempt", Integer, nullable=False, default=1),
    Column("parent", Text),
    Column("config_hash", Text, nullable=False),
    Column("rubric_hash", Text, nullable=False),
    Column("seed", Integer, nullable=False),
    Column("dir", Text, nullable=False),
    Column("pid", Integer),
    Column("usage_read", Integer, nullable=False, server_default="0"),
    Column("result", JSON),
    Column("reason", Text, nullable=False, default=""),
    Column("created_at", Text, nullable=False),
    Column("finished_at", Text),
)
"""`live` is 1 while the round is unfinished and NULL afterwards: its uniqueness allows one live round. `usage_read`
is how many bytes of its `usage.jsonl` are counted in `judge_days`."""

round_samples = Table(
    "round_samples",
    metadata,
    Column("round_id", ForeignKey("rounds.id"), primary_key=True),
    Column("task_id", ForeignKey("tasks.id"), primary_key=True, index=True),
    Column("split", Text, nullable=False),
)

gate_tests = Table(
    "gate_tests",
    metadata,
    Column("round_id", ForeignKey("rounds.id"), primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    Column("alpha", Float, nullable=False),
    Column("conversations", Integer),
    Column("spread", Float),
    Column("samples", Integer),
)
"""Which test of the gate each round is, see `flywheel.evaluation.budget`. `conversations`, how many it has used, is
NULL until its rewards were seen: the test is not spent."""

gate_conversations = Table(
    "gate_conversations",
    metadata,
    Column("conversation", Text, primary_key=True),
    Column("round_id", ForeignKey("gate_tests.round_id"), primary_key=True, index=True),
    sqlite_with_rowid=False,
)
"""Which held-out conversations each test that was spent has used."""

adapters = Table(
    "adapters",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("round_id", ForeignKey("rounds.id"), nullable=False),
    Column("parent", Text),
    Column("base_model", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("comparison", JSON),
    Column("probe", JSON),
    Column("created_at", Text, nullable=False),
)

deployments = Table(
    "deployments",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("alias", Text, nullable=False),
    Column("active_alias", Text, unique=True),
    Column("endpoints", JSON, nullable=False),
    Column("adapter", Text),
    Column("previous", Text),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("report", JSON),
    Column("error", Text, nullable=False, default=""),
    Column("created_at", Text, nullable=False),
    Column("activated_at", Text),
    Column("retired_at", Text),
)
"""`active_alias` is the alias while the deployment is active and NULL otherwise: at most one is. A NULL adapter is
the base model."""
