"""Filtering while judge and embedding model fail in every way at once, and while it is stopped and started again.

Whatever happens meanwhile, in the end every task is decided, as if nothing had: nothing is lost, and nothing passes.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import select

from flywheel.daemon.judging.judging import TaskJudging
from flywheel.records.states import Split
from flywheel.store import deduplication
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.views.balance import balance
from tests.daemon.filter_bench import Make, by_model, states, tell
from tests.factories.embedding_server import EmbeddingServer
from tests.factories.judge_faults import FAULTS
from tests.factories.judge_server import JudgeServer
from tests.factories.trace import replies_on, reply

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
]
# Those that refuse us altogether would only end the run, and those that wait would make the test long.
PASSING = [fault for fault in FAULTS if not fault.startswith(("40", "422", "429 with"))]
OUTAGE, MOST = 10, 60
"""Runs that fail, and runs after which all must be decided."""


def behaviours(chance: random.Random) -> Iterator[str]:
    while True:
        yield chance.choice(PASSING) if chance.random() < 0.5 else "good"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_an_outage_of_everything_changes_no_decision(
    store: Store, make: Make, judge: JudgeServer, embeddings: EmbeddingServer, seed: int
) -> None:
    chance = random.Random(seed)
    asked = [" ".join(chance.choices(WORDS, k=3)) for _ in range(40)]
    told = [
        reply(n, query=query, answer="WRONG" if n % 5 == 0 else "fine", conversation_id=each.conversation_id)
        for n, (query, each) in enumerate(zip(asked, replies_on(Split.TRAIN, len(asked)), strict=True))
    ]
    config = make(
        by_model(embeddings, batch_size=8, max_attempts=2),
        judge={
            "base_url": judge.base_url,
            "model": "j",
            "max_attempts": 2,
            "max_thread": 4,
            "retry_undecided_seconds": 0,
            "max_task_attempts": MOST,
        },
    )
    await tell(store, *told[:20])
    for number in range(MOST):
        if number == OUTAGE // 2:
            await tell(store, *told[20:])
        is_outage = number < OUTAGE
        failing = behaviours(chance)
        judge.behave(*([next(failing) for _ in range(50)] if is_outage else ["good"]))
        embeddings.failures = chance.choices([200, 500, 503, 429, 400], k=6) if is_outage else []
        stop = threading.Event()
        if is_outage and chance.random() < 0.3:
            asyncio.get_running_loop().call_later(chance.random() / 5, stop.set)
        filtering = TaskJudging(store, config)
        await filtering.run(stop=stop)
        filtering.grader.close()
        books = await store.read(balance)
        assert books.balanced
        assert books.problems == []
        stand = set(await states(store))
        assert stand <= {"pending", "undecided", "accepted", "rejected"}
        if not is_outage and stand <= {"accepted", "rejected"}:
            break
    else:
        raise AssertionError("some task was never decided")

    rows = {row.id: row for row in await store.read(lambda conn: conn.execute(select(schema.tasks)).all())}
    repeats = dict(
        await store.read(
            lambda conn: conn.execute(
                select(deduplication.duplicates.c.task_id, deduplication.duplicates.c.original_id)
            ).all()
        )
    )
    accepted = [sorted(row.payload["main_query"].split()) for row in rows.values() if row.state == "accepted"]
    assert len(accepted) == len({tuple(words) for words in accepted}), "no question twice"
    for row in rows.values():
        if row.payload["answer"] == "WRONG":
            assert row.state == "rejected"
        elif row.state == "rejected":
            assert rows[repeats[row.id]].state == "accepted", "it repeats one that stands"
