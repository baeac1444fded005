"""Erases the texts of tasks from the files of rounds and evaluations, and from what the state has of their results.

Every JSON file of a directory is looked through, and loses its records of erased tasks (`flywheel.records.erasure`);
each appears whole. The specification is the last one: while it names an erased task, the work is not done, and after
a kill -9 it is done again. Which errors and logs quote a task cannot be known (tracebacks have values, in any form),
so such a directory, and the row of its round, loses them all.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Set
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
    LOG_FILE,
    LONGEST_SYSTEM_PROMPT,
    RESULT_FILE,
    SPEC_FILE,
    Probe,
)
from flywheel.records.states import RoundState
from flywheel.serving.client.weight_verification import can_prove
from flywheel.store import rounds as store_rounds
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import adapters, events, round_samples, rounds, tasks
from flywheel.system.files import (
    json_line,
    remove_temporary,
    temporary_of,
    torn_line,
    whole_file,
    write_atomic,
    write_json,
)
from flywheel.system.lock import alone_in
from flywheel.training.data.rollout import system_prompts_of
from flywheel.training.data.rollout_file import rollout_files
from flywheel.training.data.round_directory import CHECKPOINTS_DIR, SYNC_DIR, clear

ROUNDS_DIR: Final = "rounds"
TRACKING_DIR: Final = "tracking"
"""Where trackers have their files unless `tracking.dir` says otherwise."""
ERASED_FOLDERS: Final = (ROUNDS_DIR, evaluation_log.FOLDER, TRACKING_DIR)
"""Of the trackers, the gate's decisions on this machine have sentences."""
EMPTIED: Final = b"The log was removed: it could quote tasks whose texts were erased.\n"
WITHOUT_TEXTS: Final = frozenset({ADAPTER_DIR, CANDIDATE_DIR, CHECKPOINTS_DIR, SYNC_DIR})
"""Folders that have weights and no tasks."""


def erase_from_files(state_dir: Path, keys: Set[str], used: Collection[Path]) -> int:
    """Erase the tasks of these keys from the files of all rounds and evaluations of a state, none of which runs; the
    number of files that have changed. `used` are the directories of rounds that are known to have had one
    (`round_samples`).

    Raises LockedError and StoreError, as `erase_from_round`; what is left is done when it is run again.
    """
    of_used = {*used, *(state_dir / TRACKING_DIR / each.name for each in used)}
    found = set(of_used)
    for folder in (state_dir / name for name in ERASED_FOLDERS):
        found |= {each for each in folder.iterdir() if each.is_dir()} if folder.is_dir() else set()
    there = [each for each in sorted(found) if each.is_dir()]
    return sum(_remove_left(each) + erase_from_round(each, keys, used=each in of_used) for each in there)


def _remove_left(directory: Path) -> int:
    """Remove what killed processes left beside the files of a round, unless it runs: nothing says whose it is. A
    running round has no texts of erased tasks."""
    if not any(temporary_of(path.name) for path in _files(directory)):
        return 0
    try:
        with alone_in(directory):
            return sum(remove_temporary(each) for each in _folders(directory))
    except LockedError:
        return 0
    except OSError as error:
        raise _unwritable(directory, error) from error


def erase_from_round(directory: Path, keys: Set[str], *, used: bool = False) -> int:
    """Erase the tasks of these keys from the files of a round that does not run; the number of files that have
    changed. It may be done again at any time. An evaluation (`flywheel evaluate`) has the same files.

    `used` says that the round had one of them, also if its specification does not name it any more (retention
    removes tasks from it, and the rounds of `round_samples` are known). Raises LockedError while a worker runs, and
    StoreError for a file that cannot be read or written.
    """
    if not directory.is_dir() or not (used or _names(directory, keys)):
        return 0
    try:
        with alone_in(directory, f"erase tasks from the files in {directory}"):
            return _erase(directory, keys)
    except OSError as error:
        raise _unwritable(directory, error) from error


def _unwritable(directory: Path, error: OSError) -> StoreError:
    why = f"{error.filename or directory}: {error.strerror or error}"
    hint = "Let this user write there, and run it again."
    return StoreError(f"erase tasks from the files in {directory}", why, hint, retryable=True)


UNPROVABLE: Final = "its probe was made of prompts whose texts were erased, and the others are too few to prove it"


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


def _prompts_of_result(path: Path) -> frozenset[str]:
    """The system prompts in the result of a worker."""
    try:
        sampling = orjson.loads(path.read_bytes()).get("sampling") or {}
        return frozenset(each["text"] for each in sampling["system_prompts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return frozenset()


def tasks_of(directory: Path) -> set[str]:
    """The keys of all tasks of which the worker of a round has texts; none without a specification."""
    try:
        return tasks_named_in(orjson.loads((directory / SPEC_FILE).read_bytes()))
    except (OSError, ValueError):
        return set()


def _erase(directory: Path, keys: Set[str]) -> int:
    # No worker goes on with it: the round has other tasks now.
    clear(directory, is_over=True)
    changed = sum(remove_temporary(each) for each in _folders(directory))
    log = directory / LOG_FILE
    if log.exists() and log.read_bytes() != EMPTIED:
        write_atomic(log, EMPTIED)
        changed += 1
    objects, lists = _json_files(directory)
    # Results count the system prompts of all rollouts: before these are rewritten, it is known which stay.
    prompts = _system_prompts(directory, keys)
    changed += sum(_erase_from_object(path, keys, prompts) for path in objects if path.name != SPEC_FILE)
    changed += sum(_erase_from_lines(path, keys, prompts) for path in lists)
    return changed + sum(_erase_from_object(path, keys, prompts) for path in objects if path.name == SPEC_FILE)


def _folders(directory: Path) -> Iterator[Path]:
    """The directory, and what is below it and can have texts."""
    yield directory
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.is_symlink() and path.name not in WITHOUT_TEXTS:
            yield from _folders(path)


def _files(directory: Path) -> Iterator[Path]:
    for folder in _folders(directory):
        yield from (path for path in sorted(folder.iterdir()) if path.is_file() and not path.is_symlink())


def _json_files(directory: Path) -> tuple[list[Path], list[Path]]:
    """Those with one JSON value, and those with one in each line."""
    files = [path for path in _files(directory) if not path.name.startswith(".")]
    objects, lists = ([path for path in files if path.suffix == suffix] for suffix in (".json", ".jsonl"))
    return objects, lists


def _names(directory: Path, keys: Set[str]) -> bool:
    """Whether the specification, the result or another file with one value names one of these tasks. What is no JSON
    is not looked at; files of lines name no task that the specification does not name."""
    for path in _json_files(directory)[0]:
        with contextlib.suppress(OSError, ValueError):
            value = json.loads(path.read_bytes())
            if without(value, keys) is not value:
                return True
    return False


def _lines(path: Path) -> Iterator[bytes]:
    """The complete lines. An incomplete last one is read by nobody."""
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _parsed(line: bytes) -> Any:
    """The value of a line; `REMOVED` if it is no JSON."""
    for parse in (orjson.loads, json.loads):  # The second one takes NaN, too.
        with contextlib.suppress(ValueError):
            return parse(line)
    return REMOVED


def _left(line: bytes, keys: Set[str], system_prompts: frozenset[str]) -> bytes:
    """What is left of a line: the line itself, another one, or nothing, as of a line that is no JSON."""
    value = _parsed(line)
    left = without(value, keys, system_prompts)
    if left is REMOVED:
        return b""
    return line if left is value else json_line(left)


def _erase_from_lines(path: Path, keys: Set[str], system_prompts: frozenset[str]) -> bool:
    """Rewrite a file of lines without erased tasks, and without an incomplete last line; whether it has changed."""
    with path.open("rb") as file:
        is_torn = bool(torn_line(file))
    changes = is_torn or any(_left(line, keys, system_prompts) is not line for line in _lines(path))
    if changes:
        with whole_file(path) as file:
            file.writelines(_left(line, keys, system_prompts) for line in _lines(path))
    return changes


def _erase_from_object(path: Path, keys: Set[str], system_prompts: frozenset[str]) -> bool:
    """Rewrite a file with one value without erased tasks; whether it has changed. Raises StoreError for a file that
    is no JSON."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        why = "it is no JSON, so that it is unknown whether texts of the tasks are in it"
        raise StoreError(f"erase tasks from {path}", why, "Remove it, and run this again.") from None
    left = without(value, keys, system_prompts)
    if left is value:
        return False
    if left is REMOVED:
        path.unlink()
    else:
        write_json(path, left)
    return True


def _system_prompts(directory: Path, keys: Set[str]) -> frozenset[str]:
    """Those with which other tasks asked the policy: of their prompts, and of the rollouts of the user's agent."""
    found = {""}  # That there was none.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        for task in orjson.loads((directory / SPEC_FILE).read_bytes())["train"]:
            if task["task_id"] not in keys:
                found.update(system_prompts_of(task["prompt"]))
    for line in (line for path in rollout_files(directory) for line in _lines(path)):
        value = _parsed(line)
        if isinstance(value, dict) and value.get("task_id") not in keys:
            found.update(value.get("system_prompts", ()))
    return frozenset(found | {text[:LONGEST_SYSTEM_PROMPT] for text in found})
