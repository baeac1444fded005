"""What `flywheel status` says that nobody would look for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flywheel.records.states import Split
from flywheel.records.trace import Reply
from flywheel.store import ledger
from flywheel.store.kernel.database import Store
from tests.cli.conftest import Run
from tests.factories.trace import batch, replies_on, reply


def filled(home: Path, *replies: Reply, train_ratio: float = 0.7) -> None:
    async def fill() -> None:
        store = await Store.open(home)
        await store.write(
            lambda conn: ledger.record_batch(
                conn, ledger.source_id(conn, "/a"), batch(*replies), train_ratio=train_ratio, split_seed=42
            )
        )
        await store.close()

    asyncio.run(fill())


@pytest.mark.parametrize("side", Split)
def test_a_side_that_stays_empty_is_explained(flywheel: Run, tmp_path: Path, side: Split) -> None:
    first, *_ = replies_on(side, 1, query="Hello?")
    filled(tmp_path / "home", first, *(reply(1000 + n, query="Hello?") for n in range(99)))
    told = flywheel("status", "--json").json["warnings"]
    empty = "held out" if side is Split.TRAIN else "for training"
    why = "all 100 conversations begin alike, and such conversations are in one split"
    assert told == [f"no task is {empty}: {why}"]
    assert told[0] in flywheel("status").out


def test_few_conversations_and_the_ratio_explain_it_too(flywheel: Run, tmp_path: Path) -> None:
    home = tmp_path / "home"
    filled(home, *(reply(n, query=f"Who wrote book {n}?") for n in (1, 2)), train_ratio=1.0)
    (tmp_path / "flywheel.yaml").write_text("ingest: {train_ratio: 1.0}\n")
    (told,) = flywheel("status", "--json").json["warnings"]
    assert "no task is held out: by ingest.train_ratio 1 about 0% of conversations are" in told
    assert "2 conversations begin in 2 ways" in told


def test_nothing_is_said_where_both_sides_have_some_or_there_is_nothing(flywheel: Run, tmp_path: Path) -> None:
    assert flywheel("status", "--json").json["warnings"] == []
    filled(tmp_path / "home", *replies_on(Split.TRAIN, 2), *replies_on(Split.HELD_OUT, 1))
    assert flywheel("status", "--json").json["warnings"] == []
