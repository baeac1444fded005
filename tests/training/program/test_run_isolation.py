"""What one run leaves to the next one: nothing of the environment, and nothing at all with `isolation: run`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from flywheel.training.program.program_pool import ProgramPool
from tests.training.program.conftest import MODELS, NewPool

CHANGES = """
    import os, sys
    def mask():
        found = os.umask(0)
        os.umask(found)
        return found
    def setup():
        os.environ["OF_SETUP"] = "kept"
        os.environ["ORDINARY"] = "of the setup"
        os.umask(0o027)
        sys.path.append("/of/setup")
        os.chdir("/")
    async def run(task, model):
        names = ("LEFT", "ORDINARY", "OF_SETUP", "OPENAI_MODEL")
        found = [os.getpid(), {name: os.environ.get(name) for name in names}, mask(), os.getcwd(), list(sys.path)]
        os.environ["LEFT"] = "by a run"
        os.environ["ORDINARY"] = "changed"
        os.environ["OPENAI_MODEL"] = "another"
        del os.environ["OF_SETUP"]
        os.umask(0)
        sys.path.insert(0, "/of/a/run")
        os.chdir("/")
        if task.get("removes"):
            os.rmdir(found[3])
        if task.get("raises"):
            raise ValueError("after its changes")
        return {"response": found}
"""
COUNTS = """
    import os
    runs, setups = [], []
    def setup():
        setups.append(os.getpid())
    async def run(task, model):
        runs.append(os.getpid())
        return {"response": [runs, setups]}
"""


async def found_by(pool: ProgramPool, **task: Any) -> Any:
    result = await pool.run(task, MODELS, "policy")
    return json.loads(result.response) if result.response is not None else result.cause


@pytest.mark.slow
async def test_environment_umask_path_and_folder_are_restored_after_each_run(
    new_pool: NewPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORDINARY", "seen")
    (tmp_path / "folder").mkdir()
    pool = new_pool(CHANGES, setup=f"{tmp_path}/agent.py:setup", folder=str(tmp_path / "folder"))
    first = await found_by(pool)
    pid, environment, umask, folder, path = first
    assert environment == {
        "LEFT": None,
        "ORDINARY": "of the setup",
        "OF_SETUP": "kept",
        "OPENAI_MODEL": MODELS["policy"].model,
    }
    assert (umask, folder, path[-1]) == (0o027, str(tmp_path / "folder"), "/of/setup")
    assert await found_by(pool) == first
    assert await found_by(pool, raises=True) == "raised"
    assert await found_by(pool) == first
    # Where something cannot be restored, the process is replaced.
    assert await found_by(pool, removes=True) == first
    (tmp_path / "folder").mkdir()
    last = await found_by(pool)
    assert (last[0] != pid, last[1:]) == (True, first[1:])


@pytest.mark.slow
async def test_with_isolation_each_run_has_a_process_of_its_own_set_up_anew(new_pool: NewPool) -> None:
    pool = new_pool(COUNTS, setup="agent:setup", isolation="run")
    pool.start()
    found = [await found_by(pool) for _ in range(3)]
    pids = [runs[0] for runs, _ in found]
    assert found == [[[pid], [pid]] for pid in pids]
    assert len({*pids, os.getpid()}) == 4
