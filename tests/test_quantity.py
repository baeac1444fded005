"""Quantities in words."""

from __future__ import annotations

import pytest

from flywheel.quantity import duration, quantity


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 replies"), (1, "1 reply"), (2, "2 replies"), (1_200, "1,200 replies")]
)
def test_a_noun_goes_by_its_number(number: int, words: str) -> None:
    assert quantity(number, "reply", "replies") == words


def test_most_nouns_take_an_s() -> None:
    assert [quantity(number, "call") for number in (1, 3)] == ["1 call", "3 calls"]


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3_600, "1 h 0 min"), (7_384, "2 h 3 min")]
)
def test_durations_read_as_people_say_them(seconds: float, told: str) -> None:
    assert duration(seconds) == told
