"""Filtering: pending tasks through the chain and the rubric, several at once, into stored verdicts."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

from sqlalchemy import Connection

from flywheel.config import Config
from flywheel.daemon.claim import Taking
from flywheel.daemon.judge_setup import chain_of, exchange_of, judge_settings, rubric_of
from flywheel.daemon.linked_event import LinkedEvent
from flywheel.daemon.pre_filter import Ask, Screened, Screening, without_embeddings
from flywheel.daemon.task_result import FilterReport, Judged, Preview
from flywheel.errors import FilterError, FlywheelError, JudgeError
from flywheel.judge.budget import Budget
from flywheel.judge.grader import CallEstimate, Grader
from flywheel.judge.independence import check_independence
from flywheel.judge.pool import grade_all
from flywheel.rubric import Rubric
from flywheel.states import TaskState
from flywheel.store import claims, deduplication, notes, verdicts
from flywheel.store.claims import Claimed
from flywheel.store.database import Store
from flywheel.verdict import Exchange, Outcome, Verdict

log = logging.getLogger(__name__)

T = TypeVar("T")

CAPABILITIES_NOTE = "judge_means"
"""Key of the note on what the judge's endpoints turned out not to do."""


@dataclass(slots=True)
class _Feed:
    """What the judging thread and the event loop say to each other."""

    stop: LinkedEvent
    taking: Taking
    queue: asyncio.Queue[Judged | FlywheelError | None] = field(default_factory=asyncio.Queue)
    freed: int = 0


class Filtering:
    """Judges what is due. Raises ConfigError at once for a wrong rubric, chain or judge.

    `rubric` takes the place of the one that the configuration and the chain name. `judge` is the judge as both have
    it, `budget` what it may use, and `redact` what takes personal data out of a task before it, if there is any.
    """

    def __init__(self, store: Store, config: Config, *, rubric: Rubric | None = None) -> None:
        self._store = store
        self._config = config
        self._chain = chain_of(config)
        self.redact = self._chain.redact if self._chain else None
        for notice in self._chain.notices if self._chain else ():
            log.info("%s", notice)
        self.rubric = rubric or rubric_of(config, self._chain)
        check_independence(config, self.rubric)
        self.judge = judge_settings(config, self._chain)
        self.grader = Grader(self.rubric, self.judge)
        self.budget = Budget(self.judge.budget, lambda: self._ask(verdicts.tokens_today))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed = False
        self._screening = Screening(self._chain, self._ask) if self._chain else None

    async def run(
        self,
        *,
        limit: int | None = None,
        stop: threading.Event | None = None,
        on_judged: Callable[[Judged], None] | None = None,
        rejudge: bool = False,
    ) -> FilterReport:
        """Judge due tasks, at most `limit`, until none is left or `stop` is set. Nothing is left in `judging`.

        With `rejudge`, accepted and rejected tasks follow that another rubric or judge decided; each stays where it
        is until its new verdict is there.
        """
        linked = LinkedEvent(stop)
        feed = _Feed(linked, self._taking(self._ask, linked, limit))
        if self._screening is not None:
            self._screening.stop = linked
        report = FilterReport()
        self._loop = loop = asyncio.get_running_loop()
        capabilities = self.grader.client.capabilities
        capabilities.restore(await self._store.read(notes.noted, CAPABILITIES_NOTE))
        known = capabilities.snapshot()
        try:
            while True:
                feed.freed = 0
                taken = feed.taking.taken
                suspect = await self._store.read(claims.has_suspects)
                given = (feed, loop, rejudge, suspect)
                threading.Thread(target=self._work, args=given, name="judging", daemon=True).start()
                await self._settle_all(feed, report, on_judged)
                if suspect and feed.taking.taken > taken and report.error is None:
                    continue
                if not feed.freed or report.error is not None or feed.stop.is_set():
                    break
                # The last verdicts rejected what others had been put aside for: those are due now.
                rejudge = False
        finally:
            feed.stop.set()
            left = list(feed.taking.claimed)
            if left:
                await asyncio.shield(self._store.write(claims.release, left, "not judged"))
        await self._store.write(notes.note, notes.JUDGE_NOTE, str(report.error or ""))
        if capabilities.snapshot() != known:
            await self._store.write(notes.note, CAPABILITIES_NOTE, capabilities.snapshot())
        return report

    async def count(self, *, limit: int | None = None, rejudge: bool = False) -> int:
        """How many tasks `run` would take."""
        total = await self._store.read(claims.count_due)
        if rejudge:
            total += await self._store.read(claims.count_decided, self.rubric.hash, self.grader.judge_hash)
        return total if limit is None else min(total, limit)

    async def preview(self, *, limit: int | None = None, rejudge: bool = False) -> Preview:
        """What `run` would take, without a call to anybody. Tasks are taken as `run` does, and that is undone.

        Embeddings would have to be asked for: what a chain stops by them is counted as if it went on.
        """
        stop = threading.Event()
        looking = asyncio.create_task(self._store.trial(self._preview, stop, limit, rejudge))
        try:
            return await asyncio.shield(looking)
        except asyncio.CancelledError:
            # A transaction is never broken off: it ends with the tasks that it has taken.
            stop.set()
            await looking
            raise

    def _preview(self, conn: Connection, stop: threading.Event, limit: int | None, rejudge: bool) -> Preview:
        def ask(function: Callable[..., T], *args: Any) -> T:
            return function(conn, *args)

        total = Preview()
        screening = Screening(without_embeddings(self._chain), ask) if self._chain else None
        taking = self._taking(ask, stop, limit)
        suspects = iter(lambda: next(taking.suspect(), []), [])
        for batch in chain(suspects, taking.batches(rejudge=rejudge)):
            for each in screening.through(batch) if screening else map(Screened, batch):
                needed = CallEstimate()
                if each.goes_on and each.task.stored is None:
                    needed = self.grader.estimate(exchange_of(each.task.line), each.task.earlier)
                total.add(needed)
        return total

    async def _settle_all(
        self, feed: _Feed, report: FilterReport, on_judged: Callable[[Judged], None] | None
    ) -> None:
        """Everything that the judging thread puts, to its end."""
        ended = False
        while not ended:
            ready = [await feed.queue.get()]
            while not feed.queue.empty():
                ready.append(feed.queue.get_nowait())
            ended = None in ready
            await self._settle(feed, [item for item in ready if item is not None], report, on_judged)

    async def _settle(
        self,
        feed: _Feed,
        items: list[Judged | FlywheelError],
        report: FilterReport,
        on_judged: Callable[[Judged], None] | None,
    ) -> None:
        done = [item for item in items if isinstance(item, Judged)]
        changed, freed = await self._store.write(self._store_all, done)
        report.changed += changed
        feed.freed += freed
        for item in items:
            if isinstance(item, FlywheelError):
                report.error = item
                continue
            feed.taking.claimed.pop(item.task.id, None)
            if item.held:
                report.held += 1
            elif item.verdict is None:
                report.dead += 1
            else:
                report.count(item.verdict, reused=item.reused)
            if item.paid is not None and not item.reused:
                report.bill(item.paid)
            self._tell_reason(item)
            if on_judged is not None:
                on_judged(item)

    def _store_all(self, conn: Any, done: list[Judged]) -> tuple[int, int]:
        """How many are decided the other way now, and how many others are due again."""
        changed = 0
        retry = self._config.judge.retry_undecided_seconds
        for item in done:
            if item.held:
                continue
            if item.paid is not None and item.paid is not item.task.stored:
                verdicts.store(conn, item.task.id, item.paid, self.rubric.hash, self.grader.judge_hash)
            if item.repeats is not None:
                deduplication.note(conn, item.task.id, item.repeats)
            if item.verdict is None:
                claims.dead_letter_task(conn, item.task.id, item.task.key, item.error)
                continue
            if item.verdict is not item.task.stored:
                verdicts.store(conn, item.task.id, item.verdict, item.rubric_hash, self.grader.judge_hash)
            if item.task.was is TaskState.JUDGING:
                claims.apply(conn, item.task.id, item.verdict, retry)
            else:
                changed += claims.apply_again(conn, item.task.id, item.task.was, item.verdict)
        # What repeats a task that is rejected now has nothing to repeat any more, nor has what was found to repeat
        # one that was rejected since.
        gone = [item.task.id for item in done if item.verdict is None or item.verdict.outcome is Outcome.REJECTED]
        gone += deduplication.gone(conn, [item.repeats.task for item in done if item.repeats is not None])
        return changed, deduplication.free_repetitions(conn, gone)

    def _work(self, feed: _Feed, loop: asyncio.AbstractEventLoop, rejudge: bool, suspect: bool) -> None:
        """The judging thread: claims, filters and grades, and hands everything to the loop. A `suspect`, which was in
        work when a process ended, is alone in work."""

        def put(item: Judged | FlywheelError | None) -> None:
            loop.call_soon_threadsafe(feed.queue.put_nowait, item)

        try:
            if self._screening is not None:
                self._screening.weigh_earlier()
            # A calibration beside the daemon has its part of the day's budget.
            self.budget.look_again()
            # After a run that failed, one first: each claim is written down, and so is each task that is given back,
            # at every try of an outage.
            batches = (
                feed.taking.suspect()
                if suspect
                else feed.taking.batches(rejudge=rejudge, first=1 if self._failed else None)
            )
            self._failed = False
            items = self._to_grade(batches, put)
            verdicts = grade_all(
                self.grader,
                items,
                self.judge.max_thread,
                feed.stop,
                budget=self.budget,
                drain_seconds=self._config.daemon.drain_seconds,
                earlier=lambda task: task.earlier,
            )
            for task, verdict in verdicts:
                put(self._behind_the_judge(Judged(task, verdict, self.rubric.hash)))
        except FlywheelError as error:
            self._failed = True
            if not (feed.stop.is_set() and isinstance(error, FilterError)):  # of the stop itself
                put(error)
        except Exception as error:
            log.exception("judging failed")
            put(JudgeError("judge tasks", f"{type(error).__name__}: {error}", "This is a defect; please report it."))
        finally:
            put(None)

    def _taking(self, ask: Ask, stop: threading.Event, limit: int | None) -> Taking:
        return Taking(ask, self.rubric.hash, self.grader.judge_hash, stop, 4 * self.judge.max_thread, limit)

    def _to_grade(
        self, batches: Iterator[list[Claimed]], put: Callable[[Judged], None]
    ) -> Iterator[tuple[Claimed, Exchange]]:
        """Tasks that need a call. Those that stored verdicts or the chain decide are put at once."""
        for batch in batches:
            for each in self._screening.through(batch) if self._screening else map(Screened, batch):
                task = each.task
                if not each.goes_on:
                    put(self._stopped(each))
                    continue
                # Released with the others if the run ends before: in the form that the judge would have seen.
                exchange = exchange_of(task.line)
                verdict = task.stored
                if verdict is None and task.earlier:
                    verdict = self.grader.reuse(exchange, task.earlier)
                if verdict is None:
                    yield task, exchange
                else:
                    reused = verdict is task.stored or bool(verdict.judgements)
                    put(self._behind_the_judge(Judged(task, verdict, self.rubric.hash, reused=reused)))

    def _behind_the_judge(self, judged: Judged) -> Judged:
        """What the judge accepted can still be stopped by the filters that a chain keeps behind it."""
        verdict = judged.verdict
        if verdict is not None and verdict.broken and judged.task.was is TaskState.JUDGING:
            return replace(judged, verdict=None, error=verdict.error)
        is_new = (
            verdict is not None and verdict.outcome is Outcome.ACCEPTED and judged.task.was is not TaskState.ACCEPTED
        )
        if self._screening is None or not is_new:
            return judged
        screened = self._screening.after(judged.task)
        return judged if screened.goes_on else replace(self._stopped(screened), paid=verdict, reused=judged.reused)

    def _stopped(self, screened: Screened) -> Judged:
        assert self._chain is not None
        if screened.error or screened.held:
            return Judged(screened.task, None, "", error=screened.error, held=screened.held)
        verdict = Verdict(Outcome.REJECTED, 0.0, reason=screened.reason)
        return Judged(screened.task, verdict, f"{verdicts.CHAIN}{self._chain.hash}", repeats=screened.repeats)

    def _ask(self, function: Callable[..., T], *args: Any) -> T:
        """One transaction of the store, from the judging thread."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._store.write(function, *args), self._loop).result()

    def _tell_reason(self, item: Judged) -> None:
        if self._chain and self._chain.judge and self._chain.judge.print_reason and item.verdict is not None:
            verdict = item.verdict
            log.info("%s %s: %s", item.task.key, verdict.outcome.value, verdict.reason or verdict.error)
