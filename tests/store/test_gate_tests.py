"""Tests of the gate in an older state."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy import select

from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import gate_conversations, gate_tests
from tests.samples import reply
from tests.store.kernel.test_migrations import as_version_6, put


async def test_rounds_of_version_6_are_the_first_epoch_of_the_gate(tmp_path: Path) -> None:
    """They have seen their held-out conversations; a round that is under way is the next test."""
    store = await Store.open(tmp_path / "state")
    await store.write(put, *(reply(number) for number in range(1, 4)), reply(4, conversation_id="unknown"))
    await store.close()
    as_version_6(tmp_path / "state" / "state.db")
    database = sqlite3.connect(tmp_path / "state" / "state.db")
    rounds = [
        (1, "rejected", None, '{"comparison": {"tasks": 3}}'),
        (2, "rejected", None, '{"comparison": null}'),
        (3, "failed", None, None),
        (4, "promoted", None, '{"comparison": {"tasks": 2}}'),
        (5, "training", 1, None),
    ]
    database.executemany(
        "INSERT INTO rounds (id, name, state, live, result, trigger, attempt, config_hash, rubric_hash, seed, dir, "
        "reason, created_at) VALUES (?1, 'r' || ?1, ?2, ?3, ?4, '', 1, '', '', 1, '', '', '2026-01-01')",
        rounds,
    )
    asked = [(1, 1, "held-out"), (1, 4, "held-out"), (1, 2, "train"), (3, 3, "held-out"), (4, 1, "held-out")]
    database.executemany("INSERT INTO round_samples (round_id, task_id, split) VALUES (?, ?, ?)", asked)
    database.commit()
    database.close()
    store = await Store.open(tmp_path / "state")
    try:
        tests = await store.read(
            lambda conn: conn.execute(
                select(gate_tests.c.round_id, gate_tests.c.epoch, gate_tests.c.number, gate_tests.c.conversations)
            ).all()
        )
        assert [tuple(row) for row in tests] == [(1, 1, 1, 2), (4, 1, 2, 1), (5, 1, 3, None)]
        used = await store.read(lambda conn: conn.execute(select(gate_conversations)).all())
        assert {(row.round_id, row.conversation) for row in used} == {
            (1, "conversation-1"),
            (1, f"trace{4:027d}"),
            (4, "conversation-1"),
        }
    finally:
        await store.close()
