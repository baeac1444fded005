"""A round whose worker, trainer or engine is killed in a step and again in the gate: it goes on where it was, and the
judge is not asked again about what was graded."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from flywheel.cli.demo import judge
from flywheel.config import Config
from flywheel.judge.usage import UsageFile
from flywheel.records.round import RoundSpec
from flywheel.training.data.rollout_file import read_rollouts
from tests.factories.worker import Done, Judge, graded, killed, read, run, spec

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

STEPS, THREADS = 5, 4


def planned(judge_url: str, overlap: int) -> RoundSpec:
    made = spec(judge_url)
    settings = json.loads(json.dumps(made.settings))
    settings["training"] |= {"steps": STEPS, "save_steps": 2, "beta": 0.05, "overlap": overlap}
    return made.model_copy(update={"settings": Config.model_validate(settings).model_dump(mode="json")})


@dataclass(frozen=True)
class Resumed:
    done: Done
    synced: set[str]
    """Hashes of the weights that the engines had at the first death."""
    partial: set[str]
    """Those in the file of graded rollouts."""
    judged: int


@pytest.fixture(
    scope="module",
    params=[(0, "worker", "Engine"), (1, "Trainer", "worker")],
    ids=["worker-engine", "overlap-trainer-worker"],
)
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resumed]:
    directory = tmp_path_factory.mktemp("resumed") / "r0001"
    answering = Judge()
    with judge.running(complete=answering) as url:
        overlap, first, second = request.param
        made = planned(url, overlap)
        in_step = lambda: '"step":3' in read(directory / "metrics.jsonl") and graded(directory) >= 3  # noqa: E731
        with answering.holding(in_step):
            synced = killed(directory, made, in_step, first)
        partial = {line["weights"] for line in read_rollouts(directory / "partial.jsonl")}
        judged = graded(directory)
        in_gate = lambda: '"evaluating"' in read(directory / "metrics.jsonl") and graded(directory) >= 3  # noqa: E731
        with answering.holding(in_gate):
            killed(directory, made.model_copy(update={"attempt": 2}), in_gate, second)
        yield Resumed(run(directory, made.model_copy(update={"attempt": 3})), synced, partial, judged)


def test_every_step_is_taken_once(resumed: Resumed) -> None:
    done = resumed.done
    assert done.code == 0, (done.directory / "worker.log").read_text()[-3000:]
    assert (done.result.outcome, done.result.steps) == ("trained", STEPS)
    assert [line["step"] for line in done.steps] == list(range(1, STEPS + 1))
    taken = Counter(line["step"] for line in done.rollouts)
    assert set(taken) == set(range(1, STEPS + 1))
    assert len(set(taken.values())) == 1
    assert done.left_running == []


def test_the_worker_goes_on_from_the_checkpoint_with_equal_weights(resumed: Resumed) -> None:
    log = (resumed.done.directory / "worker.log").read_text()
    assert resumed.partial <= resumed.synced
    assert "r0001 goes on from its checkpoint after step 2" in log
    # They are found by the hash of the weights, which are the same after two steps from the checkpoint and others
    # from stored rollouts.
    assert sum(map(int, re.findall(r"(\d+) of 32 rollouts were graded by an earlier worker", log))) == resumed.judged
    assert log.count("stage 1 of 1, grpo") == 2, "the third worker finds the stage at its end"


def test_the_judge_is_asked_again_only_about_what_was_in_flight(resumed: Resumed) -> None:
    done = resumed.done
    asked = sum(used.calls for used in UsageFile(done.directory).read(0)[0])
    of_steps = sum((line["verdict"] or {"calls": 0})["calls"] for line in done.rollouts)
    assert asked - done.result.usage["judge_calls"] <= 2 * THREADS
    assert done.result.usage["judge_calls"] > of_steps
    assert done.result.usage["rollouts"] == len(done.rollouts) + len(
        read(done.directory / "evaluation.jsonl").splitlines()
    )


def test_every_answer_of_the_gate_is_there_once(resumed: Resumed) -> None:
    done = resumed.done
    answers = [json.loads(line) for line in read(done.directory / "evaluation.jsonl").splitlines()]
    keys = [(line["side"], line["task_id"], line["seed"]) for line in answers]
    assert len(keys) == len(set(keys))
    assert done.result.comparison is not None
    assert len(keys) == 2 * done.result.comparison.tasks * done.result.comparison.samples


def test_a_finished_round_keeps_nothing_to_go_on_with(resumed: Resumed) -> None:
    directory = resumed.done.directory
    for name in ("partial.jsonl", "identity.json", "sync", "stages/1-grpo/checkpoints"):
        assert not (directory / name).exists()
