"""Removes from the files of rounds and evaluations: of an old round all that nothing needs any more, and of erased
tasks all that they said.

For an erasure every JSON file of a directory is looked through, and loses its records of erased tasks
(`flywheel.records.erasure`); each appears whole, and weights stay. The specification is the last one: while it names
an erased task, the work is not done, and after a kill -9 it is done again. Which errors and logs quote a task cannot
be known (tracebacks have values, in any form), so such a directory, and the row of its round, loses them all.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Final

import orjson
from sqlalchemy import Connection, Row, Text, cast, or_, select, update

from flywheel.daemon import evaluation_log
from flywheel.daemon.rounds.trackers import decision_of
from flywheel.errors import LockedError, StoreError
from flywheel.records.erasure import ERASED, REMOVED, tasks_named_in, without
from flywheel.records.round import (
    ADAPTER_DIR,
    CANDIDATE_DIR,
    ERROR_FILE,
    LOG_FILE,
    LONGEST_SYSTEM_PROMPT,
    METRICS_FILE,
    RESULT_FILE,
    SELECTION_FILE,
    SPEC_FILE,
    Probe,
)
from flywheel.records.states import RoundState
from flywheel.records.trace import get_path
from flywheel.serving.client.weight_verification import can_prove
from flywheel.store import rounds as store_rounds
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import adapters, events, round_samples, rounds, tasks
from flywheel.system.files import json_line, remove, rewrite_lines, size_of, temporary_of, write_atomic, write_json
from flywheel.system.lock import alone_in
from flywheel.training.data.rollout import system_prompts_of
from flywheel.training.data.rollout_file import rollout_files
from flywheel.training.data.round_directory import CHECKPOINTS_DIR, SYNC_DIR, clear

STAYS: Final = frozenset({SPEC_FILE, METRICS_FILE, RESULT_FILE, ERROR_FILE, SELECTION_FILE})
"""Specification (without its tasks, which are in the state), measurements and result of a round."""
WITHOUT_TASKS: Final[Mapping[str, object]] = {"train": [], "held_out": [], "suites": [], "pool": None}
ASIDE: Final = f".{ADAPTER_DIR}.removed"
"""An adapter that is being removed."""
ROUNDS_DIR: Final = "rounds"
TRACKING_DIR: Final = "tracking"
"""Where trackers have their files unless `tracking.dir` says otherwise."""
ERASED_FOLDERS: Final = (ROUNDS_DIR, evaluation_log.FOLDER, TRACKING_DIR)
"""Of the trackers, the gate's decisions on this machine have sentences."""
EMPTIED: Final = b"The log was removed: it could quote tasks whose texts were erased.\n"
WITHOUT_TEXTS: Final = frozenset({ADAPTER_DIR, CANDIDATE_DIR, CHECKPOINTS_DIR, SYNC_DIR})
"""Folders that have weights and no tasks."""


@contextlib.contextmanager
def explained(attempted: str) -> Iterator[None]:
    """Raise StoreError for files that cannot be read, written or removed."""
    try:
        yield
    except OSError as error:
        hint = "Give this user write permission there, and run it again. The daemon retries by itself."
        why = f"{error.filename or 'a file'}: {error.strerror or error}"
        raise StoreError(attempted, why, hint, retryable=True) from error


def leftovers(directory: Path) -> list[Path]:
    """What does not stay of an old round. Raises StoreError."""
    with explained(f"remove old files from {directory}"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [path for path in directory.iterdir() if path.name not in STAYS]
    return []


def size_of_leftovers(directory: Path) -> int:
    """In bytes. Raises StoreError."""
    return sum(map(size_of, leftovers(directory)))


def set_aside(directory: Path) -> None:
    """Rename the adapter, if there is one, so that nothing loads it. Raises StoreError."""
    aside, adapter = directory / ASIDE, directory / ADAPTER_DIR
    with explained(f"remove old files from {directory}"), contextlib.suppress(FileNotFoundError):
        if adapter.exists() and aside.is_dir():
            remove(aside)  # of an earlier removal that was killed
        adapter.rename(aside)


def remove_leftovers(directory: Path) -> int:
    """Remove what does not stay of an old round; returns its bytes. Raises StoreError."""
    size = size_of_leftovers(directory)
    spec = directory / SPEC_FILE
    with explained(f"remove old files from {directory}"):
        # Most of its bytes are its tasks, which are in the state. What is no specification stays as it is.
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            write_json(spec, {**json.loads(spec.read_bytes()), **WITHOUT_TASKS})
        for path in leftovers(directory):
            remove(path)
    return size


def erase_from_files(state_dir: Path, keys: Set[str], used: Collection[Path]) -> int:
    """Erase the tasks of these keys from the files of all rounds and evaluations of a state, none of which runs; the
    number of files that have changed. `used` are the directories of rounds that are known to have had one
    (`round_samples`).

    Raises LockedError and StoreError, as `erase_from_round`; what is left is done when it is run again.
    """
    of_used = {*used, *(state_dir / TRACKING_DIR / each.name for each in used)}
    found = set(of_used)
    for folder in (state_dir / name for name in ERASED_FOLDERS):
        with explained(f"erase tasks from the files in {folder}"):
            found |= {*folder.iterdir()} if folder.is_dir() else set()
    return sum(erase_from_round(each, keys, used=each in of_used) for each in sorted(found))


def erase_from_round(directory: Path, keys: Set[str], *, used: bool = False) -> int:
    """Erase the tasks of these keys from the files of a round that does not run; the number of files that have
    changed. It may be done again at any time. An evaluation (`flywheel evaluate`) has the same files. What killed
    processes left beside the files of any round goes as well: nothing says whose it is.

    `used` says that the round had one of them, also if its specification does not name it any more (retention
    removes tasks from it, and the rounds of `round_samples` are known). Raises LockedError while a worker runs, and
    StoreError for a file that cannot be read or written.
    """
    if not directory.is_dir():
        return 0
    attempted = f"erase tasks from the files in {directory}"
    with explained(attempted):
        # What is no JSON is not looked at; files of lines name no task that the specification does not name.
        values = (_read(path) for path in _files(directory) if path.suffix == ".json")
        has_texts = used or any(without(value, keys) is not value for value in values)
        left = [path for path in _files(directory) if temporary_of(path.name)]
        if not has_texts and not left:
            return 0
        try:
            with alone_in(directory, attempted):
                for path in left:
                    remove(path)
                return len(left) + (_erase(directory, keys) if has_texts else 0)
        except LockedError:
            if has_texts:
                raise
            return 0  # A running round has no texts of erased tasks.


def tasks_of(directory: Path) -> set[str]:
    """The keys of all tasks of which the worker of a round has texts; none without a specification."""
    return tasks_named_in(_read(directory / SPEC_FILE))


def _erase(directory: Path, keys: Set[str]) -> int:
    # No worker goes on with it: the round has other tasks now.
    clear(directory, is_over=True)
    # Results count the system prompts of all rollouts: before these are rewritten, it is known which stay.
    prompts = _system_prompts(directory, keys)
    files = sorted(_files(directory), key=lambda path: path.name == SPEC_FILE)
    return sum(_rewrite(path, keys, prompts) for path in files if not path.name.startswith("."))


def _files(directory: Path) -> Iterator[Path]:
    """The files in a directory, and in the folders below it that can have texts."""
    for path in sorted(directory.iterdir()):
        if path.is_file() and not path.is_symlink():
            yield path
        elif path.is_dir() and not path.is_symlink() and path.name not in WITHOUT_TEXTS:
            yield from _files(path)


def _read(path: Path) -> Any:
    """The value of a file; `REMOVED` if it cannot be read, or is no JSON."""
    with contextlib.suppress(OSError):
        return _parsed(path.read_bytes())
    return REMOVED


def _parsed(data: bytes) -> Any:
    """A value; `REMOVED` if it is no JSON."""
    for parse in (orjson.loads, json.loads):  # The second one takes NaN, too.
        with contextlib.suppress(ValueError):
            return parse(data)
    return REMOVED


def _rewrite(path: Path, keys: Set[str], system_prompts: frozenset[str]) -> bool:
    """Rewrite a file without erased tasks, or a log without anything; whether it has changed. Raises StoreError for a
    file of one value that is no JSON."""
    if path.name == LOG_FILE:
        if is_changed := path.read_bytes() != EMPTIED:
            write_atomic(path, EMPTIED)
        return is_changed
    if path.suffix == ".jsonl":
        return rewrite_lines(path, lambda line: _left(line, keys, system_prompts)) > 0
    if path.suffix != ".json":
        return False
    if (value := _parsed(path.read_bytes())) is REMOVED:
        why = "it is not JSON, so it is unknown whether it contains texts of the tasks"
        raise StoreError(f"erase tasks from {path}", why, "Remove it, and run this again.")
    if (left := without(value, keys, system_prompts)) is REMOVED:
        path.unlink()
    elif left is not value:
        write_json(path, left)
    return left is not value


def _left(line: bytes, keys: Set[str], system_prompts: frozenset[str]) -> bytes:
    """What is left of a line: nothing of one that is no JSON, or incomplete, so that nobody reads it."""
    value = _parsed(line) if line.endswith(b"\n") else REMOVED
    if (left := without(value, keys, system_prompts)) is REMOVED:
        return b""
    return line if left is value else json_line(left)


def _system_prompts(directory: Path, keys: Set[str]) -> frozenset[str]:
    """Those with which other tasks asked the policy: of their prompts, and of the rollouts of the user's agent."""
    found = {""}  # That there was none.
    with contextlib.suppress(KeyError, TypeError):  # It may be damaged.
        for task in get_path(_read(directory / SPEC_FILE), "train") or ():
            if task["task_id"] not in keys:
                found.update(system_prompts_of(task["prompt"]))
    for path in rollout_files(directory):
        with path.open("rb") as file:
            for value in map(_parsed, file):
                if isinstance(value, dict) and value.get("task_id") not in keys:
                    found.update(value.get("system_prompts", ()))
    return frozenset(found | {text[:LONGEST_SYSTEM_PROMPT] for text in found})


def _prompts_of_result(path: Path) -> frozenset[str]:
    """The system prompts in the result of a worker."""
    with contextlib.suppress(KeyError, TypeError):  # Its form is that of its version.
        return frozenset(each["text"] for each in get_path(_read(path), "sampling", "system_prompts") or ())
    return frozenset()


UNPROVABLE: Final = "texts of its probe were erased, and the rest is too little for the weight check"


def erase_from_results(conn: Connection, keys: Set[str]) -> list[str]:
    """Erase the tasks of these keys from what the state has of the rounds that used them: results, errors and probes
    of adapters. Returns the adapters whose probe cannot prove them any more, and was removed.

    It may be done again. The files come first: of the system prompts in a result, those stay that `result.json` has.
    """
    of_tasks = select(round_samples.c.round_id).join(tasks, tasks.c.id == round_samples.c.task_id)
    used = {row.round_id for row in rows_in(conn, of_tasks, tasks.c.key, sorted(keys))}
    unprovable = []
    for row in list(rows_in(conn, select(rounds), rounds.c.id, sorted(used))):
        prompts = _prompts_of_result(Path(row.dir) / RESULT_FILE)
        if (result := without(row.result, keys, prompts)) is not row.result:
            conn.execute(update(rounds).where(rounds.c.id == row.id).values(result=result))
        _erase_errors(conn, row)
        query = select(adapters).where(adapters.c.round_id == row.id)
        for adapter in conn.execute(query).all():
            if adapter.probe and not _keep_probe(conn, adapter, keys):
                store_rounds.make_unprovable(conn, adapter, UNPROVABLE)
                unprovable.append(str(adapter.name))
    return unprovable


def _keep_probe(conn: Connection, adapter: Row[Any], keys: Set[str]) -> bool:
    """Store what is left of an adapter's probe; False if that does not suffice."""
    left = without({"probe": adapter.probe}, keys)["probe"]
    if left is adapter.probe:
        return True
    if left is None or not can_prove(Probe.model_validate(left)):
        return False
    conn.execute(update(adapters).where(adapters.c.id == adapter.id).values(probe=left))
    return True


def _erase_errors(conn: Connection, row: Row[Any]) -> None:
    """Erase the errors of a round: as its reason, and in events about it and about its samples, which were free again
    for that reason. Reasons of the gate stay."""
    event, ends = events.c, [RoundState.FAILED.value, RoundState.ABANDONED.value]
    is_error = or_(event.new.in_(ends), event.old == RoundState.ABANDONED.value)
    decision = decision_of(row.state, row.reason, row.result)
    if row.reason != store_rounds.HAS_ERASED and without(decision, frozenset(), ()) is not decision:
        conn.execute(update(rounds).where(rounds.c.id == row.id).values(reason=ERASED))
        is_error |= event.detail == row.reason
        own = select(cast(round_samples.c.task_id, Text)).where(round_samples.c.round_id == row.id)
        of_samples = event.kind == tasks.name, event.subject.in_(own), event.detail == row.reason[:200]
        conn.execute(update(events).where(*of_samples).values(detail=ERASED))
    of_round = event.kind == rounds.name, event.subject == str(row.id)
    is_text = event.detail.not_in(["", store_rounds.HAS_ERASED])
    conn.execute(update(events).where(*of_round, is_text, is_error).values(detail=ERASED))
