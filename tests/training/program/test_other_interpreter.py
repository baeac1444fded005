"""A workflow in an environment of its own, which has neither Flywheel nor what Flywheel needs."""

from __future__ import annotations

import json
import sys
import venv
from pathlib import Path

from tests.training.program.conftest import MODELS, NewPool


async def test_an_environment_without_flywheel_runs_a_workflow(new_pool: NewPool, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    site = next((environment / "lib").glob("python*/site-packages"))
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
