"""Whole GPUs first, and an engine's memory goes by its share. With tensor parallelism, nothing is shared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import TrainError
from flywheel.training.engine.gpu_placement import GpuShare, place_on_gpus, why_too_small

GIB = 1 << 30


def test_eight_engines_and_the_trainer_use_all_of_eight_gpus() -> None:
    found = place_on_gpus(8, 8, trainers=1)
    [trainer] = found.trainers
    assert {gpu_share.place for gpu_share in (trainer, *found.engines)} == set(range(8))
    assert sorted(gpu_share.share for gpu_share in found.engines) == [0.5] + [1.0] * 7
    assert trainer.share == 0.5, "they take turns"
    assert [gpu_share.memory(None) for gpu_share in found.engines if gpu_share.share == 1] == [0.9] * 7
    assert found.engines[0].place == trainer.place
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
    found = place_on_gpus(engines, gpus, trainers=1)
    assert [gpu_share.share for gpu_share in found.trainers] == [trainer]
    assert [gpu_share.share for gpu_share in found.engines] == of_engines


@given(st.integers(1, 40), st.integers(0, 20), st.integers(0, 20))
def test_everybody_has_a_seat_and_no_gpu_is_idle_or_given_away_twice(engines: int, gpus: int, trainers: int) -> None:
    if 0 < gpus < trainers:
        with pytest.raises(
            TrainError, match=f"training.workers {trainers} need one each, and there (is|are) {gpus}\\."
        ):
            place_on_gpus(engines, gpus, trainers=trainers)
        return
    found = place_on_gpus(engines, gpus, trainers=trainers)
    placement = [*found.engines, *found.trainers]
    assert (len(found.engines), len(found.trainers)) == (engines, trainers)
    assert len({gpu_share.place for gpu_share in found.trainers}) == trainers, "none shares with another"
    assert sum(found.occupied) == len(placement)
    for place, number in enumerate(found.occupied):
        shares = [gpu_share.share for gpu_share in placement if gpu_share.place == place]
        assert len(shares) == number
        assert round(sum(shares), 6) <= 1
    if gpus:
        assert len(found.occupied) == min(gpus, len(placement))
        assert max(found.occupied) - min(found.occupied) <= 1


def test_processes_of_the_trainer_have_a_gpu_each_beside_the_engines() -> None:
    found = place_on_gpus(2, 4, trainers=2)
    assert {gpu_share.place for gpu_share in (*found.trainers, *found.engines)} == set(range(4))
    assert {gpu_share.share for gpu_share in (*found.trainers, *found.engines)} == {1.0}
    shared = place_on_gpus(1, 2, trainers=2)
    assert sorted(gpu_share.place for gpu_share in shared.trainers) == [0, 1]
    assert [shared.occupied[each.place] for each in (*shared.trainers, *shared.engines)] == [2, 1, 2]
    with pytest.raises(TrainError, match=r"training\.workers 4 need one each, and there are 2") as caught:
        place_on_gpus(1, 2, trainers=4)
    assert "Set training.workers to 2 or lower" in caught.value.hint
    assert not caught.value.retryable


def test_what_is_configured_goes_before() -> None:
    assert GpuShare(0, 0.5).memory(0.3) == 0.3


@pytest.mark.parametrize(
    ("engines", "each", "trainers", "gpus", "why"),
    [
        (1, 2, 1, 3, ""),
        (1, 2, 1, 4, ""),
        (2, 2, 1, 5, ""),
        (2, 4, 1, 9, ""),
        (1, 2, 0, 2, ""),
        (2, 2, 3, 7, ""),
        (2, 2, 3, 6, "are 4, and training.workers 3 need one each: 7 in all, and there are 6"),
        (1, 2, 1, 2, "engines 1 × rollout.tensor_parallel 2 are 2, and the trainer needs one: 3 in all, and there"
         " are 2"),
        (2, 4, 1, 8, "8, and the trainer needs one: 9 in all, and there are 8"),
        (1, 2, 0, 1, "rollout.engines 1 × rollout.tensor_parallel 2 are 2: 2 in all, and there is 1"),
        (1, 2, 1, 0, "3 in all, and there is none"),
        (1, 2, 0, 0, "2 in all, and there is none"),
    ],
)  # fmt: skip
def test_engines_of_several_gpus_have_them_whole_or_are_refused(
    engines: int, each: int, trainers: int, gpus: int, why: str
) -> None:
    if why:
        with pytest.raises(TrainError) as caught:
            place_on_gpus(engines, gpus, trainers=trainers, tensor_parallel=each)
        assert why in caught.value.why
        assert not caught.value.retryable
        return
    found = place_on_gpus(engines, gpus, trainers=trainers, tensor_parallel=each)
    shares = [*found.engines, *found.trainers]
    assert [share.share for share in shares] == [each] * engines + [1] * trainers
    assert [found.gpus(share.place) for share in shares] == [each] * engines + [1] * trainers
    assert found.occupied == (1,) * len(shares)
    assert [share.place for share in shares] == list(range(len(shares))), "no GPU is shared"
    assert {share.memory(None) for share in shares} == {0.9}


@pytest.mark.parametrize(
    ("engines", "gpus", "of_places"), [(1, 0, [0, 0]), (1, 1, [1]), (1, 2, [1, 1]), (4, 2, [1, 1])]
)
def test_a_place_without_tensor_parallelism_is_one_gpu(engines: int, gpus: int, of_places: list[int]) -> None:
    found = place_on_gpus(engines, gpus, trainers=1)
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
