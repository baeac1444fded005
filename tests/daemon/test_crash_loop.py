"""A task that is in work whenever the process ends: three times, then it is a dead letter and the others go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flywheel.daemon.judging.judging import TaskJudging
from flywheel.records.states import TaskState
from flywheel.store import claims, dead_letters
from flywheel.store.kernel.database import Store
from tests import warm
from tests.daemon.conftest import Make
from tests.daemon.filter_bench import questions, states, tell
from tests.factories.config import write_config
from tests.factories.judge_server import JudgeServer
from tests.factories.state import execute
from tests.factories.trace import write_lines
from tests.factories.verdict import settle, undecided
from tests.waiting import SOON

COUNT = 10
POISON = "What is the poisoned question?"


class Flywheel:
    """A configuration with a file of tasks, one of which ends the process that judges it."""

    def __init__(self, folder: Path, number: int | None) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.number = number
        self.asked_of_poison = 0
        self.state = folder / "state" / "state.db"
        self.config = folder / "flywheel.yaml"
        self.source = folder / "tasks.jsonl"
        lines = [{"question": f"What is {n} + 1?", "answer": f"\\boxed{{{n + 1}}}"} for n in range(COUNT - 1)]
        lines.insert(COUNT // 2, {"question": POISON, "answer": "\\boxed{0}"})
        write_lines(self.source, *lines)

    def verdict(self, question: str, _answer: str) -> bool:
        if question == POISON:
            self.asked_of_poison += 1
            if self.number is not None:
                self.process.send_signal(self.number)
                self.process.wait(SOON)  # it has ended without an answer
        return True

    def start(self, judge: JudgeServer, *arguments: str) -> int:
        write_config(
            self.config.parent,
            sources=[{"type": "jsonl", "path": str(self.source)}],
            judge={"base_url": judge.base_url, "model": "judge", "max_thread": 4},
            trigger={"min_samples": 100_000},
            daemon={"drain_seconds": 0.1},
        )
        command = [sys.executable, "-m", "flywheel", *arguments, "-c", str(self.config)]
        with warm.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            self.process = process
            _, self.said = process.communicate(timeout=300)
        return process.returncode

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return execute(self.state, query)

    def crashes(self) -> list[tuple[Any, ...]]:
        return self.rows(f"SELECT state, crashes FROM tasks WHERE json_extract(payload, '$.main_query') = '{POISON}'")


@pytest.mark.slow
def test_a_task_on_which_the_process_dies_three_times_is_a_dead_letter(tmp_path: Path) -> None:
    flywheel = Flywheel(tmp_path, signal.SIGKILL)
    with JudgeServer(flywheel.verdict) as judge:
        ends = [flywheel.start(judge, "run", "--once") for _ in range(4)]
        assert ends == [-signal.SIGKILL] * 3 + [0], flywheel.said.decode()
        assert "is a dead letter: the process died 3 times in a row while judging it" in flywheel.said.decode()
        assert flywheel.asked_of_poison == 3
        assert flywheel.rows("SELECT state, count(*) FROM tasks GROUP BY state ORDER BY state") == [
            ("accepted", COUNT - 1),
            ("dead", 1),
        ]
        ((kind, error),) = flywheel.rows("SELECT kind, error FROM dead_letters")
        assert (kind, error) == (
            "task",
            "while it was judged, the process ended 3 times in a row: killed, crashed or stopped by the watchdog",
        )
        # Retried by hand, it has as many chances again; and now the process lives.
        flywheel.number = None
        assert flywheel.start(judge, "dead-letters", "retry", "1") == 0
        assert flywheel.crashes() == [("pending", 0)]
        assert flywheel.start(judge, "run", "--once") == 0
        assert flywheel.crashes() == [("accepted", 0)]
    audit = warm.run(
        [sys.executable, "-m", "flywheel", "audit", "--json", "-c", str(flywheel.config)],
        capture_output=True,
        check=True,
    )
    assert json.loads(audit.stdout)["balanced"]


@pytest.mark.slow
def test_a_stop_is_no_crash(tmp_path: Path) -> None:
    flywheel = Flywheel(tmp_path, signal.SIGTERM)
    with JudgeServer(flywheel.verdict) as judge:
        for times in range(1, 5):
            assert flywheel.start(judge, "run", "--once") != 0
            assert flywheel.asked_of_poison == times
            assert flywheel.crashes() == [("pending", 0)]
        assert flywheel.rows("SELECT count(*) FROM dead_letters") == [(0,)]
        flywheel.number = None
        assert flywheel.start(judge, "run", "--once") == 0
        assert flywheel.crashes() == [("accepted", 0)]


@pytest.mark.slow
async def test_what_was_in_work_is_judged_one_by_one_after_a_crash(
    make: Make, store: Store, judge: JudgeServer
) -> None:
    await tell(store, *questions(*(f"What is {n} + 1?" for n in range(6))))
    await store.write(claims.claim, 4, "r", "j")
    assert await store.write(claims.recover) == (4, [])
    judge.delay_seconds = 0.05  # calls that were made at once would be in flight at once
    judge.hold(after=4, until=2)
    alone: list[int] = []
    filtering = TaskJudging(store, make())
    report = await filtering.run(on_judged=lambda _: alone.append(judge.most_in_flight))
    assert (report.judged, judge.calls) == (6, 6)
    assert alone[:4] == [1, 1, 1, 1]
    assert judge.most_in_flight == 2, "those that were not in work are judged together"
    assert await states(store) == ["accepted"] * 6
    assert not await store.read(claims.suspects)


async def test_a_verdict_between_two_crashes_starts_the_count_anew(store: Store) -> None:
    await tell(store, *questions("What is 1 + 1?"))
    await store.write(claims.claim, 9, "r", "j")
    for _ in range(claims.CRASHES - 1):
        await store.write(claims.recover)
        (task,) = await store.write(claims.claim, 1, "r", "j", True)
    await store.write(settle, task.id, undecided(), "r", "j", 0.0)
    for _ in range(claims.CRASHES - 1):
        assert len(await store.write(claims.claim, 9, "r", "j")) + len(
            await store.write(claims.claim, 1, "r", "j", True)
        )
        assert (await store.write(claims.recover))[0] == 1
    assert await store.read(dead_letters.count) == {"open": 0, "retried": 0, "dropped": 0}


async def test_an_estimate_counts_what_was_in_work(make: Make, store: Store) -> None:
    await tell(store, *questions(*(f"What is {n} + 1?" for n in range(5))))
    await store.write(claims.claim, 3, "r", "j")
    await store.write(claims.recover)
    filtering = TaskJudging(store, make())
    assert (await filtering.preview()).calls == 5
    assert (await filtering.preview(limit=2)).calls == 2
    assert await states(store) == [TaskState.PENDING.value] * 5
