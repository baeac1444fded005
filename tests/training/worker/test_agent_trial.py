"""Before a round trains, the user's agent is tried on a task, and on two others if it fails."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.records.program_run import RunResult
from flywheel.training.data.rollout import Completion, RolloutRequest
from flywheel.training.engine import ray_cluster
from flywheel.training.optim.rollout_grading import has_judge
from flywheel.training.worker.processes import EngineAdapters
from flywheel.training.worker.users_agent import TRIALS, UsersAgent, with_decided_reward
from tests.factories.round import round_spec
from tests.training.data.rollouts import prompt

WHOLE = Completion(run=RunResult(reward=1.0))
FAILED = Completion(error="RuntimeError: the shop is closed", cause="raised")
CUT = Completion(truncated=True)


def settings_of(**rollout: Any) -> Config:
    return Config.model_validate({"training": {"group_size": 4}, "rollout": rollout})


def tried(monkeypatch: pytest.MonkeyPatch, *runs: Completion) -> tuple[RunResult | None, int]:
    """What the trial returns when the agent's runs end like these, and how many there were."""
    made: list[RolloutRequest] = []

    def generated(_: Any, call: partial[Any]) -> list[Completion]:
        asked: Sequence[RolloutRequest] = call.args[0]
        made.extend(asked)
        return list(runs[len(made) - len(asked) : len(made)])

    monkeypatch.setattr(ray_cluster, "anywhere", generated)
    settings = settings_of()
    agent = UsersAgent(round_spec(), settings, [], EngineAdapters([]))
    found = agent.try_on([prompt(f"t-{number}", (number,)) for number in range(5)], settings)
    assert len({request.prompt.task.task_id for request in made}) == len(made), "each is on another task"
    return found, len(made)


def test_one_whole_run_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, WHOLE) == (WHOLE.run, 1)
    assert tried(monkeypatch, FAILED, FAILED, WHOLE) == (WHOLE.run, TRIALS)


def test_an_agent_that_fails_on_each_task_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainError, match=r"it failed on 3 tasks before training.*the shop is closed") as refused:
        tried(monkeypatch, FAILED, FAILED, FAILED)
    assert not refused.value.retryable
    failed = Completion(error="the engine failed", cause="engine_error")
    with pytest.raises(TrainError, match="it failed on 3 tasks") as refused:
        tried(monkeypatch, FAILED, failed, FAILED)
    assert refused.value.retryable


def test_an_agent_that_reaches_a_limit_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, FAILED, CUT, FAILED) == (None, TRIALS)


REWARD_ALONE, BOTH, RESPONSE = RunResult(reward=1.0), RunResult(reward=1.0, response="7"), RunResult(response="7")


@pytest.mark.parametrize(
    ("first", "counts"), [(REWARD_ALONE, (0, 1)), (BOTH, (1, 0)), (RESPONSE, (1, 0)), (None, (1, 0))]
)
@pytest.mark.parametrize("later", [REWARD_ALONE, BOTH, RESPONSE, None])
def test_a_later_worker_does_not_decide_anew_which_reward_counts(
    tmp_path: Path, first: RunResult | None, counts: tuple[int, int], later: RunResult | None
) -> None:
    """The stored rollouts, of the same groups perhaps, have the reward that the first one has decided on."""
    settings = settings_of(agent={"workflow": f"{tmp_path}/flow.py:run"})
    begun, told = with_decided_reward(settings, first, tmp_path)
    assert bool(told) == (first in (REWARD_ALONE, BOTH))
    again, told_again = with_decided_reward(settings, later, tmp_path)
    assert told_again == told
    for each in (begun, again):
        assert (each.rollout.weights.rubric, each.rollout.weights.workflow) == counts
        assert has_judge(each) == (counts[0] > 0)


def test_settings_decide_before_any_run(tmp_path: Path) -> None:
    both = {"agent": {"workflow": f"{tmp_path}/flow.py:run"}, "reward": {"rubric": 1, "workflow": 1}}
    settings = settings_of(**both)
    assert with_decided_reward(settings, REWARD_ALONE, tmp_path) == (settings, "")
    assert not (tmp_path / "reward.json").exists()
