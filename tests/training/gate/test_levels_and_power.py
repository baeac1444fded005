"""The error budget: levels, epochs, and what a test could show, against what scipy computes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from scipy import stats

from flywheel.config.training import GateSettings
from flywheel.records.round import SpentTest
from flywheel.training.gate.gate import alpha_of, expected_spread, following_test, power, power_on_suite


def spent(epoch: int = 1, number: int = 1, conversations: int = 50, spread: float | None = None) -> SpentTest:
    return SpentTest(epoch=epoch, number=number, conversations=conversations, spread=spread, samples=8)


def test_the_levels_of_an_epoch_are_those_of_the_formula_and_never_exceed_the_budget() -> None:
    assert alpha_of(0.004, 1) == pytest.approx(0.004 * 6 / math.pi**2)
    assert alpha_of(0.004, 7) == pytest.approx(0.004 * 6 / math.pi**2 / 49)
    assert 0.99 * 0.004 < sum(alpha_of(0.004, number) for number in range(1, 1000)) < 0.004


def test_tests_count_on_until_as_many_conversations_as_the_last_one_used_were_never_tested() -> None:
    first = following_test(0.004, None, 50)
    assert (first.epoch, first.number, first.alpha) == (1, 1, alpha_of(0.004, 1))
    again = following_test(0.004, spent(1, 3, 50), 49)
    assert (again.epoch, again.number, again.alpha) == (1, 4, alpha_of(0.004, 4))
    anew = following_test(0.004, spent(1, 3, 50), 50)
    assert (anew.epoch, anew.number, anew.alpha) == (2, 1, alpha_of(0.004, 1))


@pytest.mark.parametrize("conversations", [20, 50, 200])
@pytest.mark.parametrize("alpha", [0.025, 0.0024, 1e-5])
def test_the_power_is_about_that_of_the_t_test(conversations: int, alpha: float) -> None:
    freedom, spread = conversations - 1, 0.3
    needed = stats.t.isf(alpha, freedom)
    exact = stats.nct.sf(needed, freedom, 0.1 * math.sqrt(conversations) / spread)
    assert power(conversations, spread, alpha) == pytest.approx(exact, abs=0.015)


def test_few_conversations_have_no_power_however_alike_scores_are() -> None:
    """Turning the signs of eight differences can at best be as rare as one in 256."""
    assert power(8, 1e-9, 0.0024) == 0
    assert power(9, 1e-9, 0.0024) > 0.99
    assert power(0, 0.3, 0.0024) == power(1, 0.3, 0.9) == 0


def test_past_comparisons_tell_how_much_scores_vary() -> None:
    assumed = expected_spread(8)
    assert assumed == pytest.approx(math.sqrt(0.06))
    assert expected_spread(2) > assumed, "fewer answers vary more"
    calm = [spent(conversations=50, spread=assumed / 2)] * 3
    assert assumed / 2 < expected_spread(8, calm) < 0.7 * assumed
    assert expected_spread(8, [spent(conversations=50, spread=2 * assumed)]) > 1.5 * assumed
    assert expected_spread(8, [spent(conversations=50, spread=0.0)]) > 0.6 * assumed, "one comparison proves little"
    assert expected_spread(2, calm) / expected_spread(8, calm) == pytest.approx(expected_spread(2) / assumed)
    assert expected_spread(8, [spent()]) == assumed, "of an earlier Flywheel's comparisons it is not known"


def test_the_sizes_of_suites_that_the_page_names_are_those_that_are_needed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "understand" / "gate.md").read_text()
    table = page.partition("| margin | conversations |")[2].partition("\n\n")[0]
    sizes = {float(margin): int(size) for margin, size in re.findall(r"\| ([\d.]+) \| (\d+) \|", table)}
    assert len(sizes) == 4
    gate = GateSettings()
    for margin, size in sizes.items():
        assert next(n for n in range(1, 1000) if power_on_suite(n, n, margin, gate) >= 0.5) == size
