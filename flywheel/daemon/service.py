"""`flywheel run`: stages that wake each other, periodic jobs that wake them all, and an orderly stop.

sources change ─▶ ledger ─▶ judge ─▶ rounds (plan, train, gate, swap)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from enum import Enum, auto
from functools import partial
from typing import Final

from flywheel.config.crontab import cron_trigger
from flywheel.config.file import Config
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.erasure import Eraser
from flywheel.daemon.judging.judging import CLAIMED_PER_THREAD, TaskJudging, recover
from flywheel.daemon.langfuse import LangfuseExport
from flywheel.daemon.metrics_server import MetricsServer
from flywheel.daemon.notifier import WAITS, NoticeTarget, Target
from flywheel.daemon.notifier import resume as resume_notices
from flywheel.daemon.promotion_watch import PromotionWatch
from flywheel.daemon.requests import RequestWatch
from flywheel.daemon.rounds.retention import remove_regularly
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.daemon.rounds.worker_process import STOP_SECONDS
from flywheel.daemon.source_supervisor import SourceSupervisor
from flywheel.daemon.stage import Intervals, Stage, in_turn, waiting_for
from flywheel.daemon.status import LANGFUSE, snapshot
from flywheel.errors import ConfigError, FlywheelError, LockedError, StoreError, TrainError
from flywheel.judge.rubric.checks import language
from flywheel.judge.usage import CallsInFlight
from flywheel.records.states import RoundState
from flywheel.serving.client.replica_client import QUICK_SECONDS
from flywheel.sources.ingestion import Ingestion
from flywheel.store import claims, erasures, stages, verdicts
from flywheel.store.erasures import ErasureState
from flywheel.store.kernel.database import Store
from flywheel.store.requests import RequestKind
from flywheel.store.stages import Pass
from flywheel.system.clock import steady
from flywheel.system.lock import INSTANCE_LOCK, is_lost
from flywheel.system.process import feed_watchdog, in_container, kill_mode, tell_systemd, trim_malloc
from flywheel.system.signals import Stop, StopReason

IDLE_CHECKS: Final = 2
"""Checks without work before memory is released."""
CHECKS_PER_RELEASE: Final = 240
"""While the daemon stays idle, memory is released again after so many checks: full scans use memory too."""
log = logging.getLogger(__name__)
RETRY_SECONDS = stages.RETRY_SECONDS
ERASURE_SECONDS = 60.0
"""How often an unfinished erasure is tried again."""
PURGE_SECONDS = 5.0
"""How long a purge waits for readers; it is tried again."""
REQUEST_SECONDS = 1.0
"""How often requests of people are looked for."""
NOTICE_SECONDS = 2.0
"""How often new events are looked for."""
DELIVERY_SECONDS = 120.0
"""How long `run --once` sends notices to one target, or scores."""
PRUNE_SECONDS = 6 * 3600.0
FIGURE: Final = re.compile(r"-?\d+\.\d+\b")
SPARE_SECONDS = 15.0
"""Time for the last steps of a stop, beside the waits for judge calls, worker and swap."""
BESIDE_ROUNDS: Final = (
    "promotion watch", "rounds of rolled back adapters", "rounds of erased tasks", "promotions",
)  # fmt: skip
"""Stages beside the rounds: a candidate that may be promoted now does not wait for the worker of another round."""


class Wake(Enum):
    """What wakes stages, beside their intervals and requests of people (`RequestKind`)."""

    START = auto()
    TASKS = auto()
    """There are tasks to judge."""
    JUDGED = auto()
    ERASURE = auto()
    """An erasure was asked for."""
    ERASED = auto()
    """What may be judged, and what rounds may take, has changed."""
    WINDOW = auto()
    """The time of `trigger.cron` has come."""


class MemoryRelease:
    """`check` is called at regular intervals, `note_work` whenever there was something to ingest or judge."""

    def __init__(self, store: Store, judging: asyncio.Lock) -> None:
        """`judging` is held while something is judged."""
        self._store = store
        self._judging = judging
        self._idle_checks = 0

    def note_work(self) -> None:
        self._idle_checks = 0

    async def check(self) -> None:
        self._idle_checks += 1
        if not self._is_due:
            return
        # Judging that goes on is work, which is noted at its end.
        async with waiting_for(self._judging):
            if self._is_due:
                await self._store.release_memory()
                # It waits for a thread that loads the model.
                await asyncio.to_thread(language.forget_model)
                await asyncio.to_thread(trim_malloc)

    @property
    def _is_due(self) -> bool:
        return self._idle_checks % CHECKS_PER_RELEASE == IDLE_CHECKS


class Service:
    """`flywheel run`. The caller holds the instance lock."""

    def __init__(self, config: Config, store: Store, stop: Stop | None = None) -> None:
        """`stop` ends `once` and `run`."""
        self._config = config
        self._store = store
        self._stop = stop or Stop(config.daemon.drain_seconds)
        self._pass = self._stop.part()
        """Ends what is judged now."""
        self._ingestion = Ingestion(store, config)
        self._filtering = TaskJudging(store, config, calls=CallsInFlight(config.state_dir))
        self._filtering.require_judge()
        self._deployer = Deployer(store, config)
        rubric, budget = self._filtering.rubric, self._filtering.budget
        self._rounds = Rounds(store, config, rubric, self._deployer, budget, self._stop)
        self._eraser = Eraser(store, config, self._ingestion, self._rounds.cancel_erased)
        self._attempted: frozenset[int] = frozenset()
        """The open erasures that were tried."""
        self._judging = asyncio.Lock()
        """Held while something is judged, or erased: nothing of an erased task may be in work."""
        self._window = self._rejects_all = self._clock_was_set = self._has_started = False
        self._max_rounds: int | None = None
        self._finished_rounds = self._new_tasks = 0
        self._replica_errors: frozenset[tuple[str, str]] = frozenset()
        self._sources = SourceSupervisor(store, config, self._ingestion, self._stop, self._judge_new)
        self._request_watch = RequestWatch(store)
        self._looked_at: object = None
        """The version of the state at the last look for requests, and the minute."""
        self._memory_release = MemoryRelease(store, self._judging)
        self._remove_old = partial(remove_regularly, store, config)
        self.metrics = MetricsServer(
            config.daemon,
            lambda: store.read(snapshot, config),
            self._unhealthy,
            self._unready,
            self._sources.concern,
        )
        self._targets: dict[str, Target] = {
            f"notice {n}": NoticeTarget(store, config, each) for n, each in enumerate(config.notify, 1)
        }
        if config.export.langfuse is not None:
            self._targets[LANGFUSE] = LangfuseExport(store, config.export.langfuse)
        self._stages = self._table()

    def _table(self) -> dict[str, Stage]:
        store, own = self._store, self._rounds
        retry, reconcile = RETRY_SECONDS, self._config.daemon.reconcile_seconds
        waits = (retry, retry)
        retention = partial(in_turn, self._sources.prune, self._remove_old)
        watch = PromotionWatch(store, self._config, self._deployer)
        tasks = (Wake.TASKS, Wake.ERASED, RequestKind.RETRY, RequestKind.RELEASE)
        approvals = (RequestKind.DEPLOY,)
        samples = (Wake.JUDGED, Wake.ERASED, Wake.WINDOW)
        # The state has the record of what is noted, and of what only looks its failures. What judging says is noted
        # where it judges.
        noted, looks = partial(Stage, store=store), partial(Stage, store=store, is_quiet=True)
        # fmt: off
        table = (
            #     name                              action                      every (s)        woken by
            # Erasures first: they begin before what is judged.
            noted("erasures",                       self._do_erase,             ERASURE_SECONDS, (Wake.ERASURE,)),
            Stage("judge",                          self._do_judge,             retry,           tasks, waits=waits),
            noted("rounds",                         self._do_round,             retry,           samples),
            looks("promotion watch",                watch.look,                 retry),
            looks("rounds of rolled back adapters", own.cancel_rolled_back,     retry),
            looks("rounds of erased tasks",         own.cancel_erased,          retry),
            looks("promotions",                     own.promote_passed,         retry,           approvals),
            Stage("reconcile",                      self._do_reconcile,         reconcile),
            noted("retention",                      retention,                  PRUNE_SECONDS),
            Stage("memory",                         self._memory_release.check, retry),
            Stage("metrics",                        self.metrics.listen,        retry,           (Wake.START,)),
            Stage("requests",                       self._do_requests,          REQUEST_SECONDS),
            *(noted(name, target.deliver, NOTICE_SECONDS, waits=WAITS) for name, target in self._targets.items()),
        )
        # fmt: on
        return {stage.name: stage for stage in table}

    def _wake(self, *events: Enum) -> None:
        for stage in self._stages.values():
            if not stage.wakes.isdisjoint(events):
                stage.wake()

    async def recover(self) -> None:
        """Clean up after a process that died. The instance lock excludes others."""
        await resume_notices(self._store, self._config)
        for target in self._targets.values():
            await target.begin()
        await self._store.write(stages.forget_others, list(self._stages))
        await asyncio.to_thread(self._ingestion.remove_left)
        released, dead = await recover(self._store, self._config.state_dir, self._config.judge)
        failed = await self._deployer.recover()
        for task in dead:
            log.error(
                "%s is a dead letter: the process died %d times in a row while judging it", task, claims.CRASHES
            )
        if released or failed:
            log.info("after a crash: %d tasks are judged again, %d unfinished swaps failed", released, failed)

    async def once(self, max_rounds: int | None) -> FlywheelError | None:
        """Do everything that is due now; returns the last error, if any."""
        await self.recover()
        error: FlywheelError | None = None
        try:
            for report in await self._ingestion.run(final=True, stop=self._stop):
                if report.error is not None:
                    log.error("%s", report.error)
                    error = report.error
            await self._eraser.finish()
            judged = await self._filtering.run(stop=self._stop)
            if judged.error is not None:
                log.error("%s", judged.error)
                error = judged.error
            await self._stages["reconcile"].attempt()
            for name in BESIDE_ROUNDS:
                await self._stages[name].attempt()
                error = self._stages[name].error or error
            state = await self._rounds.finish_live()
            for number in itertools.count():
                is_over = state is RoundState.FAILED or self._stop.is_set() or number == max_rounds
                if is_over or not await self._rounds.start_due():
                    break
                state = await self._rounds.finish_live()
            if state is RoundState.FAILED:
                error = TrainError("finish the round", "it failed", "`flywheel status` says why.")
            await self._remove_old()
        except FlywheelError as failure:
            log.error("%s", failure)
            error = failure
        finally:
            await self._ingestion.close()
            await self._rounds.close()
        await self._deliver_notices()
        return error

    async def _deliver_notices(self) -> None:
        """Send the notices and scores of this run; what does not arrive is sent by the next one."""
        for name in self._targets:
            try:
                async with asyncio.timeout(DELIVERY_SECONDS):
                    await self._stages[name].attempt()
            except TimeoutError:
                log.warning("not everything was sent within %g s: the next run sends the rest", DELIVERY_SECONDS)

    async def run(self, max_rounds: int | None = None) -> None:
        """Run until SIGTERM, SIGINT or `max_rounds` finished rounds. A second signal skips the drain.

        Raises ConfigError when a worker is to outlive this process where none can, and LockedError when the lock file
        was removed or replaced: another daemon may have it.
        """
        self._stop.detaches = self._config.daemon.on_stop == "detach"
        if self._stop.detaches and in_container():
            raise ConfigError(
                "start the daemon",
                "daemon.on_stop: detach has no effect in a container, which ends with all its processes",
                "Set daemon.on_stop: stop.",
            )
        if self._stop.detaches and (mode := await asyncio.to_thread(kill_mode)) not in ("", "process"):
            log.warning(
                "daemon.on_stop is detach, and systemd ends the worker with this service (KillMode=%s): add the"
                " drop-in detach.conf, which `flywheel init --systemd` writes",
                mode,
            )
        self._max_rounds = max_rounds
        # Until the loop is closed: a signal during the last steps does not interrupt them.
        self._stop.listen()
        await self.recover()
        scheduler = self._schedule()
        beating = asyncio.create_task(feed_watchdog(), name="watchdog")
        for stage in self._stages.values():
            stage.begin(self._stop)
        self._wake(Wake.START)
        try:
            await self._sources.start()
            scheduler.start()
            self._has_started = True
            for stage in self._stages.values():
                stage.wake()
            tell_systemd(f"READY=1\nSTATUS=watching {len(self._config.sources)} sources")
            log.info("watching %d sources; state in %s", len(self._config.sources), self._config.state_dir)
            await self._stop.asked()
        finally:
            microseconds = round(self._longest_end_seconds() * 1e6)
            tell_systemd(f"STOPPING=1\nSTATUS=stopping\nEXTEND_TIMEOUT_USEC={microseconds}")
            if scheduler.running:  # False when a source could not start
                scheduler.shutdown(wait=False)
            await self._end()
            beating.cancel()
            await self.metrics.stop()
        if self._stop.reason is StopReason.LOCK_LOST:
            raise LockedError(
                f"go on with {self._config.state_dir}",
                f"its file {INSTANCE_LOCK} was removed or replaced, so another daemon could start",
                "Start one again, and leave that file.",
            )

    def _unhealthy(self) -> str:
        """Stages that hang; empty without one."""
        if self._stop.is_set():
            return ""
        every = (*self._stages.values(), *self._sources.stages)
        hanging = [f"hangs: {each.name}" for each in every if each.heartbeat.overdue_seconds]
        return f"{', '.join(hanging)}; restart the daemon" if hanging else ""

    def _unready(self) -> str:
        if not self._has_started:
            return "starting"
        return "stopping" if self._stop.is_set() else self._sources.overdue

    def _longest_end_seconds(self) -> float:
        """The longest stop: judge calls in flight, a worker that is killed, a swap that is rolled back."""
        undo = 2 * QUICK_SECONDS * len(self._config.serving.urls)
        return self._config.daemon.drain_seconds + STOP_SECONDS + undo + SPARE_SECONDS

    def stop(self) -> None:
        """Begin the orderly stop, as a signal does."""
        self._stop.ask(StopReason.FINISHED)

    async def _end(self) -> None:
        self.stop()
        stop_sources = asyncio.create_task(self._sources.stop())
        running = {name: stage.task for name, stage in self._stages.items() if stage.task is not None}
        # A notice under way is sent again by the next process: no stop waits for its target.
        for name in running.keys() & self._targets:
            running[name].cancel()
        await self._stop.drain(*running.values())
        # Also after a second signal: ingestion ends at its next batch; an open inbox would keep the process alive.
        await asyncio.gather(stop_sources, return_exceptions=True)
        await self._ingestion.close()

    def _schedule(self) -> Intervals:
        scheduler = Intervals(self._after_clock_set)
        every = scheduler.every
        every(self._config.ingest.poll_seconds, "poll", self._sources.poll)
        every(RETRY_SECONDS, "sources", self._sources.refresh)
        every(REQUEST_SECONDS, "lock", self._check_lock)
        scheduler.wake(self._stages.values())
        if self._config.trigger.cron:
            scheduler.at(cron_trigger(self._config.trigger.cron), "cron", self._open_window)
        return scheduler

    def _after_clock_set(self) -> None:
        self._clock_was_set = True
        for stage in self._stages.values():
            stage.retry_now()
        self._sources.poll()

    def _check_lock(self) -> None:
        if is_lost(self._config.state_dir) and not self._stop.is_set():
            log.error("the file %s was removed or replaced: stopping", self._config.state_dir / INSTANCE_LOCK)
            self._stop.ask(StopReason.LOCK_LOST)

    def _judge_new(self, new: int) -> None:
        self._new_tasks += new
        self._memory_release.note_work()
        self._wake(Wake.TASKS)

    def _open_window(self) -> None:
        self._window = True
        self._wake(Wake.WINDOW)

    async def _do_judge(self) -> Pass:
        # An erasure that has to be tried again waits for one batch.
        most = CLAIMED_PER_THREAD * self._filtering.judge.max_thread if await self._eraser.has_work() else None
        self._pass = self._stop.part()
        async with waiting_for(self._judging):
            new, self._new_tasks = self._new_tasks, 0
            if self._clock_was_set:
                await self._store.write(claims.bound_waits, self._config.judge.retry_undecided_seconds)
                self._clock_was_set = False
            report = await self._filtering.run(limit=most, stop=self._pass)
        if report.tasks == most:
            self._wake(Wake.TASKS)
        if new or report.judged:
            log.info("%d new tasks; judged %d: %d accepted, %d rejected, %d undecided", new, report.judged,
                     report.accepted, report.rejected, report.undecided)  # fmt: skip
        if report.judged:
            self._memory_release.note_work()
            self._wake(Wake.JUDGED)
            await self._warn_of_rejections()
        if report.error is not None:
            raise report.error
        return report.result

    async def _do_erase(self) -> Pass:
        """Carry out erasures that people asked for, while nothing is judged."""
        if not await self._eraser.has_work():
            return Pass.IDLE
        asked_for = await self._open_erasures()
        if asked_for - self._attempted:
            # What is being judged is ended first; a later attempt waits for the end of its batch.
            self._pass.ask(StopReason.CANCELLED, "an erasure was asked for")
        self._attempted = asked_for
        try:
            async with waiting_for(self._judging):
                is_purged = await self._eraser.finish(PURGE_SECONDS)
        finally:
            self._wake(Wake.ERASED)
        if not is_purged:
            why = "another process reads an older state"
            raise StoreError("purge what was erased", why, "It is tried again every minute.", retryable=True)
        return Pass.WORKED

    async def _open_erasures(self) -> frozenset[int]:
        return frozenset(row.id for row in await self._store.read(erasures.in_states, ErasureState.OPEN))

    async def _do_requests(self) -> None:
        # Most of the time nothing was written since the last look, which costs a read less. Each minute all the same:
        # a disk that is slow to sync lets a commit be seen long after its files were written.
        version = self._store.version()
        looked_at = version, steady() // RETRY_SECONDS
        if version is not None and looked_at == self._looked_at:
            return
        if await self._open_erasures() - self._attempted:
            self._wake(Wake.ERASURE)
        kinds = await self._request_watch.look()
        if RequestKind.RETRY in kinds:
            self._sources.read_again()
        self._wake(*kinds)
        self._looked_at = looked_at

    async def _warn_of_rejections(self) -> None:
        warning = await self._store.read(verdicts.none_accepted, self._config.filter.warn_window)
        # Logged once each time it begins.
        if warning and not self._rejects_all:
            log.warning("%s", warning)
        self._rejects_all = bool(warning)

    async def _do_round(self) -> Pass:
        result = Pass.IDLE
        while True:
            if await self._rounds.finish_live() is not None:
                result = Pass.WORKED
                self._finished_rounds += 1
                if self._finished_rounds == self._max_rounds:
                    self.stop()
            window, self._window = self._window, False
            if self._stop.is_set() or not await self._rounds.start_due(window=window):
                return result

    async def _do_reconcile(self) -> None:
        reports = []
        for own in self._config.by_target().values():
            with contextlib.suppress(LockedError):  # a swap is running
                reports.append(await self._deployer.of(own).reconcile())
        if not reports:
            return
        # Errors that differ only in a measured number are the same error.
        errors = {
            (each.url, FIGURE.sub("…", each.error)): each.error
            for report in reports
            for each in report.replicas
            if each.error
        }
        for key, error in errors.items():
            if key not in self._replica_errors:
                log.warning("%s", error)
        if self._replica_errors and not errors:
            log.info("all inference servers have recovered")
        self._replica_errors = frozenset(errors)
