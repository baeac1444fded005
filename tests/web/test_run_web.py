"""`flywheel run --web` starts the pages, and ends with them; `flywheel web` refuses what is unsafe."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest

from flywheel.errors import EXIT_CONFIG
from tests import warm
from tests.factories.web import WAIT_SECONDS, address_in
from tests.waiting import wait_for

CONFIG = """sources: []
state: {dir: state}
daemon: {metrics: null}
judge: {base_url: 'http://127.0.0.1:9/v1', model: j}
"""


@contextlib.contextmanager
def daemon(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "flywheel.yaml").write_text(CONFIG)
    with (folder / "log").open("wb") as log:
        process = warm.Popen(
            [sys.executable, "-m", "flywheel", "--set=model.alias=given", "run", "--web", "--web-port", "0"],
            cwd=folder, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_the_pages_end_with_the_daemon(tmp_path: Path) -> None:
    with daemon(tmp_path) as process:
        address = wait_for(lambda: address_in(tmp_path / "log"), "the pages")
        assert "Overview" in httpx2.get(address, timeout=WAIT_SECONDS).text
        children = psutil.Process(process.pid).children()
        assert len(children) == 1
        assert {"-c", "flywheel.yaml", "--set=model.alias=given"} <= {*children[0].cmdline()}
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
        assert not children[0].is_running()
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(address)


@pytest.mark.slow
def test_the_daemon_outlives_its_pages(tmp_path: Path) -> None:
    with daemon(tmp_path) as process:
        wait_for(lambda: address_in(tmp_path / "log"), "the pages")
        [child] = psutil.Process(process.pid).children()
        child.kill()
        # Its first thread is a zombie before the others have ended, and its parent hears of the end after that.
        threads = Path(f"/proc/{child.pid}/task")
        wait_for(lambda: child.status() == psutil.STATUS_ZOMBIE and len([*threads.iterdir()]) == 1, "their end")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
        assert "flywheel web ended early, with exit code -9" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_off_loopback_it_needs_a_token(tmp_path: Path) -> None:
    (tmp_path / "flywheel.yaml").write_text(CONFIG)
    for token, expected in (
        ("", "whoever reaches it could read"),
        ("short", "FLYWHEEL_WEB_TOKEN has fewer than 16 characters"),
        (" a token with blanks around it ", "FLYWHEEL_WEB_TOKEN holds no token"),
        ("un jeton de caractères accentués", "FLYWHEEL_WEB_TOKEN holds no token"),
    ):
        done = warm.run(
            [sys.executable, "-m", "flywheel", "web", "--host", "0.0.0.0", "--port", "0"],
            cwd=tmp_path, env={**os.environ, "FLYWHEEL_WEB_TOKEN": token}, capture_output=True, text=True,
            timeout=WAIT_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == EXIT_CONFIG and expected in done.stderr, done.stderr
