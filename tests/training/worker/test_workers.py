"""A round of SFT and GRPO whose trainer is two processes, and whose rollouts overlap with its steps.

One process of the trainer is killed in a step, then the worker in a step, and then the worker in the gate: the round
goes on where it was, the judge is not asked again about what was graded, and no process is left.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from flywheel.cli.demo import judge
from flywheel.config.file import Config
from flywheel.judge.usage import UsageFile
from flywheel.records.round import RoundSpec
from tests.factories.worker import (
    HELD_OUT,
    SAMPLES,
    Done,
    Judge,
    below,
    end,
    graded,
    read,
    run,
    spec,
    start,
    with_reply,
)
from tests.factories.worker import killed as killed_at
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.training,
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

STEPS, THREADS, SOON = 8, 4, 60.0
GOES_ON = "goes on from its checkpoint after step"


def planned(judge_url: str) -> RoundSpec:
    made = spec(judge_url)
    settings = json.loads(json.dumps(made.settings))
    settings["training"] |= {
        "workers": 2,
        "stages": ["sft", "grpo"],
        "steps": STEPS,
        "save_steps": 2,
        "beta": 0.05,
        "overlap": 1,
        "learning_rate": 1e-3,
    }
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
    """The processes of the trainer that were left after each of its deaths."""
    judged: list[int]
    """Rollouts of a step, and answers of the gate, that were judged before each death."""


def attempt(directory: Path, made: RoundSpec, answering: Judge, *, worker_dies: bool) -> list[str]:
    """Kill -9 the worker, or one process of its trainer, in a step of GRPO. Returns the processes of the
    trainer that are left."""

    def in_step() -> bool:
        """Behind the third. The judge is needed for each that follows, so that only one more ends."""
        steps = [json.loads(line) for line in read(directory / "metrics.jsonl").splitlines()]
        has_begun = GOES_ON in read(directory / "worker.log") if made.attempt > 1 else graded(directory) >= 3
        return has_begun and sum(line.get("stage") == "grpo" for line in steps) >= 3

    with answering.holding(in_step):
        worker = start(directory, made)
        try:
            wait_for(lambda: worker.poll() is not None or in_step(), "a step", seconds=400)
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
            end(worker, directory)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    directory, answering = tmp_path_factory.mktemp("workers") / "r0001", Judge()
    with judge.running(complete=answering) as url:
        first, second, third, fourth = (planned(url).model_copy(update={"attempt": n}) for n in (1, 2, 3, 4))
        left = [attempt(directory, first, answering, worker_dies=False)]
        judged = [graded(directory)]
        error = json.loads(read(directory / "error.json"))
        left.append(attempt(directory, second, answering, worker_dies=True))
        judged.append(graded(directory))

        def in_gate() -> bool:
            return '"evaluating"' in read(directory / "metrics.jsonl") and graded(directory) >= 3

        with answering.holding(in_gate):
            killed_at(directory, third, in_gate, "worker")
        judged.append(graded(directory))
        yield Killed(run(directory, fourth), error, left, judged)


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
    before = done.result.stages[0].steps
    after = [int(number) - before for number in re.findall(rf"r0001 {GOES_ON} (\d+)", log)]
    assert len(after) == 2
    assert all(2 <= number < STEPS and number % 2 == 0 for number in after)
    assert [log.count(f"stage {number} of 2, {stage}") for number, stage in ((1, "sft"), (2, "grpo"))] == [1, 3]
    # They are found by the hash of the weights, which are the same after two steps from the checkpoint and others
    # from stored rollouts. The second worker may have been killed before it found them.
    found = re.findall(r"(\d+) of 32 rollouts were graded by an earlier worker", log.rpartition(GOES_ON)[2])
    assert sum(map(int, found)) == killed.judged[1]
    assert set(Counter(line["step"] for line in done.rollouts).values()) == {32}
    assert done.left_running == []
    assert done.left_behind == []


def test_in_the_gate_only_what_was_in_flight_is_asked_again(killed: Killed) -> None:
    log = (killed.done.directory / "worker.log").read_text()
    assert f"{killed.judged[2]} of {2 * SAMPLES * HELD_OUT} rollouts were graded by an earlier worker" in log
    answers = [json.loads(line) for line in read(killed.done.directory / "evaluation.jsonl").splitlines()]
    keys = Counter((line["side"], line["task_id"], line["seed"]) for line in answers)
    assert set(keys.values()) == {1}
    assert len(keys) == 2 * SAMPLES * HELD_OUT


def test_the_judge_is_asked_again_only_about_what_was_in_flight(killed: Killed) -> None:
    done = killed.done
    asked = sum(used.calls for used in UsageFile(done.directory).read(0)[0])
    of_steps = sum((line["verdict"] or {"calls": 0})["calls"] for line in done.rollouts)
    assert asked - done.result.usage["judge_calls"] <= 3 * THREADS
    assert done.result.usage["judge_calls"] > of_steps


def test_a_finished_round_keeps_nothing_to_go_on_with(killed: Killed) -> None:
    for name in ("partial.jsonl", "identity.json", "sync", "stages/2-grpo/checkpoints"):
        assert not (killed.done.directory / name).exists()
