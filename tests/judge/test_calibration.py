"""Agreement: the figures, by hand and at their edges."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import bootstrap

from flywheel.judge.calibration import agreement_json, confusion, consistency, kappa_of


def pairs(both: int, only_people: int, only_judge: int, neither: int) -> tuple[list[bool], list[bool]]:
    people = [True] * (both + only_people) + [False] * (only_judge + neither)
    judge = [True] * both + [False] * only_people + [True] * only_judge + [False] * neither
    return people, judge


def test_kappa_as_in_a_textbook() -> None:
    # Fleiss, Levin and Paik, or any page on the subject: 20, 5, 10, 15 of 50 give 0.4.
    people, judge = pairs(20, 5, 10, 15)
    table = confusion(people, judge)
    found = kappa_of(table)
    assert found.value == pytest.approx(0.4)
    assert (table.n, table.agreement, table.base_rate, table.judge_rate) == (50, 0.7, 0.5, 0.6)
    # The asymptotic standard error (Fleiss, Cohen and Everitt 1969) is 0.127 here.
    assert found.low == pytest.approx(0.4 - 1.96 * 0.127, abs=0.03)
    assert found.high == pytest.approx(0.4 + 1.96 * 0.127, abs=0.03)
    assert kappa_of(table) == found


@pytest.mark.parametrize(
    ("counts", "value"),
    [((10, 0, 0, 10), 1.0), ((0, 10, 10, 0), -1.0), ((5, 5, 5, 5), 0.0), ((10, 0, 5, 0), 0.0), ((1, 0, 0, 1), 1.0)],
)
def test_kappa_at_its_edges(counts: tuple[int, int, int, int], value: float) -> None:
    found = kappa_of(confusion(*pairs(*counts)))
    assert found.value == pytest.approx(value)
    assert found.low is not None
    assert found.high is not None
    assert -1 <= found.low <= value <= found.high <= 1


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (7, 0, 0, 0), (0, 0, 0, 7)])
def test_kappa_is_not_defined_where_all_is_alike(counts: tuple[int, int, int, int]) -> None:
    found = kappa_of(confusion(*pairs(*counts)))
    assert (found.value, found.low, found.high) == (None, None, None)


def test_the_interval_narrows_with_the_labels_and_covers_what_is_true() -> None:
    widths = []
    for factor in (1, 10, 100):
        found = kappa_of(confusion(*pairs(20 * factor, 5 * factor, 10 * factor, 15 * factor)))
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
    judge = [not each if n % 10 == 0 else each for n, each in enumerate(people)]
    found = kappa_of(confusion(people, judge))
    assert found.value == pytest.approx(0.8, abs=0.03)


@pytest.mark.slow
def test_labels_and_calibrations_give_one_interval() -> None:
    people, judge = pairs(20, 5, 10, 15)
    shown = agreement_json(people, judge)["kappa"]
    found = kappa_of(confusion(people, judge))
    assert shown == {"value": found.value, "low": found.low, "high": found.high}
    # SciPy's bootstrap over the pairs themselves.
    resampled = bootstrap(
        (people, judge),
        lambda a, b: kappa_of(confusion(a.astype(bool).tolist(), b.astype(bool).tolist())).value or 0.0,
        paired=True, vectorized=False, n_resamples=500, method="percentile", rng=1,
    ).confidence_interval  # fmt: skip
    assert found.low == pytest.approx(resampled.low, abs=0.06)
    assert found.high == pytest.approx(resampled.high, abs=0.06)
