"""Whole GPUs first, and an engine's memory goes by its share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.training.engine.gpu_placement import GpuShare, place_on_gpus


def test_eight_engines_and_the_trainer_use_all_of_eight_gpus() -> None:
    found = place_on_gpus(8, 8, with_trainer=True)
    assert found.trainer is not None
    assert {gpu_share.place for gpu_share in (found.trainer, *found.engines)} == set(range(8))
    assert sorted(gpu_share.share for gpu_share in found.engines) == [0.5] + [1.0] * 7
    assert found.trainer.share == 0.5, "they take turns"
    assert [gpu_share.memory(None) for gpu_share in found.engines if gpu_share.share == 1] == [0.9] * 7
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
    found = place_on_gpus(engines, gpus, with_trainer=True)
    assert found.trainer is not None
    assert found.trainer.share == trainer
    assert [gpu_share.share for gpu_share in found.engines] == of_engines


@given(st.integers(1, 40), st.integers(0, 20), st.booleans())
def test_everybody_has_a_seat_and_no_gpu_is_idle_or_given_away_twice(
    engines: int, gpus: int, with_trainer: bool
) -> None:
    found = place_on_gpus(engines, gpus, with_trainer=with_trainer)
    placement = [*found.engines, *([found.trainer] if found.trainer else [])]
    assert (len(found.engines), found.trainer is not None) == (engines, with_trainer)
    assert sum(found.occupied) == len(placement)
    for place, number in enumerate(found.occupied):
        shares = [gpu_share.share for gpu_share in placement if gpu_share.place == place]
        assert len(shares) == number
        assert round(sum(shares), 6) <= 1
    if gpus:
        assert len(found.occupied) == min(gpus, len(placement))
        assert max(found.occupied) - min(found.occupied) <= 1


def test_what_is_configured_goes_before() -> None:
    assert GpuShare(0, 0.5).memory(0.3) == 0.3
