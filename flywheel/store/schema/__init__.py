"""The tables. Times are UTC in ISO 8601; JSON columns hold what varies in structure."""

from __future__ import annotations

from typing import Final

from flywheel.store.schema.base import meta, metadata
from flywheel.store.schema.judging import (
    calibrations,
    duplicates,
    embeddings,
    fingerprint_bands,
    fingerprints,
    influences,
    judge_days,
    verdicts,
)
from flywheel.store.schema.ledger import (
    conversations,
    dead_letters,
    events,
    openings,
    openings_filter,
    recent_openings,
    replies,
    sources,
    tasks,
    traces,
)
from flywheel.store.schema.training import (
    adapters,
    deployments,
    gate_conversations,
    gate_tests,
    round_samples,
    rounds,
)

SCHEMA_VERSION: Final = 7

__all__ = [
    "SCHEMA_VERSION",
    "adapters",
    "calibrations",
    "conversations",
    "dead_letters",
    "deployments",
    "duplicates",
    "embeddings",
    "events",
    "fingerprint_bands",
    "fingerprints",
    "gate_conversations",
    "gate_tests",
    "influences",
    "judge_days",
    "meta",
    "metadata",
    "openings",
    "openings_filter",
    "recent_openings",
    "replies",
    "round_samples",
    "rounds",
    "sources",
    "tasks",
    "traces",
    "verdicts",
]
