"""Which commands work while a daemon holds the state, and which end with 75: docs/operate/troubleshooting.md."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from flywheel.system.lock import instance_lock
from tests.cli.conftest import Run

NEED_IT_STOPPED = (
    "run",
    "run --once",
    "ingest",
    "filter",
    "round",
    "round --force",
)
BESIDE_IT = (
    "status",
    "audit",
    "audit --deep",
    "dead-letters",
    "dead-letters drop --all",
    "tasks",
    "tasks release --all",
    "tasks reject --all",
    "filter --dry-run",
    "filter --estimate",
    "backup backup",
)


@pytest.fixture
def config(flywheel: Run, tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("state: {dir: state}\nsources: []\n")
    assert flywheel("ingest", "-c", path).code == 0
    return path


@pytest.mark.parametrize("command", NEED_IT_STOPPED)
def test_what_needs_the_state_for_itself_ends_with_75(flywheel: Run, config: Path, command: str) -> None:
    with instance_lock(config.parent / "state"):
        ran = flywheel(*command.split(), "-c", config)
    assert ran.code == 75
    assert "stop it" in ran.err


@pytest.mark.slow
@pytest.mark.parametrize("command", BESIDE_IT)
def test_the_rest_works_beside_the_daemon(flywheel: Run, config: Path, command: str) -> None:
    with instance_lock(config.parent / "state"):
        assert flywheel(*command.split(), "-c", config).code == 0


def test_a_taken_port_of_the_pages_is_refused_before_the_daemon_starts(flywheel: Run, config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = flywheel("run", "--web", "--web-port", str(port), "-c", config)
    assert ran.code == 1
    assert f"serve the pages at 127.0.0.1:{port}" in ran.err and "choose another port" in ran.err
    assert "watching" not in ran.err
