"""Where the time of a round went, and what overlap would have saved of it."""

from __future__ import annotations

from typing import Any

from flywheel.training.data.step_figures import figures_of, times_of

STEPS: list[dict[str, Any]] = [
    {
        "event": "step",
        "step": place + 1,
        "overlap": 0,
        "seconds": {"generate": 10.0, "grade": grade, "sync": 1.0, "train": 5.0},
        "busy": {"engines": 10.0, "judge": 12.0, "trainer": 5.0},
    }
    for place, grade in enumerate((4.0, 30.0, 4.0))
]
SFT = {"event": "step", "step": 4, "stage": "sft", "seconds": {"train": 100.0}}


def test_parts_and_busy_time_are_summed_over_steps_with_rollouts() -> None:
    times = times_of(figures_of([*STEPS, SFT]))
    assert times is not None
    assert times.steps == 3
    assert times.parts == {"generate": 30.0, "grade": 38.0, "sync": 3.0, "train": 15.0}
    assert times.busy == {"engines": 30.0, "judge": 36.0, "trainer": 15.0}
    assert times.whole == 86.0
    assert times.share(43.0) == 0.5


def test_overlap_saves_what_generation_fits_into_the_wait_for_the_judge() -> None:
    """The rollouts of steps 2 and 3, of 10 s each, would be generated in the waits of steps 1 and 2."""
    times = times_of(figures_of(STEPS))
    assert times is not None
    assert times.overlap_saves == 4.0 + 10.0
    overlapped = times_of(figures_of([{**line, "overlap": 1} for line in STEPS]))
    assert overlapped is not None
    assert overlapped.overlap_saves is None


def test_without_rollouts_there_is_nothing_to_say() -> None:
    assert times_of(figures_of([SFT])) is None
    assert times_of({}) is None


def test_lines_of_an_older_version_have_no_busy_time() -> None:
    times = times_of(figures_of([{"seconds": line["seconds"]} for line in STEPS]))
    assert times is not None
    assert set(times.busy.values()) == {0.0}
