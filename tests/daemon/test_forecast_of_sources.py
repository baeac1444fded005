"""What rounds could train on of the databases that the settings name, before there is a state."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.daemon.forecast import forecast_of_sources
from tests.factories.config import make_config, write_config
from tests.factories.judge_server import JudgeServer
from tests.factories.recorded_reply import call, mark_of, trace
from tests.factories.recorded_reply import config_of as recorded_config
from tests.sources.calls.log_server import LogServer
from tests.sources.studio.writer import DATA, Studio

KILLED = """
import asyncio, os, pathlib, signal, sys
from flywheel.config.file import load
from flywheel.daemon import forecast

forecast.forecast = lambda conn, config: os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(forecast.forecast_of_sources(load(pathlib.Path(sys.argv[1]))))
"""


def config_of(folder: Path, *paths: str, judge: str = "http://127.0.0.1:9", **sections: Any) -> Config:
    """Of the fixture `old` and other sources."""
    studio = {"path": "old.sqlite", "models": {"include": ["*"]}}
    return make_config(
        folder,
        sources=[studio, *({"path": path, "type": "jsonl"} for path in paths)],
        judge={"base_url": f"{judge}/v1"},
        serving={"urls": [judge]},
        ingest={"output": "tasks.jsonl"},
        **sections,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    shutil.copy(DATA / "old.sqlite", made)
    return made


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


async def test_it_counts_what_a_round_could_use_and_writes_and_asks_nothing(folder: Path) -> None:
    with JudgeServer(lambda *_: True) as server:
        config = config_of(folder, judge=server.base_url.removesuffix("/v1"), training={"inexact_prompts": "use"})
        found, wrong = await forecast_of_sources(config)
        assert server.requests == []
    assert wrong == []
    assert found is not None
    assert (found.tasks, found.held_out, found.for_training, found.usable) == (96, 37, 59, 46)
    assert [(each.setting, each.tasks) for each in found.reasons] == [("rollout.tools.uncalled", 13)]
    assert names(folder) == ["old.sqlite"]


async def test_recorded_calls_are_not_pulled_so_that_their_prompts_are_not_exact(tmp_path: Path) -> None:
    mark = mark_of()
    Studio(tmp_path / "studio.sqlite").write(*trace(1, mark))
    with LogServer(tmp_path / "calls.db") as server:
        server.log.append([call(1, mark)])
        found, wrong = await forecast_of_sources(recorded_config(tmp_path, server, ingest={"train_ratio": 1}))
        assert (server.requests, wrong) == (0, [])
    assert found is not None
    assert [(each.setting, each.tasks) for each in found.reasons] == [("training.inexact_prompts", 1)]
    assert not (tmp_path / "state").exists()


async def test_what_is_not_there_or_cannot_be_read_is_said(folder: Path) -> None:
    found, wrong = await forecast_of_sources(config_of(folder, "none.jsonl"))
    assert (found is not None, wrong) == (True, [f"there is no {folder}/none.jsonl"])
    (folder / "old.sqlite").write_text("no database")
    found, wrong = await forecast_of_sources(config_of(folder))
    assert found is None
    assert [each.partition(": ")[0] for each in wrong] == [f"cannot read Studio database {folder}/old.sqlite"]
    (folder / "old.sqlite").unlink()
    assert await forecast_of_sources(config_of(folder)) == (None, [f"there is no {folder}/old.sqlite"])
    nowhere = make_config(folder, sources=[{"type": "otlp"}])
    assert await forecast_of_sources(nowhere) == (None, ["the settings name no database"])


@pytest.mark.slow
def test_a_killed_one_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    config = write_config(tmp_path, sources=[{"path": str(folder / "old.sqlite")}])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(config)], env={**os.environ, "TMPDIR": str(temporary)}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert (names(folder), names(temporary)) == (["old.sqlite"], [])
    assert not (tmp_path / "state").exists()
