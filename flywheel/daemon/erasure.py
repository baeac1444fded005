"""Erasing a conversation, or all of a user: what belongs to them is found, and removed from files and state.

The order makes every step repeatable: first nothing new is stored, judged or trained on; then files are rewritten, by
what the rows say of them; then the rows go, in one transaction; then SQLite's logs are emptied. A process that dies
in between leaves an open erasure, which the next one carries out from its beginning.

`PLACES` lists where texts are: in the files of the state, in what killed processes left, and in the memory of what
sends them. An erasure goes through it, and so does a test, which fails for a place that is not in it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import orjson
from sqlalchemy import Connection, Row, select

from flywheel.config.file import DATA_SETS, Config
from flywheel.daemon.langfuse import LangfuseExport
from flywheel.daemon.notifier import NoticeTarget
from flywheel.daemon.rounds.erasure import ERASED_FOLDERS, erase_from_files, erase_from_results
from flywheel.daemon.rounds.rounds import end_round_with_erased
from flywheel.errors import StoreError
from flywheel.judge.usage import IN_FLIGHT_FILE
from flywheel.records.task import NO_CONVERSATION
from flywheel.serving.calls.call_log import CallLog, call_log_copy_path
from flywheel.sources.calls.conversations import extending
from flywheel.sources.ingestion import Ingestion
from flywheel.sources.otlp import inbox
from flywheel.store import backup, erasures
from flywheel.store.erasures import ErasureState, Kind, Touched
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.database import STATE_FILE, Store, noted
from flywheel.store.kernel.schema import tasks
from flywheel.store.views import erased_samples
from flywheel.system.lock import STATE_LOCKS
from flywheel.system.process_folder import PREFIX
from flywheel.system.purge import purge
from flywheel.system.terminal import quantity

log = logging.getLogger(__name__)

PURGE_SECONDS: Final = 30.0
"""How long reading transactions of other processes are waited for."""
INBOXES: Final = ("otlp/*.sqlite",)


class Report(msgspec.Struct, frozen=True):
    """What an erasure erased, as counts and names; no texts.

    - `rounds`: names of the rounds that used the tasks, for training or in the gate. `files`: how many of their
      files, and of evaluations, were rewritten.
    - `calls`: recorded calls; `pending`: how many of them servers have that could not be asked, by URL.
    - `unprovable`: adapters whose weights no server can prove any more, because their probes were made of the texts.
    - `adapters`: those that were trained on the tasks, or go back to one that was (`AffectedAdapter`); `held_out`:
      the rounds in whose gates the tasks were; `advice`: both in sentences, with the versions to go back to.
    - `backups`: folders of backups that could not be told: a restore from there brings it back.
    """

    replies: int
    tasks: int
    calls: int
    spans: int
    lines: int
    rounds: Sequence[str] = ()
    files: int = 0
    pending: dict[str, int] = {}
    backups: Sequence[str] = ()
    unprovable: Sequence[str] = ()
    adapters: Sequence[dict[str, Any]] = ()
    held_out: Sequence[dict[str, Any]] = ()
    advice: Sequence[str] = ()


def used_for(conn: Connection, found: Touched) -> dict[str, Any]:
    """What the tasks were used for, as parts of a report."""
    adapters = erased_samples.affected(conn, found.tasks)
    held_out = erased_samples.held_out_uses(conn, found.tasks)
    clean = erased_samples.last_clean(conn, adapters)
    gates = [f"{each.round}: {quantity(each.tasks, 'task')} in its gate, which trained nothing" for each in held_out]
    return {
        "adapters": [each.as_json() for each in adapters],
        "held_out": [each._asdict() for each in held_out],
        "advice": [each.sentence for each in adapters] + gates + [each.sentence for each in clean],
    }


def report_of(found: Touched, **done: Any) -> dict[str, Any]:
    """A report as it is stored, of what was found and `done`."""
    counts = {"replies": len(found.replies), "tasks": len(found.tasks), "calls": len(found.calls)}
    defaults = {**counts, "spans": 0, "lines": 0, "rounds": sorted(found.rounds)}
    report: dict[str, Any] = msgspec.to_builtins(Report(**{**defaults, **done}))
    return report


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
        user = subject if kind is Kind.USER else ""
        wanted = await self._store.read(_wanted, kind, subject, erasure)
        calls = await asyncio.to_thread(self._calls_of, wanted, user)
        found, seen = Touched(conversations=wanted, calls=set(calls)), -1
        within = await self._store.read(_within, kind, subject, erasure)
        for conversation, service in within:
            await self._add_of_service(found, conversation, service)
        while seen != len(found.calls) + len(found.traces):
            seen = len(found.calls) + len(found.traces)
            calls = found.calls | await asyncio.to_thread(self._resent, found.calls)
            traces = found.traces | await self._traces_of(wanted, user, calls)
            found = await self._store.read(erasures.touched, wanted, calls, traces, user)
        found.shared = {conversation for conversation, _ in within}
        return found

    async def services(self, conversation: str) -> dict[str, set[str]]:
        """The services of each trace of a conversation, as its tasks and received spans say; none if they do not say.
        Raises StoreError and ReceiverError."""
        services, _ = await self._services(conversation)
        return services

    async def _services(self, conversation: str) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
        """The services of each trace of a conversation, and the recorded calls that its received spans name."""
        received, calls = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        for path in _inboxes(self._config.state_dir):
            for trace, service, named in await inbox.services_of(path, conversation):
                received[trace] |= {service} - {""}
                calls[trace] |= set(named)
        return await self._store.read(erasures.services_by_trace, conversation, received), calls

    async def _add_of_service(self, found: Touched, conversation: str, service: str) -> None:
        """Add what a service has of a conversation: the traces that it is in, those that may be of every service, and
        the calls that name the conversation and are not of others' traces."""
        services, calls = await self._services(conversation)
        found.traces |= {trace for trace, names in services.items() if service in names or not names}
        others = services.keys() - found.traces
        of_others = await self._store.read(erasures.calls_of_traces, others)
        of_others |= {call for trace in others for call in calls.get(trace, ())}
        found.calls |= await asyncio.to_thread(self._calls_of, [conversation], "") - of_others

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

        def all_purged() -> bool:
            # Each, also where one is busy.
            done = [_in_log(path, CallLog.purge, seconds) for path in self._call_logs()]
            done += [purge(path, seconds) for path in _inboxes(state)]
            return all([*done, purge(state / STATE_FILE, seconds, rewrite=True)])

        try:
            return await asyncio.to_thread(all_purged)
        except sqlite3.Error as error:
            why = f"SQLite: {error}"
            raise StoreError("purge what was erased", why, "Run the command again.", retryable=True) from error

    def _calls_of(self, wanted: Collection[str], user: str) -> set[str]:
        users = [user] if user else []
        named = [_in_log(path, CallLog.ids_of, wanted, users) for path in self._call_logs()]
        return set(itertools.chain.from_iterable(named))

    def _resent(self, calls: Collection[str]) -> set[str]:
        """The later calls that send these ones' messages again."""
        found: set[str] = set()
        for path in self._call_logs():
            found.update(_in_log(path, extending, sorted(calls)))
        return found

    async def _traces_of(self, wanted: Collection[str], user: str, calls: Collection[str]) -> set[str]:
        inboxes = _inboxes(self._config.state_dir)
        return set().union(*[await inbox.traces_of(path, wanted, user, calls) for path in inboxes])

    def _call_logs(self) -> list[Path]:
        """The copy of all call logs, and those of servers that have the same state directory."""
        state = self._config.state_dir
        paths = [call_log_copy_path(state), *sorted((state / "serving").glob("calls-*.db"))]
        return [path for path in paths if path.is_file()]

    async def erase_left(self, _: Erasing) -> None:
        """Remove what killed processes left. The caller's lock keeps restores out."""
        await asyncio.to_thread(self._ingestion.remove_left)
        await asyncio.to_thread(_remove_restoring, self._config.state_dir)

    async def erase_calls(self, erasing: Erasing) -> None:
        """Erase recorded calls here and on the servers: how many were there, and how many servers still have."""
        ids = sorted(erasing.found.calls)
        erasing.done["calls"] = await asyncio.to_thread(self._erase_here, ids)
        if (puller := self._ingestion.calls) is not None and ids:
            await puller.erase(ids)
            erasing.done["pending"] = await puller.finish_erasing()

    async def erase_lines(self, erasing: Erasing) -> None:
        hashes = await self._store.read(_hashes, erasing.found)
        erasing.done["lines"] = await self._ingestion.erase(erasing.found.keys, hashes)

    async def erase_data_sets(self, erasing: Erasing) -> None:
        await self._ingestion.erase_data_sets(erasing.found.traces, erasing.found.conversations)

    async def erase_spans(self, erasing: Erasing) -> None:
        inboxes, traces = _inboxes(self._config.state_dir), erasing.found.traces
        erasing.done["spans"] = sum([await inbox.erase(path, traces) for path in inboxes])

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

    def _erase_here(self, ids: Sequence[str]) -> int:
        there: set[str] = set()
        for path in self._call_logs():
            there.update(_in_log(path, CallLog.sizes, ids))
            _in_log(path, CallLog.erase, ids)
        return len(there)


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
        "copies of a Studio database, of a data set or of a backup that killed processes left",
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


def _remove_restoring(state: Path) -> None:
    folder = state / backup.RESTORING
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        hint = "Remove the folder, which a killed restore left, and run the command again."
        raise StoreError(f"remove {folder}", f"{error.filename}: {error.strerror or error}", hint) from error


def _inboxes(state: Path) -> list[Path]:
    return sorted(path for pattern in INBOXES for path in state.glob(pattern))


def _in_log(path: Path, method: Any, *arguments: Any) -> Any:
    with CallLog(path) as call_log:
        return method(call_log, *arguments)


def _wanted(conn: Connection, kind: Kind, subject: str, erasure: int) -> set[str]:
    wanted = {subject} - NO_CONVERSATION if kind is Kind.CONVERSATION else set()
    if kind is Kind.USER and subject:
        wanted |= erasures.conversations_of_user(conn, subject)
    return wanted | erasures.conversations_of(conn, erasure)


def _within(conn: Connection, kind: Kind, subject: str, erasure: int) -> list[tuple[str, str]]:
    """The conversations, each with the service whose part of it is wanted."""
    if kind is not Kind.SERVICE:
        return []
    if not subject:
        return erasures.within_services(conn, erasure)
    conversation, service = orjson.loads(subject)
    return [(conversation, service)]


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
