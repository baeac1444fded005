"""A round whose candidate gains on the held-out tasks and forgets a suite, with real Ray, vLLM and TRL; its worker is
killed while the suite is judged."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.demo import judge
from flywheel.cli.demo.questions import SYSTEM_PROMPT, Question, questions
from flywheel.config import Config
from flywheel.daemon.file_round import spec_of
from flywheel.judge.usage import Purpose, UsageFile
from flywheel.records.round import DecisionReason
from flywheel.training.data.round_progress import progress_of
from flywheel.training.gate.gate import decide
from tests.factories.config import make_config, write_yaml
from tests.factories.round import POLICY
from tests.factories.worker import Done, Judge, killed, lines, read, run

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

TRAIN, HELD_OUT, SUITE, SAMPLES, THREADS = 32, 16, 48, 2, 4
BOXED = {"id": "boxed", "criteria": [{"id": "boxed", "type": "contains", "value": "\\boxed{"}]}
PLAIN = {
    "id": "plain",
    "criteria": [
        {"id": "plain", "type": "not-regex", "value": "boxed", "required": True},
        {"id": "correct", "value": "The number is right."},
    ],
}
MARGIN = 0.25


def written(path: Path, some: Sequence[Question]) -> Path:
    """Tasks with the replies that SFT imitates: all numbers are boxed."""
    rows: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": question.text},
                {"role": "assistant", "content": f"\\boxed{{{question.answer}}}"},
            ]
        }
        for question in some
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(folder: Path, judge_url: str, *, margin: float | None) -> Config:
    """The base policy boxes three numbers in ten. The round rewards boxes, the suite numbers without one."""
    return make_config(
        folder,
        sources=[],
        model={"base": str(POLICY)},
        judge={"base_url": judge_url, "model": "demo-judge", "max_thread": THREADS, "max_attempts": 1},
        filter={"rubric": str(write_yaml(folder / "boxed.yaml", BOXED))},
        training={
            "stages": ["sft"],
            "sft": {"epochs": 6, "learning_rate": 1e-2},
            "lora": {"r": 8, "alpha": 16},
        },
        rollout={"max_model_len": 128},
        serving={"max_model_len": 192},
        gate={
            "samples": SAMPLES,
            "suites": {
                "plain": {
                    "file": "suite.jsonl",
                    "rubric": str(write_yaml(folder / "plain.yaml", PLAIN)),
                    "margin": margin,
                }
            },
        },
    )


@dataclass(frozen=True)
class Forgot:
    done: Done
    config: Config
    judged: int
    """Answers of the suite that were judged before the worker died."""


@pytest.fixture(scope="module")
def forgot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forgot]:
    folder = tmp_path_factory.mktemp("suites")
    # In one wording, so that no two are nearly alike.
    some = [question for question in questions() if question.text.startswith("What is")]
    random.Random(1).shuffle(some)
    data = written(folder / "train.jsonl", some[:TRAIN])
    held_out = written(folder / "held_out.jsonl", some[TRAIN : TRAIN + HELD_OUT])
    # The first one is of the tasks to train on.
    written(folder / "suite.jsonl", [some[0], *some[-(SUITE - 1) :]])
    directory = folder / "tune"
    answering = Judge()
    with judge.running(complete=answering) as url:
        config = settings(folder, url, margin=MARGIN)
        made = spec_of(config, data, held_out)
        in_suite = lambda: judged_of_suite(directory) >= 3  # noqa: E731
        with answering.holding(in_suite):
            killed(directory, made, in_suite, "worker")
        judged = judged_of_suite(directory)
        yield Forgot(run(directory, made.model_copy(update={"attempt": 2})), config, judged)


def judged_of_suite(directory: Path) -> int:
    """Of whole lines."""
    return sum('"plain/' in line for line in read(directory / "partial.jsonl").split("\n")[:-1])


def test_a_candidate_that_forgets_a_suite_with_a_margin_is_blocked(forgot: Forgot) -> None:
    done = forgot.done
    assert done.code == 0, read(done.directory / "worker.log")[-3000:]
    comparison = done.result.comparison
    assert comparison is not None
    [suite] = comparison.suites
    assert (suite.name, suite.tasks, suite.conversations, suite.undecided) == ("plain", SUITE, SUITE, 0)
    assert suite.gain == pytest.approx(suite.candidate_mean - suite.deployed_mean)
    assert suite.upper < -MARGIN
    decision = decide(comparison, forgot.config.gate)
    assert (decision.promote, decision.reason_code, decision.suite) == (False, DecisionReason.WORSE_ON_SUITE, "plain")
    assert decision.reason.startswith(f"suite plain lost: gain {suite.gain:+.3f}")


def test_without_a_margin_it_is_promoted_and_the_loss_is_told(forgot: Forgot) -> None:
    comparison = forgot.done.result.comparison
    assert comparison is not None
    unguarded = settings(forgot.done.directory.parent, "http://127.0.0.1:1/v1", margin=None)
    decision = decide(comparison, unguarded.gate)
    assert decision.promote, decision.reason
    assert "; worse in suite plain (" in decision.reason


def test_the_gates_progress_has_the_steps_of_sft(forgot: Forgot) -> None:
    """Which are not `training.steps`."""
    progress = progress_of(forgot.done.directory)
    assert progress is not None
    steps = forgot.done.result.steps
    assert (progress.phase, progress.step, progress.steps) == ("evaluating", steps, steps)
    assert 0 < steps != forgot.config.training.steps


def test_a_task_of_the_suite_is_not_trained_on(forgot: Forgot) -> None:
    done = forgot.done
    assert len(done.spec.train) == TRAIN - 1
    assert len(done.result.left_out) == 1
    [why] = done.result.left_out.values()
    assert re.fullmatch(r"it begins nearly as plain/\S+ does, a task of gate\.suites", why)


def test_the_next_worker_asks_again_only_about_what_was_in_flight(forgot: Forgot) -> None:
    """The held-out answers were graded as well, and the stage had ended."""
    done = forgot.done
    log = read(done.directory / "worker.log")
    held_out = 2 * SAMPLES * HELD_OUT
    assert f"{held_out} of {held_out} rollouts were graded by an earlier worker" in log
    assert f"{forgot.judged} of {2 * SAMPLES * SUITE} rollouts were graded by an earlier worker" in log
    assert forgot.judged >= 3
    answers = lines(done.directory / "evaluation.jsonl")
    keys = Counter((line.get("suite"), line["side"], line["task_id"], line["seed"]) for line in answers)
    assert set(keys.values()) == {1}
    assert Counter(suite for suite, *_ in keys) == {None: held_out, "plain": 2 * SAMPLES * SUITE}
    used, _ = UsageFile(done.directory).read(0)
    assert {each.purpose for each in used} == {Purpose.GATES}, "the rubric of the round asks no judge"
    asked = sum(each.calls for each in used)
    plain = sum("boxed" not in line["answer"] for line in answers if line.get("suite"))
    assert plain <= asked <= plain + THREADS
    assert done.result.usage["judge_calls"] == plain
