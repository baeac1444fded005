"""How long a round's choice of samples takes: `python -m benchmarks.selection`.

A state with 10,000 accepted tasks is made by the program itself, and the next round chooses 1,000 of them with
`training.coreset`. Half of the questions are English, half are Chinese; a tenth of them repeat another one.
`*_seconds` is the wall time of the whole choice: candidates and their texts are read from the state, compared and
chosen. `*_repeated` is how many of the chosen questions repeat another one that was chosen.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from sqlalchemy import update

from benchmarks import measurement
from flywheel.config.file import Config
from flywheel.daemon.rounds.sample_selection import choose
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.coreset import ORDERS
from flywheel.records.states import TaskState
from flywheel.records.task import Batch, entry_of
from flywheel.records.trace import Reply
from flywheel.store import ledger, rounds
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import tasks

TASKS: Final = 10_000
SIZE: Final = 1_000
START: Final = datetime(2026, 1, 1, tzinfo=UTC)
RUBRIC: Final = Rubric.model_validate({"id": "right", "criteria": [{"id": "right", "value": "Is it right?"}]})


def questions(count: int) -> list[str]:
    """Questions of 8 to 30 words, or of 10 to 40 Chinese characters."""
    drawn = random.Random(1)
    found: list[str] = []
    for number in range(count):
        if number % 10 == 9:
            found.append(drawn.choice(found))
        elif number % 2:
            found.append("".join(chr(0x4E00 + drawn.randrange(2000)) for _ in range(drawn.randint(10, 40))))
        else:
            found.append(" ".join(f"word{drawn.randrange(3000)}" for _ in range(drawn.randint(8, 30))))
    return found


def reply(number: int, query: str) -> Reply:
    at = START + timedelta(seconds=number)
    names = {"span_id": f"s{number}", "trace_id": f"t{number}", "conversation_id": f"c{number}", "agent": "Tutor"}
    return Reply(**names, query=query, answer="It is so.", started_at=at, ended_at=at, model="my-agent")


async def fill(store: Store, asked: list[str]) -> None:
    """Accepted training tasks with these questions."""
    source = await store.write(ledger.source_id, "/studio.db")
    for start in range(0, len(asked), 1000):
        some = [reply(number, query) for number, query in enumerate(asked[start : start + 1000], start)]
        batch = Batch(None, tuple(entry_of(each, "/studio.db") for each in some))
        await store.write(lambda conn, batch=batch: ledger.record_batch(
            conn, source, batch, train_ratio=1.0, split_seed=42
        ))  # fmt: skip
    await store.write(lambda conn: conn.execute(update(tasks).values(state=TaskState.ACCEPTED.value)))


async def measured(count: int, size: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"tasks": count, "size": size}
    with tempfile.TemporaryDirectory() as folder:
        store = await Store.open(Path(folder))
        await fill(store, questions(count))
        for strategy in ORDERS:
            training = {"stages": ["sft"], "coreset": {"size": size, "strategy": strategy}}
            config = Config.model_validate({"training": training, "trigger": {"max_samples": count}})
            begun, cpu = time.perf_counter(), time.process_time()
            chosen, _ = await store.read(choose, config, RUBRIC)
            figures[f"{strategy}_seconds"] = round(time.perf_counter() - begun, 2)
            figures[f"{strategy}_cpu_seconds"] = round(time.process_time() - cpu, 2)
            lines = await store.read(rounds.payloads, chosen.tasks)
            figures[f"{strategy}_repeated"] = len(lines) - len({line["main_query"] for line in lines})
        await store.close()
    return figures


def main() -> None:
    options = measurement.parser("selection", __doc__).parse_args()
    before = measurement.machine()
    count, size = (500, 50) if options.quick else (TASKS, SIZE)
    measurement.report(asyncio.run(measured(count, size)), before, as_json=options.json)


if __name__ == "__main__":
    main()
