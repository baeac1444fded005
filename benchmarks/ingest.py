"""Ingestion against a bare loop over the same rows: `python -m benchmarks.ingest`.

`cold_vs_floor` is the speed of reading rows to whole replies relative to that loop, `ingest_vs_floor` that of a whole
first ingestion with state and task file, `rss_growth_mb` what the latter adds to the memory of its process. One
repetition with a million spans needs 228 s of processor time, most of it on two cores at once, and a minute more if
the database has to be made; more repetitions say more on a machine that others use, too.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import measurement, reading
from benchmarks.databases import SCHEMAS, Database, cached


def compare(database: Database, scratch: Path, repetitions: int) -> dict[str, Any]:
    """All sides in turn, `repetitions` times. SystemExit if one of them missed something."""
    measurement.warm(database.path)
    floor, cold, ingest = [], [], []
    for _ in range(repetitions):
        floor.append(measurement.measure(reading.floor, database.path))
        cold.append(measurement.measure(reading.cold, database.path, scratch / "cold"))
        ingest.append(measurement.measure(reading.ingest, database.path, scratch / "ingest"))
        shutil.rmtree(scratch / "cold")
        shutil.rmtree(scratch / "ingest")
    truth = database.truth
    for told in ingest:
        found = (told.value["replies"], told.value["tasks"], told.value["dead"])
        if "error" in told.value or found != (truth.replies, truth.tasks, 0):
            sys.exit(f"ingested {found} replies, tasks and dead rows of {truth}: {told.value.get('error', '')}")
    if {one.value for one in floor} != {truth.spans} or {one.value for one in cold} != {truth.replies}:
        sys.exit(f"read {floor[0].value} rows and {cold[0].value} replies of {truth}")
    sides = {"floor": floor, "cold": cold, "ingest": ingest}
    seconds = {name: median(one.seconds for one in many) for name, many in sides.items()}
    cpu = {name: median(one.cpu_seconds for one in many) for name, many in sides.items()}
    return {
        "cold_vs_floor": round(seconds["floor"] / seconds["cold"], 3),
        "ingest_vs_floor": round(seconds["floor"] / seconds["ingest"], 3),
        "rss_growth_mb": round(max(one.growth_mb for one in ingest), 1),
        "cold_rss_growth_mb": round(max(one.growth_mb for one in cold), 1),
        "spans": truth.spans,
        "replies": truth.replies,
        "tasks": truth.tasks,
        "schema": database.schema,
        "repetitions": repetitions,
        "spans_per_second": round(truth.spans / seconds["ingest"]),
        **{f"{name}_seconds": round(taken, 3) for name, taken in seconds.items()},
        **{f"{name}_cpu_seconds": round(spent, 3) for name, spent in cpu.items()},
    }


def main() -> None:
    options = measurement.parser("ingest", __doc__)
    options.add_argument("--spans", type=int)
    options.add_argument("--schema", choices=SCHEMAS, default="new")
    options.add_argument("--repetitions", type=int)
    given = options.parse_args()
    spans = given.spans or (1_000 if given.quick else 1_000_000)
    repetitions = given.repetitions or 1
    before = measurement.machine()
    with measurement.folders(given.dir) as (kept, scratch):
        result = compare(cached(kept, spans, given.schema), scratch, repetitions)
    measurement.report(result, before, as_json=given.json)


if __name__ == "__main__":
    main()
