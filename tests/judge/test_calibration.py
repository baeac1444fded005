"""Agreement: the figures, by hand and at their edges."""

from __future__ import annotations

import numpy as np
import pytest

from flywheel.judge.agreement import confusion, large_sample_kappa
from flywheel.judge.calibration import consistency, kappa_of


def pairs(both: int, only_people: int, only_judge: int, neither: int) -> tuple[list[bool], list[bool]]:
    people = [True] * (both + only_people) + [False] * (only_judge + neither)
    judge = [True] * both + [False] * only_people + [True] * only_judge + [False] * neither
    return people, judge


def test_kappa_as_in_a_textbook() -> None:
    # Fleiss, Levin and Paik, or any page on the subject: 20, 5, 10, 15 of 50 give 0.4.
    people, judge = pairs(20, 5, 10, 15)
    found = kappa_of(people, judge)
    assert found.value == pytest.approx(0.4)
    table = confusion(people, judge)
    assert (table.n, table.agreement, table.base_rate, table.judge_rate) == (50, 0.7, 0.5, 0.6)
    # The asymptotic standard error (Fleiss, Cohen and Everitt 1969) is 0.127 here.
    assert found.low == pytest.approx(0.4 - 1.96 * 0.127, abs=0.03)
    assert found.high == pytest.approx(0.4 + 1.96 * 0.127, abs=0.03)
    assert kappa_of(people, judge) == found


@pytest.mark.parametrize(
    ("counts", "value"),
    [((10, 0, 0, 10), 1.0), ((0, 10, 10, 0), -1.0), ((5, 5, 5, 5), 0.0), ((10, 0, 5, 0), 0.0), ((1, 0, 0, 1), 1.0)],
)
def test_kappa_at_its_edges(counts: tuple[int, int, int, int], value: float) -> None:
    found = kappa_of(*pairs(*counts))
    assert found.value == pytest.approx(value)
    assert found.low is not None
    assert found.high is not None
    assert -1 <= found.low <= value <= found.high <= 1


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (7, 0, 0, 0), (0, 0, 0, 7)])
def test_kappa_is_not_defined_where_all_is_alike(counts: tuple[int, int, int, int]) -> None:
    found = kappa_of(*pairs(*counts))
    assert (found.value, found.low, found.high) == (None, None, None)


def test_the_interval_narrows_with_the_labels_and_covers_what_is_true() -> None:
    widths = []
    for factor in (1, 10, 100):
        found = kappa_of(*pairs(20 * factor, 5 * factor, 10 * factor, 15 * factor))
        assert found.low is not None and found.high is not None and found.value == pytest.approx(0.4)
        widths.append(found.high - found.low)
    assert widths[0] > 2 * widths[1] > 4 * widths[2]


def test_consistency_counts_pairs() -> None:
    assert consistency([[True, True, True], [False, False, False]]) == 1.0
    assert consistency([[True, True, False]]) == pytest.approx(1 / 3)
    assert consistency([[True], [False]]) is None
    assert consistency([[True, False], [True, True]]) == 0.5


def test_a_large_calibration_stays_in_memory() -> None:
    rng = np.random.default_rng(1)
    people = list(rng.random(5_000) < 0.5)
    found = kappa_of(people, [not each if n % 10 == 0 else each for n, each in enumerate(people)])
    assert found.value == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("counts", [(20, 5, 10, 15), (200, 30, 50, 90), (40, 2, 1, 37)])
def test_the_quick_interval_is_near_the_resampled_one(counts: tuple[int, int, int, int]) -> None:
    people, judge = pairs(*counts)
    quick, slow = large_sample_kappa(confusion(people, judge)), kappa_of(people, judge)
    assert quick.value == pytest.approx(slow.value)
    assert quick.low == pytest.approx(slow.low, abs=0.03)
    assert quick.high == pytest.approx(slow.high, abs=0.03)


@pytest.mark.parametrize(
    "counts", [(0, 0, 0, 0), (7, 0, 0, 0), (0, 0, 0, 7), (10, 0, 0, 10), (0, 10, 10, 0), (1, 0, 0, 0)]
)
def test_the_quick_kappa_at_its_edges(counts: tuple[int, int, int, int]) -> None:
    people, judge = pairs(*counts)
    quick, slow = large_sample_kappa(confusion(people, judge)), kappa_of(people, judge)
    if slow.value is None:
        assert quick == slow
    else:
        assert quick.value == pytest.approx(slow.value)
    assert quick.low is None or -1 <= quick.low <= (quick.value or 0) <= (quick.high or 0) <= 1
