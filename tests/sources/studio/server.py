"""Writes to its database as a Studio server does.

`python -m tests.sources.studio.server PATH NAME SEED FIRST_CYCLE COMMITS PAUSE`: NAME is a fixture, whose rows it
stores over and over under new ids, with pauses of PAUSE seconds on average, until it has made COMMITS or its standard
input ends. The cycle it is in is finished then. The old server (generation 1) waits a second for a lock; the new one
waits five, and spans that come a second time are updated in their rows. The result is printed as JSON.
"""

from __future__ import annotations

import json
import random
import select
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from tests.sources.studio.writer import GENERATION, empty_like, renamed

BUSY_SECONDS = {"generation 1": 1.0, "generation 2": 5.0}
MOST_ROWS = 108

Row = tuple[Any, ...]
ID, ATTRIBUTES = 0, {"generation 1": 5, "generation 2": 10}


def filled(path: Path, name: str, cycles: int) -> Path:
    """The database before the server starts."""
    empty_like(name, path)
    database = sqlite3.connect(path)
    for cycle in range(cycles):
        store(database, name, renamed(name, cycle))
    database.commit()
    database.close()
    return path


def commits(name: str, seed: int, first_cycle: int) -> Iterator[list[Row]]:
    """What the server stores, always the same for a seed; an empty one ends each cycle."""
    chance = random.Random(seed)
    agents: list[Row] = []
    for cycle in count(first_cycle):
        every = renamed(name, cycle)
        while every:
            size = min(MOST_ROWS, 2 + int(chance.expovariate(1 / 15)))
            commit, every = every[:size], every[size:]
            if GENERATION[name] == "generation 2":
                agents += [row for row in commit if '"invoke_agent"' in row[ATTRIBUTES["generation 2"]]]
                sent = {row[ID] for row in commit}
                again = [row for row in agents if row[ID] not in sent]
                for row in chance.sample(again, k=min(len(again), chance.choice((0, 0, 0, 1, 3)))):
                    commit.append(changed(row, chance.choice(("", f" (said again in {chance.randrange(10**6)})"))))
            yield commit
        yield []


def changed(row: Row, more: str) -> Row:
    """A span that is sent again, with something more at the end of its answer."""
    place = ATTRIBUTES["generation 2"]
    attributes = json.loads(row[place])
    for message in attributes["gen_ai"].get("output", {}).get("messages", [])[-1:]:
        if more:
            message["parts"].append({"type": "text", "content": more})
    return (*row[:place], json.dumps(attributes), *row[place + 1 :])


def store(database: sqlite3.Connection, name: str, commit: Sequence[Row]) -> None:
    """Look which rows are there, as an object mapper does, update those and insert the others."""
    known = set()
    for row in commit:
        known |= {found for (found,) in database.execute("SELECT id FROM span_table WHERE id = ?", (row[ID],))}
    place = ATTRIBUTES[GENERATION[name]]
    for row in commit:
        if row[ID] in known:
            database.execute(
                "UPDATE span_table SET attributes = ?, parentSpanId = parentSpanId WHERE id = ?",
                (row[place], row[ID]),
            )
        else:
            database.execute(f"INSERT INTO span_table VALUES ({','.join('?' * len(row))})", row)


def serve(path: Path, name: str, seed: int, first_cycle: int, wanted: int, pause: float) -> dict[str, Any]:
    database = sqlite3.connect(path, timeout=BUSY_SECONDS[GENERATION[name]], isolation_level=None)
    database.execute("PRAGMA journal_mode = DELETE")
    chance = random.Random(seed)
    done, failures, longest, is_ending = 0, [], 0.0, False
    for commit in commits(name, seed, first_cycle):
        if not commit:
            if is_ending:
                break
            continue
        began = time.perf_counter()
        try:
            database.execute("BEGIN TRANSACTION")
            store(database, name, commit)
            database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            failures.append(f"commit {done}: {error}")
            break
        longest = max(longest, time.perf_counter() - began)
        done += 1
        if is_ending:
            time.sleep(0.1 * pause)
        else:
            seconds = chance.uniform(0.1, 1.9) * pause
            is_ending = done >= wanted or bool(select.select([sys.stdin], [], [], seconds)[0])
    database.close()
    return {"commits": done, "failures": failures, "longest_commit_ms": round(longest * 1000, 1)}


def main() -> None:
    path, name, seed, first_cycle, wanted, pause = sys.argv[1:]
    json.dump(serve(Path(path), name, int(seed), int(first_cycle), int(wanted), float(pause)), sys.stdout)


if __name__ == "__main__":
    main()
