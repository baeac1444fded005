"""Whole GPUs first, and an engine's memory goes by its share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.gpu_placement import GpuShare, seating


def test_eight_engines_and_the_trainer_use_all_of_eight_gpus() -> None:
    found = seating(8, 8, with_trainer=True)
    assert found.trainer is not None
    assert {seat.place for seat in (found.trainer, *found.engines)} == set(range(8))
    assert sorted(seat.share for seat in found.engines) == [0.5] + [1.0] * 7
    assert found.trainer.share == 0.5, "they take turns"
    assert [seat.memory(None) for seat in found.engines if seat.share == 1] == [0.9] * 7
    assert found.engines[0].place == found.trainer.place
    assert found.engines[0].memory(None) == 0.45


@pytest.mark.parametrize(
    ("engines", "gpus", "trainer", "of_engines"),
    [
        (1, 1, 0.5, [0.5]),
        (1, 2, 1.0, [1.0]),
        (3, 8, 1.0, [1.0, 1.0, 1.0]),
        (4, 2, 0.5, [0.33, 0.33, 0.33, 0.5]),
        (2, 1, 0.33, [0.33, 0.33]),
        (2, 0, 0.0, [0.0, 0.0]),
    ],
)
def test_gpus_are_shared_only_where_there_are_too_few(
    engines: int, gpus: int, trainer: float, of_engines: list[float]
) -> None:
    found = seating(engines, gpus, with_trainer=True)
    assert found.trainer is not None
    assert found.trainer.share == trainer
    assert [seat.share for seat in found.engines] == of_engines


@given(st.integers(1, 40), st.integers(0, 20), st.booleans())
def test_everybody_has_a_seat_and_no_gpu_is_idle_or_given_away_twice(
    engines: int, gpus: int, with_trainer: bool
) -> None:
    found = seating(engines, gpus, with_trainer=with_trainer)
    seats = [*found.engines, *([found.trainer] if found.trainer else [])]
    assert (len(found.engines), found.trainer is not None) == (engines, with_trainer)
    assert sum(found.occupied) == len(seats)
    for place, number in enumerate(found.occupied):
        shares = [seat.share for seat in seats if seat.place == place]
        assert len(shares) == number
        assert round(sum(shares), 6) <= 1
    if gpus:
        assert len(found.occupied) == min(gpus, len(seats))
        assert max(found.occupied) - min(found.occupied) <= 1


def test_what_is_configured_goes_before() -> None:
    assert GpuShare(0, 0.5).memory(0.3) == 0.3
