from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from flywheel.system.process import feed_watchdog, tell_systemd
from tests import warm


def test_the_service_manager_hears_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        assert tell_systemd("READY=1")
        assert manager.recv(100) == b"READY=1"
    path.unlink()
    assert not tell_systemd("READY=1")


def test_a_service_manager_that_reads_nothing_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))

        def tell_until_it_is_full() -> None:
            while tell_systemd("WATCHDOG=1"):
                pass

        telling = threading.Thread(target=tell_until_it_is_full, daemon=True)
        telling.start()
        telling.join(30)
        assert not telling.is_alive()


async def test_a_service_manager_that_watches_hears_that_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", "20000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        beating = asyncio.create_task(feed_watchdog())
        heard = [await asyncio.to_thread(manager.recv, 100) for _ in range(3)]
        assert heard == [b"WATCHDOG=1"] * 3
        beating.cancel()


@pytest.mark.parametrize(("microseconds", "pid"), [("", ""), ("0", ""), ("nonsense", ""), ("20000", "1")])
async def test_who_is_not_watched_says_nothing(monkeypatch: pytest.MonkeyPatch, microseconds: str, pid: str) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", microseconds)
    monkeypatch.setenv("WATCHDOG_PID", pid)
    await feed_watchdog()  # returns


def test_without_a_service_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not tell_systemd("READY=1")


def test_the_daemon_says_when_it_is_ready_that_it_lives_and_how_long_its_end_may_take(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    (tmp_path / "flywheel.yaml").write_text(
        "sources: []\nstate: {dir: state}\njudge: {base_url: 'http://127.0.0.1:9/v1', model: j}\n"
        "daemon: {drain_seconds: 100}\nserving: {urls: ['http://127.0.0.1:9']}\n"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(120)
        process = warm.Popen(
            [sys.executable, "-m", "flywheel", "run", "-c", tmp_path / "flywheel.yaml"],
            env={**os.environ, "NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "100000"},
        )
        try:
            heard: list[str] = []

            def hear(word: str) -> None:
                while word not in (message := manager.recv(500).decode()):
                    heard.append(message)
                heard.append(message)

            hear("READY=1")
            hear("WATCHDOG=1")
            process.send_signal(signal.SIGTERM)
            hear("STOPPING=1")
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()
    asked = heard[-1].rpartition("EXTEND_TIMEOUT_USEC=")[2]
    assert int(asked) / 1e6 > 100 + 20, "longer than calls of the judge and a worker's end"
