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
from flywheel.training.worker.training_round import TRIALS, Round
from tests.factories.round import round_spec
from tests.training.data.rollouts import prompt

WHOLE = Completion(run=RunResult(reward=1.0))
FAILED = Completion(error="RuntimeError: the shop is closed", cause="raised")
CUT = Completion(truncated=True)


def tried(directory: Path, monkeypatch: pytest.MonkeyPatch, *runs: Completion) -> tuple[RunResult | None, int]:
    """What the trial returns when the agent's runs end like these, and how many there were."""
    made: list[RolloutRequest] = []

    def generated(_: Any, call: partial[Any]) -> list[Completion]:
        asked: Sequence[RolloutRequest] = call.args[0]
        made.extend(asked)
        return list(runs[len(made) - len(asked) : len(made)])

    monkeypatch.setattr(ray_cluster, "anywhere", generated)
    settings = Config.model_validate({"training": {"group_size": 4}})
    whole = Round(round_spec(settings=settings.model_dump(mode="json")), directory, settings, lambda *_: Any)  # type: ignore[arg-type, return-value]
    found = whole._try_program([prompt(f"t-{number}", (number,)) for number in range(5)])
    assert len({request.prompt.task.task_id for request in made}) == len(made), "each is on another task"
    return found, len(made)


def test_one_whole_run_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(tmp_path, monkeypatch, WHOLE) == (WHOLE.run, 1)
    assert tried(tmp_path, monkeypatch, FAILED, FAILED, WHOLE) == (WHOLE.run, TRIALS)


def test_an_agent_that_fails_on_each_task_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainError, match=r"it failed on 3 tasks before training.*the shop is closed") as refused:
        tried(tmp_path, monkeypatch, FAILED, FAILED, FAILED)
    assert not refused.value.retryable
    failed = Completion(error="the engine failed", cause="engine_error")
    with pytest.raises(TrainError, match="it failed on 3 tasks") as refused:
        tried(tmp_path, monkeypatch, FAILED, failed, FAILED)
    assert refused.value.retryable


def test_an_agent_that_reaches_a_limit_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(tmp_path, monkeypatch, FAILED, CUT, FAILED) == (None, TRIALS)
