"""A round of SFT and GRPO whose trainer is two processes. One of them is killed, and then the worker: the round goes
on where it was, and no process is left."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from flywheel.cli.demo import judge
from flywheel.config import Config
from flywheel.records.round import RoundSpec
from tests.factories.worker import Done, Judge, below, family, graded, read, run, spec, start, with_reply
from tests.waiting import wait_for

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

STEPS, SOON = 4, 60.0
GOES_ON = "goes on from its checkpoint after step"


def planned(judge_url: str) -> RoundSpec:
    made = spec(judge_url)
    settings = json.loads(json.dumps(made.settings))
    settings["training"] |= {"workers": 2, "stages": ["sft", "grpo"], "steps": STEPS, "save_steps": 2, "beta": 0.05}
    settings["training"]["sft"] |= {"epochs": 1, "batch_size": 8, "learning_rate": 1e-3}
    return made.model_copy(
        update={
            "settings": Config.model_validate(settings).model_dump(mode="json"),
            "train": [with_reply(task) for task in made.train],
            "held_out": [with_reply(task) for task in made.held_out],
        }
    )


@dataclass(frozen=True)
class Killed:
    done: Done
    error: dict[str, Any]
    """Why the attempt ended whose trainer lost a process."""
    left: list[list[str]]
    """The processes of the trainer that were left after each death."""


def attempt(directory: Path, made: RoundSpec, answering: Judge, *, worker_dies: bool) -> list[str]:
    """Kill -9 the worker, or one process of its trainer, in the third step of GRPO. Returns the processes of the
    trainer that are left."""

    def in_step() -> bool:
        steps = [json.loads(line) for line in read(directory / "metrics.jsonl").splitlines()]
        has_begun = GOES_ON in read(directory / "worker.log") if made.attempt > 1 else graded(directory) >= 3
        return has_begun and sum(line.get("stage") == "grpo" for line in steps) == 2

    with answering.holding(in_step):
        worker = start(directory, made)
        try:
            wait_for(lambda: worker.poll() is not None or in_step(), "the third step", seconds=400)
            assert worker.poll() is None, read(directory / "worker.log")[-3000:]
            ranks = [each for each in below(worker.pid) if " ".join(each.cmdline()).startswith("ray::Trainer")]
            assert len(ranks) == 2
            if worker_dies:
                worker.kill()
            else:
                ranks[1].kill()
                worker.communicate(timeout=SOON)
            with contextlib.suppress(AssertionError):
                wait_for(lambda: not any(map(psutil.Process.is_running, ranks)), "their end", seconds=SOON)
            return [str(rank) for rank in ranks if rank.is_running()]
        finally:
            for member in family(directory):
                member.kill()
            worker.communicate()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    directory, answering = tmp_path_factory.mktemp("workers") / "r0001", Judge()
    with judge.running(complete=answering) as url:
        first, second, third = (planned(url).model_copy(update={"attempt": number}) for number in (1, 2, 3))
        left = [attempt(directory, first, answering, worker_dies=False)]
        error = json.loads(read(directory / "error.json"))
        left.append(attempt(directory, second, answering, worker_dies=True))
        yield Killed(run(directory, third), error, left)


def test_a_killed_process_ends_the_attempt_and_the_others(killed: Killed) -> None:
    assert killed.error["retryable"]
    assert "a process of it died" in killed.error["error"]
    assert killed.left[0] == []


def test_the_processes_of_the_trainer_end_with_a_killed_worker(killed: Killed) -> None:
    assert killed.left[1] == []


def test_the_round_goes_on_and_takes_every_step_once(killed: Killed) -> None:
    done = killed.done
    log = (done.directory / "worker.log").read_text()
    assert done.code == 0, log[-3000:]
    assert [(stage.stage, stage.outcome) for stage in done.result.stages] == [("sft", "trained"), ("grpo", "trained")]
    assert done.result.stages[1].steps == STEPS
    assert [line["step"] for line in done.steps] == list(range(1, done.result.steps + 1))
    assert log.count(GOES_ON) == 2
    assert log.count("stage 1 of 2, sft") == 1
    assert set(Counter(line["step"] for line in done.rollouts).values()) == {32}
    assert done.left_running == []
    assert done.left_behind == []
