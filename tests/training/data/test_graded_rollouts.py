"""What a worker that is started again finds of graded rollouts: every figure and every row as it was."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import TrainError
from flywheel.records.program_run import LARGEST_REWARD, RunResult
from flywheel.records.verdict import CriterionResult, Outcome, Verdict
from flywheel.training.data.graded_rollouts import GradedRollouts, StoredSteps, restored_batch
from flywheel.training.data.rollout import (
    AnsweredCall,
    CallOutcome,
    Completion,
    LoadedAdapter,
    RewardWeights,
    Rollout,
    RolloutBatch,
    deviation,
    mean,
)
from flywheel.training.data.rollout_file import append_rollouts, rollout_line
from flywheel.training.data.samples import Sample
from tests.training.data.rollouts import batch, failed, missed, recorded, request, rollout

finite = st.floats(allow_nan=False, allow_infinity=False, width=64)
rewards = st.floats(-LARGEST_REWARD, LARGEST_REWARD)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(1, 6))
    mask = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    logprobs = tuple(draw(st.none() | finite.map(lambda value: -abs(value))) if own else None for own in mask)
    return Sample(tuple(range(length)), tuple(mask), logprobs)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    made = tuple(draw(st.lists(samples(), max_size=2)))
    outcomes = st.sampled_from(CallOutcome)
    called = st.builds(
        lambda outcome, repeats: AnsweredCall("", "add", outcome, None, repeats), outcomes, st.booleans()
    )
    run = draw(st.none() | st.builds(RunResult, reward=st.none() | rewards, metrics=st.just({"won": 1.0})))
    return Completion(
        text=draw(texts),
        samples=made,
        texts=tuple(tuple(None for _ in sample.token_ids) for sample in made),
        steps=tuple(draw(st.lists(st.fixed_dictionaries({"role": st.just("tool"), "content": texts}), max_size=2))),
        calls=tuple(draw(st.lists(called, max_size=2))),
        turns=draw(st.integers(1, 4)),
        forks=draw(st.integers(0, 2)),
        truncated=draw(st.booleans()),
        loop=draw(st.sampled_from(["", "'again' is repeated 40 times"])),
        run=run,
        system_prompts=tuple(draw(st.lists(texts, max_size=2))),
    )


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    score = draw(st.none() | st.floats(0, 1))
    result = st.builds(CriterionResult, texts, texts, st.floats(0, 1), st.booleans(), texts)
    outcome = Outcome.UNDECIDED if score is None else draw(st.sampled_from([Outcome.ACCEPTED, Outcome.REJECTED]))
    counts = draw(st.tuples(*[st.integers(0, 99)] * 3))
    error = "the judge was away" if score is None else ""
    results = tuple(draw(st.lists(result, max_size=2)))
    return Verdict(outcome, score, results, "", error, *counts)


WEIGHTS = RewardWeights(0.5, 0.5)


@pytest.mark.slow
@given(made=st.lists(st.tuples(completions(), st.none() | verdicts()), min_size=1, max_size=8))
def test_a_stored_rollout_comes_back_with_all_figures_and_rows(
    made: Sequence[tuple[Completion, Verdict | None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("round")
    prompt = recorded()
    rollouts = tuple(
        Rollout(request(place // 4, place, of=prompt), each, verdict, WEIGHTS)
        for place, (each, verdict) in enumerate(made)
    )
    step = RolloutBatch(rollouts, {"generate": 1.0}, most_groups=1)
    StoredSteps(directory).append(0, step, "group")
    [requests, lines] = [[each.request for each in rollouts], StoredSteps(directory).lines(0)]
    found = replace(restored_batch(lines, requests, WEIGHTS), most_groups=1)
    assert found.rows() == step.rows()
    assert (found.advantages(), found.rewards, found.dropped) == (step.advantages(), step.rewards, step.dropped)
    assert (found.summary(), found.usage()) == (step.summary(), step.usage())
    assert found.system_prompts == step.system_prompts
    assert [each.completion for each in found.rollouts] == [each.completion for each in rollouts]
    assert [each.failure for each in found.rollouts] == [each.failure for each in rollouts]


def test_misses_failures_and_what_the_judge_left_undecided_come_back_too(tmp_path: Path) -> None:
    of_program = Completion(error="it raised", cause="raised", run=RunResult(cause="raised", error="it raised"))
    rollouts = (
        *(rollout(0, score) for score in (1, None, 0.5, 0, 0.25)),
        missed(1, of=recorded()),
        failed(1),
        Rollout(request(1), of_program, None),
    )
    step = RolloutBatch(rollouts)
    append_rollouts(tmp_path, 3, step, "group")
    lines = StoredSteps(tmp_path, before=2).lines(0)
    by_seed = {(line["group"], place): line for place, line in enumerate(json_lines(tmp_path / "rollouts.jsonl"))}
    asked = [replace(each.request, seed=place) for place, each in enumerate(rollouts)]
    found = restored_batch(by_seed, asked, RewardWeights())
    assert set(lines) == {(0, 0), (1, 0)}
    assert (found.missed, found.undecided, found.failed) == (step.missed, step.undecided, step.failed)
    assert [each.failure for each in found.rollouts] == [each.failure for each in rollouts]
    assert found.usage() == step.usage()


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_that_was_not_written_whole_is_removed(tmp_path: Path) -> None:
    """At every length to which a crash can cut rollouts and index, which are written in this order."""
    append_rollouts(tmp_path, 1, batch([1, 0, 1, 0], [0, 1]), "group")
    rollouts, index = tmp_path / "rollouts.jsonl", tmp_path / "rollouts.index.jsonl"
    first = rollouts.stat().st_size, index.stat().st_size
    append_rollouts(tmp_path, 2, batch([1, 0, 1, 0], [0, 1]), "group")
    whole = rollouts.read_bytes(), index.read_bytes()
    cuts = [(size, first[1]) for size in range(first[0], len(whole[0]), 97)]
    cuts += [(len(whole[0]), size) for size in range(first[1], len(whole[1]), 11)]
    for cut in cuts:
        rollouts.write_bytes(whole[0][: cut[0]])
        index.write_bytes(whole[1][: cut[1]])
        steps = StoredSteps(tmp_path)
        assert (0 in steps, 1 in steps) == (True, False)
        assert (rollouts.stat().st_size, index.stat().st_size) == first
    rollouts.write_bytes(whole[0])
    index.write_bytes(whole[1])
    assert 1 in StoredSteps(tmp_path)
    assert (rollouts.read_bytes(), index.read_bytes()) == whole


def test_other_rollouts_than_the_rounds_are_refused(tmp_path: Path) -> None:
    append_rollouts(tmp_path, 1, batch([1, 0]), "group")
    with pytest.raises(TrainError, match="other rollouts than this round would make"):
        restored_batch(StoredSteps(tmp_path).lines(0), [request(0, 99)], RewardWeights())


def adapter(weights: str) -> LoadedAdapter:
    return LoadedAdapter("r0001-step-1", 1, weights)


def test_graded_rollouts_are_found_by_weights_task_and_seed(tmp_path: Path) -> None:
    asked = request(0, 5, adapter=adapter("a"))
    done = replace(rollout(0, 0.75), request=asked)
    GradedRollouts(tmp_path).add(done)
    again = GradedRollouts(tmp_path)
    found = again.find(asked, RewardWeights())
    assert found is not None
    assert (found.reward, found.completion) == (0.75, done.completion)
    for other in (request(0, 6, adapter=adapter("a")), request(0, 5, adapter=adapter("b")), request(0, 5)):
        assert again.find(other, RewardWeights()) is None
    later = request(0, 7, adapter=adapter("a"))
    again.add(replace(done, request=later))
    again.remove(RolloutBatch((done,)))
    for store in (again, GradedRollouts(tmp_path)):
        assert store.find(asked, RewardWeights()) is None
    assert GradedRollouts(tmp_path).find(later, RewardWeights()) is not None, "that of the next step stays"
    again.remove(RolloutBatch((replace(done, request=later),)))
    assert not (tmp_path / "partial.jsonl").exists()


def test_what_failed_is_tried_again_and_what_missed_is_not(tmp_path: Path) -> None:
    store = GradedRollouts(tmp_path)
    for place, each in enumerate((rollout(0, None), failed(0), missed(0))):
        store.add(replace(each, request=request(0, place)))
    again = GradedRollouts(tmp_path)
    assert [again.find(request(0, place), RewardWeights()) is not None for place in range(3)] == [False, False, True]


def test_half_a_line_of_a_worker_that_died_costs_that_line_alone(tmp_path: Path) -> None:
    store = GradedRollouts(tmp_path)
    for seed in range(2):
        store.add(replace(rollout(0, 1), request=request(0, seed)))
    path = tmp_path / "partial.jsonl"
    os.truncate(path, path.stat().st_size - 5)
    again = GradedRollouts(tmp_path)
    assert [again.find(request(0, seed), RewardWeights()) is not None for seed in range(2)] == [True, False]
    again.add(replace(rollout(0, 1), request=request(0, 1)))
    assert GradedRollouts(tmp_path).find(request(0, 1), RewardWeights()) is not None


def test_log_probabilities_rewards_and_advantages_are_stored_exactly() -> None:
    value = -0.1 - 1e-16
    completion = replace(
        rollout(0, 1).completion, samples=(Sample((1, 2), (False, True), (None, value)),), texts=((None, None),)
    )
    line = json.loads(json.dumps(rollout_line(Rollout(request(0), completion, None), 1, 1 / 3)))
    assert line["samples"][0]["logprobs"][1] == value
    assert line["advantage"] == 1 / 3


def test_the_mean_of_huge_metrics_does_not_overflow() -> None:
    assert mean([1.7e308, 1.7e308]) == pytest.approx(1.7e308)
    assert deviation([1.0, 3.0]) == 1.0
