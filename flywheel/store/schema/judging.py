"""What judging found, and what it compares tasks by."""

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
)

from flywheel.store.schema.base import metadata

verdicts = Table(
    "verdicts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("task_id", ForeignKey("tasks.id"), nullable=False),
    Column("rubric_hash", Text, nullable=False),
    Column("judge_hash", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("score", Float),
    Column("results", JSON, nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("error", Text, nullable=False, default=""),
    Column("calls", Integer, nullable=False, default=0),
    Column("prompt_tokens", Integer, nullable=False, default=0),
    Column("completion_tokens", Integer, nullable=False, default=0),
    Column("latency_seconds", Float, nullable=False, default=0.0),
    Column("created_at", Text, nullable=False),
    Column("judgements", JSON, nullable=False, server_default="[]"),
    UniqueConstraint("task_id", "rubric_hash", "judge_hash"),
)
"""`judgements` is every opinion of the judge that the verdict was made of, see `flywheel.verdict.Judgement`."""

judge_days = Table(
    "judge_days",
    metadata,
    Column("day", Text, primary_key=True),
    Column("purpose", Text, primary_key=True),
    Column("calls", Integer, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
)
"""What judging has used, by day (UTC) and by what it was for, see `flywheel.judge_usage.Purpose`."""

fingerprints = Table(
    "fingerprints",
    metadata,
    Column("task_id", ForeignKey("tasks.id"), primary_key=True),
    Column("like", Integer, nullable=False),
    Column("scope", BigInteger, nullable=False),
    Column("exact", BigInteger, nullable=False),
    Column("words", LargeBinary, nullable=False),
    Column("particulars", LargeBinary, nullable=False),
    Column("text", Text, nullable=False),
    Column("threshold", Float, nullable=False),
    Column("kept", Boolean, nullable=False),
    Index("fingerprints_by_exact", "exact"),
    Index("fingerprints_by_scope", "scope", "kept"),
    Index("fingerprints_by_like", "like"),
)
"""What a task's question is compared by. Only questions of one `scope` are: the same side of the split, the same
conversation before, the same numbers. `like` is the first task that it nearly repeats, else itself; `kept` whether it
went on to the judge; `text` names its embedding."""

fingerprint_bands = Table(
    "fingerprint_bands",
    metadata,
    Column("band", BigInteger, primary_key=True),
    Column("task_id", ForeignKey("tasks.id"), primary_key=True, index=True),
    sqlite_with_rowid=False,
)

embeddings = Table(
    "embeddings",
    metadata,
    Column("model", Text, primary_key=True),
    Column("text", Text, primary_key=True),
    Column("vector", LargeBinary, nullable=False),
)
"""One float32 vector of length 1 per text and model, those of a model with as many numbers; `text` is a hash. An
empty vector is one that the endpoint did not make."""

duplicates = Table(
    "duplicates",
    metadata,
    Column("task_id", ForeignKey("tasks.id"), primary_key=True),
    Column("original_id", ForeignKey("tasks.id"), nullable=False, index=True),
    Column("similarity", Float, nullable=False),
    Column("method", Text, nullable=False),
    Column("created_at", Text, nullable=False),
)
"""Which task each rejected duplicate repeats."""

influences = Table(
    "influences",
    metadata,
    Column("task_id", ForeignKey("tasks.id"), primary_key=True),
    Column("conversation", Text, nullable=False),
    Column("user", Text, nullable=False),
    Column("template", BigInteger, nullable=False),
    Column("origin", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("released", Boolean, nullable=False, default=False),
    Index("influences_by_origin", "origin", "at"),
)
"""By what a task's share of a round is counted. `origin` is its user, else its source; `at` when it was asked, in
seconds since 1970; `released` that a person has let it go on."""

calibrations = Table(
    "calibrations",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("rubric_id", Text, nullable=False),
    Column("rubric_hash", Text, nullable=False),
    Column("judge_hash", Text, nullable=False),
    Column("judge_model", Text, nullable=False),
    Column("n", Integer, nullable=False),
    Column("undecided", Integer, nullable=False),
    Column("agreement", Float),
    Column("kappa", Float),
    Column("kappa_low", Float),
    Column("kappa_high", Float),
    Column("created_at", Text, nullable=False),
    Index("calibrations_by_rubric", "rubric_hash", "judge_hash"),
)
"""`kappa` is NULL where it is not defined: labels or verdicts that are all alike."""
