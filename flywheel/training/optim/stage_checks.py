"""What ends a stage of GRPO: rollouts or updates that show that nothing can be learned, or that it goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from flywheel.config.file import Config
from flywheel.training.data.rollout import RolloutBatch
from flywheel.training.data.samples import TrainingRow
from flywheel.training.optim.collapse import CollapseWatch
from flywheel.training.optim.round_steps import (
    FIRST_LOOK,
    MOST_UNTRAINED,
    UntrainedError,
    miss_shares,
    refuse_growing_misses,
    refuse_wide_gap,
    refuse_without_spread,
    why_untrained,
)

log = logging.getLogger("flywheel.training.worker")


class StageChecks:
    """Of one stage, whose steps it is told in their order."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._first: list[RolloutBatch] = []
        self.misses: list[list[float]] = []
        """The share of misses of each group of each step."""
        self._misses_of_calling: list[list[float]] = []
        self._collapse = CollapseWatch()
        self._gap: float | None = None
        """The `logprob_gap` of the first step that was trained on."""
        self.untrained = ""
        """The last step without a token to train, and why it had none."""
        self.untrained_in_a_row = 0

    def rolled_out(self, batch: RolloutBatch) -> None:
        """A step has these rollouts. Raises RoundRefusedError and TrainError."""
        training = self._settings.training
        batch.refuse_failed(training.max_undecided_share)
        batch.refuse_undecided(training.max_undecided_share)
        if len(self._first) < FIRST_LOOK:
            self._first.append(batch)
            if len(self._first) == min(FIRST_LOOK, training.steps):
                refuse_without_spread(self._first, training.min_spread_share, self._settings.rollout)
        self.misses.append(miss_shares(batch))
        self._misses_of_calling.append(miss_shares(batch, of_calling=True))
        refuse_growing_misses(self.misses, self._misses_of_calling)

    def begun(self, number: int, batch: RolloutBatch, rows: Sequence[TrainingRow]) -> None:
        """The step of this number trains on these rows."""
        self.untrained_in_a_row = 0 if rows else self.untrained_in_a_row + 1
        if not rows:
            self.untrained = f"step {number} has no token to train: {why_untrained(batch, self._settings)}"
            log.warning("%s; it counts as no step", self.untrained)

    def trained(self, batch: RolloutBatch, figures: Mapping[str, float]) -> None:
        """The step is complete, with these figures. Raises RoundRefusedError and TrainError."""
        if self._gap is None:
            self._gap = figures.get("logprob_gap")
            refuse_wide_gap(self._gap, self._settings.model.trainer_quantization)
        self._collapse.rolled_out(figures.get("entropy"), batch)
        if self.untrained_in_a_row == MOST_UNTRAINED:
            raise UntrainedError(f"{self.untrained}; training ended after {MOST_UNTRAINED} such steps in a row")

    def recalled(self, batch: RolloutBatch, entropy: float | None) -> None:
        """An earlier worker has completed the step, which was within all limits. Raises CollapsedError."""
        if not self.untrained_in_a_row:
            # Without a token, it was not measured.
            self._gap = 0.0
        self._collapse.rolled_out(entropy, batch)
