"""Two targets in one workflow: a round of each, with the other one frozen at its adapter.

Whole rounds as in `test_round`: real Ray, vLLM and TRL, the demo's policy and a judge over HTTP.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.demo.questions import Question, questions
from flywheel.records.round import FrozenTarget, RoundSpec, RoundTask
from flywheel.system.files import tree_sha256
from tests.demo.two_agents import OPERATIONS
from tests.factories.worker import Done, run, spec, tasks

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.timeout(900)]

WORKFLOW = Path(__file__).parents[2] / "demo" / "two_agents.py"
STEPS, PROMPTS, GROUP = 2, 3, 6


def asked(name: str) -> list[Question]:
    some = [question for question in questions() if f" {OPERATIONS[name]} " in question.text]
    random.Random(1).shuffle(some)
    return some


def program_tasks(some: list[Question], prefix: str) -> list[RoundTask]:
    return [
        task.model_copy(
            update={
                "agent": "program",
                "line": {"task_id": task.task_id, "main_query": task.exchange.query, "metadata": {}},
            }
        )
        for task in tasks(some, prefix)
    ]


def of_target(judge_url: str, name: str, frozen: FrozenTarget, **changes: Any) -> RoundSpec:
    made = spec(judge_url)
    settings = made.settings
    settings["training"] |= {"steps": STEPS, "prompts_per_step": PROMPTS, "group_size": GROUP}
    settings["rollout"] |= {"agent": {"workflow": f"{WORKFLOW}:run"}, "workers": 3}
    settings["model"] |= {"alias": f"{name}-agent"}
    settings["targets"] = {each: {"alias": f"{each}-agent"} for each in OPERATIONS}
    some = asked(name)
    return made.model_copy(
        update={
            "target": name,
            "frozen": [frozen],
            "train": program_tasks(some[:20], f"{name}-"),
            "held_out": program_tasks(some[20:28], f"{name}-held-"),
            "settings": settings,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def planner(judge_url: str, tmp_path_factory: pytest.TempPathFactory) -> Done:
    solver = FrozenTarget(target="solver", alias="solver-agent", adapter=None)
    return run(tmp_path_factory.mktemp("planner") / "r0001", of_target(judge_url, "planner", solver))


@pytest.fixture(scope="module")
def solver(judge_url: str, planner: Done, tmp_path_factory: pytest.TempPathFactory) -> Done:
    frozen = FrozenTarget(target="planner", alias="planner-agent", adapter=planner.result.adapter)
    made = of_target(judge_url, "solver", frozen, round_id="r0002")
    return run(tmp_path_factory.mktemp("solver") / "r0002", made)


def test_each_target_is_trained_on_its_own_tokens_alone(planner: Done, solver: Done) -> None:
    hashes = set()
    for done, own, other in ((planner, "plus", "times"), (solver, "times", "plus")):
        assert done.code == 0, (done.directory / "worker.log").read_text()[-5000:]
        assert len(done.rollouts) == STEPS * PROMPTS * GROUP
        for line in done.rollouts:
            (sample,) = line["samples"]
            text = "".join(sample["text"])
            assert f" {own} " in text
            assert f" {other} " not in text
            of_policy = (part for part, is_own in zip(sample["text"], sample["loss_mask"], strict=True) if is_own)
            assert "".join(of_policy).startswith(line["answer"])
        for step in done.steps:
            # The engine's log-probabilities of the tokens are those of the adapter that is trained.
            assert step["logprob_gap"] < 1e-3
            assert not any(step["program"]["failures"].values())
            assert set(step["program"]["metrics"]) == set(OPERATIONS)
        adapter = done.result.adapter
        assert adapter is not None
        assert tree_sha256(Path(adapter.path)) == adapter.sha256
        hashes.add(adapter.sha256)
        assert done.left_running == []
        assert done.left_behind == []
    assert len(hashes) == 2
