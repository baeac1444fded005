"""Workflows and commands of the examples and of the documentation run as in rollouts, in processes of the pool."""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flywheel
from flywheel import tuner
from flywheel.config.training import AgentProgramSettings
from flywheel.records.program_run import RunResult
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.program.program_pool import ProgramPool
from flywheel.tuner import call
from tests.agents.running import EXAMPLES, ROOT
from tests.agents.scripted_model import Recorder, ScriptedModel
from tests.serving.fake_vllm import running, with_middleware

ALIAS = "my-agent"
TASKS = [json.loads(line) for line in (EXAMPLES / "workflow" / "tasks.jsonl").read_text().splitlines()]
ANSWERS = ["The result is 408.", "The result is 30.", "You asked: Thank you"]


def environment(folder: Path, *packages: str) -> Path:
    """The interpreter of a new environment with these packages."""
    python = folder / "bin" / "python"
    venv.create(folder, with_pip=True)
    install = [str(python), "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(install, capture_output=True, text=True, timeout=500, check=False)
    if done.returncode != 0:
        pytest.skip(f"{packages[0]} could not be installed: {done.stderr[-300:]}")
    return python


def agentscope_1_environment(workflow: str, folder: Path) -> Path:
    """What `flywheel workflow env` makes of the genuine packages."""
    command = [sys.executable, "-m", "flywheel", "workflow", "env", workflow, "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    if "No matching distribution" in done.stderr:
        pytest.skip(f"there is no package registry: {done.stderr[-300:]}")
    assert (done.returncode, done.stdout) == (0, f"rollout.agent.python: {folder}/bin/python\n"), done.stderr
    return folder / "bin" / "python"


async def results_of(program: AgentProgram, *aliases: str) -> tuple[list[RunResult], list[dict[str, Any]]]:
    """What each of the example's tasks gave, and what the model was sent."""
    sent = Recorder(ScriptedModel())
    pool = ProgramPool(program, workers=1)
    with running(sent) as url:
        try:
            pool.start()
            models = {alias: ModelEndpoint(f"{url}/v1", alias) for alias in aliases or (ALIAS,)}
            results = [await pool.run(task, models, next(iter(models))) for task in TASKS]
        finally:
            pool.close()
    assert [result.error for result in results] == [""] * len(TASKS)
    return results, sent.requests


def texts(request: dict[str, Any]) -> list[tuple[str, str]]:
    """Role and text of each message, without the reminder that AgentScope adds and without system prompts."""
    said = [(message["role"], str(message.get("content") or "")) for message in request["messages"]]
    return [(role, text) for role, text in said if role != "system" and "<system-reminder>" not in text]


def assert_continues_the_conversation(sent: list[dict[str, Any]]) -> None:
    assert all(request["model"] == ALIAS for request in sent)
    [second] = [
        texts(request) for request in sent if len(texts(request)) == 3 and "5 by 6" in str(request["messages"])
    ]
    assert [role for role, _ in second] == ["user", "assistant", "user"]
    assert "The result is 408." in second[1][1] and "And 5 by 6?" in second[2][1]


@pytest.mark.slow
async def test_agentscope_2(tmp_path: Path) -> None:
    program = AgentProgram(workflow=f"{EXAMPLES / 'workflow' / 'agent.py'}:run", folder=str(tmp_path))
    results, sent = await results_of(program)
    assert [result.response for result in results] == ANSWERS
    assert [result.reward for result in results] == [1.0, 1.0, 0.0]
    assert [dict(result.metrics) for result in results] == [{"tool_calls": calls} for calls in (1, 1, 0)]
    assert_continues_the_conversation(sent)


@pytest.mark.slow
async def test_openai_agents_sdk(tmp_path: Path) -> None:
    pytest.importorskip("agents", reason="openai-agents is not installed")
    program = AgentProgram(workflow=f"{EXAMPLES / 'openai_agents' / 'workflow.py'}:run", folder=str(tmp_path))
    results, sent = await results_of(program)
    assert [result.response for result in results] == ANSWERS
    assert [dict(result.metrics) for result in results] == [{"model_calls": calls} for calls in (2, 2, 1)]
    assert_continues_the_conversation(sent)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_a_node_program(tmp_path: Path) -> None:
    command = ("node", str(EXAMPLES / "node_command" / "agent.mjs"))
    results, sent = await results_of(AgentProgram(command=command, folder=str(tmp_path)))
    assert [result.response for result in results] == ANSWERS
    assert [dict(result.metrics) for result in results] == [{"tool_calls": calls} for calls in (1, 1, 0)]
    assert_continues_the_conversation(sent)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("folder", "make"),
    [
        ("langgraph", lambda _, folder: environment(folder, "langgraph", "langchain-openai")),
        ("agentscope_1", agentscope_1_environment),
    ],
)
async def test_environments_of_their_own(tmp_path: Path, folder: str, make: Callable[[str, Path], Path]) -> None:
    """They have none of Flywheel's packages."""
    workflow = f"{EXAMPLES / folder / 'workflow.py'}:run"
    python = make(workflow, tmp_path / "venv")
    results, sent = await results_of(AgentProgram(workflow=workflow, python=str(python), folder=str(tmp_path)))
    assert [result.response for result in results] == ANSWERS
    assert_continues_the_conversation(sent)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "aliases"), [("train/your-agent.md", ()), ("cookbook.md", ("planner", "writer"))])
async def test_the_functions_on_the_pages(tmp_path: Path, page: str, aliases: tuple[str, ...]) -> None:
    text = (ROOT / "docs" / page).read_text()
    [function] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "agent.py").write_text(function)
    results, sent = await results_of(AgentProgram(workflow=f"{tmp_path / 'agent.py'}:run"), *aliases)
    assert ANSWERS[-1] in str(results[-1].response)
    assert [request["model"] for request in sent] == list(aliases or (ALIAS,)) * len(TASKS)


@pytest.mark.slow
def test_the_page_shows_what_the_check_of_the_example_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "train" / "your-agent.md").read_text()
    found = re.search(r"^    flywheel (workflow check [^\n]*)\n\n```\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-m", "flywheel", *found[1].split()]
    with running(with_middleware(ScriptedModel(), FLYWHEEL_ALIAS=ALIAS)) as url:
        done = subprocess.run(
            [*command, "--url", url],
            cwd=ROOT,
            env={**os.environ, "FLYWHEEL_HOME": str(tmp_path), "COLUMNS": "120"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    told = done.stdout.replace(f"{ROOT}/", "")
    varying = re.compile(r"\d+\.\d s|\d+ MB|\d+ \+|(?<=files that runs leave\): ).*")
    assert varying.sub("…", told) == varying.sub("…", found[2])


def test_the_example_calls_tune_as_it_is_defined(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    given: dict[str, Any] = {}

    def tune(*arguments: Any, **named: Any) -> tuner.TuneResult:
        given.update(inspect.signature(tuner.tune).bind(*arguments, **named).arguments)
        return tuner.TuneResult(Path("a"), True, "it is better", None, Path("d"), 20, 0.25, 0.75)

    monkeypatch.setattr(flywheel, "tune", tune)
    monkeypatch.setattr("sys.argv", ["tune.py", "tasks.jsonl", "/models/tiny"])
    monkeypatch.syspath_prepend(str(EXAMPLES / "workflow"))
    runpy.run_path(str(EXAMPLES / "workflow" / "tune.py"), run_name="__main__")
    assert capsys.readouterr().out == "it is better\nreward 0.25 → 0.75; adapter: a\n"
    config = call.round_of(given, Path("d"), Path(sys.executable)).settings
    assert (config.training.group_size, config.training.steps, config.rollout.temperature) == (8, 20, 1.0)
    assert isinstance(config.rollout.agent, AgentProgramSettings)
    assert config.rollout.agent.workflow == f"{EXAMPLES / 'workflow' / 'agent.py'}:run"
