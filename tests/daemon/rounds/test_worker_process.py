"""The worker as a process: adopted only if it is ours, stopped by its process id, heard even when it dies."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flywheel.config.file import Config
from flywheel.daemon.rounds.worker_process import WorkerProcess, result_of
from flywheel.errors import TrainError
from flywheel.records.round import RoundResult
from flywheel.system.files import write_json
from flywheel.training.data.round_directory import go_on
from tests.daemon.rounds.workers import stray_worker, works
from tests.factories.round import round_spec


@pytest.fixture
def impostor(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with stray_worker(tmp_path) as process:
        yield process


def test_a_reused_process_id_is_not_adopted(tmp_path: Path) -> None:
    assert WorkerProcess.adopt(tmp_path, os.getpid()) is None
    assert WorkerProcess.adopt(tmp_path, None) is None


@pytest.mark.slow
async def test_the_worker_of_an_earlier_daemon_is_adopted_and_stopped(
    tmp_path: Path, impostor: subprocess.Popen[bytes]
) -> None:
    assert WorkerProcess.adopt(tmp_path / "another-round", impostor.pid) is None
    worker = WorkerProcess.adopt(tmp_path, impostor.pid)
    await worker.stop()
    assert impostor.wait(30) != 0
    assert WorkerProcess.adopt(tmp_path, impostor.pid) is None


def test_the_workers_own_words_are_passed_on(tmp_path: Path) -> None:
    write_json(
        tmp_path / "error.json",
        {"error": "no GPU has 40 GB free", "hint": "Use a smaller model.", "retryable": False},
    )
    with pytest.raises(TrainError, match=r"no GPU has 40 GB free\. Use a smaller model\.") as caught:
        result_of(tmp_path)
    assert not caught.value.retryable


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "died"),
    [
        ("kill -9 $$", "died of SIGKILL, often because memory ran out, (out of luck)"),
        ("kill -SEGV $$", "died of SIGSEGV (out of luck)"),
        ("exit 143", "died of SIGTERM (out of luck)"),
        ("exit 3", "died with exit code 3 (out of luck)"),
    ],
)
async def test_a_death_names_its_signal_and_the_last_line_of_the_workers_own_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, died: str
) -> None:
    works(tmp_path, monkeypatch, f"echo begun; echo out of luck; {end}")
    worker = await WorkerProcess.start(tmp_path / "r0001", round_spec())
    code = await worker.wait()
    with pytest.raises(TrainError, match=re.escape(died)) as caught:
        result_of(worker.dir, code)
    assert caught.value.retryable


async def test_what_an_earlier_worker_said_last_is_not_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.log").write_text("out of memory\n")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    worker = await WorkerProcess.start(tmp_path, round_spec())
    with pytest.raises(TrainError, match=r"its worker died with exit code 1\. See") as caught:
        result_of(tmp_path, await worker.wait())
    assert "memory" not in str(caught.value)


def test_the_result_wins_over_everything(tmp_path: Path) -> None:
    result = RoundResult(round_id="r0001", outcome="refused", reason="no spread")
    write_json(tmp_path / "result.json", result.model_dump(mode="json"))
    assert result_of(tmp_path) == result


TORN = "result.json cannot be read"


@pytest.mark.parametrize(
    ("name", "written", "why"),
    [
        ("result.json", '{"round_id": "r0001", "outcome": "trained", "of_tomorrow": 1}', TORN),
        ("result.json", '{"round_id":', TORN),
        ("result.json", "", TORN),
        *(("error.json", written, "its worker died") for written in ("[]", "{}", "3", '"text"')),
    ],
)
def test_a_result_of_another_version_and_a_torn_one_start_the_round_again(
    tmp_path: Path, name: str, written: str, why: str
) -> None:
    (tmp_path / name).write_text(written)
    with pytest.raises(TrainError, match=why) as caught:
        result_of(tmp_path)
    assert caught.value.retryable


@pytest.mark.slow
async def test_whoever_starts_a_worker_says_that_it_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in the worker's log as well, which nobody watches."""
    (tmp_path / "flow.py").write_text("async def run(task, model):\n    return 0.0\n")
    settings = Config(rollout={"agent": {"workflow": f"{tmp_path}/flow.py:run"}}).model_dump(mode="json")
    spec = round_spec(settings=settings)
    works(tmp_path, monkeypatch, "exit 0")
    for correct, said in ((False, False), (True, True)):
        go_on(tmp_path, spec)
        if correct:
            (tmp_path / "flow.py").write_text("async def run(task, model):\n    return 1.0\n")
        with caplog.at_level(logging.WARNING):
            await (await WorkerProcess.start(tmp_path, spec)).wait()
        why = f"r0001 starts over: since its last attempt, these have changed: {tmp_path}/flow.py"
        assert (why in caplog.messages) == said
