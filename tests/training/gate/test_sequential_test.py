"""The sequential test: its error rate, that order of the arms cannot hurt it, and what it would have noticed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.watch import Scene, units_to_rollback
from flywheel.training.gate.sequential_test import (
    PRESENCE_LIMIT,
    QUALITY_LIMIT,
    SequentialTest,
    WatchTest,
    detectable_loss,
    information,
    sample_ratio_p_value,
)

OUTCOMES = st.lists(st.booleans(), max_size=60)
SHARES = st.floats(0.05, 0.95)


@given(OUTCOMES, SHARES, st.data())
def test_a_factor_has_an_expectation_of_one_whatever_came_before(
    before: list[bool], share: float, data: st.DataObject
) -> None:
    """With the arm drawn at random and an outcome that does not depend on it, as where both versions are as good."""
    test = SequentialTest(share, QUALITY_LIMIT)
    for success in before:
        test.add(is_new=data.draw(st.booleans()), success=success)
    for success in (True, False):
        expected = 0.0
        for is_new, chance in ((False, 1 - share), (True, share)):
            after = SequentialTest(share, QUALITY_LIMIT, [*test.units], [*test.successes], test.log_e, test.log_most)
            after.add(is_new=is_new, success=success)
            expected += chance * math.exp(after.log_e - test.log_e)
        assert expected == pytest.approx(1.0)


@given(OUTCOMES, SHARES)
def test_while_the_new_version_looks_better_nothing_is_learnt_against_it(outcomes: list[bool], share: float) -> None:
    test = SequentialTest(share, QUALITY_LIMIT)
    for success in outcomes:
        test.add(is_new=success, success=success)  # Only the old version fails.
    assert test.log_most == pytest.approx(0.0, abs=1e-9)
    assert not test.shows_harm


def test_a_version_that_fails_always_is_found_after_few_units() -> None:
    test = SequentialTest(0.5, QUALITY_LIMIT)
    for place in range(40):
        test.add(is_new=bool(place % 2), success=not place % 2)
        if test.shows_harm:
            break
    assert test.shows_harm
    assert sum(test.units) <= 20
    assert test.successes == [test.units[0], 0]
    assert test.e_value >= QUALITY_LIMIT


def test_an_alarm_stays() -> None:
    """It may be looked at after every unit: what was shown once counts."""
    test = SequentialTest(0.5, QUALITY_LIMIT)
    for place in range(30):
        test.add(is_new=bool(place % 2), success=not place % 2)
    for _ in range(400):
        test.add(is_new=True, success=True)
    assert test.e_value < QUALITY_LIMIT
    assert test.shows_harm


@pytest.mark.parametrize(
    "scene", [Scene(0.8), Scene(0.8, drift=True), Scene(0.6, late=True)], ids=lambda each: each.name
)
def test_few_watches_of_what_is_as_good_end_in_a_rollback(scene: Scene) -> None:
    """At most one in twenty; 100 seeds, of which more than 10 would happen by chance once in a hundred times."""
    stopped = [seed for seed in range(100) if units_to_rollback(scene, 0.5, 0.0, 600, seed) is not None]
    assert len(stopped) <= 10


def test_both_tests_together_raise_at_most_one_false_alarm_in_twenty() -> None:
    assert pytest.approx(1 / 20) == 1 / QUALITY_LIMIT + 1 / PRESENCE_LIMIT


def test_a_version_whose_outcomes_are_missing_is_found_and_one_of_both_is_not() -> None:
    alone, together = WatchTest(0.5), WatchTest(0.5)
    for place in range(60):
        is_new = bool(place % 2)
        alone.add(is_new=is_new, success=None if is_new else True)
        together.add(is_new=is_new, success=None if place % 4 < 2 else True)
    assert alone.shows_harm and alone.presence.shows_harm and not alone.quality.shows_harm
    assert not together.shows_harm


@given(st.integers(0, 60), st.integers(0, 60), st.floats(0.01, 0.99))
def test_the_chance_of_uneven_arms_is_that_of_the_binomial_distribution(old: int, new: int, share: float) -> None:
    units = old + new
    chances = [math.comb(units, k) * share**k * (1 - share) ** (units - k) for k in range(units + 1)]
    tails = math.fsum(chances[: new + 1]), math.fsum(chances[new:])
    tail = tails[1] if new > units * share else tails[0]
    assert sample_ratio_p_value(old, new, share) == pytest.approx(min(1.0, 2 * tail), rel=1e-9)


def test_what_chance_does_not_explain() -> None:
    assert sample_ratio_p_value(500, 500, 0.5) > 0.9
    assert sample_ratio_p_value(545, 455, 0.5) > 0.001 > sample_ratio_p_value(555, 445, 0.5)
    assert sample_ratio_p_value(100_000, 0, 0.5) == 0.0
    assert sample_ratio_p_value(450_000, 50_000, 0.1) > 0.9


def test_a_comparison_of_before_and_after_would_not_do() -> None:
    """What both arms share does not matter: drift alone shows nothing, although all outcomes get worse."""
    test, rng = SequentialTest(0.5, QUALITY_LIMIT), random.Random(3)
    for place in range(2000):
        test.add(is_new=rng.random() < 0.5, success=rng.random() < 0.95 - 0.9 * place / 2000)
    assert not test.shows_harm


@given(st.integers(0, 5000), SHARES, st.floats(0.05, 1.0))
def test_what_is_noticeable_is_a_loss_that_can_happen(units: int, share: float, rate: float) -> None:
    loss = detectable_loss(units, share, rate)
    assert loss is None or 0 < loss <= rate


@given(st.integers(20, 2000), SHARES, st.floats(0.3, 0.95))
def test_more_units_notice_smaller_losses(units: int, share: float, rate: float) -> None:
    few, many = detectable_loss(units, share, rate), detectable_loss(4 * units, share, rate)
    assert few is None or (many is not None and many < few)


@given(SHARES, st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_information_is_that_of_the_joint_distribution(share: float, old: float, new: float) -> None:
    arms = {False: (1 - share, old), True: (share, new)}
    marginal = {True: sum(weight * rate for weight, rate in arms.values())}
    marginal[False] = 1 - marginal[True]
    direct = sum(
        weight * chance * math.log(chance / marginal[success])
        for weight, rate in arms.values()
        for success, chance in ((True, rate), (False, 1 - rate))
    )
    assert information(share, old, new) == pytest.approx(direct, abs=1e-12)


def test_about_four_of_five_noticeable_losses_are_noticed() -> None:
    loss = detectable_loss(300, 0.5, 0.8)
    assert loss is not None
    found = [units_to_rollback(Scene(0.8), 0.5, loss, 300, seed) for seed in range(100)]
    assert sum(each is not None for each in found) >= 65
