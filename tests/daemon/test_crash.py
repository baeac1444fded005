"""Kill -9 at any moment: every reply once, nothing in between left hanging, and only calls in flight paid again."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.factories.config import write_config
from tests.factories.judge_server import JudgeServer
from tests.factories.trace import write_lines
from tests.waiting import wait_for

DATA = Path(__file__).parent.parent / "data" / "studio"
THREADS = 4
KILLS = 8
TASKS = 400


def has_asked(judge: JudgeServer, calls: int, process: subprocess.Popen[bytes]) -> bool:
    """Or whether the process has ended before."""
    return judge.calls >= calls or process.poll() is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_kill_9_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    databases = [Path(shutil.copy(DATA / f"{name}.sqlite", tmp_path)) for name in ("old", "new_v1", "new_v2")]
    with JudgeServer(delay_seconds=0.02) as judge:
        config = write_config(
            tmp_path,
            sources=[{"path": str(path)} for path in databases],
            judge={"base_url": judge.base_url, "model": "judge", "max_thread": THREADS},
            trigger={"min_samples": 100_000},
        )

        def start() -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "flywheel", "run", "--once", "-c", str(config)]
            return warm.Popen(command, stderr=subprocess.DEVNULL)

        killed = 0
        for number in range(KILLS):
            process = start()
            if number == 0:
                # While it reads.
                time.sleep(chance.uniform(0.1, 1.0))
            else:
                # What the last one had in flight gets its verdict: three deaths make a task a dead letter.
                wanted = judge.calls + chance.randint(3 * THREADS, 15 * THREADS)
                wait_for(partial(has_asked, judge, wanted, process), "calls of the judge")
            process.send_signal(signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
        assert killed > 0
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
    with JudgeServer() as judge:
        config = write_config(
            tmp_path,
            sources=[{"path": "tasks.jsonl", "type": "jsonl"}],
            judge={"base_url": judge.base_url, "model": "judge", "max_thread": 16},
            trigger={"min_samples": 100_000},
        )
        command = [sys.executable, "-m", "flywheel", "filter", "-c", str(config)]

        def status() -> dict[str, Any]:
            asked = [sys.executable, "-m", "flywheel", "status", "--json", "-c", str(config)]
            return dict(json.loads(subprocess.run(asked, capture_output=True, check=True).stdout))

        for kill in range(1, 4):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_for(lambda end=kill * TASKS // 4: judge.calls >= end, "calls of the judge", seconds=60)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            told = status()
            decided = told["tasks"]["accepted"] + told["tasks"]["rejected"]
            assert judge.calls - kill * 16 <= decided <= judge.calls
        # The next start books the calls that were in flight.
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        usage = status()["judge"]["by_purpose"]["filter"]
    assert TASKS <= judge.calls <= TASKS + 3 * 16, "only what was in flight is paid twice"
    assert abs(judge.calls - usage["calls"]) <= 3 * 16
    assert usage["prompt_tokens"] >= 100 * usage["calls"]
