"""`flywheel status --watch`: what matters is on a screen of any size, and a pipe gets it while it goes on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from rich.console import Console

from flywheel.cli import status as status_command
from flywheel.cli.status import fitted
from flywheel.config.file import load
from flywheel.daemon.status import Facts, snapshot
from flywheel.store.kernel.database import read_once
from tests import warm
from tests.cli.conftest import Run
from tests.cli.terminal import in_terminal
from tests.factories.round import comparison
from tests.sources.studio.writer import DATA

SECONDS = 120
SOURCES = 5


@pytest.fixture
def folder(tmp_path: Path, flywheel: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five sources that were read."""
    monkeypatch.setenv("HOME", str(tmp_path))  # so that every path fits a line
    paths = [shutil.copy(DATA / "old.sqlite", tmp_path / f"studio-{number}.sqlite") for number in range(SOURCES)]
    settings = {"state": {"dir": "state"}, "sources": [{"path": path.name} for path in map(Path, paths)]}
    (tmp_path / "flywheel.yaml").write_text(json.dumps(settings))
    assert flywheel("ingest").code == 0
    return tmp_path


def status_with(folder: Path, rounds: int, **values: Any) -> Facts:
    """The status of the folder's state, with so many rounds, the newest one last."""
    config = load(folder / "flywheel.yaml")
    status = asyncio.run(read_once(config.state_dir, snapshot, config))
    given = {
        "state": "promoted", "trigger": "by hand", "reason": "", "reward_first": 0.1, "reward_last": 0.2,
        "comparison": None,
    }  # fmt: skip
    return status | {"rounds": [{"round": f"r{n:04}", **given, **values} for n in range(1, rounds + 1)]}


def shown(state: Facts, lines: int, columns: int = 80) -> list[str]:
    console = Console(width=columns, height=lines, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115, PTH123
    with console.file:
        console.print(fitted(state, console))
    return console.export_text().splitlines()


@pytest.mark.slow
def test_what_fits_is_whole(folder: Path) -> None:
    for rounds in (0, 20):
        status = status_with(folder, rounds)
        for lines in (4, 8, 17, 24, 30, 60, 100):
            found = shown(status, lines)
            text = "\n".join(found)
            assert "…" not in text
            if lines >= 17:
                assert len(found) < lines
                for name in ("tasks", "waiting", "ledger"):
                    assert re.search(rf"^{name} +\S", text, re.M), text
            else:
                assert found[0].startswith("ledger")
            assert (text.count("longest read") == SOURCES) == (lines == 100 or (lines == 60 and not rounds))
            # Of the rounds, the oldest are left out first.
            assert ("r0020" in text) == (rounds > 0 and lines >= 24)
            assert ("r0001" in text) == (rounds > 0 and lines >= 60)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 160])
def test_a_round_is_told_in_few_lines_on_any_terminal(folder: Path, columns: int) -> None:
    status = status_with(
        folder,
        1,
        comparison=comparison(deployed_mean=0.29, candidate_mean=0.54),
        reward_first=0.42,
        reward_last=0.53,
        reason="better: gain +0.250, 95% interval +0.179 to +0.321; candidate 0.542, deployed 0.292",
    )
    found = shown(status, 60, columns)
    assert all(len(line) <= columns for line in found)
    [first] = [place for place, line in enumerate(found) if "r0001" in line]
    told = " ".join(" ".join(found[first : first + 4]).split())
    assert all(part in told for part in ("0.42 → 0.53", "0.29 → 0.54", "deployed 0.292"))


@pytest.mark.slow
def test_a_terminal_shows_it_at_once(folder: Path) -> None:
    seen = in_terminal(folder, ["status", "--watch"], columns=80, home=folder, interrupted_at=b"ledger")
    assert seen.code == 130
    assert all(name in seen.screen for name in ("tasks", "waiting", "ledger"))
    assert "…" not in seen.screen


@pytest.mark.slow
def test_that_a_server_was_looked_at_once_more_is_no_news(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = status_with(folder, 0)
    own = status["targets"][""]
    since = "2026-01-01T00:00:00.000+00:00"
    server = own["replicas"][0] | {"condition": "ok", "serves": "tiny", "since": since}
    moments = iter([since, "2026-01-01T00:00:15.000+00:00", None])

    def look() -> Facts:
        if (moment := next(moments)) is None:
            raise KeyboardInterrupt
        return status | {"targets": {"": own | {"replicas": [server | {"looked_at": moment}]}}}

    monkeypatch.setattr(status_command, "WATCH_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        status_command._watch(look)
    shown = capsys.readouterr().out
    assert shown.count("ok, serves tiny, since 2026-01-01 00:00:00 UTC, checked 2026-01-01 00:00:00 UTC") == 1
    assert shown.count("ledger") == 1


@pytest.fixture
def piped(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = warm.Popen(
        [sys.executable, "-m", "flywheel", "status", "--watch"],
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(SECONDS, process.kill)
    watchdog.start()
    yield process
    watchdog.cancel()
    process.kill()
    process.wait()
    process.stdout.close()


def until(output: IO[str], name: str) -> str:
    return next(line for line in output if line.startswith(name))


@pytest.mark.slow
def test_a_pipe_gets_it_whenever_it_has_changed(flywheel: Run, folder: Path, piped: subprocess.Popen[str]) -> None:
    assert piped.stdout is not None
    assert "96 pending" in until(piped.stdout, "tasks")
    until(piped.stdout, "ledger")
    (folder / "more.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    settings = {"state": {"dir": "state"}, "sources": [{"type": "jsonl", "path": "more.jsonl"}]}
    (folder / "more.yaml").write_text(json.dumps(settings))
    assert flywheel("ingest", "-c", "more.yaml").code == 0
    # A look in the middle of the ingestion shows less.
    while "97 pending" not in until(piped.stdout, "tasks"):
        pass
    piped.send_signal(signal.SIGINT)
    assert piped.wait(SECONDS) == 130
