"""The figures of steps in `metrics.jsonl`: those of the rollouts or items of a step and of its update, and where the
time of the steps of a round went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flywheel.config.file import Config
from flywheel.config.section import value_at
from flywheel.config.training import Stage
from flywheel.training.data.rollout import RolloutBatch

UPDATE_FIGURES: Final = ("loss", "grad_norm", "learning_rate")
"""Figures of an update that `metrics.jsonl` has."""
TOKEN_MEANS: Final = ("entropy", "logprob_gap", "ratio_mean", "ratio_capped_share", "clipped_share", "kl")
"""Means over an update's trained tokens that `metrics.jsonl` has; `kl` only with `training.beta`."""
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
    names = ("overlap", *(f"seconds.{part}" for part in PARTS), *(f"busy.{each}" for each in WORKERS))
    found = {name: [value_at(line, name) for line in lines] for name in names}
    return {
        name: [float(value) if isinstance(value, int | float) else math.nan for value in values]
        for name, values in found.items()
    }


def of_rollouts(
    batch: RolloutBatch,
    figures: Mapping[str, float],
    settings: Config,
    seconds: Mapping[str, float],
    judge_seconds: float,
) -> dict[str, Any]:
    """Of a step of GRPO, given the trainer's figures of its last update, what it waited for (`PARTS`), and how
    long the judge has worked."""
    usage, generating = batch.usage(), batch.seconds.get("generate", 0.0)
    trained = figures.get("trained_tokens", 0.0)
    return {
        **batch.summary(),
        **{name: figures.get(name) for name in (*UPDATE_FIGURES, *TOKEN_MEANS)},
        "masked_share": 1 - trained / max(usage["rollout_tokens"], 1),
        "trained_tokens": int(trained),
        "temperature": settings.rollout.temperature,
        "tokens_per_second": usage["rollout_tokens"] / max(generating, 1e-9),
        "overlap": settings.training.overlap,
        "seconds": dict(seconds),
        "busy": {"engines": generating, "judge": judge_seconds, "trainer": seconds["train"]},
    }


def of_items(stage: Stage, epoch: float, count: int, figures: Mapping[str, float]) -> dict[str, Any]:
    """Of a step of SFT on so many replies, or of DPO on so many pairs. For pairs, rewards are beta times the gain in
    log-probability over the reference; `margin` is that of the chosen reply minus that of the rejected one."""
    about = {"epoch": epoch}
    update = {name: figures.get(name) for name in ("grad_norm", "learning_rate", "entropy")}
    if stage == "sft":
        trained = int(figures.get("trained_tokens", 0))
        return {**about, "replies": count, "loss": figures.get("nll"), "trained_tokens": trained, **update}
    names = {"chosen": "chosen", "rejected": "rejected", "margin": "margins", "accuracy": "accuracies"}
    rewards = {name: figures.get(f"rewards/{theirs}") for name, theirs in names.items()}
    return {**about, "pairs": count, "loss": figures.get("loss"), **rewards, **update}
