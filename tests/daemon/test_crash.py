"""Kill -9 at any moment: every reply once, nothing in between left hanging, and only calls in flight paid again."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.daemon.following import killed_at
from tests.daemon.killed import POINTS
from tests.factories.config import write_config
from tests.factories.judge_server import JudgeServer
from tests.factories.trace import write_lines
from tests.waiting import SOON

DATA = Path(__file__).parent.parent / "data" / "studio"
THREADS = 4
KILLS = 8
TASKS = 400


class DeadlyJudge(JudgeServer):
    """A judge in one of whose calls the process that asks is killed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._last = sys.maxsize
        self._asking: Future[subprocess.Popen[bytes]] = Future()

    def kill_after(self, calls: int, start: Callable[[], subprocess.Popen[bytes]]) -> int:
        """Start a process and kill it in the call that follows this many; the code with which it ended, also if it
        had nothing to ask any more."""
        self._last, self._asking = self.calls + calls, Future()
        process = start()
        self._asking.set_result(process)
        try:
            return process.wait(SOON)
        finally:
            self._last = sys.maxsize

    def begin(self, request: dict[str, Any], headers: dict[str, str]) -> tuple[int, str]:
        begun = super().begin(request, headers)
        if self.calls > self._last:
            self._asking.result(SOON).send_signal(signal.SIGKILL)
        return begun


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("seed", [1, 2])
def test_kill_9_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    databases = [Path(shutil.copy(DATA / f"{name}.sqlite", tmp_path)) for name in ("old", "new_v1", "new_v2")]
    with DeadlyJudge(delay_seconds=0.02) as judge:
        config = write_config(
            tmp_path,
            sources=[{"path": str(path)} for path in databases],
            judge={"base_url": judge.base_url, "model": "judge", "max_thread": THREADS},
            trigger={"min_samples": 100_000},
        )

        def start() -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "flywheel", "run", "--once", "-c", str(config)]
            return warm.Popen(command, stderr=subprocess.DEVNULL)

        # While it reads.
        killed_at(config, chance.choice(POINTS), chance.randint(1, 3))
        killed = 1
        for _ in range(1, KILLS):
            # What the last one had in flight gets its verdict: three deaths make a task a dead letter.
            code = judge.kill_after(chance.randint(3 * THREADS, 15 * THREADS), start)
            killed += code == -signal.SIGKILL
        assert killed > 1
        assert start().wait(timeout=300) == 0
        calls = judge.calls
        assert start().wait(timeout=300) == 0
        assert judge.calls == calls, "a second run paid for verdicts that were stored"

    audit = warm.run(
        [sys.executable, "-m", "flywheel", "audit", "--json", "-c", str(config)], capture_output=True, check=True
    )
    books = json.loads(audit.stdout)
    assert books["balanced"]
    assert books["pending"] == books["undecided"] == books["dead"] == 0
    labels = [
        json.loads(line)
        for path in databases
        for line in (DATA / f"{path.stem}.labels.jsonl").read_text().splitlines()
    ]
    visible = {label["span_id"] for label in labels if label["user_visible"] and label["answer_in_span"]}
    lines = [json.loads(line) for line in (tmp_path / "state" / "tasks.jsonl").read_text().splitlines()]
    spans = [line["metadata"]["span_id"] for line in lines]
    assert len(spans) == len(set(spans)) == len({line["task_id"] for line in lines})
    assert set(spans) <= visible
    assert books["accepted"] + books["rejected"] == len(spans)
    assert calls <= len(spans) + killed * THREADS


@pytest.mark.slow
def test_kill_9_loses_count_of_no_more_calls_than_are_in_flight(tmp_path: Path) -> None:
    """With a judge that answers at once: finished verdicts are stored as fast as they come."""
    lines = ({"main_query": f"What is {n} plus 1?", "answer": f"It is {n + 1}."} for n in range(TASKS))
    write_lines(tmp_path / "tasks.jsonl", *lines)
    with DeadlyJudge() as judge:
        config = write_config(
            tmp_path,
            sources=[{"path": "tasks.jsonl", "type": "jsonl"}],
            judge={"base_url": judge.base_url, "model": "judge", "max_thread": 16},
            trigger={"min_samples": 100_000},
        )
        command = [sys.executable, "-m", "flywheel", "filter", "-c", str(config)]

        def status() -> dict[str, Any]:
            asked = [sys.executable, "-m", "flywheel", "status", "--json", "-c", str(config)]
            return dict(json.loads(warm.run(asked, capture_output=True, check=True).stdout))

        def start() -> subprocess.Popen[bytes]:
            return warm.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        for kill in range(1, 4):
            assert judge.kill_after(TASKS // 4, start) == -signal.SIGKILL
            told = status()
            decided = told["tasks"]["accepted"] + told["tasks"]["rejected"]
            assert judge.calls - kill * 16 <= decided <= judge.calls
        # The next start books the calls that were in flight.
        warm.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        usage = status()["judge"]["by_purpose"]["filter"]
    assert TASKS <= judge.calls <= TASKS + 3 * 16, "only what was in flight is paid twice"
    assert abs(judge.calls - usage["calls"]) <= 3 * 16
    assert usage["prompt_tokens"] >= 100 * usage["calls"]
