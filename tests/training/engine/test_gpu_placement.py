"""Whole GPUs first, and an engine's memory goes by its share. With tensor parallelism, nothing is shared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import TrainError
from flywheel.training.engine.gpu_placement import GpuShare, place_on_gpus, why_too_small

GIB = 1 << 30


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


@pytest.mark.parametrize(
    ("engines", "each", "with_trainer", "gpus", "why"),
    [
        (1, 2, True, 3, ""),
        (1, 2, True, 4, ""),
        (2, 2, True, 5, ""),
        (2, 4, True, 9, ""),
        (1, 2, False, 2, ""),
        (1, 2, True, 2, "engines 1 × rollout.tensor_parallel 2 are 2, and the trainer needs one: 3 in all, and there"
         " are 2"),
        (2, 4, True, 8, "8, and the trainer needs one: 9 in all, and there are 8"),
        (1, 2, False, 1, "rollout.engines 1 × rollout.tensor_parallel 2 are 2: 2 in all, and there is 1"),
        (1, 2, True, 0, "3 in all, and there is none"),
        (1, 2, False, 0, "2 in all, and there is none"),
    ],
)  # fmt: skip
def test_engines_of_several_gpus_have_them_whole_or_are_refused(
    engines: int, each: int, gpus: int, why: str, *, with_trainer: bool
) -> None:
    if why:
        with pytest.raises(TrainError) as caught:
            place_on_gpus(engines, gpus, with_trainer=with_trainer, tensor_parallel=each)
        assert why in caught.value.why
        assert not caught.value.retryable
        return
    found = place_on_gpus(engines, gpus, with_trainer=with_trainer, tensor_parallel=each)
    shares = [*found.engines, *([found.trainer] if found.trainer else [])]
    assert [share.share for share in shares] == [each] * engines + [1] * with_trainer
    assert [found.gpus(share.place) for share in shares] == [each] * engines + [1] * with_trainer
    assert found.occupied == (1,) * len(shares)
    assert [share.place for share in shares] == list(range(len(shares))), "no GPU is shared"
    assert {share.memory(None) for share in shares} == {0.9}


@pytest.mark.parametrize(
    ("engines", "gpus", "of_places"), [(1, 0, [0, 0]), (1, 1, [1]), (1, 2, [1, 1]), (4, 2, [1, 1])]
)
def test_a_place_without_tensor_parallelism_is_one_gpu(engines: int, gpus: int, of_places: list[int]) -> None:
    found = place_on_gpus(engines, gpus, with_trainer=True)
    assert [found.gpus(place) for place in range(len(found.occupied))] == of_places


@pytest.mark.parametrize(
    ("share", "memory", "weights", "each", "why"),
    [
        (0.9, 80, 70, 1, ""),
        (0.9, 80, 72, 1, "the share of an engine, 72.0 GiB, cannot hold the model's weights, 72.0 GiB"),
        (0.45, 80, 40, 1, "36.0 GiB, cannot hold the model's weights, 40.0 GiB"),
        (0.9, 80, 140, 1, "72.0 GiB, cannot hold the model's weights, 140 GiB"),
        (0.9, 80, 140, 2, ""),
        (0.9, 80, 148, 2, "cannot hold the model's weights, 148 GiB / rollout.tensor_parallel 2 = 74.0 GiB"),
        (0.5, 80, 148, 4, ""),
        (0.9, 80, 0, 2, ""),
    ],
)
def test_weights_fit_into_the_engines_share_of_its_gpus(
    share: float, memory: int, weights: int, each: int, why: str
) -> None:
    told = why_too_small(share, memory * GIB, weights * GIB, each)
    assert bool(told) == bool(why)
    assert told.endswith(why)
