"""Ingestion beside AgentJet's tracing reader, on a database that it can read: `python -m benchmarks.peer --peer DIR`.

DIR is a checkout of https://github.com/modelscope/AgentJet. Its reader knows the old schema only, finds spans named
`ReActAgent.reply`, and takes their `Msg(...)` texts apart with regular expressions: a list of messages or a quotation
mark in an answer ends it with an exception. Hence the database: old schema, and only replies whose texts are plain.

Both sides begin with a database and end with a file of tasks; the second pass finds nothing new. AgentJet's filters
call models, so none is configured. Flywheel also reads the other three quarters of the spans, which hold history,
tool calls and system prompts, and keeps a ledger; the peer does neither.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from benchmarks import measurement, reading
from benchmarks.databases import Database, cached

_PACKAGES: Final = ("ajet", "ajet.task_reader")
_FILTERS: Final = "ajet.task_reader.tracing_reader.filters"


def load(begin: reading.Begin, checkout: Path, path: Path, out: Path) -> int:
    """The peer's pass: from the database to its task file. Returns the number of tasks it knows then."""
    os.environ["LOGURU_LEVEL"] = "ERROR"
    sys.path.insert(0, str(checkout))
    # The packages' own __init__ import the whole trainer, which need not be installed to read a database.
    for name in _PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(checkout.joinpath(*name.split(".")))]
        sys.modules[name] = package
    filters = ModuleType(f"{_FILTERS}.factory")
    filters.build_filters = lambda specs: []  # type: ignore[attr-defined]
    sys.modules[f"{_FILTERS}.factory"] = filters
    package = ModuleType(_FILTERS)
    package.__path__ = [str(checkout.joinpath(*_FILTERS.split(".")))]
    sys.modules[_FILTERS] = package
    reader = importlib.import_module("ajet.task_reader.tracing_reader").TracingReader
    config = {"base_url": str(path), "train_output_path": str(out), "filters": []}
    begin()
    # It prints what it cannot parse.
    with contextlib.redirect_stdout(sys.stderr):
        loaded = reader(SimpleNamespace(feedback_tracing=config))
    return len(loaded.get_training_tasks()) + len(loaded.get_validation_tasks())


def compare(database: Database, checkout: Path, scratch: Path, repetitions: int) -> dict[str, Any]:
    """Both sides in turn, each cold and then once more, every pass in a process of its own."""
    measurement.warm(database.path)
    seconds: dict[str, list[float]] = {key: [] for key in ("cold", "second", "peer_cold", "peer_second")}
    out = scratch / "peer.jsonl"
    found = set()
    for _ in range(repetitions):
        for key in ("peer_cold", "peer_second"):
            passed = measurement.measure(load, checkout, database.path, out)
            seconds[key].append(passed.seconds)
            found.add(passed.value)
        out.unlink()
        for key, new in (("cold", database.truth.tasks), ("second", 0)):
            passed = measurement.measure(reading.ingest, database.path, scratch / "ours")
            if (passed.value["tasks"], passed.value["new"]) != (database.truth.tasks, new):
                sys.exit(f"{key} pass: {passed.value} of {database.truth}")
            seconds[key].append(passed.seconds)
        shutil.rmtree(scratch / "ours")
    peer_tasks = max(found)
    if len(found) != 1 or not peer_tasks:
        sys.exit(f"the peer found {peer_tasks} tasks of {database.truth.tasks}")
    taken = {key: median(many) for key, many in seconds.items()}
    return {
        "cold_vs_peer": round(taken["peer_cold"] / taken["cold"], 3),
        "second_vs_peer": round(taken["peer_second"] / taken["second"], 2),
        "spans": database.truth.spans,
        "tasks": database.truth.tasks,
        "peer_tasks": peer_tasks,
        "peer_commit": _commit(checkout),
        "schema": database.schema,
        "repetitions": repetitions,
        **{f"{key}_seconds": round(value, 3) for key, value in taken.items()},
    }


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    options = measurement.parser("peer", __doc__)
    options.add_argument("--peer", type=Path, required=True, help="a checkout of AgentJet")
    options.add_argument("--spans", type=int)
    options.add_argument("--repetitions", type=int)
    given = options.parse_args()
    checkout = given.peer.absolute()
    if not (checkout / "ajet" / "task_reader" / "tracing_reader" / "connector.py").is_file():
        options.error(f"{given.peer} is no checkout of AgentJet: it has no ajet/task_reader/tracing_reader")
    spans = given.spans or (1_000 if given.quick else 1_000_000)
    repetitions = given.repetitions or (1 if given.quick else 3)
    before = measurement.machine()
    with measurement.folders(given.dir) as (kept, scratch):
        database = cached(kept, spans, "old", plain=True)
        result = compare(database, checkout, scratch, repetitions)
    measurement.report(result, before, as_json=given.json)


if __name__ == "__main__":
    main()
