"""Agreement: the figures, by hand and at their edges."""

from __future__ import annotations

from collections import Counter

import pytest
from scipy.stats import bootstrap

from flywheel.judge.calibration import Agreement, consistency


def counted(both: int, only_people: int, only_judge: int, neither: int) -> Agreement:
    counts = {(True, True): both, (True, False): only_people, (False, True): only_judge, (False, False): neither}
    return Agreement(Counter(counts))


def test_kappa_as_in_a_textbook() -> None:
    # Fleiss, Levin and Paik, or any page on the subject: 20, 5, 10, 15 of 50 give 0.4.
    table = counted(20, 5, 10, 15)
    found = table.kappa
    assert found.value == pytest.approx(0.4)
    assert (table.n, table.share, table.base_rate, table.judge_rate) == (50, 0.7, 0.5, 0.6)
    # The asymptotic standard error (Fleiss, Cohen and Everitt 1969) is 0.127 here.
    assert found.low == pytest.approx(0.4 - 1.96 * 0.127, abs=0.03)
    assert found.high == pytest.approx(0.4 + 1.96 * 0.127, abs=0.03)
    assert table.kappa == found


@pytest.mark.parametrize(
    ("counts", "value"),
    [((10, 0, 0, 10), 1.0), ((0, 10, 10, 0), -1.0), ((5, 5, 5, 5), 0.0), ((10, 0, 5, 0), 0.0), ((1, 0, 0, 1), 1.0)],
)
def test_kappa_at_its_edges(counts: tuple[int, int, int, int], value: float) -> None:
    found = counted(*counts).kappa
    assert found.value == pytest.approx(value)
    assert found.low is not None
    assert found.high is not None
    assert -1 <= found.low <= value <= found.high <= 1


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (7, 0, 0, 0), (0, 0, 0, 7)])
def test_kappa_is_not_defined_where_all_is_alike(counts: tuple[int, int, int, int]) -> None:
    found = counted(*counts).kappa
    assert (found.value, found.low, found.high) == (None, None, None)


def test_the_interval_narrows_with_the_labels_and_covers_what_is_true() -> None:
    widths = []
    for factor in (1, 10, 100):
        found = counted(20 * factor, 5 * factor, 10 * factor, 15 * factor).kappa
        assert found.low is not None and found.high is not None and found.value == pytest.approx(0.4)
        widths.append(found.high - found.low)
    assert widths[0] > 2 * widths[1] > 4 * widths[2]


def test_consistency_counts_pairs() -> None:
    assert consistency([[True, True, True], [False, False, False]]) == 1.0
    assert consistency([[True, True, False]]) == pytest.approx(1 / 3)
    assert consistency([[True], [False]]) is None
    assert consistency([[True, False], [True, True]]) == 0.5


@pytest.mark.slow
def test_the_interval_is_that_of_a_bootstrap_over_the_pairs() -> None:
    found = counted(20, 5, 10, 15)
    people = [True] * 25 + [False] * 25
    judge = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
    resampled = bootstrap(
        (people, judge),
        lambda a, b: Agreement(Counter(zip(a.tolist(), b.tolist(), strict=True))).kappa.value or 0.0,
        paired=True, vectorized=False, n_resamples=500, method="percentile", rng=1,
    ).confidence_interval  # fmt: skip
    assert found.kappa.low == pytest.approx(resampled.low, abs=0.06)
    assert found.kappa.high == pytest.approx(resampled.high, abs=0.06)
    kappa = found.kappa
    assert found.as_json()["kappa"] == {"value": kappa.value, "low": kappa.low, "high": kappa.high}
