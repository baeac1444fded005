"""`flywheel demo`: recorded replies and a recorded round, judged and shown, as a newcomer sees it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from demo import recording
from demo.recording import RecordingError
from flywheel.cli.demo import recorded_round
from flywheel.cli.demo.recorded_round import REPLIES_FILE, ROUND_FILE
from flywheel.errors import EXIT_FAILED
from flywheel.records.round import METRICS_FILE
from tests import warm
from tests.factories.text_places import place_of
from tests.factories.web import address_in
from tests.waiting import wait_for

WAIT_SECONDS = 300
DEMO = [sys.executable, "-m", "flywheel", "demo"]
PAGES = ("", "tasks", "rounds", "rounds/r0001", "rollouts/r0001", "gate", "gate/r0001")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a demo, and what it printed."""
    folder = tmp_path_factory.mktemp("shown") / "demo"
    command = [*DEMO, "--no-browser", "--dir", str(folder)]
    wide = {**os.environ, "COLUMNS": "120"}
    done = warm.run(command, env=wide, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def status_of(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "flywheel", "status", "--json", "-c", str(folder / "flywheel.yaml")]
    done = warm.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=True)
    status: dict[str, Any] = json.loads(done.stdout)
    return status


@pytest.mark.slow
def test_the_table(shown: tuple[Path, str]) -> None:
    folder, printed = shown
    found = re.findall(r"^(base model|demo-agent@r0001) +(\d+) +(\d+) +(\d+)% *$", printed, re.MULTILINE)
    judged = {name: int(number) for name, number, _, _ in found}
    shares = {name: int(share) for name, *_, share in found}
    assert set(shares) == {"base model", "demo-agent@r0001"}
    assert shares["demo-agent@r0001"] > shares["base model"] > 0
    replies = sum(judged.values())
    assert f"{replies} replies of an AgentScope Studio database" in printed
    assert "no model was asked" in printed
    assert "are recorded" in printed and "nothing was trained" in printed
    for kind in ("accepted", "rejected"):
        assert kind in printed
    state = folder / "state"
    files = [path.relative_to(state).as_posix() for path in state.rglob("*") if path.is_file()]
    assert {file for file in files if len(place_of(file)) != 1} == set(), "`forget` would miss it"
    command = [*DEMO, "--no-browser", "--dir", str(folder)]
    again = warm.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert again.returncode == EXIT_FAILED and "is not empty" in again.stderr


ROOT = Path(__file__).parents[2]


def outputs(page: str, mark: str) -> list[str]:
    """The lines of the block that has this text, without blanks at their ends and between cells."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    [block] = [each for each in blocks if mark in each]
    return [" ".join(line.split()) for line in block.splitlines() if line.strip() not in ("", "…")]


@pytest.mark.slow
def test_the_pages_show_what_it_prints(shown: tuple[Path, str]) -> None:
    folder, printed = shown
    told = [printed]
    for command in (["why", "r0001"], ["rollouts", "r0001"]):
        arguments = [sys.executable, "-m", "flywheel", *command, "-c", str(folder / "flywheel.yaml")]
        told.append(
            subprocess.run(arguments, capture_output=True, text=True, timeout=WAIT_SECONDS, check=True).stdout
        )
    lines = {" ".join(line.split()) for line in "\n".join(told).splitlines()}
    for page, mark in (
        ("README.md", "answered by"),
        *(("docs/start/first-round.md", each) for each in ("held-out:", "step 1")),
    ):
        assert set(outputs(page, mark)) <= lines


@pytest.mark.slow
def test_the_recorded_round_is_stored_as_if_it_had_been_run(shown: tuple[Path, str]) -> None:
    folder, _ = shown
    recorded = recorded_round.shipped().round
    status = status_of(folder)
    assert status["balanced"] is True
    assert status["promoted"] == 1
    [row] = status["rounds"]
    assert (row["round"], row["state"]) == ("r0001", "promoted")
    assert status["deployment"]["adapter"] == "r0001"
    assert datetime.fromisoformat(row["finished_at"]) < datetime.now(UTC)
    database = f"file:{folder / 'state' / 'state.db'}?mode=ro"
    with closing(sqlite3.connect(database, uri=True)) as state:
        events = dict(state.execute("SELECT new, at FROM events WHERE kind = 'rounds'").fetchall())
        assert events == {str(name): at for name, at in recorded.round_times.items()}
        # The gate decides again, and the servers were asked for that reason.
        [[reason]] = state.execute("SELECT reason FROM deployments").fetchall()
        assert reason.startswith("r0001: better") and reason.removeprefix("r0001: ") == row["reason"]
        used = "SELECT tasks.state, count(*) FROM round_samples JOIN tasks ON tasks.id = task_id WHERE {} GROUP BY 1"
        trained = dict(state.execute(used.format("round_samples.split = 'train'")).fetchall())
        assert set(trained) <= {"consumed", "accepted"} and sum(trained.values()) >= 50
        assert state.execute("SELECT DISTINCT rubric_hash FROM verdicts").fetchall() == [(recorded.rubric_hash,)]
        of_other_splits = used.format("round_samples.split != tasks.split")
        assert state.execute(of_other_splits).fetchall() == []


@pytest.mark.slow
def test_a_recording_of_its_state_is_the_same(shown: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = shown
    size = recording.write(folder, tmp_path / "again.tar.xz")
    shipped = recorded_round.shipped()
    with (tmp_path / "again.tar.xz").open("rb") as packed:
        again = recorded_round.read(packed)
    assert size == (tmp_path / "again.tar.xz").stat().st_size
    assert again == shipped


@pytest.mark.slow
def test_what_names_a_machine_is_not_recorded(
    shown: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = shown
    metrics = folder / "state" / "rounds" / "r0001" / METRICS_FILE
    before = metrics.read_bytes()
    try:
        for leak in (str(folder / "state"), f"{socket.gethostname()}:8000"):
            metrics.write_bytes(before + f'{{"event": "{leak}"}}\n'.encode())
            with pytest.raises(RecordingError, match=METRICS_FILE):
                recording.write(folder, tmp_path / "leak.tar.xz")
    finally:
        metrics.write_bytes(before)
    monkeypatch.setattr(recording, "MOST_BYTES", 1000)
    with pytest.raises(RecordingError, match="1,000"):
        recording.write(folder, tmp_path / "large.tar.xz")
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_recording_is_small_and_names_no_machine() -> None:
    shipped = recorded_round.shipped()
    size = Path(recorded_round.__file__).with_name("recorded.tar.xz").stat().st_size
    assert size <= recording.MOST_BYTES
    text = b"\n".join(shipped.files.values()).decode()
    steps = {f"rollouts/{number:04}.jsonl" for number in range(1, 13)}
    assert set(shipped.files) == {REPLIES_FILE, ROUND_FILE, "metrics.jsonl", "evaluation.jsonl", *steps}
    assert set(re.findall(r"https?://([^:/\"]+)", text)) <= {"127.0.0.1"}
    assert not re.search(r"(?<![\w.<])/(?:home|root|work|tmp|usr|opt|mnt|data)/", text)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_pages_are_served_until_a_signal_and_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    environment = {"PATH": "/nonexistent", "TMPDIR": str(tmp_path), "HOME": str(tmp_path), "BROWSER": str(browser)}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(DEMO, env=environment, stdout=output, stderr=output)
    try:
        found = wait_for(lambda: address_in(log) or process.poll() is not None, "the address of the pages")
        assert process.poll() is None, log.read_text()
        pages = {path: httpx2.get(f"{found}{path}", timeout=WAIT_SECONDS).raise_for_status().text for path in PAGES}
        assert {path for path, page in pages.items() if "r0001" not in page} == set()
        assert "demo-agent@r0001" in pages[""] and "1 promoted of 1" in " ".join(pages[""].split())
        assert "768 rollouts" in pages["rollouts/r0001"]
        assert "recorded from make demo" in pages["rounds/r0001"]
        wait_for((tmp_path / "opened").exists, "the browser to be started")
        process.send_signal(number)
        # It says that Ctrl-C stops it: that is no failure.
        expected = 0 if number == signal.SIGINT else 128 + number
        assert process.wait(WAIT_SECONDS) == expected, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text()
    assert not list(tmp_path.glob("flywheel-demo-*"))
