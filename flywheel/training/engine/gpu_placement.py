"""Places the trainer and the rollout engines of a round on GPUs: whole ones if there are enough, else shares.

An engine with tensor parallelism has several whole GPUs of one node. A trainer of several processes has as many GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from flywheel.errors import TrainError
from flywheel.system.terminal import byte_size

USABLE: Final = 0.9
"""Default share of a GPU's memory for engines; driver and allocator need the rest."""

LARGER_SHARE: Final = (
    "Raise rollout.gpu_memory_utilization or rollout.tensor_parallel, or use a smaller model or a larger GPU."
)

MAX_LOADED: Final = 2
"""Adapters of the policy loaded at the same time: the old and the new one of a step, or candidate and deployed."""
SPARE_SLOTS: Final = 1
"""One slot stays empty: on a CPU, vLLM 0.32 by itself applies the adapter in the last slot to requests for the base
model when a request for an adapter is in the same batch."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """The part of a GPU, or the whole GPUs, that one process gets."""

    place: int
    """Number of the GPU, or of a group of them; without GPUs, of the process."""
    share: float
    """Part of the GPU, or the number of GPUs; 0 without GPUs."""

    def memory(self, configured: float | None) -> float:
        """The `rollout.gpu_memory_utilization` of an engine here."""
        return configured if configured is not None else round(USABLE * min(self.share, 1), 3)


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """Where the processes of a round run."""

    trainers: tuple[GpuShare, ...]
    """Of each process of the trainer, the first one first; empty without a trainer."""
    engines: tuple[GpuShare, ...]
    occupied: tuple[int, ...]
    """Number of processes at each place."""

    def gpus(self, place: int) -> int:
        """Number of GPUs at a place."""
        processes = (*self.engines, *self.trainers)
        return max(math.ceil(each.share) for each in processes if each.place == place)


def place_on_gpus(engines: int, gpus: int, *, trainers: int, tensor_parallel: int = 1) -> GpuPlacement:
    """Place a round on this many GPUs: `tensor_parallel` of them for each engine, and one for each process of the
    trainer, which are so many, `trainers` (0: there is no trainer).

    With too few GPUs, a process of the trainer shares one with an engine: they work in turns, while two engines on
    one GPU would each take twice as long. Processes of the trainer share none with each other, and nothing is shared
    with tensor parallelism: too few GPUs raise TrainError.
    """
    processes = engines + trainers
    if tensor_parallel > 1:
        needed = engines * tensor_parallel + trainers
        if gpus < needed:
            also = ", and the trainer needs one" if trainers else ""
            if trainers > 1:
                also = f", and training.workers {trainers} need one each"
            raise TrainError(
                "place the round on GPUs",
                f"rollout.engines {engines} × rollout.tensor_parallel {tensor_parallel} are"
                f" {engines * tensor_parallel}{also}: {needed} in all, and {_there(gpus)}",
                "Set rollout.tensor_parallel or rollout.engines lower. Only with 1 can GPUs be shared, or rounds run"
                " without one.",
            )
        alone = [GpuShare(place, float(tensor_parallel)) for place in range(engines)]
        others = [GpuShare(place, 1.0) for place in range(engines, processes)]
        return GpuPlacement(tuple(others), tuple(alone), (1,) * processes)
    if gpus == 0:
        places = [GpuShare(place, 0.0) for place in range(processes)]
        return GpuPlacement(tuple(places[engines:]), tuple(places[:engines]), (1,) * processes)
    if gpus < trainers:
        raise TrainError(
            "place the round on GPUs",
            f"training.workers {trainers} need one each, and {_there(gpus)}",
            f"Set training.workers to {gpus} or lower, or give the round more GPUs.",
        )
    least, more = divmod(processes, min(gpus, processes))
    occupied = tuple(least + (place < more) for place in range(min(gpus, processes)))
    # Rounded down, so that the shares of a GPU fit.
    shares = [
        GpuShare(place, math.floor(100 / number) / 100)
        for place, number in enumerate(occupied)
        for _ in range(number)
    ]
    # Engines keep the GPUs that are not shared.
    by_place = sorted(range(len(occupied)), key=lambda place: (occupied[place] == 1, occupied[place]))
    own = [next(share for share in shares if share.place == place) for place in by_place[:trainers]]
    for share in own:
        shares.remove(share)
    return GpuPlacement(tuple(own), tuple(shares), occupied)


def _there(gpus: int) -> str:
    return f"there {'is' if gpus == 1 else 'are'} {gpus}" if gpus else "there is none"


def why_too_small(share: float, memory: int, weights: int, tensor_parallel: int) -> str:
    """Why an engine with this share of a GPU's `memory` cannot hold the base model's `weights`, both in bytes; empty
    if it can, or their size is not known (0)."""
    own, part = int(share * memory), weights // tensor_parallel
    if part < own or not part:
        return ""
    split = f" / rollout.tensor_parallel {tensor_parallel} = {byte_size(part)}" if tensor_parallel > 1 else ""
    return f"the share of an engine, {byte_size(own)}, cannot hold the model's weights, {byte_size(weights)}{split}"
