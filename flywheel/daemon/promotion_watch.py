"""Watches promotions: while two versions of an alias answer, it compares the outcomes of their conversations, and
rolls the new one back if it is shown to be worse.

A unit's outcome is that of the reply which its first call after the swap belongs to: a failure for an error of the
engine, an empty or cut answer, or a rejection; missing where the client gave up, the server refused, or the reply has
not ended a day later. What the request alone decides, or an erasure removes, is no unit. See
`flywheel.training.gate.sequential_test` for the tests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import Row

from flywheel.config.file import Config
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.watch_figures import figures_of
from flywheel.records.request_id import BASE_VERSION
from flywheel.records.states import WatchState
from flywheel.records.trace import ModelCall
from flywheel.serving.calls.call_log import call_log_copy_path
from flywheel.serving.client.adapter_swap import version_name
from flywheel.sources.call_puller import CallLogCopy
from flywheel.store import notices, watches
from flywheel.store.kernel.bulk import chunks
from flywheel.store.kernel.database import Store
from flywheel.store.watches import Outcome, Result, UnitCall
from flywheel.system.terminal import quantity

log = logging.getLogger(__name__)

CALLS_AT_ONCE: Final = 1_000
PARSED_AT_ONCE: Final = 50
ABSENT_AFTER_NS: Final = 24 * 3600 * 10**9
"""How long after its call was read a reply may end; later it is missing."""
CATCH_UP_SECONDS: Final = 3600.0
"""How long a process reads sources before it takes a reply to be missing."""


def outcome_of_call(call: ModelCall) -> Outcome | None:
    """The outcome that a call alone decides; None where it needs a verdict."""
    if 400 <= call.status < 500:
        return Outcome(Result.MISSING, "refused by the server (4xx)")
    if call.status >= 500 or (call.error and not call.is_interrupted):
        return Outcome(Result.FAILURE, "an error of the engine")
    if call.is_interrupted or not call.status:
        return Outcome(Result.MISSING, "the client disconnected before the end")
    if not any(answer.content or answer.tool_calls for answer in call.answers):
        return Outcome(Result.FAILURE, "an empty answer")
    if any(answer.finish_reason == "length" for answer in call.answers):
        return Outcome(Result.FAILURE, "a cut answer")
    return None


def _decided_by(calls: CallLogCopy, first: Sequence[UnitCall]) -> dict[str, Outcome]:
    """The outcomes that these calls alone decide, by unit."""
    units = {call.request_id: call.unit for call in first}
    found = {}
    for some in chunks(list(units), PARSED_AT_ONCE):
        for request_id, call in calls.calls_of(some).items():
            if (outcome := outcome_of_call(call)) is not None:
                found[units[request_id]] = outcome
    return found


class PromotionWatch:
    """Watches the promotions of all targets. `look` is called regularly, and goes on from any state that a crash
    left."""

    def __init__(self, store: Store, config: Config, deployer: Deployer) -> None:
        self._store, self._config, self._deployer = store, config, deployer
        self._targets = list(config.by_target().values())
        self._began = time.monotonic()

    async def look(self) -> None:
        """Read new outcomes of all watches, and end those that are decided. Raises ServeError and CallLogError."""
        for own in self._targets:
            alias = own.model.alias
            if (watch := await self._store.write(watches.follow, alias)) is None:
                continue
            if watch.state == WatchState.WATCHING:
                await self._read_calls(watch)
                await self._read_outcomes(watch)
                watch = await self._decide(watch)
            if watch is not None:
                await self._roll_back(watch, own)

    async def _read_calls(self, watch: Row[Any]) -> None:
        """Enter the units of new calls, with those outcomes that the calls alone decide."""
        since = await self._store.read(watches.activated_ns, watch)
        path = call_log_copy_path(self._config.state_dir)
        if not path.exists():
            return
        after, more = watch.read_to, True
        with closing(CallLogCopy(path)) as calls:
            while more:
                page = await asyncio.to_thread(calls.units_after, after, CALLS_AT_ONCE)
                after, more = page[-1].number if page else after, len(page) == CALLS_AT_ONCE
                own = [call for call in page if call.started_ns >= since]
                own = await asyncio.to_thread(self._of_alias, calls, watch, own)
                first = await self._store.read(watches.first_calls, watch.id, own)
                found = await asyncio.to_thread(_decided_by, calls, first)
                await self._store.write(watches.enter, watch.id, own, found, after, time.time_ns())

    def _of_alias(self, calls: CallLogCopy, watch: Row[Any], page: Sequence[UnitCall]) -> list[UnitCall]:
        """The calls to the watched alias. The base model can answer several."""
        versions = {watches.version_of(watch.alias, name) for name in (watch.adapter, watch.other)}
        own = [call for call in page if call.version in versions]
        if len(self._targets) == 1 or BASE_VERSION not in versions:
            return own
        asked = calls.calls_of([call.request_id for call in own if call.version == BASE_VERSION])
        return [call for call in own if call.request_id not in asked or asked[call.request_id].model == watch.alias]

    async def _read_outcomes(self, watch: Row[Any]) -> None:
        """Take over the verdicts on replies whose calls are units."""
        units = await self._store.read(watches.undecided, watch.id)
        waiting = {row.request_id: row.unit for row in units}
        # After an outage the sources are read first: what happened meanwhile is not missing.
        before = time.time_ns() - ABSENT_AFTER_NS if time.monotonic() - self._began >= CATCH_UP_SECONDS else 0
        late = [row.request_id for row in units if row.entered_ns <= before]
        found = await self._store.read(watches.outcomes_of, list(waiting), late)
        if found:
            by_unit = {waiting[request_id]: outcome for request_id, outcome in found.items()}
            await self._store.write(watches.decide, watch.id, by_unit, time.time_ns())

    async def _decide(self, watch: Row[Any]) -> Row[Any] | None:
        """End the watch if it is decided; the watch if the new version is to be rolled back."""
        figures = await self._store.read(figures_of, watch)
        settings = self._config.deploy.watch
        age = datetime.now(UTC) - datetime.fromisoformat(watch.created_at)
        if figures.harm:
            why = f"worse in traffic: {figures.harm}"
            await self._store.write(watches.begin_rollback, watch, why, figures)
            return await self._store.read(watches.current, watch.alias)
        for kind, text in figures.doubts.items():
            await self._store.write(notices.note_watch, watch, kind, text)
        suffices = figures.suffices(settings.until_units, watch.share)
        is_over = age >= timedelta(days=settings.max_days)
        if not is_over and (figures.doubts or not suffices):
            return None
        state, loss = WatchState.KEPT, f"no loss was shown in {quantity(figures.outcomes, 'conversation')}"
        if not suffices:
            state, loss = (
                WatchState.NOT_SHOWN,
                f"{settings.max_days:g} days were not enough to show whether it is worse",
            )
        why = "; ".join([f"{loss}: {figures.summary}", figures.noticeable, *figures.doubts.values()])
        own = next(each for each in self._targets if each.model.alias == watch.alias)
        # The figures first: after a crash between the two, `follow` ends the watch with them.
        await self._store.write(watches.note, watch, state, why, figures)
        await self._deployer.of(own).end_ab_test(why)
        await self._store.write(watches.follow, watch.alias)
        log.info("%s stays deployed as %s: %s", watch.adapter, watch.alias, why)
        return None

    async def _roll_back(self, watch: Row[Any], own: Config) -> None:
        """Give everything to the version before. Begun again after a crash, until it has happened."""
        log.warning("%s is rolled back: %s", version_name(watch.alias, watch.adapter), watch.reason)
        await self._deployer.of(own).rollback(watch.other or "base", why=watch.reason)
        # The rollback is recorded: `follow` ends the watch, now or after a crash.
        await self._store.write(watches.follow, watch.alias)
