"""Studio databases of any size for the benchmarks, made of the genuine rows of the fixture databases.

`python -m benchmarks.databases --spans N --schema old|new --out FILE`. The same parameters give the same file. What a
reader is to find in it stands beside it in FILE.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks import templates
from benchmarks.templates import SOURCES, Dialogue, Row, Talk, Truth, open_read_only, short_id

SCHEMAS: Final = tuple(SOURCES)
FIRST_SECOND: Final = int(datetime(2025, 1, 1, tzinfo=UTC).timestamp())
SPANS_PER_SECOND: Final = 2
SPEAKERS: Final = 8
"""Conversations under way at once: their spans interleave."""


@dataclass(frozen=True, slots=True)
class Database:
    path: Path
    schema: str
    truth: Truth


def cached(directory: Path, spans: int, schema: str, *, seed: int = 0, plain: bool = False) -> Database:
    """The database of these parameters in `directory`, made if it is not there. Do not write to it: copy it.

    It takes the place of one that an earlier version of this program made.
    """
    made_of = (Path(__file__), Path(templates.__file__), templates.WORDS, *sorted(templates.DATA.glob("*.sqlite")))
    version = hashlib.sha256(b"".join(path.read_bytes() for path in made_of)).hexdigest()[:8]
    name = f"studio-{schema}{'-plain' * plain}-{spans}-{seed}"
    path = directory / f"{name}-{version}.sqlite"
    truth = _truth_file(path)
    # The truth is written last: where it is, the database is whole.
    if truth.exists():
        return Database(path, schema, Truth(**json.loads(truth.read_text())))
    directory.mkdir(parents=True, exist_ok=True)
    for outdated in directory.glob(f"{name}-*.sqlite*"):
        outdated.unlink()
    return generate(path, spans, schema, seed=seed, plain=plain)


def generate(path: Path, spans: int, schema: str, *, seed: int = 0, plain: bool = False) -> Database:
    """Write a database of exactly `spans` spans. `plain`: only replies that need no care to read."""
    rng = random.Random(f"{schema} {spans} {seed}")
    drawn = Talk(schema, plain=plain).draw(rng, spans)
    rng.shuffle(drawn)
    path.unlink(missing_ok=True)
    model = next(iter(SOURCES[schema]))
    target = sqlite3.connect(path, isolation_level=None)
    # The file is no use before it is whole, so nothing need survive a crash.
    target.executescript("PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF; PRAGMA cache_size = -200000; BEGIN;")
    later = _copy_schema(model, target)
    runs: list[str] = []
    width = len(_columns(target, "span_table"))
    target.executemany(insert_sql("span_table", width), _rows(drawn, rng, runs))
    target.executemany(
        insert_sql("run_table", len(_columns(target, "run_table"))), (_run(run, n) for n, run in enumerate(runs))
    )
    for statement in later:
        target.execute(statement)
    # Journal mode and file format are as Studio leaves them: nothing but the rows differs.
    target.execute("COMMIT")
    target.close()
    truth = sum((dialogue.truth for dialogue in drawn), Truth())
    _truth_file(path).write_text(json.dumps(dataclasses.asdict(truth)))
    return Database(path, schema, truth)


def insert_sql(table: str, width: int) -> str:
    return f"INSERT INTO {table} VALUES ({','.join('?' * width)})"  # noqa: S608 - names of our own


def _truth_file(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _copy_schema(model: str, target: sqlite3.Connection) -> list[str]:
    """Make the tables, and tell what is to be made after the rows. Studio's own record of migrations is copied."""
    with open_read_only(model) as source:
        made = source.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        for kind, name, sql in made:
            if kind == "table" and not name.startswith("sqlite_"):
                target.execute(sql)
        for table in ("migrations", "typeorm_metadata"):
            rows = source.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608 - a constant
            target.executemany(insert_sql(table, len(_columns(target, table))), rows)
    source.close()
    return [sql for kind, _, sql in made if kind in ("index", "view")]


def _columns(database: sqlite3.Connection, table: str) -> list[Any]:
    return database.execute(f"PRAGMA table_info({table})").fetchall()


def _run(run: str, number: int) -> Row:
    moment = datetime.fromtimestamp(FIRST_SECOND + number, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return (run, "benchmark", f"run-{number}", moment, "", number, "done")


def _rows(drawn: Sequence[Dialogue], rng: random.Random, runs: list[str]) -> Iterator[Row]:
    """The rows of all dialogues as a server stores them that several clients talk to at once."""
    waiting = iter(drawn)
    second = FIRST_SECOND * SPANS_PER_SECOND

    def conversation() -> Iterator[list[Row]]:
        """One client: some dialogues one after the other, in one conversation."""
        run = short_id(rng)
        runs.append(run)
        for _ in range(rng.randint(1, 6)):
            dialogue = next(waiting, None)
            if dialogue is None:
                return
            own = dialogue.source == "new_v2"
            yield dialogue.fill(rng, second // SPANS_PER_SECOND, None if own else run)

    def client() -> Iterator[Row]:
        for rows in conversation():
            yield from rows

    speaking = [client() for _ in range(SPEAKERS)]
    while speaking:
        place = rng.randrange(len(speaking))
        for _ in range(rng.randint(1, 4)):
            row = next(speaking[place], None)
            if row is None:
                speaking[place] = client()
                row = next(speaking[place], None)
                if row is None:
                    runs.pop()
                    del speaking[place]
                    break
            second += 1
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.databases", description=__doc__)
    parser.add_argument("--spans", type=int, required=True)
    parser.add_argument("--schema", choices=SCHEMAS, default="new")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    made = generate(given.out, given.spans, given.schema, seed=given.seed)
    print(json.dumps({"path": str(made.path), "schema": made.schema, **dataclasses.asdict(made.truth)}))


if __name__ == "__main__":
    main()
