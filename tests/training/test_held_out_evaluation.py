"""Held-out tasks are asked as the agent's server answers them, and not as a round learns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flywheel.config import Config
from flywheel.round import RoundSpec
from flywheel.training.held_out_evaluation import answer
from flywheel.training.rollout import Batch, LoadedAdapter, Rollout, RolloutRequest
from tests.training.rollouts import prompt, rollout


class Noted:
    """Takes the place of engines and judge: every answer is right."""

    def __init__(self) -> None:
        self.requests: list[RolloutRequest] = []

    def collect(self, requests: Sequence[RolloutRequest]) -> Batch:
        self.requests += requests
        done = rollout(0, 1.0)
        return Batch(tuple(Rollout(request, done.completion, done.verdict) for request in requests))


def asked(directory: Path, **sections: object) -> list[RolloutRequest]:
    settings = Config.model_validate({"gate": {"min_tasks": 1, "samples": 2, **sections.pop("gate", {})}, **sections})  # type: ignore[dict-item]
    spec = RoundSpec(
        round_id="r0001", attempt=1, seed=7, debug=False, base_model="base", parent=None, train=[], held_out=[],
        rubric={}, settings=settings.model_dump(mode="json"),
    )  # fmt: skip
    noted = Noted()
    candidate = LoadedAdapter("r0001", 1, "/r0001")
    answer([prompt("t-1", (1,)), prompt("t-2", (2,))], (candidate, None), spec, settings, noted, directory)  # type: ignore[arg-type]
    return noted.requests


def test_the_gates_answers_have_the_servers_limits_and_not_the_rounds(tmp_path: Path) -> None:
    requests = asked(tmp_path, rollout={"max_completion_tokens": 16, "temperature": 0.7, "timeout_seconds": 100})
    assert len(requests) == 8
    assert {(each.as_served, each.max_tokens, each.temperature, each.seconds) for each in requests} == {
        (True, None, None, 90.0)
    }


def test_the_agents_temperature_is_used_where_it_is_told(tmp_path: Path) -> None:
    assert {each.temperature for each in asked(tmp_path, gate={"temperature": 0.3})} == {0.3}


def test_both_sides_are_asked_with_the_same_seeds(tmp_path: Path) -> None:
    requests = asked(tmp_path)
    seeds = [[each.seed for each in requests if (each.adapter is None) is deployed] for deployed in (False, True)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4
