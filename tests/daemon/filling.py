"""A process that fills a source as its owner would, until its standard input ends: `python -m tests.daemon.filling`.

A database gets the rows of a fixture over and over, under new ids, in commits of a few rows that cut traces in two. A
file gets lines, some of them in two writes. What was begun is finished before it ends.
"""

from __future__ import annotations

import json
import random
import select
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.sources.studio.writer import renamed

PAUSE_SECONDS = 0.1


def ended(seconds: float) -> bool:
    """Wait, or until the standard input ends."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def in_commits(name: str, chance: random.Random) -> Iterator[Sequence[tuple[Any, ...]]]:
    for cycle in range(1_000):
        every = renamed(name, cycle)
        while every:
            size = chance.randint(2, 30)
            yield every[:size]
            every = every[size:]
        yield ()


def fill_database(path: Path, name: str, chance: random.Random) -> None:
    database = sqlite3.connect(path, timeout=5, isolation_level=None)
    is_ending = False
    for commit in in_commits(name, chance):
        if is_ending and not commit:
            break
        if commit:
            database.execute("BEGIN IMMEDIATE")
            database.executemany(f"INSERT INTO span_table VALUES ({','.join('?' * len(commit[0]))})", commit)
            database.execute("COMMIT")
        is_ending = is_ending or ended(PAUSE_SECONDS)
    database.close()


def fill_lines(path: Path, chance: random.Random) -> None:
    number = 0
    with path.open("ab", buffering=0) as file:
        while not ended(PAUSE_SECONDS):
            for _ in range(chance.randint(1, 4)):
                number += 1
                line = (
                    json.dumps({"main_query": f"What is {number} + 1?", "answer": str(number + 1)}).encode() + b"\n"
                )
                cut = chance.randrange(len(line))
                file.write(line[:cut])
                file.write(line[cut:])


def main() -> None:
    path, name, seed = sys.argv[1:]
    if name == "jsonl":
        fill_lines(Path(path), random.Random(int(seed)))
    else:
        fill_database(Path(path), name, random.Random(int(seed)))


if __name__ == "__main__":
    main()
