"""The comparison against values worked out by hand, and what must hold for any rewards."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks.gate import Traffic, promotes_one
from flywheel.config.training import GateSettings
from flywheel.records.round import Comparison, CriterionComparison
from flywheel.training.gate.gate import alpha_of, decide, expected_spread, power_on_suite
from flywheel.training.gate.intervals import Paired, at_worst, compare, compare_criterion, compare_suite


def made(*pairs: tuple[tuple[float | None, ...], tuple[float | None, ...]]) -> list[Paired]:
    return [Paired(f"t-{place}", candidate, deployed) for place, (candidate, deployed) in enumerate(pairs)]


def run(tasks: list[Paired], alpha: float = 0.025, needed: float = -2.0) -> Comparison:
    """By both methods, unless so much is `needed` that the first shows too little."""
    return compare(tasks, samples=2, alpha=alpha, needed=needed, seed=1)


def test_means_and_gain_by_hand() -> None:
    result = run(made(((1, 1), (0, 0)), ((1, 0), (0, 0)), ((0, 0), (1, 0)), ((1, 0), (1, 0))))
    assert [(score.candidate, score.deployed) for score in result.scores] == [(1, 0), (0.5, 0), (0, 0.5), (0.5, 0.5)]
    assert (result.candidate_mean, result.deployed_mean) == (0.5, 0.25)
    assert result.gain == 0.25
    assert (result.tasks, result.undecided, result.samples) == (4, 0, 2)
    assert result.lower < 0.25 < result.upper


def test_a_task_has_the_mean_of_its_decided_answers_and_one_without_any_is_left_out_and_counted() -> None:
    decided = made(((1, 1), (0, 0)), ((1, 0), (0, 0)), ((0, 1), (1, 1)))
    result = run([*decided, Paired("a", (1, None), (0, 0)), Paired("b", (1, 1), (None, None))])
    assert (result.tasks, result.undecided, result.candidate_undecided, result.deployed_undecided) == (4, 1, 1, 2)
    assert (result.scores[3].candidate, result.scores[3].deployed) == (1, 0)
    alone = run([*decided, Paired("a", (1,), (0, 0))])
    assert (result.gain, result.upper, result.spread) == (alone.gain, alone.upper, alone.spread)


def in_which(lost: tuple[float | None, ...]) -> list[Paired]:
    """200 tasks. On 80 the deployed adapter is right, and the candidate's answers are `lost`; on the others the
    candidate is better."""
    luck = random.Random(1)
    tasks = []
    for place in range(200):
        deployed = tuple(float(luck.random() < 0.6) for _ in range(2))
        candidate: tuple[float | None, ...] = tuple(max(each, float(luck.random() < 0.3)) for each in deployed)
        if place % 5 < 2:
            candidate, deployed = lost, (1.0, 1.0)
        tasks.append(Paired(f"t-{place}", candidate, deployed, f"c-{place}"))
    return tasks


def test_answers_that_the_judge_could_not_grade_are_no_gain() -> None:
    undecided, wrong = (run(in_which(lost), needed=0.0) for lost in ((None, None), (0.0, 0.0)))
    assert (undecided.tasks, undecided.gain > 0.1, undecided.candidate_undecided) == (120, True, 160)
    assert undecided.lower == wrong.lower < -0.2
    assert not decide(undecided, GateSettings()).promote
    assert decide(
        run([task for task in in_which((None, None)) if None not in task.candidate]), GateSettings()
    ).promote


def test_undecided_answers_of_the_deployed_adapter_count_as_right_where_it_has_more_of_them() -> None:
    """Where both have about as many, they are nobody's fault."""
    more = [Paired(f"t-{place}", (1.0, 1.0), (0.0, None if place % 4 == 0 else 0.0)) for place in range(40)]
    assert {each.deployed for each in at_worst(more)} == {(0.0, 1.0), (0.0, 0.0)}
    both = [replace(task, candidate=(1.0, None) if place % 4 == 1 else (1.0, 1.0)) for place, task in enumerate(more)]
    assert {each.deployed for each in at_worst(both)} == {(0.0, 0.0)}
    assert {each.candidate for each in at_worst(both)} == {(1.0, 0.0), (1.0, 1.0)}
    assert {each.deployed for each in at_worst(more, -1.0, 3.0)} == {(0.0, 3.0), (0.0, 0.0)}
    crowded = [replace(task, conversation="c") for task in more]
    assert {each.deployed for each in at_worst(crowded)} == {(0.0, 0.0)}, "one conversation shows nothing"


@pytest.mark.parametrize("takes_away", [False, True])
def test_a_criterion_without_a_value_counts_as_the_worst_and_one_that_does_not_apply_stays_out(
    takes_away: bool,
) -> None:
    best = 0.0 if takes_away else 1.0

    def compared(candidate: tuple[float | None, ...]) -> CriterionComparison:
        tasks = [Paired(f"t-{place}", candidate if place < 20 else (best, best), (best, best)) for place in range(60)]
        return compare_criterion("c", tasks, takes_away=takes_away, confidence=0.95, seed=1)

    unasked, undecided, worst = compared((best,)), compared((best, None)), compared((best, 1 - best))
    assert (unasked.tasks, undecided.tasks, undecided.gain) == (60, 60, 0.0)
    assert undecided.lower == worst.lower < unasked.lower - 0.1


def test_the_differences_are_paired() -> None:
    """Tasks differ far more than the two sides do: only a paired interval can see the gain."""
    tasks = made(*(((place / 40 + 0.02 + place % 2 / 50,), (place / 40,)) for place in range(39)))
    result = run(tasks)
    assert 0 < result.lower < result.gain < result.upper < 0.05
    unpaired = stats.ttest_ind([t.candidate[0] for t in tasks], [t.deployed[0] for t in tasks])
    assert unpaired.pvalue > 0.5


def test_the_interval_is_about_that_of_students_t_where_that_holds() -> None:
    gains = [(place % 7 - 2) / 20 for place in range(200)]
    result = run(made(*(((0.5 + gain,), (0.5,)) for gain in gains)), 0.05)
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


@pytest.mark.slow
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
    assert result.lower - 1e-9 <= result.gain <= result.upper + 1e-9
    if len(pairs) > 1:
        gains = [score.candidate - score.deployed for score in result.scores]
        width = stats.t.isf(0.025, len(gains) - 1) * statistics.stdev(gains) / math.sqrt(len(gains))
        # Sign flips can widen the interval, and never narrow it.
        assert result.lower <= max(-1.0, result.gain - width) + 1e-9
        assert result.upper >= min(1.0, result.gain + width) - 1e-9


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


def in_conversations(gains: list[float], tasks: int) -> list[Paired]:
    """So many tasks in each conversation, all with the conversation's gain."""
    return [
        Paired(f"t-{place}-{task}", ((1 + gain) / 2,), ((1 - gain) / 2,), f"c-{place}")
        for place, gain in enumerate(gains)
        for task in range(tasks)
    ]


def test_tasks_of_a_conversation_are_no_evidence_of_their_own() -> None:
    gains = [0.4, 0.3, -0.2, 0.5, 0.1, -0.1, 0.4, 0.2, -0.3, 0.6, 0.3, 0.1]
    alone, many = run(in_conversations(gains, 1)), run(in_conversations(gains, 20))
    assert (many.tasks, many.conversations, alone.conversations) == (240, 12, 12)
    assert (many.gain, many.lower, many.upper) == pytest.approx((alone.gain, alone.lower, alone.upper), abs=1e-9)
    assert many.spread == pytest.approx(alone.spread)
    apart = run([Paired(task.task_id, task.candidate, task.deployed) for task in in_conversations(gains, 20)])
    assert apart.conversations == 240
    assert apart.upper - apart.lower < 0.5 * (many.upper - many.lower)


def test_conversations_of_a_criterion_count_too() -> None:
    gains = [0.4, 0.3, -0.2, 0.5, 0.1, -0.1, 0.4, 0.2, -0.3, 0.6, 0.3, 0.1]
    alone, many = looked(in_conversations(gains, 1)), looked(in_conversations(gains, 20))
    assert (many.gain, many.lower, many.upper) == pytest.approx((alone.gain, alone.lower, alone.upper), abs=0.01)


def test_every_task_counts_the_same_however_long_its_conversation() -> None:
    long = [Paired(f"l-{place}", (1,), (0,), "long") for place in range(6)]
    short = [Paired(f"s-{place}", (0,), (0.5,), f"short-{place}") for place in range(6)]
    assert run([*long, *short]).gain == pytest.approx(0.25)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 18, 40])
def test_what_is_much_better_passes_at_the_level_of_any_test(number: int) -> None:
    """9,999 sign flips resolve no level below 0.0001: from some test on nothing could pass."""
    gains = [0.3 + (place % 5 - 2) / 10 for place in range(60)]
    alpha = alpha_of(0.004, number)
    found = run(in_conversations(gains, 1), alpha, needed=0.0)
    assert 0 < found.lower < found.gain < found.upper
    assert found.confidence == pytest.approx(1 - 2 * alpha)


def test_a_smaller_level_needs_more() -> None:
    gains = [0.3 + (place % 5 - 2) / 5 for place in range(40)]
    lower = [run(in_conversations(gains, 1), alpha_of(0.05, number)).lower for number in (1, 2, 5, 10)]
    assert lower == sorted(lower, reverse=True)
    assert lower[0] - lower[-1] > 0.05


def test_a_bound_that_equals_what_is_needed_is_not_above_it_by_rounding() -> None:
    """0.1 + 0.2 - 0.3 is more than 0."""
    third = made(*([((0.1 + 0.2,), (0.3,))] * 12 + [((0.3,), (0.1 + 0.2,))] * 2))
    assert run(third).lower == 0


@pytest.mark.slow
def test_rounds_on_the_same_conversations_spend_one_budget() -> None:
    """Each at the whole level instead, half of these sequences promote something."""
    gate = GateSettings(alpha=0.05, samples=2)
    promoted = sum(promotes_one(Traffic(30), gate, seed, rounds=12) for seed in range(100))
    assert promoted <= 14


def test_rounds_on_conversations_of_many_tasks_promote_no_more() -> None:
    """Tasks resampled one by one, a third of such candidates are promoted in the first round already."""
    gate = GateSettings(alpha=0.05, samples=2)
    crowded = Traffic(16, tasks=8, alike=True)
    assert sum(promotes_one(crowded, gate, seed, rounds=1) for seed in range(150)) <= 15


def test_a_suite_is_compared_as_a_criterion_is_with_undecided_answers_at_their_worst() -> None:
    decided = in_conversations([0.4, 0.3, -0.2, 0.5], 2)
    found = compare_suite("math", [*decided, Paired("a", (None, None), (0, 0))], confidence=0.95, seed=1)
    assert (found.name, found.tasks, found.conversations, found.undecided) == ("math", 8, 4, 1)
    alone, wrong = looked(decided), looked([*decided, Paired("a", (0, 0), (0, 0))])
    assert (found.candidate_mean, found.deployed_mean, found.gain, found.lower, found.upper) == (
        alone.candidate_mean, alone.deployed_mean, alone.gain, min(alone.lower, wrong.lower), alone.upper,
    )  # fmt: skip
    nothing = compare_suite("math", [], confidence=0.95, seed=1)
    assert (nothing.tasks, nothing.conversations, nothing.lower, nothing.upper) == (0, 0, -1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("margin", "samples"), [(0.1, 8), (0.2, 2)])
def test_half_of_the_candidates_that_are_as_good_keep_a_suite_that_is_just_large_enough(
    margin: float, samples: int
) -> None:
    """Differences of conversations as `expected_spread` assumes them. A power that leaves out the artificial
    conversations of the interval would take 26 instead of 41 for a margin of 0.1, where one in five passes."""
    gate = GateSettings(samples=samples)
    size = next(n for n in range(1, 1000) if power_on_suite(n, n, margin, gate) >= 0.5)
    rng = random.Random(1)
    passed = 0
    for seed in range(100):
        gains = [max(-1.0, min(1.0, rng.gauss(0, expected_spread(samples)))) for _ in range(size)]
        found = compare_suite("s", in_conversations(gains, 1), confidence=gate.confidence, seed=seed)
        passed += found.lower > -margin
    assert 35 <= passed <= 65
