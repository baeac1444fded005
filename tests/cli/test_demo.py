"""`flywheel demo`: 100 replies, judged and shown, as a newcomer sees it."""

from __future__ import annotations

import lzma
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from flywheel.errors import EXIT_FAILED
from scripts import demo_replies
from tests.factories.text_places import place_of
from tests.factories.web import address_in
from tests.waiting import wait_for

WAIT_SECONDS = 300
DEMO = [sys.executable, "-m", "flywheel", "demo"]


@pytest.mark.slow
def test_the_table(tmp_path: Path) -> None:
    command = [*DEMO, "--no-browser", "--dir", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    by_adapter = re.findall(r"^(base model|demo-agent@r0001) +50 +(\d+) +\d+% *$", done.stdout, re.MULTILINE)
    shares = dict(by_adapter)
    assert set(shares) == {"base model", "demo-agent@r0001"}
    assert int(shares["demo-agent@r0001"]) > int(shares["base model"]) > 0
    assert "100 replies of an AgentScope Studio database" in done.stdout
    assert "no model was asked" in done.stdout
    for kind in ("accepted", "rejected"):
        assert kind in done.stdout
    status = [sys.executable, "-m", "flywheel", "status", "-c", str(tmp_path / "demo" / "flywheel.yaml")]
    shown = subprocess.run(status, capture_output=True, text=True, timeout=WAIT_SECONDS, check=True).stdout
    assert "100 replies = 100 tasks" in shown
    state = tmp_path / "demo" / "state"
    files = [path.relative_to(state).as_posix() for path in state.rglob("*") if path.is_file()]
    assert {file for file in files if len(place_of(file)) != 1} == set(), "`forget` would miss it"
    again = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert again.returncode == EXIT_FAILED and "is not empty" in again.stderr


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
        page = httpx2.get(found, timeout=WAIT_SECONDS).text
        assert "demo-agent@r0001" in page
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


@pytest.mark.slow
def test_the_shipped_replies_are_what_the_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = demo_replies.TARGET.read_bytes()
    monkeypatch.setattr(demo_replies, "TARGET", tmp_path / "replies.sqlite.xz")
    demo_replies.main()

    def rows(content: bytes) -> list[tuple[object, ...]]:
        import sqlite3

        path = tmp_path / "replies.sqlite"
        path.write_bytes(lzma.decompress(content))
        connection = sqlite3.connect(path)
        try:
            return connection.execute("SELECT * FROM span_table ORDER BY id").fetchall()
        finally:
            connection.close()

    made = rows(demo_replies.TARGET.read_bytes())
    assert len(made) == 200 and made == rows(shipped)
