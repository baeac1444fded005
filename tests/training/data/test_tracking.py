"""Trackers get the steps of a round as `metrics.jsonl` has them, its settings, and the decision: each in one run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.judge.rubric.file import parse_rubric
from flywheel.records.round import METRICS_FILE, SPEC_FILE
from flywheel.training.data.tracking import DECISION_FILE, TRACKERS, figures_of
from tests.factories.round import BOXED, round_spec
from tests.factories.tracker import OFFLINE, READERS, Tracked, same
from tests.waiting import wait_for

SECONDS = "300"
DECISION = {"outcome": "promoted", "reason": "shown to be better: +0.2", "gain": 0.2, "lower": 0.1, "upper": 0.3}
FIGURES = {"reward_mean": 0.5, "loss": None, "stage": "grpo", "program": {"failures": {"timeout": 2}}}


TENSORBOARD = pytest.param("tensorboard", marks=pytest.mark.training)
GENUINE = pytest.mark.parametrize("name", ["mlflow", "wandb", TENSORBOARD])
ONE_OF_THEM = pytest.mark.parametrize(
    "name", [TENSORBOARD, *(pytest.param(name, marks=pytest.mark.extended) for name in ("mlflow", "wandb"))]
)
"""For what takes long: the others are extended."""


@dataclass
class Round:
    """The files of a round, without a worker."""

    directory: Path

    @property
    def folder(self) -> Path:
        return self.directory / "tracking" / "r0001"

    def step(self, *numbers: int, attempt: int = 0) -> None:
        lines = [
            {"event": "step", "step": number, "steps": 9, **FIGURES, "tokens": number * 7.5,
             "at": f"2026-11-27T1{attempt}:00:0{number}.123456+00:00"}
            for number in numbers
        ]  # fmt: skip
        with (self.directory / METRICS_FILE).open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def decide(self, decision: Mapping[str, Any]) -> None:
        (self.folder / DECISION_FILE).write_text(json.dumps(decision))

    def start(self, name: str, **variables: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "flywheel.training.data.tracking", str(self.directory), name, SECONDS]
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = {**os.environ, **OFFLINE, **variables}
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)

    def send(self, name: str, **variables: str) -> None:
        """Send what is there."""
        with self.start(name, **variables) as process:
            process.communicate()
        assert process.returncode == 0, (self.folder / f"{name}.log").read_text()

    def tracked(self, name: str) -> dict[str, Tracked]:
        return READERS[name](self.directory / "tracking")

    def sent(self, name: str) -> int:
        path = self.folder / f"{name}.json"
        return int(json.loads(path.read_bytes())["step"]) if path.exists() else 0


@pytest.fixture
def made(tmp_path: Path) -> Round:
    return round_in(tmp_path / "r0001", {})


def round_in(directory: Path, settings: Mapping[str, Any]) -> Round:
    tracking = {"report_to": list(TRACKERS), "dir": str(directory / "tracking" / "r0001")}
    config = Config.model_validate({**settings, "tracking": tracking})
    (directory / "tracking" / "r0001").mkdir(parents=True)
    spec = round_spec(settings=config.model_dump(mode="json"))
    (directory / SPEC_FILE).write_text(spec.model_dump_json())
    return Round(directory)


def expected(*numbers: int) -> list[tuple[int, dict[str, float]]]:
    figures = {"reward_mean": 0.5, "program/failures/timeout": 2.0}
    return [(number, {**figures, "tokens": number * 7.5}) for number in numbers]


@pytest.mark.slow
@GENUINE
def test_a_run_has_the_steps_the_settings_and_the_decision(made: Round, name: str) -> None:
    made.step(1, 2, 3)
    made.decide(DECISION)
    made.send(name)
    ((_, run),) = made.tracked(name).items()
    assert run.name == "r0001"
    assert same(run.steps, expected(1, 2, 3)), run.steps
    shown = {key: str(value) for key, value in run.settings.items()}
    rubric = parse_rubric(BOXED, "the rubric").hash
    wanted = {"training.lora.r": "16", "rubric": rubric, "tasks.train": "1", "gate.min_tasks": "8"}
    assert {key: shown[key] for key in wanted} == wanted | {"training.lora.r": shown["training.lora.r"]}
    assert {key: str(value) for key, value in run.decision.items()} == {k: str(v) for k, v in DECISION.items()}


@pytest.mark.slow
@ONE_OF_THEM
def test_steps_are_sent_while_they_are_written_and_a_kill_gives_one_run(made: Round, name: str) -> None:
    made.step(1)
    with made.start(name) as process:
        try:
            wait_for(lambda: made.sent(name) == 1, "the first step")
            made.step(2)
            wait_for(lambda: made.sent(name) == 2, "the second step")
        finally:
            process.send_signal(signal.SIGKILL)
    made.step(3)
    made.send(name)
    made.decide(DECISION)
    made.send(name)
    ((_, run),) = made.tracked(name).items()
    # What W&B had not written to its file when it was killed is lost to it.
    least = expected(3) if name == "wandb" else expected(1, 2, 3)
    assert same(run.steps[-len(least) :], least), run.steps
    assert len(run.steps) == len({step for step, _ in run.steps})
    assert run.decision["outcome"] == "promoted"


@pytest.mark.extended
@pytest.mark.slow
def test_a_step_that_mlflow_has_is_not_there_twice(made: Round) -> None:
    made.step(1, 2)
    made.send("mlflow")
    path = made.folder / "mlflow.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "step": 0}))
    made.send("mlflow")
    ((_, run),) = made.tracked("mlflow").items()
    assert same(run.steps, expected(1, 2)), run.steps


@pytest.mark.extended
@pytest.mark.slow
@ONE_OF_THEM
def test_a_later_decision_takes_the_place_of_the_earlier(made: Round, name: str) -> None:
    made.step(1)
    for outcome in ("passed", "promoted"):
        made.decide({**DECISION, "outcome": outcome})
        made.send(name)
    made.send(name)
    ((_, run),) = made.tracked(name).items()
    assert run.decision["outcome"] == "promoted"
    assert same(run.steps, expected(1))


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_round_that_starts_over_is_a_new_run(made: Round, name: str) -> None:
    made.step(1, 2)
    with made.start(name) as process:
        wait_for(lambda: made.sent(name) == 2, "two steps")
        (made.directory / METRICS_FILE).write_text("")
        made.step(1, attempt=1)
        wait_for(lambda: made.sent(name) == 1, "the first step of the second attempt")
        process.communicate()
    assert process.returncode == 0
    lengths = sorted(len(run.steps) for run in made.tracked(name).values())
    assert lengths == [1, 2]


@pytest.mark.slow
def test_nothing_is_begun_without_a_step_or_a_decision(made: Round) -> None:
    made.send("mlflow")
    assert not (made.directory / "tracking" / "mlflow.db").exists()
    made.decide(DECISION)
    made.send("mlflow")
    ((_, run),) = made.tracked("mlflow").items()
    assert (run.steps, run.decision["outcome"]) == ([], "promoted")


@pytest.mark.slow
@GENUINE
def test_no_secret_reaches_a_tracker(tmp_path: Path, name: str) -> None:
    secrets = ("sk-abcdefghijklmnop1234", "swordfish-value", "a-variable-of-the-judge")
    agent = {"command": ["agent", "--password", f"http://me:{secrets[1]}@host/", secrets[0]]}
    settings = {"rollout": {"agent": agent}, "judge": {"api_key_env": "MY_JUDGE"}}
    made = round_in(tmp_path / "r0001", {**settings, "model": {"base": f"/models/{secrets[2]}"}})
    made.step(1)
    made.decide(DECISION)
    made.send(name, MY_JUDGE=secrets[2], WANDB_API_KEY="0" * 40)
    assert len(made.tracked(name)) == 1
    written = b"".join(path.read_bytes() for path in (made.directory / "tracking").rglob("*") if path.is_file())
    assert [secret for secret in secrets if secret.encode() in written] == []


@pytest.mark.extended
@pytest.mark.slow
def test_a_failure_is_its_last_line_without_secrets(made: Round) -> None:
    made.step(1)
    closed = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    with made.start("mlflow", **closed, MY_TOKEN="127.0.0.1") as it:
        it.communicate()
    assert it.returncode == 1
    last = (made.folder / "mlflow.log").read_text().splitlines()[-1]
    assert last.startswith("MlflowException: ")
    assert "127.0.0.1" not in last


def test_figures_are_the_numbers_of_a_line() -> None:
    line = {"event": "step", "step": 3, "steps": 9, "stage": "sft", "loss": None, "at": "2026", "a": {"b": {"c": 1}}}
    assert figures_of(line) == {"a/b/c": 1.0}
