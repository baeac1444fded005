"""The samples that a round takes: how many there are now, which ones it would be, and why the others wait."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import Connection, Row

from flywheel.config.file import Config
from flywheel.config.training import CoresetSettings
from flywheel.records.coreset import ORDERS, Order, in_order, text_of
from flywheel.records.round import ClassShare, RoundSelection, RoundTask, SamplePool
from flywheel.records.selection import (
    LATER,
    SHARES,
    UNWEIGHTED,
    Candidate,
    Selection,
    SelectionRules,
    largest,
    select,
)
from flywheel.records.similarity import NEAR
from flywheel.store import rounds, samples
from flywheel.system.terminal import quantity

if TYPE_CHECKING:
    from flywheel.judge.filters.influence import Influence
    from flywheel.judge.rubric.rubric import Rubric

OLDEST: Final = "those of the fewest rounds first, then the oldest"
POOL_ORDERS: Final[Mapping[str, Order]] = {"loss_topk": "random", "hybrid": "diversity"}
"""How a pool is chosen."""


@dataclass(frozen=True, slots=True)
class AvailableSamples:
    """`usable` samples could be taken now; a round `needs` this many. `waiting` counts the other accepted samples by
    reason; `widened` are the shares of one conversation, user or template (0…1) that had to be raised."""

    usable: int
    needs: int
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
        return f"{shares} of a round, above the cap of `influence`: there are too few others to fill it"


class AvailableSamplesCache:
    """How many samples a round could take. The chain is read once, the samples when other ones are free."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for a wrong chain."""
        self._config = config
        self._rules = rules_of(config)
        self._known: tuple[object, AvailableSamples] | None = None

    def now(self, conn: Connection) -> AvailableSamples:
        which = samples.marks_of_free(conn, self._config.takes.train)
        if self._known is None or self._known[0] != which:
            self._known = which, self._available(conn, which[0])
        return self._known[1]

    def _available(self, conn: Connection, free: int) -> AvailableSamples:
        rules = self._rules
        if not (rules.shares or rules.weights):
            usable = min(free, most_samples(self._config))
            return AvailableSamples(usable, rules.needed, {LATER: free - usable} if usable < free else {})
        chosen = select(_candidates(conn, self._config, rules), rules)
        return AvailableSamples(len(chosen.tasks), rules.needed, chosen.left_out, chosen.widened)


def choose(conn: Connection, config: Config, rubric: Rubric) -> tuple[Selection, RoundSelection]:
    """What the next round takes now, and the record of it. It depends on the state, the settings and the round's seed
    alone. Raises ConfigError for a wrong chain."""
    rules, seed = rules_of(config), rounds.next_seed(conn, config.training.seed)
    found, order = _candidates(conn, config, rules), OLDEST
    if (coreset := config.training.coreset) is not None:
        lines = samples.lines(conn, [each.task for each in found])
        texts = {number: text_of(line["init_messages"], line["main_query"]) for number, line in lines}
        found, order = _in_order(found, texts, coreset, seed)
        if coreset.is_by_loss:
            order = f"a pool, of which the worker takes {coreset.size:,} by {coreset.strategy}; {order}"
    earlier: list[Candidate] = []
    if (replay := config.training.replay) is not None:
        is_grpo = "grpo" in config.training.kinds
        rows = samples.replayable(conn, config.takes.train, replay.buffer, rubric.hash, with_spread=is_grpo)
        earlier = _weighed(conn, rows, rules)
        random.Random(seed).shuffle(earlier)
    chosen = select(found, rules, earlier)
    free = samples.count_free(conn, config.takes.train)
    left_out = dict(chosen.left_out)
    if later := free - len(chosen.tasks) - sum(left_out.values()):
        left_out[LATER] = left_out.get(LATER, 0) + later
    record = RoundSelection(
        seed=seed,
        order=order,
        candidates=free,
        chosen=len(chosen.tasks),
        replayed=len(chosen.replayed),
        replayable=len(earlier),
        classes={
            name: ClassShare(weight=rules.weights[name], **asdict(count)) for name, count in chosen.classes.items()
        },
        widened=dict(chosen.widened),
        left_out=left_out,
    )
    return chosen, record


def _in_order(
    found: Sequence[Candidate], texts: Mapping[int, str], coreset: CoresetSettings, seed: int
) -> tuple[list[Candidate], str]:
    """The candidates in the order of a coreset, and its name."""
    way = POOL_ORDERS.get(coreset.strategy) or cast("Order", coreset.strategy)
    return in_order(found, texts, way, coreset.candidates, seed), ORDERS[way]


def choose_of_file(
    tasks: Sequence[RoundTask], structures: Mapping[str, str], config: Config, *, by_steps: bool
) -> tuple[list[RoundTask], dict[str, str], SamplePool | None]:
    """What a round on files takes of these tasks, in their order, by `training.task_weights` and `training.coreset`:
    if it is limited `by_steps`, what these use, and if that is all there are, the largest number in which the weights
    hold. `structures` are the classes by id. Then why others are left out, by id, and the pool of which the worker
    chooses, if it does."""
    weights, coreset = dict[str, float](config.training.task_weights.items()), config.training.coreset
    if not tasks or not (weights or coreset):
        return list(tasks), {}, None
    found = [Candidate(place, structure=structures[task.task_id]) for place, task in enumerate(tasks)]
    supply = Counter(each.structure for each in found)
    names = [f"training.{name}" for name in ("task_weights", "coreset") if getattr(config.training, name)]
    most = largest(weights, supply) if weights else len(tasks)
    if by_steps and (used := _of_steps(config)) < sum(supply[name] for name in weights or supply):
        most, names = used, [*names, "training.steps"]
    rules = SelectionRules(most, 0, weights=weights, size=coreset.candidates if coreset is not None else None)
    if coreset is not None:
        texts = {place: text_of(task.exchange.history, task.exchange.query) for place, task in enumerate(tasks)}
        found, _ = _in_order(found, texts, coreset, config.training.seed)
    taken = {*select(found, rules).tasks}
    why = f"the round takes {len(taken):,} of {quantity(len(tasks), 'row')}, by {' and '.join(names)}"
    left_out = {
        task.task_id: why if weights.get(structures[task.task_id], not weights) else UNWEIGHTED
        for place, task in enumerate(tasks)
        if place not in taken
    }
    own = {tasks[each.task].task_id: each for each in found if each.task in taken}
    return [tasks[place] for place in sorted(taken)], left_out, _pool(coreset, own, rules)


def _pool(
    coreset: CoresetSettings | None, candidates: dict[str, Candidate], rules: SelectionRules
) -> SamplePool | None:
    """None if the worker does not choose."""
    if coreset is None or not coreset.is_by_loss:
        return None
    strategy: Any = coreset.strategy
    return SamplePool(size=coreset.size, strategy=strategy, candidates=candidates, rules=rules)


def pool_of(conn: Connection, config: Config, ids: Sequence[int]) -> SamplePool | None:
    """These tasks as the pool of a round; None if its worker does not choose. Raises ConfigError for a wrong
    chain."""
    coreset = config.training.coreset
    if coreset is None or not coreset.is_by_loss:
        return None
    rules, rows = rules_of(config), samples.known(conn, ids)
    names = {row.id: row.key for row in rows}
    return _pool(coreset, {names[each.task]: each for each in _weighed(conn, rows, rules)}, rules)


def rules_of(config: Config) -> SelectionRules:
    """Raises ConfigError for a wrong chain."""
    caps, coreset = _caps(config), config.training.coreset
    return SelectionRules(
        _room(config),
        min(config.trigger.min_samples, most_samples(config)),
        {name: getattr(caps, name) for name in SHARES} if caps is not None else {},
        caps.widen if caps is not None else True,
        dict[str, float](config.training.task_weights.items()),
        config.training.replay.ratio if config.training.replay is not None else 0.0,
        coreset.candidates if coreset is not None else None,
    )


def _candidates(conn: Connection, config: Config, rules: SelectionRules) -> list[Candidate]:
    """The free samples in the order in which rounds take them; no more than a round takes if nothing is weighed."""
    is_weighed = bool(rules.shares or rules.weights or config.training.coreset)
    return _weighed(conn, samples.candidates(conn, config.takes.train, None if is_weighed else rules.most), rules)


def _weighed(conn: Connection, rows: Sequence[Row[object]], rules: SelectionRules) -> list[Candidate]:
    """These rows as candidates. Those that no filter run has weighed yet have shares too."""
    if not rules.shares:
        return [Candidate(row.id, structure=row.structure, uses=row.uses) for row in rows]
    # Imported here: without a chain, nobody pays for the filters.
    from flywheel.judge.filters.deduplication import fingerprint

    unknown = [row.id for row in rows if row.origin is None]
    found = {number: fingerprint(line, NEAR) for number, line in samples.lines(conn, unknown)}
    return [
        Candidate(row.id, of.conversation, of.user, of.template, row.structure, row.uses)
        for row in rows
        for of in (found.get(row.id, row),)
    ]


def _caps(config: Config) -> Influence | None:
    """The shares that the chain's `influence` allows, if there is a chain with one. Raises ConfigError."""
    if config.filter.chain is None:
        return None
    # Imported here: without a chain, nobody pays for the filters.
    from flywheel.judge.filters.chain import influence_of

    return influence_of(config)


def most_samples(config: Config) -> int:
    """The most new samples that a round takes."""
    coreset, room = config.training.coreset, _room(config)
    return room if coreset is None else min(coreset.candidates, room)


def _room(config: Config) -> int:
    """The most samples that a round has: those that its steps use, or that its stages may take. SFT uses as many as
    there are."""
    training, taken = config.training, [each.samples or math.inf for each in config.training.planned]
    used = math.inf if "sft" in training.kinds else _of_steps(config)
    return int(min(config.trigger.max_samples, used, sum(taken)))


def _of_steps(config: Config) -> int:
    """The samples that the steps of GRPO use."""
    return sum(each.steps * config.rollout.prompts_asked(each.prompts_per_step) for each in config.training.of_grpo)


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
