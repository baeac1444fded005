"""Ctrl-C and SIGTERM: no worker is left behind, nothing is lost, and the exit code says so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import waiting, warm
from tests.conftest import POLICY
from tests.factories.config import write_config
from tests.factories.daemon import ask, workers
from tests.factories.judge_server import JudgeServer
from tests.factories.model_endpoint import Endpoint, says

SOON = 120.0
STUDIO = Path(__file__).parent.parent / "data" / "studio"


@contextlib.contextmanager
def started(folder: Path, *arguments: str, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """`flywheel ARGUMENTS…` in `folder`, whose outputs go to `log` there."""
    command = [sys.executable, "-m", "flywheel", *arguments]
    with (
        (folder / "log").open("w") as log,
        warm.Popen(command, cwd=folder, stdout=stdout or log, stderr=log, text=True) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def heard(folder: Path, process: subprocess.Popen[str], text: str = "stopping") -> None:
    """Wait until the log has the text."""
    wait_for(lambda: text in (folder / "log").read_text() or process.poll() is not None, text)


wait_for = partial(waiting.wait_for, seconds=SOON)


@pytest.fixture
def config(due_config: Callable[..., Path], tmp_path: Path) -> Iterator[Path]:
    yield due_config(model={"base": str(POLICY)})
    for pid in workers(tmp_path):
        os.kill(pid, signal.SIGKILL)


def judging(judge: JudgeServer) -> dict[str, Any]:
    return {
        "sources": [{"path": str(STUDIO / "new_v1.sqlite")}],
        "judge": {"base_url": judge.base_url, "model": "judge", "max_thread": 4},
    }


@pytest.mark.parametrize(
    ("arguments", "number", "left"),
    [
        (["round"], signal.SIGINT, "r0001 is planned"),
        pytest.param(["run", "--once"], signal.SIGTERM, "r0001 is planned", marks=pytest.mark.slow),
        pytest.param(
            ["round", "--debug"], signal.SIGTERM, "only the judge's usage was stored", marks=pytest.mark.slow
        ),
    ],
)
def test_a_stopped_round_leaves_no_worker_and_goes_on_later(
    config: Path, arguments: list[str], number: signal.Signals, left: str
) -> None:
    command = [sys.executable, "-m", "flywheel", *arguments, "-c", str(config)]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: workers(config.parent) or process.poll() is not None, "the worker")
            process.send_signal(number)
            out, err = process.communicate(timeout=SOON)
        finally:
            process.kill()
    assert process.returncode == 128 + number, err
    assert workers(config.parent) == []
    forecast = "10 tasks: 4 held out; of 6 for training 6 usable.\n"
    assert out == (forecast if arguments[0] == "round" else ""), "no result"
    assert "Traceback" not in err
    [said] = [line for line in err.splitlines() if line.startswith("flywheel: ")]
    assert f"{number.name} stopped it" in said
    assert left in said
    status = ask(config, "status")
    assert status["balanced"]
    if "--debug" in arguments:
        assert (status["live_round"], status["tasks"]["reserved"]) == (None, 0)
    else:
        live = status["live_round"]
        assert (live["round"], live["state"], live["attempt"]) == ("r0001", "planned", 1)
        assert status["tasks"]["reserved"] == 6


@pytest.mark.slow
def test_a_stopped_filter_stores_what_was_in_flight(tmp_path: Path) -> None:
    with JudgeServer() as judge:
        judge.hold(after=5)
        config = write_config(tmp_path, **judging(judge), daemon={"drain_seconds": 600})
        with started(tmp_path, "filter", "--json", stdout=subprocess.PIPE) as process:
            wait_for(lambda: (judge.in_flight, judge.calls) == (4, 9) or process.poll() is not None, "judge calls")
            process.send_signal(signal.SIGTERM)
            heard(tmp_path, process)
            judge.let_go()
            out, _ = process.communicate(timeout=SOON)
        calls = judge.calls
    err = (tmp_path / "log").read_text()
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert "SIGTERM stopped it" in err
    told = json.loads(out)
    assert "SIGTERM stopped it" in told["error"]
    assert told["usage"]["calls"] == calls == 9, "what was paid for is told"
    status = ask(config, "status")
    assert status["judge"]["usage"]["calls"] == calls, "and stored"
    assert status["tasks"]["judging"] == 0
    assert status["tasks"]["pending"] > 0
    assert status["balanced"]


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_the_judge(tmp_path: Path) -> None:
    with JudgeServer() as judge:
        judge.hold()
        config = write_config(tmp_path, **judging(judge), daemon={"drain_seconds": 600})
        with started(tmp_path, "filter") as process:
            wait_for(lambda: judge.in_flight == 4 or process.poll() is not None, "judge calls")
            process.send_signal(signal.SIGINT)
            heard(tmp_path, process)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: process.poll() is not None, "the end")
        assert judge.in_flight == 4, "it did not wait for the judge"
    assert process.returncode == 130
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert ask(config, "status")["tasks"]["judging"] == 0


@pytest.mark.slow
def test_a_stopped_evaluation_does_not_wait_for_a_judge_that_is_away(tmp_path: Path, free_port: int) -> None:
    judge = {"base_url": f"http://127.0.0.1:{free_port}/v1", "model": "judge", "max_attempts": 1}
    write_config(tmp_path, judge=judge)
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "t", "main_query": "What is 1 plus 1?"}\n')
    with Endpoint(lambda *_: says("2")) as endpoint:
        model = ("--model", "small", "--base-url", endpoint.base_url, "--benchmark", "tasks.jsonl")
        with started(tmp_path, "evaluate", *model, "--json") as process:
            heard(tmp_path, process, "the judge is unreachable")
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: process.poll() is not None, "the end")
    log = (tmp_path / "log").read_text()
    assert process.returncode == 143, log
    assert "SIGTERM stopped it" in log and "Traceback" not in log


WITH_LABELS = {
    "calibrate": ["rubric", "calibrate", "rubric.yaml", "--labels", "labels.jsonl"],
    "suggest": ["rubric", "suggest", "--labels", "labels.jsonl"],
    "against": ["filter", "--against", "rubric.yaml"],
}


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """A folder with labels, a rubric and a source."""
    labels = [{"query": f"{n}?", "answer": str(n), "verdict": "accept" if n % 2 else "reject"} for n in range(40)]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(label) + "\n" for label in labels))
    (tmp_path / "rubric.yaml").write_text("version: 1\nid: x\ncriteria: [{id: right, value: It is right.}]\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "numbers"),
    [
        ("calibrate", [signal.SIGINT]), ("suggest", [signal.SIGTERM]), ("against", [signal.SIGTERM]),
        *((command, [signal.SIGINT] * 2) for command in WITH_LABELS),
    ],
)  # fmt: skip
def test_what_is_stopped_begins_no_other_call_and_stopped_twice_waits_for_none(
    labelled: Path, command: str, numbers: list[signal.Signals]
) -> None:
    at_once = 1 if command == "suggest" else 4
    with JudgeServer(hold_until=1_000_000) as judge:
        write_config(labelled, **judging(judge), daemon={"drain_seconds": 600})
        with started(labelled, *WITH_LABELS[command]) as process:
            wait_for(lambda: judge.in_flight == at_once or process.poll() is not None, "judge calls")
            process.send_signal(numbers[0])
            heard(labelled, process)
            for number in numbers[1:]:
                process.send_signal(number)
            if len(numbers) == 1:
                judge.let_go()
            wait_for(lambda: process.poll() is not None, "the end")
            assert len(numbers) == 1 or judge.in_flight == at_once, "it did not wait for the judge"
        assert judge.calls == at_once
    log = (labelled / "log").read_text()
    assert process.returncode == 128 + numbers[0], log
    assert f"{numbers[0].name} stopped it" in log or len(numbers) > 1
    assert "Traceback" not in log
