"""The commands of docs/judge/evaluate.md run as they stand there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from junitparser import JUnitXml

from flywheel.errors import EXIT_CONFIG, EXIT_QUALITY
from tests.cli.filter_bench import says
from tests.factories.config import write_yaml
from tests.factories.judge_server import JudgeServer
from tests.factories.model_endpoint import Endpoint
from tests.factories.model_endpoint import says as chat_completion

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "judge" / "evaluate.md").read_text()
INSTALLED = "pip install agentscope-flywheel"
RUBRIC: dict[str, Any] = {"id": "support", "criteria": [{"id": "right", "value": "It is right."}]}

AGENT = """
import json, urllib.request


async def run(task, model):
    model = task["openai"]
    question = {"role": "user", "content": task["main_query"]}
    asked = [{"role": "system", "content": "Answer in one sentence."}, question]
    body = json.dumps({"model": model["model"], "messages": asked}).encode()
    sent = urllib.request.Request(model["base_url"] + "/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(sent) as answer:
        return {"response": json.load(answer)["choices"][0]["message"]["content"]}
"""

Shell = Callable[[str], "subprocess.CompletedProcess[str]"]


def block(name: str) -> Any:
    """The YAML file of that name on the page."""
    [text] = re.findall(rf"```ya?ml\n# {re.escape(name)}\n(.*?)```", PAGE, re.DOTALL)
    return yaml.safe_load(text)


def steps() -> list[str]:
    """The commands of the workflow, each as a shell gets it."""
    [job] = block(".github/workflows/replies.yml")["jobs"].values()
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    with JudgeServer(says) as server:
        yield server


@pytest.fixture
def model() -> Iterator[Endpoint]:
    """What the workflow's agent asks."""
    with Endpoint(lambda *_: chat_completion("good: yes")) as server:
        yield server


@pytest.fixture
def shell(tmp_path: Path, judge: JudgeServer, model: Endpoint) -> Shell:
    """Runs commands in a checkout with the page's files, whose judge is the one of the test."""
    config = block("flywheel.yaml")
    config["judge"]["base_url"] = judge.base_url
    write_yaml(tmp_path / "flywheel.yaml", config)
    for folder in ("rubrics", "tests"):
        (tmp_path / folder).mkdir()
    write_yaml(tmp_path / "rubrics" / "support.yaml", RUBRIC)
    [row] = re.findall(r"^ {4}(\{\"task_id\".*\})$", PAGE, re.MULTILINE)
    rows = [row.replace("refund-1", f"refund-{n}").replace("Yes", "good: yes") for n in range(5)]
    (tmp_path / "tests" / "replies.jsonl").write_text("\n".join(rows) + "\n")
    questions = [{"task_id": f"q{n}", "main_query": f"Can I return {n} shoes?"} for n in range(4)]
    (tmp_path / "tests" / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    (tmp_path / "agent.py").write_text(AGENT)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("FLYWHEEL_", "OPENAI_", "GIT_"))
    }
    environment = {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
        "HOME": str(tmp_path),
        "OPENAI_API_KEY": "key",
        "OPENAI_BASE_URL": model.base_url,
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }

    def run(command: str) -> subprocess.CompletedProcess[str]:
        # As GitHub runs a step.
        return subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    user = "git -c user.name=test -c user.email=test@example.org"
    made = run(f"git init -q && git add . && {user} commit -qm start && git update-ref refs/remotes/origin/main HEAD")
    assert made.returncode == 0, made.stderr
    return run


@pytest.mark.slow
def test_the_steps_of_the_workflow_pass_and_write_their_reports(
    shell: Shell, model: Endpoint, tmp_path: Path
) -> None:
    found = steps()
    assert found[0] == INSTALLED and len(found) == 5
    rans = [shell(step) for step in found[1:]]
    for ran in rans:
        assert ran.returncode == 0, ran.stderr
    [suite] = JUnitXml.fromfile(str(tmp_path / "answers.xml"))
    assert (suite.name, suite.tests, suite.failures) == ("support", 4, 0)
    assert {request["messages"][0]["content"] for request in model.requests} == {"Answer in one sentence."}
    [suite] = JUnitXml.fromfile(str(tmp_path / "replies.xml"))
    assert (suite.name, suite.tests, suite.failures) == ("support", 5, 0)
    assert "accepted 1.000 → 1.000 of 5 tasks" in rans[2].stdout
    assert "support: passed" in (tmp_path / "summary.md").read_text()
    assert not list(tmp_path.rglob("state.db"))


@pytest.mark.extended
@pytest.mark.slow
def test_the_workflow_fails_when_replies_are_worse(shell: Shell, tmp_path: Path) -> None:
    replies = tmp_path / "tests" / "replies.jsonl"
    replies.write_text(replies.read_text().replace("good", "bad", 2))
    [step] = [step for step in steps() if "--fail-under" in step and "filter" in step]
    ran = shell(step)
    assert (ran.returncode, ran.stdout) == (EXIT_QUALITY, ""), ran.stderr
    [suite] = JUnitXml.fromfile(str(tmp_path / "replies.xml"))
    assert suite.failures == 2


@pytest.mark.extended
@pytest.mark.slow
def test_the_command_for_a_changed_judge(shell: Shell, judge: JudgeServer) -> None:
    [command] = re.findall(r"^ {4}(flywheel filter .*--against-judge .*)$", PAGE, re.MULTILINE)
    ran = shell(command)
    assert ran.returncode == 0, ran.stderr
    named = re.findall(r"gpt-[\w.-]+", command)
    assert {request["model"] for request in judge.requests} == set(named)
    assert f"by {named[0]} → support.yaml by {named[1]}" in ran.stdout


@pytest.mark.extended
@pytest.mark.slow
def test_the_hook_of_pre_commit_checks_the_files_that_it_names(shell: Shell, tmp_path: Path) -> None:
    [hook] = block(".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert re.search(hook["files"], "rubrics/support.yaml")
    write_yaml(tmp_path / "rubrics" / "wrong.yaml", {**RUBRIC, "threshold": 2})
    assert shell(f"{hook['entry']} rubrics/support.yaml").returncode == 0
    files = shlex.join(["rubrics/support.yaml", "rubrics/wrong.yaml"])
    assert shell(f"{hook['entry']} {files}").returncode == EXIT_CONFIG


def test_the_bounds_on_the_page_are_right() -> None:
    from flywheel.store.views.acceptance import wilson

    shown = re.findall(r"([\d,]+) of ([\d,]+)(?: accepted)? show ([\d.]+)", PAGE)
    assert len(shown) == 2
    for accepted, decided, bound in shown:
        found = wilson(*(int(each.replace(",", "")) for each in (accepted, decided)), 0.9)[0]
        assert f"{found:.3f}" == bound
