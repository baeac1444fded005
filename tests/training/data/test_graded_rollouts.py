"""What a worker that is started again finds of graded rollouts: every figure and every row as it was."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import StoreError, TrainError
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
from flywheel.training.data.rollout_file import rollouts, step_file
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
    made = (
        *(rollout(0, score) for score in (1, None, 0.5, 0, 0.25)),
        missed(1, of=recorded()),
        failed(1),
        Rollout(request(1), of_program, None),
    )
    step = RolloutBatch(made)
    StoredSteps(tmp_path, before=2).append(0, step, "group")
    lines = StoredSteps(tmp_path, before=2).lines(0)
    by_seed = {(line["group"], place): line for place, line in enumerate(rollouts(tmp_path))}
    asked = [replace(each.request, seed=place) for place, each in enumerate(made)]
    found = restored_batch(by_seed, asked, RewardWeights())
    assert set(lines) == {(0, 0), (1, 0)}
    assert (found.missed, found.undecided, found.failed) == (step.missed, step.undecided, step.failed)
    assert [each.failure for each in found.rollouts] == [each.failure for each in made]
    assert found.usage() == step.usage()


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """The directory of a round with three steps."""
    for step in range(3):
        StoredSteps(tmp_path).append(step, batch([1, 0, 1, 0], [0, 1]), "group")
    return tmp_path


def test_removing_a_file_costs_its_step_and_those_behind_it_alone(three: Path, tmp_path_factory: Any) -> None:
    """Files are removed by hand, as errors have advised. Steps behind the removed one cannot be gone on with: which
    rollouts they have depends on it."""
    left = {}
    for path in sorted(path for path in three.rglob("*") if path.is_file()):
        copy = shutil.copytree(three, tmp_path_factory.mktemp("round") / "r0001")
        (copy / path.relative_to(three)).unlink()
        left[path.name] = len(StoredSteps(copy)), {line["step"] for line in rollouts(copy)}
    assert left == {"0001.jsonl": (0, set()), "0002.jsonl": (1, {1}), "0003.jsonl": (2, {1, 2})}


def test_a_damaged_file_is_said_and_nothing_is_removed(three: Path) -> None:
    step_file(three, 2).write_bytes(b"something else\n")
    with pytest.raises(StoreError, match=r"0002\.jsonl"):
        StoredSteps(three)
    assert step_file(three, 3).exists()


def test_a_step_that_is_not_usable_is_kept_for_people_until_a_further_worker_makes_it_again(three: Path) -> None:
    StoredSteps(three).append(3, batch([None] * 4), "group", is_usable=False)
    assert {line["step"] for line in rollouts(three)} == {1, 2, 3, 4}
    again = StoredSteps(three)
    assert len(again) == 3
    assert {line["step"] for line in rollouts(three)} == {1, 2, 3}
    again.append(3, batch([1, 0, 1, 0]), "group")
    assert 3 in StoredSteps(three)


def test_a_step_without_a_reward_that_training_went_on_from_costs_none_behind_it(three: Path) -> None:
    stored = StoredSteps(three)
    stored.append(3, batch([None] * 4), "group", is_usable=False)
    stored.append(4, batch([1, 0, 1, 0]), "group")
    assert len(StoredSteps(three)) == 5
    assert {line["step"] for line in rollouts(three)} == {1, 2, 3, 4, 5}


def test_a_stage_has_the_steps_behind_those_before_it(three: Path) -> None:
    """Between two stages with rollouts may be steps of one without."""
    second = StoredSteps(three, before=9)
    assert (len(second), 0 in second, len(StoredSteps(three, before=1))) == (0, False, 2)
    second.append(0, batch([1, 0, 1, 0]), "group")
    assert len(StoredSteps(three, before=9)) == 1
    assert [line["step"] for line in rollouts(three)][-4:] == [10] * 4


def test_other_rollouts_than_the_rounds_are_refused(tmp_path: Path) -> None:
    StoredSteps(tmp_path).append(0, batch([1, 0]), "group")
    with pytest.raises(TrainError, match=r"other rollouts than this round would make.*Remove identity\.json"):
        restored_batch(StoredSteps(tmp_path).lines(0), [request(0, 99)], RewardWeights())


def work(directory: Path, graded: BinaryIO) -> None:
    """What a worker does with overlap: rollouts of the next step are graded before a step is complete. The seed of
    each is written to `graded` once it is stored."""

    def grade(step: int) -> RolloutBatch:
        made = [replace(rollout(0, seed % 2), request=request(0, 4 * step + seed)) for seed in range(4)]
        for each in made:
            if store.find(each.request, RewardWeights()) is None and step not in steps:
                store.add(each)
                os.write(graded.fileno(), bytes([each.request.seed]))
        return RolloutBatch(tuple(made))

    store, steps = GradedRollouts(directory), StoredSteps(directory)
    batches = [grade(0)]
    for step in range(3):
        batches.append(grade(step + 1))
        if step not in steps:
            steps.append(step, batches[step], "group")
        store.remove(batches[step])


def killed(directory: Path, graded: BinaryIO, place: int) -> bool:
    """Whether the work in another process was killed before its rename, removal or synchronisation of this number."""
    child = os.fork()
    if not child:
        done = itertools.count()

        def dying(module: Any, name: str) -> None:
            call = getattr(module, name)

            def counting(*arguments: Any, **options: Any) -> Any:
                if next(done) == place:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)

            setattr(module, name, counting)

        for module, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
            dying(module, name)
        work(directory, graded)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_kill_at_any_place_loses_no_graded_rollout(tmp_path: Path) -> None:
    """Neither those of a step that is being completed nor those of the next one, and a step is whole or absent."""
    for place in itertools.count():
        directory = tmp_path / str(place)
        directory.mkdir()
        with (tmp_path / f"{place}.graded").open("w+b") as graded:
            was_killed = killed(directory, graded, place)
            graded.seek(0)
            seeds = graded.read()
        steps, store = StoredSteps(directory), GradedRollouts(directory)
        assert [len(steps.lines(step)) for step in range(len(steps))] == [4] * len(steps)
        assert [path.name for path in directory.rglob(".0*")] == []
        found = {seed for step in range(len(steps)) for _, seed in steps.lines(step)}
        found |= {seed for seed in seeds if store.find(request(0, seed), RewardWeights()) is not None}
        assert found == set(seeds)
        with (tmp_path / f"{place}.again").open("w+b") as graded:
            assert not killed(directory, graded, 10_000)
            graded.seek(0)
            assert set(graded.read()).isdisjoint(seeds), "none is graded twice"
        assert len(StoredSteps(directory)) == 3
        if not was_killed:
            break
    assert place >= 15


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


def test_the_mean_of_huge_metrics_does_not_overflow() -> None:
    assert mean([1.7e308, 1.7e308]) == pytest.approx(1.7e308)
    assert deviation([1.0, 3.0]) == 1.0
