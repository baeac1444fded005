"""Metrics over tasks: mean, spread, and an interval by conversation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.training.gate.intervals import MetricSummary, MetricValue, summarise


def summary(*values: float | None, per_conversation: int = 1, confidence: float = 0.95) -> MetricSummary:
    found = [MetricValue(f"t-{n}", value, f"c-{n // per_conversation}") for n, value in enumerate(values)]
    return summarise(found, confidence=confidence, seed=1)


def bounds(found: MetricSummary) -> tuple[float, float]:
    assert found.lower is not None and found.upper is not None
    return found.lower, found.upper


def test_mean_std_and_count_by_hand() -> None:
    found = summary(1, 0, 0, 1, None)
    assert (found.mean, found.std, found.count, found.unmeasured, found.conversations) == (0.5, 0.5, 4, 1, 4)


def test_nothing_measured_has_no_number() -> None:
    assert summary() == MetricSummary(0, 0, 0, None, None, None, None, 0.95)
    assert summary(None, None) == MetricSummary(0, 2, 0, None, None, None, None, 0.95)


def test_several_answers_to_a_task_are_one_value_and_all_must_be_measured() -> None:
    values = [("t-1", 1.0), ("t-1", 0.0), ("t-2", 1.0), ("t-2", None), ("t-3", 1.0)]
    found = summarise([MetricValue(name, value) for name, value in values], confidence=0.95, seed=1)
    assert (found.count, found.unmeasured, found.mean, found.conversations) == (2, 1, 0.75, 2)


def test_one_conversation_says_nothing_about_others() -> None:
    assert bounds(summary(1, 1, 1, per_conversation=3)) == (0, 1)
    assert bounds(summary(1)) == (0, 1)
    # At a low level too, at which the sign flips of three conversations have bounds.
    assert bounds(summary(1, confidence=0.4)) == (0, 1)
    assert bounds(summary(1, 1, 1, 1, confidence=0.4)) != (0, 1)


def test_repetitions_within_a_conversation_are_no_further_evidence() -> None:
    values = [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0] * 2
    once = bounds(summary(*values))
    repeated = [value for value in values for _ in range(5)]
    assert bounds(summary(*repeated, per_conversation=5)) == pytest.approx(once, abs=0.02)
    lower, upper = bounds(summary(*repeated))
    assert upper - lower < (once[1] - once[0]) * 0.6


def test_equal_values_have_a_width() -> None:
    lower, upper = bounds(summary(*[1.0] * 20))
    assert 0.7 < lower < 0.95
    assert upper == 1


@pytest.mark.slow
def test_the_interval_covers_the_true_rate() -> None:
    """Of 100 samples at each rate, at least 93 intervals of 95 % have it."""
    random = np.random.default_rng(1)
    for rate in (0.5, 0.9, 0.98):
        samples = random.random((100, 40)) < rate
        covered = [
            lower <= rate <= upper for lower, upper in (bounds(summary(*map(float, each))) for each in samples)
        ]
        assert sum(covered) >= 93


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.3, 0.5, 1.0, None]), max_size=25),
    st.integers(1, 3),
    st.sampled_from([0.8, 0.95, 0.99]),
)
def test_the_mean_is_within_its_interval_and_all_is_within_0_to_1(
    values: list[float | None], per_conversation: int, confidence: float
) -> None:
    found = summary(*values, per_conversation=per_conversation, confidence=confidence)
    assert found.count + found.unmeasured == len(values)
    assert (found.mean is None) is (found.count == 0)
    if found.mean is not None:
        assert found.std is not None
        lower, upper = bounds(found)
        assert 0 <= lower <= found.mean + 1e-9
        assert found.mean - 1e-9 <= upper <= 1
        assert 0 <= found.std <= math.sqrt(found.mean * (1 - found.mean)) + 1e-9


def test_the_same_values_in_another_order_have_the_same_figures() -> None:
    values = [MetricValue(f"t-{n}", n % 3 / 2, f"c-{n % 5}") for n in range(15)]
    first, other = (summarise(each, confidence=0.95, seed=1) for each in (values, values[::-1]))
    assert (first.mean, first.count) == (pytest.approx(other.mean), other.count)
    assert bounds(first) == pytest.approx(bounds(other), abs=0.02)
