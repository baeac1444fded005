"""A workflow in an environment of its own, which has neither Flywheel nor what Flywheel needs."""

from __future__ import annotations

import asyncio
import json
import sys
import venv
from pathlib import Path

import psutil
import pytest

from flywheel.errors import ConfigError
from tests.training.program.conftest import MODELS, WITHOUT_AGENTSCOPE, NewPool
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The packages of a new environment, `tmp_path/environment`."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    return next((environment / "lib").glob("python*/site-packages"))


async def test_an_environment_without_flywheel_runs_a_workflow(new_pool: NewPool, site: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    (site / "package_of_the_agent.py").write_text("NAME = 'theirs'\n")
    pool = new_pool(
        """
        import importlib.util, json, sys
        import package_of_the_agent

        async def run(task, model, logger=None):
            logger.info("asks %s", model.model)
            return {"reward": 1, "response": json.dumps({
                "python": sys.executable,
                "package": package_of_the_agent.NAME,
                "ours": [name for name in ("pydantic", "orjson", "torch", "openai", "tests")
                         if importlib.util.find_spec(name)],
                "modules": sorted(name for name in sys.modules if name.startswith("flywheel.")),
            })}

        async def judge(task, response):
            return {"reward": 0.5}
        """,
        python=str(environment / "bin" / "python"),
        reward_function=f"{tmp_path}/agent.py:judge",
    )
    assert pool.start() == f"async def run(task, model, logger=None) in {tmp_path}/agent.py"
    result = await pool.run({}, MODELS, "policy")
    assert (result.cause, result.reward) == (None, 0.5)
    seen = json.loads(result.response or "")
    assert seen["python"] == str(environment / "bin" / "python") != sys.executable
    assert (seen["package"], seen["ours"]) == ("theirs", [])
    ours = ("flywheel.training.program", "flywheel.system", "flywheel.records")
    assert all(name.startswith(ours) or name == "flywheel.training" for name in seen["modules"])


async def test_the_interpreter_may_be_started_by_a_script(new_pool: NewPool, tmp_path: Path) -> None:
    """Which waits for it, without `exec`."""
    script, noted = tmp_path / "python", tmp_path / "pids"
    script.write_text(f'#!/bin/sh\n"{sys.executable}" "$@"\nexit $?\n')
    script.chmod(0o755)
    pool = new_pool(
        """
        import os, pathlib, subprocess, time
        async def run(task, model):
            pids = [os.getppid(), os.getpid()]
            if task["case"] != "returns":
                pids.append(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
            pathlib.Path("writing").write_text(" ".join(map(str, pids)))
            os.rename("writing", "pids")
            while task["case"] == "hangs":
                time.sleep(0.01)
            return 1
        """,
        python=str(script),
    )
    seen = []
    for case, cause in (("returns", None), ("leaves", "left_processes"), ("returns", None)):
        result = await pool.run({"case": case}, MODELS, "policy")
        assert (case, result.cause) == (case, cause), result.error
        seen.append([int(pid) for pid in noted.read_text().split()])
    assert seen[0] == seen[1][:2] == seen[2]
    assert psutil.Process(seen[0][0]).cmdline()[1] == str(script)
    noted.unlink()
    running = asyncio.create_task(pool.run({"case": "hangs"}, MODELS, "policy"))
    await until(noted.exists, "the run")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    last = [int(pid) for pid in noted.read_text().split()]
    await until(lambda: not any(map(psutil.pid_exists, {*sum(seen, last)})), "the end of all processes")


@pytest.mark.parametrize("version", ["2.0.10", "1.0.21"])
async def test_what_only_agentscope_1_has_names_the_command_for_its_interpreter(
    new_pool: NewPool, site: Path, tmp_path: Path, version: str
) -> None:
    (site / "agentscope").mkdir()
    (site / "agentscope" / "__init__.py").touch()
    about = site / f"agentscope-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: agentscope\nVersion: {version}\n")
    python = tmp_path / "environment" / "bin" / "python"
    command = "`flywheel workflow env` makes one for rollout.agent.python"
    for imported in ("from agentscope import formatter", "import agentscope.memory"):
        pool = new_pool(f"{imported}\nasync def run(task, model): ...\n", python=str(python))
        with pytest.raises(ConfigError) as caught:
            pool.start()
        assert (f"{python} has AgentScope 2.0.10. " in str(caught.value)) is (version == "2.0.10")
        assert (command in str(caught.value)) is (version == "2.0.10")
    pool = new_pool(
        """
        async def run(task, model):
            from agentscope.formatter import DashScopeChatFormatter

        import sys, types
        model = types.ModuleType("agentscope.model")
        model.OpenAIChatModel = lambda model_name, api_key, stream, client_args: None
        sys.modules["agentscope.model"] = model
        """,
        python=str(python),
    )
    (tmp_path / "agent.py").write_text((tmp_path / "agent.py").read_text().replace(WITHOUT_AGENTSCOPE, ""))
    pool.start()
    result = await pool.run({}, MODELS, "policy")
    assert "No module named 'agentscope.formatter' (agent.py, line 3)" in result.error
    assert (command in result.error) is (version == "2.0.10")
