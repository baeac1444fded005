"""Rounds of a user's agent that asks two models, of which one is trained.

First the planner is trained beside a solver that is the base model, then the solver beside that planner.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.demo.questions import SYSTEM_PROMPT, Question, questions
from flywheel.records.round import FrozenTarget, RoundSpec, RoundTask
from flywheel.system.files import tree_sha256
from tests.demo.two_agents import OPERATIONS
from tests.factories.task import round_task
from tests.factories.worker import GROUP, PROMPTS, STEPS, Done, run, spec

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.timeout(900)]

NOWHERE = "http://127.0.0.1:9/v1"
TWO_AGENTS = Path(__file__).parents[2] / "demo" / "two_agents.py"
LEAVING = """
import contextlib
import json
import re
import subprocess
import urllib.error
import urllib.request

import two_agents

TRIED = 3  # tasks before training, at most


async def run(task, model, auxiliary_models):
    if int(task["task_id"].rpartition("-")[2]) >= TRIED:
        # It cannot be answered, but its name is noted.
        body = json.dumps({"model": "gpt-9", "messages": 5}).encode()
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(urllib.request.Request(task["openai"]["base_url"] + "/chat/completions", body))
    found = await two_agents.run(task, model, auxiliary_models)
    said = found["response"]
    if sum(map(ord, said)) % 5 == 0:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return {"reward": float(task["metadata"]["number"] in said), "metrics": found["metrics"]}
"""
"""Returns a reward alone. Some of its runs leave a process."""
HELD_OUT = 10


def task(name: str, question: Question) -> RoundTask:
    prompt = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.text}]
    line: dict[str, Any] = {
        "task_id": name,
        "prompt": prompt,
        "main_query": question.text,
        "metadata": {"number": str(question.answer)},
    }
    return round_task(name, question.text, reference="", prompt=prompt, agent="program", line=line)


def of_target(judge_url: str, name: str, frozen: FrozenTarget, agent: dict[str, str], **changes: Any) -> RoundSpec:
    some = [question for question in questions() if f" {OPERATIONS[name]} " in question.text]
    random.Random(1).shuffle(some)
    settings = spec(judge_url).settings
    settings["rollout"] |= {"agent": agent, "workers": 3}
    settings["model"] |= {"alias": f"{name}-agent"}
    settings["targets"] = {each: {"alias": f"{each}-agent"} for each in OPERATIONS}
    settings["gate"] |= {"max_tasks": HELD_OUT}
    tasks = [task(f"{name}-{at}", question) for at, question in enumerate(some[: 20 + HELD_OUT])]
    about = {"target": name, "frozen": [frozen], "train": tasks[:20], "held_out": tasks[20:], "settings": settings}
    return spec(judge_url, **about, **changes)


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Its judge cannot be reached."""
    folder = tmp_path_factory.mktemp("planner")
    (folder / "leaving.py").write_text(LEAVING)
    (folder / "two_agents.py").write_text(TWO_AGENTS.read_text())
    solver = FrozenTarget(target="solver", alias="solver-agent", adapter=None)
    agent = {"workflow": f"{folder}/leaving.py:run", "folder": str(folder)}
    return run(folder / "r0001", of_target(NOWHERE, "planner", solver, agent))


@pytest.fixture(scope="module")
def solver(judge_url: str, planner: Done, tmp_path_factory: pytest.TempPathFactory) -> Done:
    frozen = FrozenTarget(target="planner", alias="planner-agent", adapter=planner.result.adapter)
    made = of_target(judge_url, "solver", frozen, {"workflow": f"{TWO_AGENTS}:run"}, round_id="r0002")
    return run(tmp_path_factory.mktemp("solver") / "r0002", made)


def assert_trained_alone(done: Done, own: str, other: str) -> None:
    """The samples have the tokens of the trained target's calls, and of no other's."""
    assert done.code == 0, (done.directory / "worker.log").read_text()[-5000:]
    assert done.result.outcome == "trained", done.result.reason
    assert (len(done.steps), len(done.rollouts)) == (STEPS, STEPS * PROMPTS * GROUP)
    for line in done.rollouts:
        if line["error"]:
            continue
        (sample,) = line["samples"]
        text = "".join(sample["text"])
        assert f" {own} " in text
        assert f" {other} " not in text
        of_policy = [part for part, is_own in zip(sample["text"], sample["loss_mask"], strict=True) if is_own]
        assert "".join(of_policy).startswith(line["answer"])
    # The engine's log-probabilities of the tokens are those of the adapter that is trained. A step of which every
    # rollout failed has none.
    gaps = [step["logprob_gap"] for step in done.steps if step["logprob_gap"] is not None]
    assert gaps
    assert max(gaps) < 1e-3
    for step in done.steps:
        assert set(step["program"]["metrics"]) == set(OPERATIONS)
    adapter = done.result.adapter
    assert adapter is not None
    assert tree_sha256(Path(adapter.path)) == adapter.sha256
    assert (done.left_running, done.left_behind) == ([], [])


def test_a_target_is_trained_on_its_own_tokens_beside_the_base_model(planner: Done) -> None:
    assert_trained_alone(planner, "plus", "times")


def test_a_run_that_leaves_a_process_costs_its_own_rollout(planner: Done) -> None:
    failed = [line for line in planner.rollouts if line["error"]]
    assert failed
    for line in failed:
        assert line["program"]["failure"] == "left_processes"
        assert "sleep" in line["error"]
        assert line["advantage"] is None
    assert sum(step["program"]["failures"].get("left_processes", 0) for step in planner.steps) == len(failed)
    comparison = planner.result.comparison
    assert comparison is not None
    assert (comparison.tasks, comparison.undecided, comparison.criteria) == (HELD_OUT, 0, [])
    assert comparison.candidate_failed + comparison.deployed_failed > 0


def test_the_reward_of_the_workflow_alone_counts_as_its_first_run_decides(planner: Done) -> None:
    assert {line["reward"] for line in planner.rollouts if not line["error"]} == {0.0, 1.0}
    [training] = [line for line in planner.metrics if line.get("phase") == "training"]
    assert training["reward_by"].startswith("the agent returns a reward and no response: its reward alone counts")
    assert sum(planner.result.usage[name] for name in ("judge_calls", "judge_prompt_tokens")) == 0


def test_names_of_models_are_listed_at_the_start_and_warned_of_once(planner: Done) -> None:
    [training] = [line for line in planner.metrics if line.get("phase") == "training"]
    assert set(training["models"]) == {"planner-agent", "solver-agent"}
    log = (planner.directory / "worker.log").read_text()
    # In the order in which they were first asked for.
    assert re.search(r"models that the agent asks for: (solver-agent \d+ times?, )?planner-agent ", log)
    # Only runs behind the first ones ask for it.
    assert log.count("the agent asks for gpt-9 ") == 1


@pytest.mark.extended
def test_a_target_is_trained_on_its_own_tokens_beside_another_targets_adapter(planner: Done, solver: Done) -> None:
    assert_trained_alone(solver, "times", "plus")
    assert not any(any(step["program"]["failures"].values()) for step in solver.steps)
    mine, other = solver.result.adapter, planner.result.adapter
    assert mine is not None
    assert other is not None
    assert mine.sha256 != other.sha256
