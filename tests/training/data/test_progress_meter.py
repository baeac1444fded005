"""The meter: steps, rollouts, tokens a second and the time left, in a file that is always whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.training.data.round_progress import Meter, RoundProgress, progress_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def read(directory: Path) -> RoundProgress:
    progress = progress_of(directory)
    assert progress is not None
    return progress


def step(meter: Meter, clock: Clock, number: int, reward: float, *, rollouts: int = 4) -> None:
    """A step of 10 s, of which rollouts take 8: each rollout two seconds and 40 tokens."""
    meter.begin()
    for _ in range(rollouts):
        clock.now += 8 / rollouts
        meter.completed(40)
    clock.now += 2
    meter.stepped(number, reward)


def test_steps_rollouts_reward_and_rate_are_told_while_they_happen(tmp_path: Path, clock: Clock) -> None:
    meter = Meter(tmp_path, steps=5, clock=clock)
    meter.enter("training", 4)
    assert (read(tmp_path).phase, read(tmp_path).step, read(tmp_path).steps) == ("training", 0, 5)
    step(meter, clock, 1, 0.25)
    meter.begin()
    clock.now += 2
    meter.completed(50)
    told = read(tmp_path)
    assert (told.step, told.rollouts, told.rollouts_planned) == (1, 1, 4)
    assert (told.reward_first, told.reward, told.tokens_per_second) == (0.25, 0.25, 25.0)
    step(meter, clock, 2, 0.5)
    assert (read(tmp_path).reward_first, read(tmp_path).reward, read(tmp_path).rollouts) == (0.25, 0.5, 0)
    assert read(tmp_path).tokens_per_second == 20.0


def test_the_time_left_is_that_of_the_phase(tmp_path: Path, clock: Clock) -> None:
    meter = Meter(tmp_path, steps=5, clock=clock)
    meter.enter("training", 4)
    assert read(tmp_path).seconds_left is None
    step(meter, clock, 1, 0.25)
    # Four steps of 10 s.
    assert read(tmp_path).seconds_left == 4 * 10
    meter.begin()
    clock.now += 4
    meter.completed(40)
    assert read(tmp_path).seconds_left == 4 * 10 - 4
    meter.enter("evaluating", 10, step=5, reward=0.5)
    meter.begin()
    for _ in range(4):
        clock.now += 3
        meter.completed(40)
    now = read(tmp_path)
    assert (now.step, now.steps, now.reward_first, now.reward, now.seconds_left) == (5, 5, None, 0.5, 6 * 3)
    meter.enter("training", 4, steps=9, step=5)
    assert (read(tmp_path).seconds_left, read(tmp_path).reward) == (None, None), "nothing is known of other steps"


def test_more_rollouts_than_planned_are_those_of_their_step_alone(tmp_path: Path, clock: Clock) -> None:
    meter = Meter(tmp_path, steps=3, clock=clock)
    meter.enter("training", 2)
    for rollouts in (2, 1):
        meter.begin(rollouts)
        for _ in range(rollouts):
            clock.now += 2
            meter.completed(40)
    assert (read(tmp_path).rollouts, read(tmp_path).rollouts_planned) == (3, 3)
    meter.stepped(1, 0.5)
    assert (read(tmp_path).rollouts, read(tmp_path).rollouts_planned) == (0, 2)


def test_a_pause_is_told_and_is_no_part_of_how_long_a_step_takes(tmp_path: Path, clock: Clock) -> None:
    meter = Meter(tmp_path, steps=3, clock=clock)
    meter.enter("training", 4)
    meter.begin()
    meter.pause("the judge is away")
    meter.pause("another word for the same")
    assert read(tmp_path).paused == "the judge is away"
    clock.now += 3600
    meter.pause("")
    assert read(tmp_path).paused == ""
    step(meter, clock, 1, 0.25)
    assert read(tmp_path).seconds_left == 2 * 10


def test_a_thousand_rollouts_do_not_write_a_thousand_files(tmp_path: Path, clock: Clock) -> None:
    meter = Meter(tmp_path, steps=3, clock=clock)
    meter.enter("training", 1000)
    meter.begin()
    seen = set()
    for _ in range(1000):
        clock.now += 0.01
        meter.completed(1)
        seen.add(read(tmp_path).rollouts)
    assert len(seen) < 20
    meter.generated()
    assert read(tmp_path).rollouts == 1000


def test_what_another_version_wrote_is_no_progress(tmp_path: Path) -> None:
    assert progress_of(tmp_path) is None
    (tmp_path / "progress.json").write_text('{"phase": "dreaming"}')
    assert progress_of(tmp_path) is None


def test_progress_reads_as_one_line() -> None:
    assert RoundProgress(phase="starting", steps=50).summary == "starting"
    told = RoundProgress(
        phase="training", step=2, steps=50, rollouts=40, rollouts_planned=64, reward=0.4125, tokens_per_second=812.4,
        seconds_left=725.0,
    ).summary  # fmt: skip
    assert told == "training, step 3 of 50, 40 of 64 rollouts, reward 0.412, 812 tokens/s, about 12 min 5 s left"
    imitating = RoundProgress(phase="training", step=2, steps=15).summary
    assert imitating == "training, step 3 of 15"
    paused = RoundProgress(
        phase="evaluating", step=50, steps=50, rollouts_planned=8, paused="the judge is away"
    ).summary
    assert paused == "evaluating, step 50 of 50, 0 of 8 rollouts, paused: the judge is away"
