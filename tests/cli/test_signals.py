"""Ctrl-C and SIGTERM: no worker is left behind, nothing is lost, and the exit code says so."""

from __future__ import annotations

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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_filter_stores_what_was_in_flight(tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "flywheel.yaml"
    log = tmp_path / "log"
    with JudgeServer() as judge:
        judge.hold(after=5)
        write_config(tmp_path, **judging(judge), daemon={"drain_seconds": 600})
        command = [sys.executable, "-m", "flywheel", "filter", "--json", "-c", str(config)]
        with (
            log.open("w") as errors,
            warm.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            try:
                wait_for(
                    lambda: (judge.in_flight, judge.calls) == (4, 9) or process.poll() is not None, "judge calls"
                )
                process.send_signal(number)
                wait_for(
                    lambda: "stopping" in log.read_text() or process.poll() is not None, "the signal to be heard"
                )
                judge.let_go()
                out, _ = process.communicate(timeout=SOON)
            finally:
                process.kill()
        calls = judge.calls
    err = log.read_text()
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert f"{number.name} stopped it" in err
    told = json.loads(out)
    assert f"{number.name} stopped it" in told["error"]
    assert told["usage"]["calls"] == calls == 9, "what was paid for is told"
    status = ask(config, "status")
    assert status["judge"]["usage"]["calls"] == calls, "and stored"
    assert status["tasks"]["judging"] == 0
    assert status["tasks"]["pending"] > 0
    assert status["balanced"]


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_the_judge(tmp_path: Path) -> None:
    config = tmp_path / "flywheel.yaml"
    with JudgeServer() as judge:
        judge.hold()
        write_config(tmp_path, **judging(judge), daemon={"drain_seconds": 600})
        command = [sys.executable, "-m", "flywheel", "filter", "-c", str(config)]
        log = tmp_path / "log"
        with log.open("w") as output, warm.Popen(command, stdout=output, stderr=output) as process:
            try:
                wait_for(lambda: judge.in_flight == 4 or process.poll() is not None, "judge calls")
                process.send_signal(signal.SIGINT)
                wait_for(lambda: "stopping" in log.read_text(), "the first signal to be heard")
                process.send_signal(signal.SIGTERM)
                wait_for(lambda: process.poll() is not None, "the end")
            finally:
                process.kill()
        assert judge.in_flight == 4, "it did not wait for the judge"
    assert process.returncode == 130
    assert "Traceback" not in log.read_text()
    assert ask(config, "status")["tasks"]["judging"] == 0


@pytest.mark.slow
def test_a_stopped_evaluation_does_not_wait_for_a_judge_that_is_away(tmp_path: Path, free_port: int) -> None:
    judge = {"base_url": f"http://127.0.0.1:{free_port}/v1", "model": "judge", "max_attempts": 1}
    write_config(tmp_path, judge=judge)
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "t", "main_query": "What is 1 plus 1?"}\n')
    log = tmp_path / "log"
    with Endpoint(lambda *_: says("2")) as endpoint, log.open("w") as output:
        model = ["--model", "small", "--base-url", endpoint.base_url]
        command = [sys.executable, "-m", "flywheel", "evaluate", *model, "--benchmark", "tasks.jsonl", "--json"]
        with warm.Popen(command, cwd=tmp_path, stdout=output, stderr=output) as process:
            try:
                wait_for(
                    lambda: "the judge is unreachable" in log.read_text() or process.poll() is not None, "the pause"
                )
                process.send_signal(signal.SIGTERM)
                wait_for(lambda: process.poll() is not None, "the end")
            finally:
                process.kill()
    assert process.returncode == 128 + signal.SIGTERM, log.read_text()
    assert "SIGTERM stopped it" in log.read_text()
    assert "Traceback" not in log.read_text()


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


def start(folder: Path, judge: JudgeServer, command: str, log: Path) -> subprocess.Popen[bytes]:
    (folder / "flywheel.yaml").write_text(
        f"state: {{dir: state}}\nsources: [{{path: {STUDIO / 'new_v1.sqlite'}}}]\n"
        f"judge: {{base_url: '{judge.base_url}', model: judge, max_thread: 4}}\ndaemon: {{drain_seconds: 600}}\n"
    )
    arguments = [sys.executable, "-m", "flywheel", *WITH_LABELS[command]]
    with log.open("wb") as output:
        return warm.Popen(arguments, cwd=folder, stdout=output, stderr=output)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", WITH_LABELS)
def test_what_is_stopped_begins_no_other_call(labelled: Path, command: str, number: signal.Signals) -> None:
    log = labelled / "log"
    at_once = 1 if command == "suggest" else 4
    with JudgeServer(hold_until=1_000_000) as judge, start(labelled, judge, command, log) as process:
        try:
            wait_for(lambda: judge.in_flight == at_once or process.poll() is not None, "judge calls")
            process.send_signal(number)
            wait_for(lambda: "stopping" in log.read_text() or process.poll() is not None, "the signal to be heard")
            judge.let_go()
            wait_for(lambda: process.poll() is not None, "the end")
        finally:
            process.kill()
            judge.let_go()
        assert judge.calls == at_once
    assert process.returncode == 128 + number, log.read_text()
    assert f"{number.name} stopped it" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", WITH_LABELS)
def test_what_is_stopped_twice_waits_for_no_call(labelled: Path, command: str) -> None:
    log = labelled / "log"
    at_once = 1 if command == "suggest" else 4
    with JudgeServer(hold_until=1_000_000) as judge, start(labelled, judge, command, log) as process:
        try:
            wait_for(lambda: judge.in_flight == at_once or process.poll() is not None, "judge calls")
            process.send_signal(signal.SIGINT)
            wait_for(lambda: "stopping" in log.read_text() or process.poll() is not None, "the signal to be heard")
            process.send_signal(signal.SIGINT)
            wait_for(lambda: process.poll() is not None, "the end")
            assert judge.in_flight == at_once, "it did not wait for the judge"
        finally:
            process.kill()
            judge.let_go()
    assert process.returncode == 130, log.read_text()
    assert "Traceback" not in log.read_text()
