"""From an adapter to conversations, and from a conversation to adapters."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from sqlalchemy import Connection, insert, select, update

from flywheel.records.states import RoundState, Split
from flywheel.store import ledger
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import round_samples, tasks
from flywheel.store.views import lineage
from tests.factories.round import comparison, put_tested_round
from tests.factories.trace import batch, record, reply

PROMOTED = RoundState.PROMOTED


def put(conn: Connection, directory: Path) -> list[str]:
    """Six replies of three conversations, one of them without an id; two adapters in a line and one beside it."""
    found = [
        reply(1, conversation_id="a"),
        reply(2, conversation_id="a"),
        reply(3, conversation_id="b"),
        reply(4, conversation_id="unknown"),
        reply(5, conversation_id="b", trace_id="trace of two"),
        reply(6, conversation_id="c", trace_id="trace of two"),
    ]
    record(conn, ledger.source_id(conn, "/a"), batch(*found), train_ratio=0.7, split_seed=42)
    put_tested_round(conn, 1, PROMOTED, directory, comparison())
    put_tested_round(conn, 2, PROMOTED, directory, comparison(), parent="r0001")
    put_tested_round(conn, 3, RoundState.REJECTED, directory, comparison(0.0), parent="r0001")
    put_tested_round(conn, 4, RoundState.FAILED, directory, reason="it ran too long", parent="r0002")
    keys = list(conn.execute(select(tasks.c.key).order_by(tasks.c.id)).scalars())
    train, held_out = Split.TRAIN.value, Split.HELD_OUT.value
    used = {
        (1, 1): train,
        (1, 2): train,
        (1, 3): train,
        (1, 4): train,
        (1, 6): held_out,
        (2, 1): train,
        (4, 1): train,
    }
    rows = [{"round_id": number, "task_id": task, "split": split} for (number, task), split in used.items()]
    conn.execute(insert(round_samples), rows)
    third = round_samples.c.round_id == 1, round_samples.c.task_id == 3
    conn.execute(update(round_samples).where(*third).values(left_out=True))
    return keys


async def test_how_many_samples_an_adapter_was_trained_on(store: Store, tmp_path: Path) -> None:
    await store.write(put, tmp_path)
    assert await store.read(lineage.samples, [1, 2, 3]) == {1: 3, 2: 1, 3: 0}, "one was left out"


async def test_the_line_of_an_adapter(store: Store, tmp_path: Path) -> None:
    await store.write(put, tmp_path)
    await store.write(
        partial(put_tested_round, number=5, state=PROMOTED, directory=tmp_path, seen=comparison(), parent="r0002")
    )
    assert await store.read(lineage.ancestors, "r0005") == ["r0002", "r0001"]
    assert await store.read(lineage.ancestors, "r0001") == []
    assert await store.read(lineage.descendants, ["r0001"]) == {"r0002": "r0001", "r0003": "r0001", "r0005": "r0002"}
    assert await store.read(lineage.descendants, []) == {}


async def test_what_an_id_names_and_which_rounds_used_it(store: Store, tmp_path: Path) -> None:
    keys = await store.write(put, tmp_path)

    def uses(conn: Connection, name: str) -> tuple[str, int, list[tuple[object, ...]]]:
        found = lineage.subject(conn, name)
        assert found is not None
        rows = [(use.round, use.split, use.tasks, use.left_out, use.adapter) for use in lineage.uses(conn, found)]
        return found.kind, len(lineage.replies_of(conn, found, 10)), rows

    first, held_out = ("r0001", "train"), ("r0001", "held-out", 1, 0, "r0001")
    failed = ("r0004", "train", 1, 0, None)
    both = [(*first, 2, 0, "r0001"), ("r0002", "train", 1, 0, "r0002"), failed]
    assert await store.read(uses, "a") == ("conversation", 2, both)
    assert await store.read(uses, "b") == ("conversation", 2, [(*first, 1, 1, "r0001")])
    assert await store.read(uses, keys[3]) == ("task", 1, [(*first, 1, 0, "r0001")])
    assert await store.read(uses, "trace of two") == ("trace", 2, [held_out])
    assert await store.read(uses, reply(6).span_id) == ("span", 1, [held_out])
    assert await store.read(lineage.subject, "nothing") is None


async def test_replies_come_in_parts(store: Store, tmp_path: Path) -> None:
    keys = await store.write(put, tmp_path)
    found = await store.read(lineage.subject, "a")
    assert found is not None
    first = await store.read(lineage.replies_of, found, 1)
    assert [row.key for row in first] == keys[:1]
    rest = await store.read(lineage.replies_of, found, 5, first[0].id)
    assert [row.key for row in rest] == keys[1:2]
