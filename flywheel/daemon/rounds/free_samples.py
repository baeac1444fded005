"""The samples that a round could take now, and why the others wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection

from flywheel.config import Config
from flywheel.store import bursts, rounds, samples
from flywheel.system.terminal import quantity

if TYPE_CHECKING:
    from flywheel.judge.filters.influence import Influence, WeighedSample

OVER: Final = "over their share"
LATER: Final = "more than a round takes"


@dataclass(frozen=True, slots=True)
class AvailableSamples:
    """`usable` samples could be taken now; a round `needs` this many. `choice` are the tasks to take, None where any
    free sample may be taken. `waiting` counts the other accepted samples by reason; `widened` are the shares of one
    conversation, user or template (0…1) that had to be raised."""

    usable: int
    needs: int
    choice: Sequence[int] | None = None
    waiting: Mapping[str, int] = field(default_factory=dict)
    widened: Mapping[str, float] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """In one line: what there is, and what waits."""
        return "; ".join((f"{self.usable} of {self.needs} samples are free", *self.waits))

    @property
    def waits(self) -> list[str]:
        return [f"{number:,} {why}" for why, number in self.waiting.items()]

    @property
    def notice(self) -> str:
        """The shares that exceed those of the chain's `influence`; empty without any, or without enough samples."""
        if not self.widened or self.usable < self.needs:
            return ""
        shares = " and ".join(f"one {name} may be {share:.0%}" for name, share in self.widened.items())
        return f"{shares} of a round, more than `influence` allows: there are too few others to fill a round"


class AvailableSamplesCache:
    """Those by the chain's `influence`. The chain is read once, the samples when other ones are free."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for a wrong chain."""
        self._config = config
        self._caps = _caps(config)
        self._known: tuple[object, AvailableSamples] | None = None

    def now(self, conn: Connection) -> AvailableSamples:
        which = samples.marks_of_free(conn, self._config.takes.train)
        if self._known is None or self._known[0] != which:
            self._known = which, self._available(conn, which[0])
        return self._known[1]

    def _available(self, conn: Connection, free: int) -> AvailableSamples:
        most = most_samples(self._config)
        needs = min(self._config.trigger.min_samples, most)
        chosen = None
        if self._caps is not None:
            from flywheel.judge.filters.influence import choose

            chosen = choose(self._candidates(conn), self._caps, most, needs)
        usable = min(free, most) if chosen is None else len(chosen.tasks)
        waiting = {OVER if usable < most else LATER: free - usable} if usable < free else {}
        if chosen is None:
            return AvailableSamples(usable, needs, waiting=waiting)
        return AvailableSamples(usable, needs, chosen.tasks, waiting, chosen.widened)

    def _candidates(self, conn: Connection) -> list[WeighedSample]:
        from flywheel.judge.filters.influence import WeighedSample, weigh

        # Samples that no filter run has weighed yet have shares too.
        unknown = {row.id: weigh(row.payload) for row in bursts.unknown(conn, None)}
        found = bursts.candidates(conn, self._config.takes.train)
        return [
            WeighedSample(row.id, of.conversation, of.user, of.template)
            for row in found
            for of in (unknown.get(row.id, row),)
        ]


def _caps(config: Config) -> Influence | None:
    """The shares that the chain's `influence` allows, if there is a chain with one. Raises ConfigError."""
    if config.filter.chain is None:
        return None
    # Imported here: without a chain, nobody pays for the filters.
    from flywheel.judge.filters.chain import influence_of

    return influence_of(config)


def most_samples(config: Config) -> int:
    """The most samples that a round takes: those that its steps use. SFT uses as many as there are."""
    training = config.training
    if "sft" in training.stages:
        return config.trigger.max_samples
    return min(config.trigger.max_samples, training.steps * config.rollout.prompts_asked(training.prompts_per_step))


@dataclass(frozen=True, slots=True)
class NewSamplesNeeded:
    """`rounds` ended since the last promotion; `new` free samples were in none of them."""

    rounds: int
    new: int
    needed: int

    @property
    def wait(self) -> str:
        """What the trigger waits for; empty when nothing is missing."""
        if self.new >= self.needed:
            return ""
        ended = quantity(self.rounds, "round")
        return f"{self.new:,} of {self.needed:,} new samples are free, after {ended} without promotion"


def new_samples_needed(conn: Connection, config: Config, needed: int) -> NewSamplesNeeded:
    """After each round without promotion, the next one needs `needed` more new samples."""
    ended = rounds.without_promotion(conn, config.takes.train.target)
    return NewSamplesNeeded(ended, samples.count_new(conn, config.takes.train) if ended else 0, ended * needed)
