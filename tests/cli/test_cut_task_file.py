"""`filter`, `run` and `status` say that another program has cut the task file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.filter_bench import Bench, says
from tests.factories.judge_server import JudgeServer

WORDS = "tasks.jsonl was cut by another program"


@pytest.mark.slow
@pytest.mark.parametrize("command", [("filter",), ("ingest",), ("run", "--once")])
def test_a_task_file_that_was_cut_is_told(flywheel: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    with JudgeServer(says) as judge:
        bench = Bench(flywheel, tmp_path, judge)
        bench.lines(*["a good answer"] * 6)
        assert WORDS not in bench("filter").err + bench("status").out
        path = tmp_path / "state" / "tasks.jsonl"
        os.truncate(path, path.stat().st_size // 2)
        for _ in range(2):
            assert WORDS in bench(*command).err
            assert WORDS in " ".join(bench("status").out.split())
            assert any(WORDS in each for each in bench("status", "--json").json["warnings"])
            bench.lines("another good answer")
