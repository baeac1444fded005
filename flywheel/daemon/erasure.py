"""Erasing a conversation, or all of a user: what belongs to them is found, and removed from files and state.

The order makes every step repeatable: first nothing new is stored, judged or trained on; then files are rewritten, by
what the rows say of them; then the rows go, in one transaction; then SQLite's logs are emptied. A process that dies
in between leaves an open erasure, which the next one carries out from its beginning.

`PLACES` lists where texts are: in the files of the state, in what killed processes left, and in the memory of what
sends them. An erasure goes through it, and so does a test, which fails for a place that is not in it.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
from sqlalchemy import Connection, Row, select

from flywheel.config.file import DATA_SETS, Config
from flywheel.daemon.langfuse import LangfuseExport
from flywheel.daemon.notifier import NoticeTarget
from flywheel.daemon.rounds.removal import ERASED_FOLDERS, erase_from_files, erase_from_results, explained
from flywheel.daemon.rounds.rounds import end_round_with_erased
from flywheel.errors import EXIT_USAGE, LockedError, StoreError
from flywheel.judge.usage import IN_FLIGHT_FILE
from flywheel.records.task import NO_CONVERSATION
from flywheel.serving.calls.call_log import CallLog, call_logs
from flywheel.sources.calls.conversations import extending
from flywheel.sources.ingestion import Ingestion
from flywheel.sources.otlp import inbox
from flywheel.store import backup, erasures
from flywheel.store.erasures import ErasureState, Kind, Touched
from flywheel.store.holder import locked
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.database import STATE_FILE, Store, noted
from flywheel.store.kernel.schema import tasks
from flywheel.store.views import erased_samples
from flywheel.system.files import remove
from flywheel.system.lock import STATE_LOCKS
from flywheel.system.process_folder import PREFIX
from flywheel.system.purge import purge
from flywheel.system.terminal import quantity

PURGE_SECONDS: Final = 30.0
"""How long reading transactions of other processes are waited for."""
FORGET_SECONDS: Final = 60.0
"""How long a running daemon, which ends what it is judging first, is waited for."""
_PAUSE_SECONDS: Final = 0.2


class UnknownServiceError(StoreError):
    """A service has no trace of a conversation."""

    exit_code = EXIT_USAGE


def used_for(conn: Connection, found: Touched) -> dict[str, Any]:
    """What the tasks were used for, as parts of a report."""
    adapters = erased_samples.affected(conn, found.tasks)
    held_out = erased_samples.held_out_uses(conn, found.tasks)
    clean = erased_samples.last_clean(conn, adapters)
    gates = [f"{each.round}: {quantity(each.tasks, 'task')} in its gate, not in training" for each in held_out]
    return {
        "adapters": [each.as_json() for each in adapters],
        "held_out": [each._asdict() for each in held_out],
        "advice": [each.sentence for each in adapters] + gates + [each.sentence for each in clean],
    }


def report_of(found: Touched, **parts: Any) -> dict[str, Any]:
    """What an erasure erased, as counts and names; no texts.

    - `rounds`: names of the rounds that used the tasks, for training or in the gate. `files`: how many of their
      files, and of evaluations, were rewritten.
    - `calls`: recorded calls; `pending`: how many of them servers have that could not be asked, by URL.
    - `unprovable`: adapters whose weights no server can prove any more, because their probes were made of the texts.
    - `adapters`: those that were trained on the tasks, or go back to one that was (`AffectedAdapter`); `held_out`:
      the rounds in whose gates the tasks were; `advice`: both in sentences, with the versions to go back to.
    - `backups`: folders of backups that could not be told: a restore from there brings it back.
    """
    return {
        "replies": len(found.replies), "tasks": len(found.tasks), "calls": len(found.calls), "spans": 0, "lines": 0,
        "rounds": sorted(found.rounds), "files": 0, "pending": {}, "backups": [], "unprovable": [],
        "adapters": [], "held_out": [], "advice": [], **parts,
    }  # fmt: skip


def shares(services: Mapping[str, int]) -> str:
    """How many traces each service has of a conversation, with what erases those of one."""
    of_each = [f"{name or 'not known'} ({quantity(count, 'trace')})" for name, count in services.items()]
    return f"{', '.join(of_each)}; --service NAME selects one service, and traces without a service"


async def forget(
    store: Store,
    config: Config,
    kind: Kind,
    subject: str,
    service: str | None = None,
    *,
    blocks: bool,
    dry_run: bool,
    tell: Callable[[Sequence[Mapping[str, str]]], object],
) -> dict[str, Any]:
    """Erase a conversation, or what one service has of it, or all of a user, here or by a daemon that has the state.

    Returns what was erased, or would be (`report_of`), how far that got, how many traces each service has of the
    conversation, and what its traces have besides, which `tell` gets before anything is erased. Raises FlywheelError.
    """
    ingestion = Ingestion(store, config)
    eraser = Eraser(store, config, ingestion)
    try:
        by_trace, _ = await eraser.services(subject) if kind is Kind.CONVERSATION else ({}, {})
        services = dict(sorted(Counter(name for names in by_trace.values() for name in names or {""}).items()))
        if service is not None:
            kind, conversation, subject = Kind.SERVICE, subject, erasures.in_service(subject, service)
            if services and service not in services and not await store.read(erasures.has_begun, kind, subject):
                attempted = f"erase what {service} has of {conversation}"
                raise UnknownServiceError(
                    attempted, f"the service has no trace of the conversation; {shares(services)}"
                )
        found = await eraser.find(kind, subject)
        others = await store.read(erasures.others_in_traces, found)
        tell(others)
        about = {"services": services, "other_runs": others}
        if dry_run:
            return {"state": "found", **about, **report_of(found, **await store.read(used_for, found))}
        number = await store.write(erasures.begin, kind, subject, found.conversations, blocks=blocks)
        until = time.monotonic() + FORGET_SECONDS
        while True:
            try:
                async with locked(store, config.state_dir):
                    await eraser.finish()
            except LockedError:
                pass  # A daemon carries it out.
            row = await store.read(erasures.with_id, number)
            if row.state == ErasureState.PURGED or time.monotonic() >= until:
                return {"state": row.state, **about, **(row.report or report_of(found))}
            await asyncio.sleep(_PAUSE_SECONDS)
    finally:
        await ingestion.close()


@dataclass(frozen=True, slots=True)
class Erasing:
    """An erasure that is carried out: its number, and what it found."""

    number: int
    found: Touched
    done: dict[str, Any] = field(default_factory=dict)
    """Parts of the report."""


class Eraser:
    """Carries out erasures. The caller holds the instance lock, and nothing ingests or judges meanwhile."""

    def __init__(
        self,
        store: Store,
        config: Config,
        ingestion: Ingestion,
        end_round: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """`end_round` ends the live round if it uses an erased task; without it, nothing runs rounds meanwhile."""
        self._store = store
        self._config = config
        self._ingestion = ingestion
        self._end_round = end_round or partial(end_round_with_erased, store)

    async def find(self, kind: Kind, subject: str, erasure: int = 0) -> Touched:
        """What belongs to a conversation, or to all conversations of a user, and to those of an erasure that has
        begun. Raises StoreError, CallLogError and ReceiverError."""
        users = [subject] if kind is Kind.USER and subject else []
        wanted, within = await self._store.read(_wanted, kind, subject, erasure)
        found, seen = Touched(conversations=wanted, calls=await self._ids(CallLog.ids_of, wanted, users)), -1
        for conversation, service in within:
            await self._add_of_service(found, conversation, service)
        while seen != len(found.calls) + len(found.traces):
            seen = len(found.calls) + len(found.traces)
            # Later calls send the messages of earlier ones again.
            calls = found.calls | await self._ids(extending, sorted(found.calls))
            traces = found.traces.union(
                *[await inbox.traces_of(path, wanted, "".join(users), calls) for path in self._inboxes()]
            )
            found = await self._store.read(erasures.touched, wanted, calls, traces, "".join(users))
        found.shared = {conversation for conversation, _ in within}
        return found

    async def services(self, conversation: str) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
        """The services of each trace of a conversation, as its tasks and received spans say, none if they do not say,
        and the recorded calls that its received spans name. Raises StoreError and ReceiverError."""
        received, calls = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        for path in self._inboxes():
            for trace, service, named in await inbox.services_of(path, conversation):
                received[trace] |= {service} - {""}
                calls[trace] |= set(named)
        return await self._store.read(erasures.services_by_trace, conversation, received), calls

    async def _add_of_service(self, found: Touched, conversation: str, service: str) -> None:
        """Add what a service has of a conversation: the traces that it is in, those that may be of every service, and
        the calls that name the conversation and are not of others' traces."""
        services, calls = await self.services(conversation)
        found.traces |= {trace for trace, names in services.items() if service in names or not names}
        others = services.keys() - found.traces
        of_others = await self._store.read(erasures.calls_of_traces, others)
        of_others |= {call for trace in others for call in calls.get(trace, ())}
        found.calls |= await self._ids(CallLog.ids_of, [conversation], []) - of_others

    async def carry_out(self, erasure: Row[Any]) -> None:
        """Carry out one erasure, which may have begun before. Raises FlywheelError."""
        found = await self.find(Kind(erasure.kind), erasure.subject, erasure.id)
        await self._store.write(_begin, erasure.id, found)
        await self._end_round()
        await self._store.write(erasures.block, erasure.id, await self._ingestion.erase_conversations(found.calls))
        erasing = Erasing(erasure.id, found)
        for place in PLACES:
            await place.erase(self, erasing)
        for source in self._ingestion.sources():
            source.count_again()

    async def has_work(self) -> bool:
        """Whether something is to be erased, or was erased and is not purged."""
        if (self._config.state_dir / backup.ERASURES).exists():
            return True
        return bool(await self._store.read(erasures.in_states, ErasureState.OPEN, ErasureState.ERASED))

    async def finish(self, purge_seconds: float | None = None) -> bool:
        """Carry out what is open, and purge; whether all that was erased is in no file any more."""
        if given := await asyncio.to_thread(backup.erased_since, self._config.state_dir):
            await self._store.write(erasures.adopt, given)
            (self._config.state_dir / backup.ERASURES).unlink()
        for erasure in await self._store.read(erasures.in_states, ErasureState.OPEN):
            await self.carry_out(erasure)
        if not await self._store.read(erasures.in_states, ErasureState.ERASED):
            return True
        if is_purged := await self.purge(PURGE_SECONDS if purge_seconds is None else purge_seconds):
            await self._store.write(_note_purged)
        return is_purged

    async def purge(self, seconds: float) -> bool:
        """Empty the logs of all databases; False while another process reads one."""
        state = self._config.state_dir
        await self._store.release_memory()
        try:
            # Each, also where one is busy.
            done = await self._in_logs(CallLog.purge, seconds)
            done += [await asyncio.to_thread(purge, path, seconds) for path in self._inboxes()]
            done.append(await asyncio.to_thread(purge, state / STATE_FILE, seconds, rewrite=True))
        except sqlite3.Error as error:
            why = f"SQLite: {error}"
            raise StoreError("purge what was erased", why, "Run the command again.", retryable=True) from error
        return all(done)

    async def _in_logs(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a method returns of each call log."""

        def called() -> list[Any]:
            results = []
            for path in call_logs(self._config.state_dir):
                with CallLog(path) as call_log:
                    results.append(method(call_log, *arguments))
            return results

        return await asyncio.to_thread(called)

    async def _ids(self, method: Callable[..., Any], *arguments: Any) -> set[str]:
        return set().union(*await self._in_logs(method, *arguments))

    def _inboxes(self) -> list[Path]:
        return sorted(self._config.state_dir.glob("otlp/*.sqlite"))

    async def erase_left(self, _: Erasing) -> None:
        """Remove what killed processes left. The caller's lock keeps restores out."""
        restoring = self._config.state_dir / backup.RESTORING
        with explained(f"remove {restoring}, which a killed restore left"):
            await asyncio.to_thread(remove, restoring)
        await asyncio.to_thread(self._ingestion.remove_left)

    async def erase_calls(self, erasing: Erasing) -> None:
        """Erase recorded calls here and on the servers: how many were there, and how many servers still have."""
        ids = sorted(erasing.found.calls)
        erasing.done["calls"] = len(await self._ids(CallLog.sizes, ids))
        await self._in_logs(CallLog.erase, ids)
        if (puller := self._ingestion.calls) is not None and ids:
            await puller.erase(ids)
            erasing.done["pending"] = await puller.finish_erasing()

    async def erase_lines(self, erasing: Erasing) -> None:
        hashes = await self._store.read(_hashes, erasing.found)
        erasing.done["lines"] = await self._ingestion.erase(erasing.found.keys, hashes)

    async def erase_data_sets(self, erasing: Erasing) -> None:
        await self._ingestion.erase_data_sets(erasing.found.traces, erasing.found.conversations)

    async def erase_spans(self, erasing: Erasing) -> None:
        traces = erasing.found.traces
        erasing.done["spans"] = sum([await inbox.erase(path, traces) for path in self._inboxes()])

    async def erase_files(self, erasing: Erasing) -> None:
        if keys := erasing.found.keys:
            used = {Path(each) for each in erasing.found.rounds.values()}
            erasing.done["files"] = await asyncio.to_thread(erase_from_files, self._config.state_dir, keys, used)

    async def tell_backups(self, erasing: Erasing) -> None:
        """Write beside each known backup what was erased; the folders that could not be written."""
        known = await self._store.read(noted, backup.FOLDERS_NOTE)
        everything = await self._store.read(erasures.everything_erased)
        erasing.done["backups"] = await asyncio.to_thread(backup.tell, orjson.loads(known or "[]"), everything)

    async def erase_rows(self, erasing: Erasing) -> None:
        """Erase it from the state, from which it was found: after everything else."""
        report = report_of(erasing.found, **erasing.done)
        await self._store.write(_end, erasing.number, erasing.found, report)


class Place(NamedTuple):
    """Where texts can be.

    Attributes:
        what: What has them.
        files: Its files, as patterns below the directory of the state; `**` stands for any number of folders.
        erase: What erases them there.
    """

    what: str
    files: tuple[str, ...]
    erase: Callable[[Eraser, Erasing], Awaitable[None]]


PLACES: Final = (
    Place(
        "copies of Studio databases, data sets or backups that killed processes left behind",
        (f"{PREFIX}*/**", f"{DATA_SETS}/{PREFIX}*/**", f"{backup.RESTORING}/**"),
        Eraser.erase_left,
    ),
    Place("recorded calls", ("calls/calls.db*", "serving/calls-*.db*"), Eraser.erase_calls),
    Place("the task file, and files of AgentJet", ("tasks*.jsonl", ".tasks*.jsonl.*"), Eraser.erase_lines),
    Place("copies of data sets", (f"{DATA_SETS}/*.jsonl", f"{DATA_SETS}/.*"), Eraser.erase_data_sets),
    Place("received spans", ("otlp/*.sqlite*",), Eraser.erase_spans),
    Place("files of rounds and evaluations", tuple(f"{folder}/**" for folder in ERASED_FOLDERS), Eraser.erase_files),
    Place("backups, which are told", (), Eraser.tell_backups),
    Place("the state", (f"{STATE_FILE}*",), Eraser.erase_rows),
)
"""In the order in which they are erased."""
WITHOUT_TEXTS: Final = (
    *sorted(STATE_LOCKS), backup.ERASURES, IN_FLIGHT_FILE, "serving/admin.key", "serving/*aliases-*.json*",
    "serving/adapters-*/**",
)  # fmt: skip
"""The other files of a state, as patterns: locks, pseudonyms, counts, keys, names and weights of adapters."""
SENDERS: Final = (NoticeTarget, LangfuseExport)
"""What sends texts elsewhere and tries again. They keep none: each attempt reads the state."""


def _wanted(conn: Connection, kind: Kind, subject: str, erasure: int) -> tuple[set[str], list[tuple[str, str]]]:
    """The conversations that are wanted, and those of which only the part of a service is, with the service."""
    wanted = erasures.conversations_of(conn, erasure)
    if kind is Kind.USER and subject:
        wanted |= erasures.conversations_of_user(conn, subject)
    if kind is not Kind.SERVICE:
        return wanted | ({subject} - NO_CONVERSATION if kind is Kind.CONVERSATION else set()), []
    if not subject:
        return wanted, erasures.within_services(conn, erasure)
    conversation, service = orjson.loads(subject)
    return wanted, [(conversation, service)]


def _begin(conn: Connection, erasure: int, found: Touched) -> None:
    erasures.block(conn, erasure, found.conversations)
    erasures.take_out(conn, found.tasks)


def _end(conn: Connection, erasure: int, found: Touched, report: dict[str, Any]) -> None:
    report = {**report, **used_for(conn, found), "unprovable": erase_from_results(conn, found.keys)}
    erasures.scrub(conn, found)
    erasures.note(conn, erasure, ErasureState.ERASED, report)


def _note_purged(conn: Connection) -> None:
    for row in erasures.in_states(conn, ErasureState.ERASED):
        erasures.note(conn, row.id, ErasureState.PURGED, row.report)


def _hashes(conn: Connection, found: Touched) -> set[str]:
    """The `qa_hash` of each task, by which lines that AgentJet wrote are found."""
    of_line = tasks.c.payload["metadata"]["qa_hash"].as_string().label("qa_hash")
    return {row.qa_hash for row in rows_in(conn, select(of_line), tasks.c.id, sorted(found.tasks))}
