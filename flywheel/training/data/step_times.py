"""Where the time of a round's steps went, from the figures of its steps in `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

PARTS: Final = ("generate", "grade", "sync", "train")
"""What a step waits for, one after the other: engines, then the judge alone, then engines for new weights, then the
optimizer. With overlap, only what the trainer waited for."""
WORKERS: Final = ("engines", "judge", "trainer")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds over all steps.

    Attributes:
        parts: By part; together the time of the steps.
        busy: How long engines, judge and trainer each worked.
        overlap_saves: About how much shorter the steps would have been with `training.overlap: 1`: the next step's
            rollouts would have been generated while the judge alone was waited for. None for a round with overlap.
    """

    steps: int
    parts: dict[str, float]
    busy: dict[str, float]
    overlap_saves: float | None

    @property
    def whole(self) -> float:
        return math.fsum(self.parts.values())

    def share(self, seconds: float) -> float:
        """The share of the time of the steps."""
        return seconds / self.whole if self.whole else 0.0


def times_of(figures: Mapping[str, Sequence[float]]) -> StepTimes | None:
    """The times of steps with rollouts, given each figure by step, NaN where a step lacks it: `seconds.generate` and
    other parts, `busy.judge` and others, `overlap`. None without such steps."""
    generated = figures.get("seconds.generate", ())
    places = [place for place, seconds in enumerate(generated) if not math.isnan(seconds)]
    if not places:
        return None

    def values(name: str) -> list[float]:
        known = figures.get(name)
        return [0.0 if known is None or math.isnan(known[place]) else known[place] for place in places]

    waits = zip(values("seconds.generate")[1:], values("seconds.grade"), strict=False)
    saves = None if any(values("overlap")) else math.fsum(min(each) for each in waits)
    parts = {part: math.fsum(values(f"seconds.{part}")) for part in PARTS}
    return StepTimes(len(places), parts, {each: math.fsum(values(f"busy.{each}")) for each in WORKERS}, saves)


def figures_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The figures of `times_of`, given the lines of steps."""
    names = {
        "overlap": ("overlap",),
        **{f"seconds.{part}": ("seconds", part) for part in PARTS},
        **{f"busy.{each}": ("busy", each) for each in WORKERS},
    }
    return {name: [_number(line, path) for line in lines] for name, path in names.items()}


def _number(line: Mapping[str, Any], path: Sequence[str]) -> float:
    value: Any = line
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else math.nan
