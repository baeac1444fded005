"""Kill -9 at any moment: every reply once, nothing in between left hanging, and only calls in flight paid again."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.judge_server import JudgeServer

DATA = Path(__file__).parent.parent / "data" / "studio"
THREADS = 4
KILLS = 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_kill_9_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    databases = [Path(shutil.copy(DATA / f"{name}.sqlite", tmp_path)) for name in ("old", "new_v1", "new_v2")]
    with JudgeServer(delay_seconds=0.02) as judge:
        config = tmp_path / "flywheel.yaml"
        config.write_text(
            json.dumps(
                {
                    "state": {"dir": "state"},
                    "sources": [{"path": str(path)} for path in databases],
                    "judge": {"base_url": judge.base_url, "model": "judge", "max_thread": THREADS},
                    "trigger": {"min_samples": 100_000},
                }
            )
        )

        def start() -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "flywheel", "run", "--once", "-c", str(config)]
            return subprocess.Popen(command, stderr=subprocess.DEVNULL)

        killed = 0
        for _ in range(KILLS):
            process = start()
            time.sleep(chance.uniform(0.5, 4.0))
            process.send_signal(signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
        assert killed > 0
        assert start().wait(timeout=300) == 0
        calls = judge.calls
        assert start().wait(timeout=300) == 0
        assert judge.calls == calls, "a second run paid for verdicts that were stored"

    audit = subprocess.run(
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
