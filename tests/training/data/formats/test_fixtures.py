"""Real traces, from the database to the consumer: what Studio recorded is read back by `datasets`."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.conftest import ROOT
from tests.training.data.formats.conftest import Load
from tests.training.data.formats.filling import lines

STUDIO = ROOT / "tests" / "data" / "studio"


@pytest.mark.parametrize("database", ["new_v2", "old"])
def test_traces_go_through_every_format(flywheel: Run, load: Load, tmp_path: Path, database: str) -> None:
    source = shutil.copy(STUDIO / f"{database}.sqlite", tmp_path / "studio.sqlite")
    assert flywheel("ingest", "--source", source).code == 0
    with sqlite3.connect(tmp_path / "home" / "state.db") as conn:
        conn.execute("UPDATE tasks SET state = 'accepted', split = 'train'")
        [there] = conn.execute("SELECT count(*) FROM tasks").fetchone()
    conn.close()
    assert there > 50
    for name in ("agentjet", "trinity", "trl-grpo", "trl-sft", "verl"):
        ran = flywheel("export", "--format", name, "--json")
        assert ran.code == 0, ran.err
        assert ran.json["lines"] + sum(ran.json["left_out"].values()) == there
        assert ran.json["lines"] > there * 0.7
        rows = list(load(tmp_path / ran.json["out"]))
        assert len(rows) == ran.json["lines"]
        if name.startswith("trl") or name == "trinity":
            assert rows == lines(tmp_path / ran.json["out"])
        if name == "trl-sft":
            assert any(message["role"] == "tool" for row in rows for message in row["completion"])
