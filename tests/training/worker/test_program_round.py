"""A whole worker, `python -m flywheel.training.worker`, whose rollouts run a user's agent that also fails: no judge
is asked, what fails is counted, and no process is left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.demo.questions import SYSTEM_PROMPT, Question, questions
from flywheel.records.round import RoundTask
from tests.factories.task import round_task
from tests.factories.worker import GROUP, PROMPTS, STEPS, run, spec

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.timeout(900)]

NOWHERE = "http://127.0.0.1:9/v1"
WORKFLOW = """
import json, subprocess, urllib.request


async def run(task, model):
    body = {"model": model.model, "messages": task["prompt"], "max_tokens": 12}
    url, headers = task["openai"]["base_url"] + "/chat/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        said = json.load(response)["choices"][0]["message"]["content"]
    if sum(map(ord, said)) % 5 == 0:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return {"reward": float(task["metadata"]["number"] in said), "metrics": {"letters": len(said)}}
"""


def task(name: str, question: Question) -> RoundTask:
    prompt = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.text}]
    line: dict[str, Any] = {"task_id": name, "prompt": prompt, "metadata": {"number": str(question.answer)}}
    return round_task(name, question.text, reference="", prompt=prompt, agent="program", line=line)


def test_a_round_of_a_workflow_whose_reward_alone_counts_as_its_first_run_decides(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(WORKFLOW)
    some = questions()[::12]
    train = [task(f"t-{at}", question) for at, question in enumerate(some[:12])]
    held_out = [task(f"h-{at}", question) for at, question in enumerate(some[12:22])]
    settings = spec(NOWHERE).settings
    settings["rollout"] |= {
        "agent": {"workflow": f"{tmp_path}/agent.py:run", "folder": str(tmp_path)},
        "workers": 2,
    }
    settings["gate"] |= {"max_tasks": 10}
    done = run(tmp_path / "r0001", spec(NOWHERE, train=train, held_out=held_out, settings=settings))
    assert done.code == 0, done.stderr
    assert (done.left_running, done.left_behind) == ([], [])
    assert done.result.outcome == "trained", done.result.reason
    assert (len(done.steps), len(done.rollouts)) == (STEPS, STEPS * PROMPTS * GROUP)
    failed = [line for line in done.rollouts if line["error"]]
    assert failed
    for line in failed:
        assert line["program"]["failure"] == "left_processes"
        assert "sleep" in line["error"]
        assert line["advantage"] is None
    assert sum(step["program"]["failures"].get("left_processes", 0) for step in done.steps) == len(failed)
    assert {line["reward"] for line in done.rollouts if not line["error"]} == {0.0, 1.0}
    [training] = [line for line in done.metrics if line.get("phase") == "training"]
    assert training["reward_by"].startswith("the agent returns a reward and no response: its reward alone counts")
    assert sum(done.result.usage[name] for name in ("judge_calls", "judge_prompt_tokens")) == 0
    comparison = done.result.comparison
    assert comparison is not None
    assert (comparison.tasks, comparison.undecided, comparison.criteria) == (10, 0, [])
    assert comparison.candidate_failed + comparison.deployed_failed > 0
