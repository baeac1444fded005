"""What tests of filtering have in common: replies that are told, runs over them, and where their tasks stand then."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from flywheel.config.file import Config
from flywheel.daemon.judging.judging import JudgingReport, TaskJudging, TaskResult
from flywheel.records.states import Split
from flywheel.records.trace import Reply
from flywheel.store.kernel.database import Store
from tests.factories.embedding_server import EmbeddingServer
from tests.factories.task import task_states
from tests.factories.trace import START, put_replies, replies_on, reply

Make = Callable[..., Config]
RUBRIC = {"id": "r", "criteria": [{"id": "correct", "value": "The answer is right.", "required": True}]}
WORDY = "Please explain to me in a few sentences how one adds {} to the number one and why that is right"
DEDUPLICATION = {"type": "deduplication"}
INFLUENCE = {"type": "influence", "params": {"burst": {"count": 5, "seconds": 60}}}


async def tell(store: Store, *replies: Reply) -> None:
    await store.write(put_replies, *replies)


async def run(store: Store, config: Config, **values: Any) -> tuple[JudgingReport, dict[str, TaskResult]]:
    seen: dict[str, TaskResult] = {}
    report = await TaskJudging(store, config, **values).run(
        on_judged=lambda judged: seen.update({judged.task.line["metadata"]["span_id"]: judged})
    )
    return report, seen


async def states(store: Store) -> list[str]:
    return await store.read(task_states)


def questions(*queries: str, side: Split = Split.TRAIN, **values: Any) -> list[Reply]:
    """One reply to each question, all on one side, in conversations of their own."""
    return [
        reply(int(each.span_id.removeprefix("span")), query=query, **values)
        for each, query in zip(replies_on(side, len(queries)), queries, strict=True)
    ]


def by_model(server: EmbeddingServer, **params: Any) -> dict[str, Any]:
    given = {"model": "e", "base_url": server.base_url, "max_attempts": 1, "similarity_threshold": 0.8, **params}
    return {"type": "deduplication", "params": given}


def burst(count: int, first: int = 100, seconds: float = 1.0, **values: Any) -> list[Reply]:
    """Near-identical questions in conversations of their own."""
    return [
        reply(
            first + n,
            query=WORDY.format(7) + " " * n,
            started_at=START + timedelta(seconds=seconds * n),
            ended_at=START + timedelta(seconds=seconds * n + 1),
            **values,
        )
        for n in range(count)
    ]
