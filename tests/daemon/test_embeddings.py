"""Deduplication while its embedding model fails half way, changes or goes away: nothing is lost or passes unseen."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import func, select

from flywheel.daemon.judging.judging import TaskJudging
from flywheel.daemon.judging.judging_report import TaskResult
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.views.balance import balance
from tests.daemon.filter_bench import WORDY, Make, by_model, questions, run, states, tell
from tests.factories.embedding_server import EmbeddingServer, by_words
from tests.factories.judge_server import JudgeServer
from tests.factories.state import open_state


async def lengths(store: Store) -> dict[int, int]:
    """How many vectors are stored of each length."""
    length = func.length(schema.embeddings.c.vector)
    query = select(length, func.count()).group_by(length)
    return dict(await store.read(lambda conn: conn.execute(query).all()))  # type: ignore[arg-type]


async def test_a_batch_that_fails_half_way_is_gone_on_with_after_a_restart(
    tmp_path: Path, store: Store, make: Make, embeddings: EmbeddingServer, judge: JudgeServer
) -> None:
    config = make(by_model(embeddings, batch_size=2))
    await tell(store, *questions("alpha", "beta", "gamma", "delta", "epsilon", "alpha alpha"))
    embeddings.failures = [200, 200, 503, 503]
    report, _ = await run(store, config)
    assert report.error.retryable
    assert await states(store) == ["pending"] * 6
    assert judge.calls == 0
    assert sum((await lengths(store)).values()) == 4
    embeddings.requests.clear()
    async with open_state(tmp_path / "state") as reopened:
        report, _ = await run(reopened, config)
        assert report.error is None
        assert await states(reopened) == [*["accepted"] * 5, "rejected"]
        assert (await reopened.read(balance)).problems == []
    assert embeddings.texts == ["epsilon", "alpha alpha"]


async def test_a_text_on_which_the_model_breaks_holds_up_no_other(
    store: Store, make: Make, embeddings: EmbeddingServer
) -> None:
    embeddings.refused = {"bad": 500}
    await tell(store, *questions("good", "bad", "fine"))
    report, _ = await run(store, make(by_model(embeddings)))
    assert report.error is None
    assert await states(store) == ["accepted"] * 3


async def test_what_has_no_embedding_is_compared_by_words_with_what_has_one(
    store: Store, make: Make, embeddings: EmbeddingServer
) -> None:
    embeddings.refused = {WORDY.format(3): 400}
    config = make(by_model(embeddings))
    await tell(store, *questions(WORDY.format(3)))
    await run(store, config)
    await tell(store, *questions("other", f"Please: {WORDY.format(3)}")[1:])
    await run(store, config)
    assert await states(store) == ["accepted", "rejected"]


async def test_another_model_by_the_same_name_lets_no_repetition_pass(
    store: Store, make: Make, embeddings: EmbeddingServer
) -> None:
    config = make(by_model(embeddings))
    told = questions("alpha beta gamma", "delta epsilon", "gamma beta alpha", "zeta")
    await tell(store, *told[:2])
    await run(store, config)
    embeddings.embed = lambda text: [*by_words(text), *by_words(text)]
    await tell(store, *told[2:])
    report, _ = await run(store, config)
    assert report.error is None
    assert await states(store) == ["accepted", "accepted", "rejected", "accepted"]
    assert await lengths(store) == {2 * 64 * 4: 4}


async def test_several_models_behind_one_name_are_told_and_the_tasks_wait(
    store: Store, make: Make, embeddings: EmbeddingServer, judge: JudgeServer
) -> None:
    embeddings.embed = lambda text: by_words(text)[: 64 if len(embeddings.requests) % 2 else 32]
    await tell(store, *questions("alpha", "beta", "gamma"))
    report, _ = await run(store, make(by_model(embeddings, batch_size=1)))
    assert "more than one model" in str(report.error)
    assert await states(store) == ["pending"] * 3
    assert judge.calls == 0


async def test_tasks_wait_for_the_embedding_model_and_hours_without_it_do_not_fill_the_history(
    store: Store, make: Make, embeddings: EmbeddingServer, judge: JudgeServer
) -> None:
    embeddings.status = 503
    await tell(store, *questions(*(f"{name} one" for name in "abcdefghij")))
    filtering = TaskJudging(store, make(by_model(embeddings)))
    count = select(func.count()).select_from(schema.events)

    async def grown() -> int:
        before = await store.read(lambda conn: conn.execute(count).scalar_one())
        error = (await filtering.run()).error
        assert error is not None and error.retryable
        return await store.read(lambda conn: conn.execute(count).scalar_one()) - before

    assert await grown() > 2
    # From then on one task is tried with: it is claimed, and given back.
    assert [await grown(), await grown()] == [2, 2]
    assert (await states(store), judge.calls) == (["pending"] * 10, 0)
    embeddings.status = 200
    assert (await filtering.run()).accepted == 10


async def test_what_repeats_a_task_that_is_rejected_meanwhile_is_due_again(
    store: Store, make: Make, embeddings: EmbeddingServer, judge: JudgeServer
) -> None:
    asked, settled = threading.Event(), threading.Event()

    def says(_question: str, answer: str) -> bool:
        return answer != "WRONG" or not asked.wait(60)

    def embed(text: str) -> list[float]:
        if text == "something else":
            # The second batch was compared by words already; the first task is rejected before it goes on.
            asked.set()
            settled.wait(60)
        return by_words(text)

    def on_judged(judged: TaskResult) -> None:
        if judged.task.line["answer"] == "WRONG":
            settled.set()

    judge.verdict, embeddings.embed = says, embed
    (first,) = questions("the same", answer="WRONG")
    others = questions("x", *(f"{name} one" for name in "abcdefg"), "the same", "something else")[1:]
    await tell(store, first, *others)
    config = make(
        by_model(embeddings), judge={"base_url": judge.base_url, "model": "j", "max_attempts": 1, "max_thread": 2}
    )
    await TaskJudging(store, config).run(on_judged=on_judged)
    assert await states(store) == ["rejected", *["accepted"] * 9]


async def test_a_stop_does_not_wait_for_the_embedding_model(
    store: Store, make: Make, embeddings: EmbeddingServer
) -> None:
    stop = threading.Event()

    def embed(_text: str) -> list[float]:
        stop.set()
        return [1.0]

    embeddings.embed, embeddings.status, embeddings.retry_after = embed, 429, "50"
    await tell(store, *questions("alpha"))
    report = await TaskJudging(store, make(by_model(embeddings, max_attempts=3))).run(stop=stop)
    assert report.judged == 0
    assert await states(store) == ["pending"]
    assert len(embeddings.requests) == 1
