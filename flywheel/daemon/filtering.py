"""Filtering: pending tasks through the chain and the rubric, several at once, into stored verdicts."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from flywheel.config import Config
from flywheel.errors import ConfigError, FlywheelError, JudgeError
from flywheel.filtering.chain import Chain, load_chain
from flywheel.judge.grader import Grader
from flywheel.judge.pool import grade_all
from flywheel.judge.rubric_file import load_rubric
from flywheel.store import funnel, judging
from flywheel.store.database import Store
from flywheel.store.judging import Claimed
from flywheel.verdict import Exchange, Outcome, Verdict

log = logging.getLogger(__name__)


@dataclass(slots=True)
class FilterReport:
    """What one run did. `reused` verdicts had been paid for before; `dead` tasks broke a filter."""

    accepted: int = 0
    rejected: int = 0
    undecided: int = 0
    dead: int = 0
    reused: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: FlywheelError | None = None

    @property
    def judged(self) -> int:
        return self.accepted + self.rejected + self.undecided

    def count(self, verdict: Verdict, *, reused: bool) -> None:
        name = verdict.outcome.value
        setattr(self, name, getattr(self, name) + 1)
        self.reused += reused
        self.calls += verdict.calls
        self.prompt_tokens += verdict.prompt_tokens
        self.completion_tokens += verdict.completion_tokens


@dataclass(frozen=True, slots=True)
class Judged:
    """One task with its verdict, for whoever watches. `error` is set when a filter broke on it instead."""

    task: Claimed
    verdict: Verdict | None
    rubric_hash: str
    reused: bool = False
    error: str = ""


class _Stop(threading.Event):
    """Set by this run for itself, or by the caller for all runs: the caller's event is only looked at."""

    def __init__(self, outer: threading.Event | None) -> None:
        super().__init__()
        self._outer = outer

    def is_set(self) -> bool:
        return super().is_set() or (self._outer is not None and self._outer.is_set())


@dataclass(slots=True)
class _Feed:
    """What the judging thread and the event loop say to each other."""

    stop: _Stop
    queue: asyncio.Queue[Judged | FlywheelError | None] = field(default_factory=asyncio.Queue)
    claimed: dict[int, Claimed] = field(default_factory=dict)


def exchange_of(line: dict[str, Any]) -> Exchange:
    """What the judge is shown of a task."""
    metadata = line["metadata"]
    return Exchange(
        query=line["main_query"],
        answer=line["answer"],
        history=tuple(line["init_messages"]),
        trajectory=tuple(orjson.loads(metadata["trajectory_json"])),
        tools=tuple(orjson.loads(metadata["tools_json"])),
    )


def check_alien(config: Config) -> None:
    """Refuse a judge that is the trained model itself: it would reward its own mistakes. Raises ConfigError."""
    own = {config.model.alias, config.model.base, config.model.base.rstrip("/").rpartition("/")[2]}
    judge = config.judge.model
    if config.judge.allow_self or not (judge in own or judge.startswith(f"{config.model.alias}@")):
        return
    raise ConfigError(
        f"judge with {judge}",
        "it is the model that is trained",
        "Set judge.model to an independent model, or judge.allow_self: true if you know why.",
    )


class Filtering:
    """Judges what is due. Raises ConfigError at once for a wrong rubric, chain or judge."""

    def __init__(self, store: Store, config: Config) -> None:
        check_alien(config)
        self._store = store
        self._config = config
        self.rubric = load_rubric(config.filter.rubric)
        self.grader = Grader(self.rubric, config.judge)
        self._chain: Chain | None = load_chain(config.filter.chain) if config.filter.chain else None

    async def run(
        self,
        *,
        limit: int | None = None,
        stop: threading.Event | None = None,
        on_judged: Callable[[Judged], None] | None = None,
    ) -> FilterReport:
        """Judge due tasks, at most `limit`, until none is left or `stop` is set. Nothing is left in `judging`."""
        feed = _Feed(_Stop(stop))
        report = FilterReport()
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._work, args=(feed, loop, limit), name="judging", daemon=True)
        thread.start()
        try:
            ended = False
            while not ended:
                ready = [await feed.queue.get()]
                while not feed.queue.empty():
                    ready.append(feed.queue.get_nowait())
                ended = None in ready
                await self._settle(feed, [item for item in ready if item is not None], report, on_judged)
        finally:
            feed.stop.set()
            left = list(feed.claimed)
            if left:
                await asyncio.shield(self._store.write(judging.release, left, "not judged"))
        await self._store.write(funnel.note, funnel.JUDGE_NOTE, str(report.error or ""))
        return report

    async def _settle(
        self,
        feed: _Feed,
        items: list[Judged | FlywheelError],
        report: FilterReport,
        on_judged: Callable[[Judged], None] | None,
    ) -> None:
        done = [item for item in items if isinstance(item, Judged)]
        await self._store.write(self._store_all, done)
        for item in items:
            if isinstance(item, FlywheelError):
                report.error = item
                continue
            feed.claimed.pop(item.task.id, None)
            if item.verdict is None:
                report.dead += 1
            else:
                report.count(item.verdict, reused=item.reused)
            if on_judged is not None:
                on_judged(item)

    def _store_all(self, conn: Any, done: list[Judged]) -> None:
        retry = self._config.judge.retry_undecided_seconds
        for item in done:
            if item.verdict is None:
                judging.bury_task(conn, item.task.id, item.task.key, item.error)
            elif item.reused:
                judging.apply(conn, item.task.id, item.verdict, retry)
            else:
                judging.settle(conn, item.task.id, item.verdict, item.rubric_hash, self.grader.judge_hash, retry)

    def _work(self, feed: _Feed, loop: asyncio.AbstractEventLoop, limit: int | None) -> None:
        """The judging thread: claims, filters and grades, and hands everything to the loop."""

        def put(item: Judged | FlywheelError | None) -> None:
            loop.call_soon_threadsafe(feed.queue.put_nowait, item)

        try:
            items = self._to_grade(feed, loop, limit, put)
            for task, verdict in grade_all(self.grader, items, self._config.judge.max_thread, feed.stop):
                put(Judged(task, verdict, self.rubric.hash))
        except FlywheelError as error:
            put(error)
        except Exception as error:
            log.exception("judging failed")
            put(JudgeError("judge tasks", f"{type(error).__name__}: {error}", "This is a defect; please report it."))
        finally:
            put(None)

    def _to_grade(
        self,
        feed: _Feed,
        loop: asyncio.AbstractEventLoop,
        limit: int | None,
        put: Callable[[Judged], None],
    ) -> Iterator[tuple[Claimed, Exchange]]:
        """Claimed tasks that need a call. Those that a stored verdict or the chain decides are put at once."""
        left = limit if limit is not None else 1 << 62
        while left > 0 and not feed.stop.is_set():
            size = min(left, 4 * self._config.judge.max_thread)
            claiming = self._store.write(judging.claim, size, self.rubric.hash, self.grader.judge_hash)
            claimed = asyncio.run_coroutine_threadsafe(claiming, loop).result()
            if not claimed:
                return
            left -= len(claimed)
            feed.claimed.update({task.id: task for task in claimed})
            for task in claimed:
                decided = self._without_a_call(task)
                if decided is not None:
                    put(decided)
                else:
                    yield task, exchange_of(task.line)

    def _without_a_call(self, task: Claimed) -> Judged | None:
        if task.stored is not None:
            return Judged(task, task.stored, self.rubric.hash, reused=True)
        if self._chain is None:
            return None
        decision = self._chain.apply(task.line)
        if decision.error:
            return Judged(task, None, "", error=decision.error)
        if decision.kept:
            return None
        verdict = Verdict(Outcome.REJECTED, 0.0, reason=f"filter {decision.filter}: {decision.reason}")
        return Judged(task, verdict, f"chain:{self._chain.hash}")
