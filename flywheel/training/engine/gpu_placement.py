"""Places the trainer and the rollout engines of a round on GPUs: whole ones if there are enough, else shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

USABLE: Final = 0.9
"""Default share of a GPU's memory for engines; driver and allocator need the rest."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """The part of a GPU that one process gets."""

    place: int
    """Number of the GPU; without GPUs, of the process."""
    share: float
    """Part of the GPU, 0 without GPUs."""

    def memory(self, configured: float | None) -> float:
        """The `rollout.gpu_memory_utilization` of an engine here."""
        return configured if configured is not None else round(USABLE * self.share, 3)


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """Where the processes of a round run."""

    trainer: GpuShare | None
    engines: tuple[GpuShare, ...]
    occupied: tuple[int, ...]
    """Number of processes on each GPU."""


def place_on_gpus(engines: int, gpus: int, *, with_trainer: bool) -> GpuPlacement:
    """Place a round on this many GPUs.

    With too few GPUs, the trainer shares one with an engine: they work in turns, while two engines on one GPU would
    each take twice as long.
    """
    processes = engines + with_trainer
    if gpus == 0:
        alone = [GpuShare(place, 0.0) for place in range(processes)]
        return GpuPlacement(alone.pop() if with_trainer else None, tuple(alone), (1,) * processes)
    least, more = divmod(processes, min(gpus, processes))
    occupied = tuple(least + (place < more) for place in range(min(gpus, processes)))
    # Rounded down, so that the shares of a GPU fit.
    shares = [
        GpuShare(place, math.floor(100 / number) / 100)
        for place, number in enumerate(occupied)
        for _ in range(number)
    ]
    if not with_trainer:
        return GpuPlacement(None, tuple(shares), occupied)
    fewest = min((number for number in occupied if number > 1), default=1)
    trainer = next(share for share in shares if occupied[share.place] == fewest)
    shares.remove(trainer)
    return GpuPlacement(trainer, tuple(shares), occupied)
