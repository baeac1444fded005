"""Which GPU the trainer and each rollout engine of a round have: whole ones while they last, else shared ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

USABLE: Final = 0.9
"""What of a GPU's memory engines take where nothing is configured: driver and allocator need the rest."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """`place` is the number of a GPU (or of a process, where there are none), `share` the part of it; 0 without."""

    place: int
    share: float

    def memory(self, configured: float | None) -> float:
        """`rollout.gpu_memory_utilization` of an engine here."""
        return configured if configured is not None else round(USABLE * self.share, 3)


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """`occupied` is how many sit in each place."""

    trainer: GpuShare | None
    engines: tuple[GpuShare, ...]
    occupied: tuple[int, ...]


def seating(engines: int, gpus: int, *, with_trainer: bool) -> GpuPlacement:
    """Seats for a round on so many GPUs.

    Where there are too few, the trainer shares one with an engine, if it shares one at all: they take turns, while
    two engines on one GPU would each take twice as long.
    """
    seats = engines + with_trainer
    if gpus == 0:
        alone = [GpuShare(place, 0.0) for place in range(seats)]
        return GpuPlacement(alone.pop() if with_trainer else None, tuple(alone), (1,) * seats)
    least, more = divmod(seats, min(gpus, seats))
    occupied = tuple(least + (place < more) for place in range(min(gpus, seats)))
    # Rounded down, so that the parts fit.
    free = [
        GpuShare(place, math.floor(100 / number) / 100)
        for place, number in enumerate(occupied)
        for _ in range(number)
    ]
    if not with_trainer:
        return GpuPlacement(None, tuple(free), occupied)
    shared = [number for number in occupied if number > 1]
    beside = min(shared) if shared else 1
    trainer = free.pop(next(at for at, seat in enumerate(free) if occupied[seat.place] == beside))
    return GpuPlacement(trainer, tuple(free), occupied)
