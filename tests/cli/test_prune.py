"""`flywheel prune` at a terminal."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from flywheel.serving.calls.call_log import CallLog, RecordedCall
from tests.cli.conftest import Run
from tests.factories.config import write_config
from tests.factories.old_round import LONG_AGO, lay_out, put
from tests.factories.state import write_state
from tests.serving.fake_vllm import FakeVllm


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a state with two rounds of long ago that were never deployed."""
    for number in (1, 2):
        directory = tmp_path / "state" / "rounds" / f"r{number:04d}"
        lay_out(directory, FakeVllm(), adapter=True)
        write_state(tmp_path / "state", put, directory, number, adapter=True, finished_at=LONG_AGO)
    return write_config(tmp_path, sources=[])


def test_a_dry_run_says_what_would_go_and_removes_nothing(flywheel: Run, config: Path, tmp_path: Path) -> None:
    ran = flywheel("prune", "--dry-run", "-c", config)
    assert ran.code == 0
    first, _, last = ran.out.splitlines()
    assert first == f"r0001  rejected  {LONG_AGO[:10]}  205 bytes  {tmp_path}/state/rounds/r0001"
    assert last == "2 rounds, 410 bytes: dry run, nothing was removed"
    assert (tmp_path / "state/rounds/r0001/adapter/weights").exists()
    assert flywheel("prune", "--dry-run", "--json", "-c", config).json["bytes"] == 410
    for days in ("-1", "nan", "inf", "1e12", "soon"):
        ran = flywheel("prune", "--keep-days", days, "-c", config)
        assert (ran.code, "--keep-days" in ran.err) == (2, True), days
    config.write_text("state: {dir: elsewhere}\nsources: []\n")
    flywheel("prune", "-c", config).fails(1, "no state at")
    assert not (tmp_path / "elsewhere").exists()


def test_what_was_removed_is_told_and_stays_told(flywheel: Run, config: Path, tmp_path: Path) -> None:
    ran = flywheel("prune", "--json", "-c", config)
    assert ran.json == {
        "removed": [
            {"round": name, "state": "rejected", "finished_at": LONG_AGO, "bytes": 205} for name in ("r0001", "r0002")
        ],
        "kept": [],
        "bytes": 410,
        "call_logs": [],
        "dry_run": False,
    }
    assert not (tmp_path / "state/rounds/r0001/adapter").exists()
    assert flywheel("prune", "-c", config).out == "nothing to remove\n"
    assert "its files were removed" in flywheel("why", "r0001", "-c", config).out


def test_days_on_the_command_line_come_before_the_settings(flywheel: Run, config: Path) -> None:
    assert flywheel("prune", "--keep-days", "1000", "-c", config).out == "nothing to remove\n"
    config.write_text(config.read_text() + "retention: {keep_days: null}\n")
    ran = flywheel("prune", "-c", config)
    assert (ran.code, ran.out) == (0, "nothing to remove\n")
    assert "retention.keep_days is null: files of rounds are kept. --keep-days N" in ran.err
    assert "2 rounds, 410 bytes removed" in flywheel("prune", "--keep-days", "0", "-c", config).out


def test_old_calls_are_removed_from_all_call_logs(flywheel: Run, config: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    logs = [state / "serving" / "calls-8000.db", state / "serving" / "calls-8001.db", state / "calls" / "calls.db"]
    for path in logs:
        with CallLog(path) as log:
            old = RecordedCall("fw-1", "/v1/completions", "base", "", 0, 1, 2, 200, True, request=b"{}")
            log.append(
                [old, replace(old, request_id="fw-2"), replace(old, request_id="fw-3", ended_ns=time.time_ns())]
            )
    flywheel("prune", "-c", config)  # the rounds, and the calls
    for path in logs:
        with CallLog(path) as log:
            log.append([replace(old, request_id=f"fw-{at}") for at in range(4, 9)])
            assert log.state()[1:3] == (3, 8)
    dry = flywheel("prune", "--dry-run", "-c", config)
    assert dry.out == "nothing to remove\n"  # they are behind a new one
    config.write_text(config.read_text() + "serving: {call_log: {keep_days: 0.000000001}}\n")
    dry = flywheel("prune", "--dry-run", "-c", config)
    assert dry.out.splitlines() == [f"{path}  6 calls older than 1e-09 days" for path in logs]
    told = flywheel("prune", "--dry-run", "--json", "-c", config).json["call_logs"]
    assert [(each["path"], each["calls"], each["above"]) for each in told] == [(str(path), 6, 0) for path in logs]
    first, *_ = flywheel("prune", "-c", config).out.splitlines()
    assert first.startswith(f"{logs[0]}  6 calls removed, ")
    assert flywheel("prune", "-c", config).out == "nothing to remove\n"


def test_a_call_log_that_is_too_large_is_cut(flywheel: Run, config: Path, tmp_path: Path) -> None:
    path = tmp_path / "state" / "calls" / "calls.db"
    with CallLog(path) as log:
        call = RecordedCall("", "/v1/completions", "base", "", 0, 1, time.time_ns(), 200, True)
        log.append(replace(call, request_id=f"fw-{at}", response=os.urandom(10_000)) for at in range(100))
    config.write_text(config.read_text() + "serving: {call_log: {max_gb: 0.0005}}\n")
    (line,) = (each for each in flywheel("prune", "--dry-run", "-c", config).out.splitlines() if str(path) in each)
    assert re.fullmatch(rf"{path}  [\d.]+ [KM]iB above 0.0005 GB", line)
    (told,) = flywheel("prune", "--json", "-c", config).json["call_logs"]
    assert 0 < told["calls"] < 100
    assert (told["size"] <= 500_000, told["above"]) == (True, 0)
    with CallLog(path) as log:
        log.append(replace(call, request_id=f"fw-{at}", response=os.urandom(10_000)) for at in range(100, 200))
    config.write_text(config.read_text() + "retention: {keep_days: null}\n")
    (told,) = flywheel("prune", "--json", "-c", config).json["call_logs"]
    assert told["calls"] > 0, "whatever is said of rounds"
    config.write_text(config.read_text().replace("{max_gb: 0.0005}", "false"))
    assert flywheel("prune", "--json", "-c", config).json["call_logs"] == []
