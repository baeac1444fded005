"""The comparison against values worked out by hand, and what must hold for any rewards."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flywheel.evaluation.compare import Paired, compare, compare_criterion
from flywheel.round import Comparison, CriterionComparison


def made(*pairs: tuple[tuple[float | None, ...], tuple[float | None, ...]]) -> list[Paired]:
    return [Paired(f"t-{place}", candidate, deployed) for place, (candidate, deployed) in enumerate(pairs)]


def run(tasks: list[Paired], confidence: float = 0.95) -> Comparison:
    return compare(tasks, samples=2, confidence=confidence, seed=1)


def test_means_and_gain_by_hand() -> None:
    result = run(made(((1, 1), (0, 0)), ((1, 0), (0, 0)), ((0, 0), (1, 0)), ((1, 0), (1, 0))))
    assert [(score.candidate, score.deployed) for score in result.scores] == [(1, 0), (0.5, 0), (0, 0.5), (0.5, 0.5)]
    assert (result.candidate_mean, result.deployed_mean) == (0.5, 0.25)
    assert result.gain == 0.25
    assert (result.tasks, result.undecided, result.samples) == (4, 0, 2)
    assert result.method == "sign flips and paired bootstrap, BCa"
    assert result.lower < 0.25 < result.upper


def test_a_task_with_an_undecided_answer_on_either_side_is_left_out_and_counted() -> None:
    decided = made(((1, 1), (0, 0)), ((1, 0), (0, 0)), ((0, 1), (1, 1)))
    with_undecided = [*decided, Paired("a", (1, None), (0, 0)), Paired("b", (1, 1), (None, None))]
    result, alone = run(with_undecided), run(decided)
    assert result.undecided == 2
    assert result.tasks == 3
    assert result.model_copy(update={"undecided": 0}) == alone


def test_the_differences_are_paired() -> None:
    """Tasks differ far more than the two sides do: only a paired interval can see the gain."""
    tasks = made(*(((place / 40 + 0.02 + place % 2 / 50,), (place / 40,)) for place in range(39)))
    result = run(tasks)
    assert 0 < result.lower < result.gain < result.upper < 0.05
    unpaired = stats.ttest_ind([t.candidate[0] for t in tasks], [t.deployed[0] for t in tasks])
    assert unpaired.pvalue > 0.5


def test_the_interval_is_about_that_of_students_t_where_that_holds() -> None:
    gains = [(place % 7 - 2) / 20 for place in range(200)]
    result = run(made(*(((0.5 + gain,), (0.5,)) for gain in gains)), 0.9)
    students = stats.ttest_1samp(gains, 0).confidence_interval(0.9)
    assert result.lower == pytest.approx(students.low, abs=0.003)
    assert result.upper == pytest.approx(students.high, abs=0.003)


def test_few_tasks_that_differ_are_no_proof() -> None:
    """Three of eight tasks are better and none is worse: one such result in eight comes about by chance."""
    some = run(made(*([((1, 0), (0, 0))] * 3 + [((1, 1), (1, 1))] * 5)))
    assert (some.tasks, some.gain) == (8, 0.1875)
    assert some.lower <= 0
    # Six of six would be one in 64, which is less than one in 40.
    assert run(made(*([((1, 0), (0, 0))] * 6 + [((1, 1), (1, 1))] * 2))).lower > 0
    # However equal, five tasks cannot show it.
    assert run(made(*([((1, 1), (0, 0))] * 5))).lower == -1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([-1, 0, 1]), min_size=2, max_size=13))
def test_nothing_is_shown_that_the_exact_sign_test_does_not_show(signs: list[int]) -> None:
    tasks = made(*(((float(sign > 0),), (float(sign < 0),)) for sign in signs))
    result = run(tasks)
    better, worse = signs.count(1), signs.count(-1)
    if result.lower > 0:
        assert stats.binomtest(better, better + worse, alternative="greater").pvalue <= 0.025
    if result.upper < 0:
        assert stats.binomtest(worse, better + worse, alternative="greater").pvalue <= 0.025


def test_equal_differences_have_no_width() -> None:
    same = run(made(*([((1, 1), (0.5, 0.5))] * 10)))
    assert (same.lower, same.gain, same.upper) == (0.5, 0.5, 0.5)
    none = run(made(*([((1, 0), (1, 0))] * 10)))
    assert (none.lower, none.upper) == (0, 0)


def test_differences_that_are_equal_but_for_rounding_have_no_width_either() -> None:
    same = [((0, 0), (0, 0.3)), ((0, 1), (0.3, 1)), ((0, 1), (0.3, 1))]
    few = run(made(*same))
    assert len({score.candidate - score.deployed for score in few.scores}) > 1, "-0.15, as far as floats can say so"
    assert (few.lower, few.upper) == (-1, 1)
    many = run(made(*same * 10))
    assert (many.lower, many.upper) == pytest.approx((-0.15, -0.15))


@pytest.mark.parametrize("tasks", [[], made(((1, 1), (0, 0))), made(((1, None), (0, 0)))])
def test_without_two_tasks_nothing_is_known(tasks: list[Paired]) -> None:
    result = run(tasks)
    assert (result.lower, result.upper) == (-1, 1)
    assert result.method.startswith("none")


def test_the_same_rewards_give_the_same_interval() -> None:
    tasks = made(((1, 1), (0, 0)), ((1, 0), (0, 0)), ((0, 0), (1, 0)), ((1, 0), (1, 0)))
    assert run(tasks) == run(tasks)


rewards = st.tuples(st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.0, 0.3, 1.0]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(rewards, rewards), max_size=25))
def test_any_rewards_give_an_interval_around_the_gain_that_can_be(
    pairs: list[tuple[tuple[float, float], tuple[float, float]]],
) -> None:
    result = run(made(*pairs))
    assert -1 - 1e-9 <= result.lower <= result.upper <= 1 + 1e-9
    # BCa shifts the interval, but never so far that it misses the mean of what was resampled.
    assert result.lower - 1e-9 <= result.gain <= result.upper + 1e-9


def looked(tasks: list[Paired], *, takes_away: bool = False) -> CriterionComparison:
    return compare_criterion("safe", tasks, takes_away=takes_away, confidence=0.95, seed=1)


def test_a_criterion_is_compared_where_it_was_looked_at() -> None:
    found = looked(made(((1, None), (0, 1)), ((None, None), (1, 1)), ((0, 0), (1, 1)), ((1, 1), (1, 1))))
    assert found.tasks == 3
    assert (found.candidate_mean, found.deployed_mean) == (pytest.approx(2 / 3), pytest.approx(2.5 / 3))
    assert found.gain == pytest.approx(-0.5 / 3)
    assert found.lower < found.gain < found.upper


def test_more_of_what_takes_away_is_worse() -> None:
    tasks = made(*([((1, 0), (0, 0))] * 20))
    found = looked(tasks, takes_away=True)
    assert (found.candidate_mean, found.deployed_mean, found.gain) == (0.5, 1, -0.5)
    assert found.upper < 0
    assert looked(tasks).lower > 0


def test_that_no_difference_was_seen_on_a_few_tasks_does_not_show_that_there_is_none() -> None:
    """A candidate that fails one time in twenty gets eight tasks right two times in three."""
    same = ((1.0, 1.0), (1.0, 1.0))
    assert looked(made(*[same] * 8)).lower < -0.2
    assert looked(made(*[same] * 50)).lower > -0.1
    assert looked(made(*[same] * 200)).lower > -0.02


def test_a_criterion_that_was_never_looked_at_is_known_in_nothing() -> None:
    found = looked(made(((None,), (1,))))
    assert (found.tasks, found.gain) == (0, 0)
    assert (found.lower, found.upper) == (-1, 1)
