"""Patience: for how many new samples the trigger waits after rounds that brought nothing."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from flywheel.config import Config
from flywheel.store import rounds, samples
from flywheel.terminal import quantity


@dataclass(frozen=True, slots=True)
class Patience:
    """`rounds` ended without a promotion since the last one that was promoted; `new` samples were in none of them."""

    rounds: int
    new: int
    needed: int

    @property
    def wait(self) -> str:
        """What the trigger waits for; empty when it does not."""
        if self.new >= self.needed:
            return ""
        ended = quantity(self.rounds, "round")
        return f"{self.new:,} of {self.needed:,} new samples are free, after {ended} without promotion"


def patience(conn: Connection, config: Config, needed: int) -> Patience:
    """As many new samples for each such round as would start one otherwise: longer each time."""
    ended = rounds.without_promotion(conn)
    return Patience(ended, samples.count_new(conn, config.training.takes) if ended else 0, ended * needed)
