"""The filter beside the table of openings never says no to what is there, whatever happens to transactions."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, create_engine, func, insert, select

from flywheel.store import signature_filter
from flywheel.store.database import Store
from flywheel.store.schema import conversations, metadata, openings
from flywheel.store.schema import openings_filter as filters

BANDS = st.lists(st.integers(0, 2**63 - 1), unique=True, max_size=40)


def enter(conn: Connection, bands: list[int]) -> None:
    """As `openings.enter` does when what is recent goes over."""
    conn.execute(conversations.insert().prefix_with("OR IGNORE").values(key="c", split="train", like="c", words=b""))
    if bands:
        conn.execute(insert(openings), [{"band": band, "key": "c"} for band in bands])
    signature_filter.add(conn, bands, len(bands))


@given(portions=st.lists(BANDS, max_size=6), absent=BANDS, smallest=st.sampled_from([8, 64, 1 << 20]))
def test_what_was_entered_may_be_there(portions: list[list[int]], absent: list[int], smallest: int) -> None:
    """However often it has to grow."""
    engine = create_engine("sqlite://")
    metadata.create_all(engine)
    entered: list[int] = []
    with pytest.MonkeyPatch.context() as patched, engine.connect() as conn:
        patched.setattr(signature_filter, "SMALLEST", smallest)
        for portion in portions:
            new = [band for band in portion if band not in entered]
            enter(conn, new)
            entered += new
            asked = [*absent, *entered]
            found = signature_filter.may_have(conn, asked)
            assert set(entered) <= set(found) <= set(asked)
    engine.dispose()


async def test_almost_nothing_else_is_looked_for(store: Store) -> None:
    """Seven thousand bands, first into bits that just suffice and then into four times as many."""
    bands = [xxhash.xxh3_64_intdigest(b"%d" % number) >> 1 for number in range(15_000)]
    there, absent = bands[:7_000], bands[7_000:]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(signature_filter, "SMALLEST", 1 << 14)
        await store.write(enter, there[:2_048])
        sizes = [await store.read(size)]
        wrong = len(await store.read(signature_filter.may_have, absent))
        assert 0 < wrong < len(absent) / 10
        await store.write(enter, there[2_048:])
        sizes.append(await store.read(size))
    assert sizes == [1 << 14, 1 << 16]
    assert await store.read(signature_filter.may_have, there) == there
    assert len(await store.read(signature_filter.may_have, absent)) < len(absent) / 10


async def test_before_anything_went_over_nothing_is_there(store: Store) -> None:
    await store.write(enter, [])
    assert await store.write(signature_filter.may_have, [1, 2, 3]) == []
    assert await store.read(lambda conn: conn.execute(select(func.count()).select_from(filters)).scalar_one()) == 0


async def test_a_transaction_that_was_undone_leaves_no_trace(store: Store) -> None:
    """What is remembered with the connection is what is in the database."""

    def failing(conn: Connection, bands: list[int]) -> None:
        enter(conn, bands)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await store.write(failing, [10])
    assert await store.write(signature_filter.may_have, [10, 11]) == []
    await store.write(enter, [1])
    with pytest.raises(ZeroDivisionError):
        await store.write(failing, [2])
    assert await store.write(signature_filter.may_have, [1, 2]) == [1]
    await store.write(enter, [3])
    assert await store.write(signature_filter.may_have, [1, 2, 3]) == [1, 3]


async def test_what_another_process_entered_is_seen(tmp_path: Path, store: Store) -> None:
    await store.write(enter, [1])
    assert await store.write(signature_filter.may_have, [1, 2]) == [1]
    other = await Store.open(tmp_path / "state")
    try:
        await other.write(enter, [2])
    finally:
        await other.close()
    assert await store.write(signature_filter.may_have, [1, 2]) == [1, 2]


def size(conn: Connection) -> int:
    """In bits."""
    return 8 * int(conn.execute(select(func.length(filters.c.bits))).scalar_one())
