"""Which prompts a step asks, and when GRPO ends."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.training.data import rollout_file
from flywheel.training.data.groups import WINDOW, growing_misses
from flywheel.training.data.rollout import (
    AnsweredCall,
    CallOutcome,
    Rollout,
    RolloutBatch,
    RolloutRequest,
)
from flywheel.training.data.round_progress import Meter, read_steps
from flywheel.training.data.samples import TrainingRow
from flywheel.training.optim.round_steps import RoundSteps, roll_out
from flywheel.training.optim.stage_checks import (
    CollapsedError,
    RoundRefusedError,
    UntrainedError,
    found_to_learn,
    miss_shares,
    refuse_without_spread,
)
from flywheel.training.worker.loop import Reinforcement
from tests.factories.round import round_spec
from tests.factories.stage_loop import FIGURES, StandInTrainers, work
from tests.training.data.rollouts import StandIn, batch, missed, recorded, rollout, verdict

PROMPTS, GROUP = 4, 4

Act = Callable[[RolloutRequest, int], float | None]
"""The reward of a rollout, given its request and its number in its group; None if it ends by a miss."""


class Scripted(StandIn):
    """Rollouts call a tool, except those that are `silent`."""

    def __init__(self, act: Act, silent: Callable[[RolloutRequest, int], bool] = lambda *_: False) -> None:
        self.act, self.silent = act, silent
        self.asked: list[list[str]] = []

    def rollouts(self, requests: Sequence[RolloutRequest], step: int) -> RolloutBatch:
        self.asked.append([request.prompt.task.task_id for request in requests[::GROUP]])
        return RolloutBatch(
            tuple(self._rollout(request, place % GROUP) for place, request in enumerate(requests)),
            {"generate": 1.0, "grade": 0.5},
        )

    def _rollout(self, request: RolloutRequest, number: int) -> Rollout:
        reward = self.act(request, number)
        if reward is None:
            return Rollout(request, missed(0).completion, None)
        calls = () if self.silent(request, number) else (AnsweredCall("c-1", "add", CallOutcome.TRACE),)
        return Rollout(request, replace(rollout(0, reward).completion, calls=calls), verdict(reward))


class Cutting(Scripted):
    """All rollouts of some steps, counted from 0, reach a limit."""

    def __init__(self, *steps: int) -> None:
        super().__init__(differing)
        self.steps = steps

    def rollouts(self, requests: Sequence[RolloutRequest], step: int) -> RolloutBatch:
        made, is_cut = super().rollouts(requests, step), step in self.steps
        cut = (replace(each, completion=replace(each.completion, truncated=is_cut)) for each in made.rollouts)
        return replace(made, rollouts=tuple(cut))


def settings(
    *, steps: int = 3, oversample: float = 1.0, masks: bool = False, overlap: int = 0, quantization: str | None = None
) -> Config:
    training = {"steps": steps, "prompts_per_step": PROMPTS, "group_size": GROUP, "mask_truncated": masks}
    return Config.model_validate(
        {
            "training": {**training, "overlap": overlap},
            "rollout": {"oversample": oversample},
            "model": {"trainer_quantization": quantization},
        }
    )


def batch_of(collector: Any, count: int, step: int = 0, **values: Any) -> RolloutBatch:
    """The rollouts of a step of a round with so many prompts."""
    some = [recorded(f"t-{n}") for n in range(count)]
    with TemporaryDirectory() as directory:
        steps = RoundSteps(round_spec(seed=7), settings(**values), Path(directory), some, collector)
        return steps.graded(step, steps.generate(step, None))


def differing(request: RolloutRequest, number: int) -> float:
    return float(number % 2)


def missing(*tasks: str) -> Act:
    """Rollouts of these tasks miss; the others' rewards differ."""
    return lambda request, number: None if request.prompt.task.task_id in tasks else float(number % 2)


def test_a_step_asks_its_prompts_once() -> None:
    collector = Scripted(differing)
    found = [batch_of(collector, 12, step) for step in range(3)]
    assert [len(asked) for asked in collector.asked] == [PROMPTS] * 3
    assert len({task for asked in collector.asked for task in asked}) == 12
    assert [(each.groups, each.dropped) for each in found] == [(PROMPTS, {})] * 3
    seeds = [rollout.request.seed for each in found for rollout in each.rollouts]
    assert len(set(seeds)) == len(seeds)


def test_a_step_goes_on_without_the_groups_that_are_dropped_for_their_misses() -> None:
    collector = Scripted(lambda request, number: None)
    found = batch_of(collector, 12)
    assert ([len(asked) for asked in collector.asked], found.rows()) == ([PROMPTS], [])
    some = batch_of(Scripted(missing("t-0")), PROMPTS)
    assert (list(some.dropped.values()), some.groups_with_spread) == (["misses"], PROMPTS - 1)
    tasks = {some.rollouts[row.rollout].request.prompt.task.task_id for row in some.rows()}
    assert tasks == {"t-1", "t-2", "t-3"}


@pytest.mark.parametrize(
    ("lacking", "oversample", "asked", "dropped"),
    [
        (1.0, 1.6, 7, {0: "spread", 1: "spread", 6: "surplus"}),
        (None, 1.75, 7, {0: "misses", 1: "misses", 6: "surplus"}),
    ],
)
def test_a_step_that_asks_more_prompts_keeps_the_groups_that_it_needs(
    lacking: float | None, oversample: float, asked: int, dropped: dict[int, str]
) -> None:
    collector = Scripted(lambda request, number: lacking if request.group < 2 else float(number % 2))
    found = batch_of(collector, 24, oversample=oversample)
    assert [len(each) for each in collector.asked] == [asked]
    assert found.dropped == dropped
    assert len({found.rollouts[row.rollout].request.group for row in found.rows()}) == PROMPTS


def test_the_share_of_misses_is_that_of_groups_that_can_miss() -> None:
    found = batch_of(Scripted(lambda request, number: None if number < request.group else 1.0), 12)
    assert miss_shares(found) == [0.0, 0.25, 0.5, 0.75]
    assert miss_shares(batch([1] * 4)) == [], "a reply cannot miss"


def test_the_share_among_rollouts_that_called_leaves_out_the_others() -> None:
    def act(request: RolloutRequest, number: int) -> float | None:
        return None if number < request.group else 1.0

    found = batch_of(Scripted(act, silent=lambda _, number: number > 1), 12)
    assert miss_shares(found, of_calling=True) == [0.0, 0.5, 1.0, 1.0]
    silent = batch_of(Scripted(differing, lambda *_: True), 12)
    assert miss_shares(silent, of_calling=True) == []


class Run:
    """A loop of GRPO whose steps a test takes, with the figures of each update."""

    def __init__(self, loop: Reinforcement) -> None:
        self.loop = loop

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loop, name)

    def roll_out(self, step: int) -> list[TrainingRow]:
        self.batch = self.loop.collect(step)
        return self.loop.items(step, self.batch)

    def report(self, number: int, figures: Mapping[str, float] = FIGURES) -> None:
        self.loop.record(number - 1, self.batch, figures)


def run_of(
    directory: Path,
    act: Act,
    *,
    steps: int,
    prompts: int = 48,
    collector: Any = None,
    silent: Any = None,
    **more: Any,
) -> Run:
    collector = collector or Scripted(act, *filter(None, (silent,)))
    directory.mkdir(exist_ok=True)
    some = [replace(recorded(f"t-{n}"), max_tokens=8) for n in range(prompts)]
    of_stage = work(round_spec(seed=7), settings(steps=steps, **more), directory, StandInTrainers())
    return Run(Reinforcement(of_stage, some, collector))


def train(run: Run, steps: int) -> None:
    for step in range(steps):
        run.roll_out(step)
        run.report(step + 1)


def test_the_gap_of_a_quantised_trainer_is_looked_at_in_the_first_step_that_trains(tmp_path: Path) -> None:
    def quantised(directory: Path) -> Run:
        return run_of(directory, differing, steps=3, quantization="8bit")

    wide, later = quantised(tmp_path / "wide"), quantised(tmp_path / "later")
    wide.roll_out(0)
    wide.report(1)
    wide.roll_out(1)
    with pytest.raises(TrainError, match=r"differ by 0\.500 in the first step"):
        wide.report(2, {**FIGURES, "logprob_gap": 0.5})
    assert read_steps(tmp_path / "wide")[-1]["logprob_gap"] == 0.5, "the figures of that step are written"
    for step, gap in enumerate((0.1, 0.5)):
        later.roll_out(step)
        later.report(step + 1, {**FIGURES, "logprob_gap": gap})
    assert later._done == 2, "what training changes is no fault of the quantisation"


@pytest.mark.parametrize("done", range(1, 6))
def test_a_round_goes_on_as_if_no_worker_had_died(tmp_path: Path, done: int) -> None:
    act = missing("t-0", "t-3", "t-5")
    whole, first = (run_of(tmp_path / name, act, steps=6, prompts=9) for name in ("whole", "again"))
    rows = []
    for step in range(6):
        rows.append(whole.roll_out(step))
        whole.report(step + 1)
    train(first, done)
    # The checkpoint is one step older than the rollouts.
    collector = Scripted(act)
    again = run_of(tmp_path / "again", act, steps=6, prompts=9, collector=collector)
    again.recall(done - 1)
    assert again.roll_out(done - 1) == rows[done - 1]
    assert collector.asked == []
    again.report(done)
    for step in range(done, 6):
        assert again.roll_out(step) == rows[step]
        again.report(step + 1)
    for name in ("with_gradient", "reward_first", "reward_last", "_done"):
        assert getattr(again, name) == getattr(whole, name)
    assert again.work.training == whole.work.training
    assert again.trained == whole.trained == 6
    of_time = ("at", "seconds", "busy", "tokens_per_second")
    lines = [read_steps(tmp_path / name) for name in ("whole", "again")]
    kept = [[{name: line[name] for name in line if name not in of_time} for line in each] for each in lines]
    assert kept[0] == kept[1]


class Delayed(Scripted):
    """Engines and judge that are sometimes slow, the judge of one step so that the next one overtakes it."""

    def __init__(self, act: Act, seed: int) -> None:
        super().__init__(act)
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.of_step: dict[int, list[list[str]]] = {}
        self.adapters: dict[int, set[str]] = {}

    def generate(self, requests: Sequence[RolloutRequest], *, order: int) -> Callable[[], RolloutBatch]:
        with self.lock:
            self.of_step.setdefault(order, []).append([each.prompt.task.task_id for each in requests[::GROUP]])
            adapters = {each.adapter.name for each in requests if each.adapter is not None}
            self.adapters.setdefault(order, set()).update(adapters)
            generating, judging = self.random.random() / 50, self.random.random() / 20
        time.sleep(generating)

        def judged() -> RolloutBatch:
            time.sleep(judging)
            return self.rollouts(requests, order)

        return judged


def overlapped(directory: Path, overlap: int, seed: int) -> tuple[Run, Delayed, list[Any]]:
    collector = Delayed(missing("t-0", "t-3", "t-5"), seed)
    run = run_of(directory, collector.act, steps=6, prompts=9, collector=collector, overlap=overlap)
    rows = []
    with run:
        for step in range(6):
            rows.append(run.roll_out(step))
            run.report(step + 1)
    return run, collector, rows


@pytest.mark.parametrize("seed", range(4))
def test_rounds_with_overlap_ask_the_same_prompts_whatever_is_slow(tmp_path: Path, seed: int) -> None:
    run, collector, rows = overlapped(tmp_path / "overlap", 1, seed)
    plain, expected, same = overlapped(tmp_path / "plain", 0, seed + 100)
    assert collector.of_step == expected.of_step
    assert rows == same
    assert run.work.training == plain.work.training
    assert run.with_gradient == plain.with_gradient
    stored = [each["step"] for each in rollout_file.rollouts(tmp_path / "overlap")]
    assert stored == sorted(stored)
    # The first two steps are by the first weights, and each other one by weights that are one update old.
    assert collector.adapters == {step: {f"step-{max(0, step - 1)}"} for step in range(6)}
    assert expected.adapters == {step: {f"step-{step}"} for step in range(6)}


def test_a_step_that_fails_ends_the_one_that_is_prefetched(tmp_path: Path) -> None:
    run = run_of(tmp_path, lambda *_: 1.0, steps=6, overlap=1)
    with pytest.raises(RoundRefusedError, match="0 of 8 groups"), run:
        train(run, 6)
    assert {each["step"] for each in rollout_file.rollouts(tmp_path)} <= {1, 2, 3}


def test_the_weights_of_the_prefetched_step_are_reached_again(tmp_path: Path) -> None:
    """Of the first step that is not stored, some rollouts may be graded: they are by the weights before the last
    stored step, so a checkpoint behind that is too late."""
    first = run_of(tmp_path, differing, steps=6, overlap=1)
    assert first.most_steps == 0
    with first:
        train(first, 3)
    stored = run_of(tmp_path, differing, steps=6, overlap=1)
    done = {each["step"] for each in rollout_file.rollouts(tmp_path)}
    assert stored.most_steps == max(done) - 1
    assert run_of(tmp_path, differing, steps=max(done), overlap=1).most_steps is None
    assert run_of(tmp_path, differing, steps=6).most_steps == max(done)


def test_a_round_goes_on_from_before_a_step_whose_rollouts_were_removed(tmp_path: Path) -> None:
    """A later checkpoint was trained on them: they would be made again with its weights."""
    with run_of(tmp_path, differing, steps=6) as run:
        train(run, 4)
    rollout_file.step_file(tmp_path, 2).unlink()
    again = run_of(tmp_path, differing, steps=6)
    assert again.most_steps == 1
    assert {each["step"] for each in rollout_file.rollouts(tmp_path)} == {1}
    again.begin()
    # The figures of the others were those of the rollouts that are gone.
    assert [line["step"] for line in read_steps(tmp_path)] == [1]


def test_a_step_that_the_judge_left_undecided_is_judged_again(tmp_path: Path) -> None:
    """The rollouts are kept for people, but a further worker must not find the same lack of verdicts again."""

    class Away(Scripted):
        def _rollout(self, request: RolloutRequest, number: int) -> Rollout:
            return replace(rollout(0, None), request=request)

    run = run_of(tmp_path, differing, steps=2, collector=Away(differing))
    with pytest.raises(TrainError, match="16 of 16 are undecided"):
        run.roll_out(0)
    assert len(list(rollout_file.rollouts(tmp_path))) == 16
    again = run_of(tmp_path, differing, steps=2)
    train(again, 2)
    assert again.reward_last == 0.5
    assert [each["step"] for each in rollout_file.rollouts(tmp_path)] == [1] * 16 + [2] * 16


def test_a_step_without_a_token_to_train_is_said_and_counts_as_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether its rollouts are masked or have rewards that do not differ."""

    def act(request: RolloutRequest, number: int) -> float:
        return 1.0 if done == 5 else float(number % 2)

    collector = Cutting(1, 2, 4)
    collector.act = act
    run = run_of(tmp_path, act, steps=7, collector=collector, masks=True)
    for done in range(7):
        run.roll_out(done)
        run.report(done + 1)
    assert (run._done, run._taken, run.trained) == (7, 7, 3)
    said = [record.getMessage() for record in caplog.records if "no token to train" in record.getMessage()]
    assert [each.partition(" has ")[0] for each in said] == ["step 2", "step 3", "step 5", "step 6"]
    assert said[0] == (
        "step 2 has no token to train: 4 of 4 groups have rewards that differ (rewards from 0 to 1);"
        " 16 of 16 rollouts reached a limit of tokens, turns or time and are left out (training.mask_truncated);"
        " it counts as no step"
    )
    assert "0 of 4 groups have rewards that differ (rewards from 1 to 1); the rubric may be too easy" in said[3]
    unmasked = run_of(tmp_path / "unmasked", differing, steps=1, collector=Cutting(0))
    train(unmasked, 1)
    assert unmasked.trained == 1


@pytest.mark.parametrize("overlap", [0, 1])
def test_three_steps_in_a_row_without_a_token_to_train_end_training(tmp_path: Path, overlap: int) -> None:
    first = run_of(tmp_path, differing, steps=9, collector=Cutting(1, 3, 4, 5), masks=True, overlap=overlap)
    with first, pytest.raises(UntrainedError, match=r"^step 6 has no token .*; training ended after 3 such steps in"):
        train(first, 9)
    assert (first._done, first.trained) == (6, 2)
    assert [line["step"] for line in read_steps(tmp_path)] == [*range(1, 7)]
    again = run_of(tmp_path, differing, steps=9, collector=Cutting(), masks=True, overlap=overlap)
    with again:
        again.recall(4)
        assert again.trained == 2
        again.roll_out(4)
        again.report(5)
        again.roll_out(5)
        with pytest.raises(UntrainedError, match=r"^step 6 has no token"):
            again.report(6)


def test_a_policy_that_collapses_to_equal_rewards_is_refused_for_that(tmp_path: Path) -> None:
    """Its adapter is not what the gate should test, although these steps have nothing to train."""
    run = run_of(tmp_path, lambda request, number: float(number % 2) if run._done < 2 else 0.0, steps=9)
    with pytest.raises(CollapsedError, match="3 steps in a row: mean entropy fell from 3 nats"):
        for step in range(9):
            rows = run.roll_out(step)
            run.report(step + 1, {**FIGURES, "entropy": 3.0} if rows else FIGURES)
    assert (run._done, run.trained) == (5, 2)


def test_misses_that_grow_end_the_round_with_the_reason_and_the_figures_of_the_step(tmp_path: Path) -> None:
    done = 0

    def growing(request: RolloutRequest, number: int) -> float | None:
        """One group of each step has no misses: steps with nothing to train would end it earlier."""
        return None if done >= WINDOW and number >= 1 and request.group % GROUP else float(number % 2)

    run = run_of(tmp_path, growing, steps=24)
    with pytest.raises(RoundRefusedError, match=r"grew from 0% in the first 4 steps to 56% in the last 4"):
        for step in range(24):
            done = step
            run.roll_out(step)
            run.report(step + 1)
    assert run._done == 2 * WINDOW - 1
    last = read_steps(tmp_path)[-1]
    assert (last["step"], last["loss"], last["missed"]) == (2 * WINDOW, None, 9)
    assert (last["groups_dropped"]["misses"], last["groups"]) == (3, 4)
    assert {each["step"] for each in rollout_file.rollouts(tmp_path)} == set(range(1, 2 * WINDOW + 1))


def test_misses_that_grow_because_the_policy_learns_to_call_do_not_end_the_round(tmp_path: Path) -> None:
    """One call in four is wrong at first, when one rollout in four calls. Later all call, and fewer calls are wrong:
    one group of each step has none, so that there is something to train."""
    done = 0

    def act(request: RolloutRequest, number: int) -> float | None:
        calls = number == request.group % GROUP if done < WINDOW else True
        wrong = number == 0 and request.group % GROUP if done >= WINDOW else request.group == 0
        return None if calls and wrong else float(number % 2)

    def silent(request: RolloutRequest, number: int) -> bool:
        return done < WINDOW and number != request.group % GROUP

    run = run_of(tmp_path, act, steps=12, silent=silent)
    for step in range(12):
        done = step
        run.roll_out(step)
        run.report(step + 1)
    shares = [line["tools"]["miss_share"] for line in read_steps(tmp_path)]
    assert shares[0] < 0.1
    assert shares[-1] == pytest.approx(3 / 16)
    assert growing_misses(run._checks.misses), "it is the share of all rollouts that grows"


def test_tasks_whose_groups_were_dropped_gave_no_gradient(tmp_path: Path) -> None:
    def act(request: RolloutRequest, number: int) -> float | None:
        misses, equal = request.prompt.task.task_id in ("t-1", "t-2"), request.prompt.task.task_id == "t-3"
        return None if misses else 1.0 if equal else float(number % 2)

    run = run_of(tmp_path, act, steps=2, prompts=9)
    train(run, 2)
    written = {each["task_id"]: each["dropped"] for each in rollout_file.rollouts(tmp_path)}
    assert {task for task, why in written.items() if why} == {"t-1", "t-2", "t-3"} & set(written)
    assert run.with_gradient == {task for task, why in written.items() if not why}


def test_a_debug_round_has_the_same_groups_and_says_what_misses_cost(tmp_path: Path) -> None:
    def debug(act: Act) -> tuple[str, Scripted]:
        collector: Any = Scripted(act)
        some = [recorded(f"t-{n}") for n in range(12)]
        directory = Path(mkdtemp(dir=tmp_path))
        steps = RoundSteps(round_spec(seed=7), settings(), directory, some, collector)
        batches = list(roll_out(steps, None, Meter(directory, steps=3), count=2))
        assert [line["step"] for line in read_steps(directory)] == [1, 2]
        return found_to_learn(batches, steps.settings.rollout), collector

    calm, planned = debug(differing)
    assert calm == "8 of 8 groups have rewards that differ; 0 rollouts are undecided"
    equal, _ = debug(lambda request, number: 1.0)
    assert equal == (
        "0 of 8 groups have rewards that differ (rewards from 1 to 1); the rubric may be too easy or too hard for"
        " these tasks; 0 rollouts are undecided"
    )
    missed, asked = debug(missing(planned.asked[0][1]))
    assert missed == (
        "7 of 8 groups have rewards that differ; 0 rollouts are undecided;"
        " 4 of 32 ended at a call without a recorded result, which drops 1 group"
    )
    trained = Scripted(missing(planned.asked[0][1]))
    batch_of(trained, 12)
    assert asked.asked[0] == trained.asked[0]


def test_a_round_of_misses_is_refused_with_that_reason_and_not_as_if_the_judge_were_down(tmp_path: Path) -> None:
    run = run_of(tmp_path, lambda request, number: None, steps=3)
    with pytest.raises(
        RoundRefusedError, match=r"0 of 8 groups .*\(no rewards\); 8 were dropped because 32 of 32"
    ) as why:
        train(run, 3)
    assert "without a recorded result" in str(why.value)
    some = [RolloutBatch((*(missed(0) for _ in range(4)), *(rollout(1, 1.0) for _ in range(4))))]
    with pytest.raises(RoundRefusedError, match=r"\(rewards from 1 to 1\); 1 were dropped because 4 of 8"):
        refuse_without_spread(some, 0.0, settings().rollout)


def test_a_judge_that_is_down_is_still_told_from_misses() -> None:
    with pytest.raises(TrainError, match="no rollout has a reward"):
        some = [RolloutBatch((missed(0), *(rollout(0, None) for _ in range(3))))]
        refuse_without_spread(some, 0.0, settings().rollout)
