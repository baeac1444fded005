"""What a round trains on: a choice among candidates, within shares and by quotas, with tasks of earlier rounds.

`select` is a pure function: the same candidates, rules and order give the same choice. It goes through the candidates
in their order and takes each one that fits the limits: of its conversation, user and template, and of its class.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import floor
from typing import Final

SHARES: Final = ("conversation", "user", "template")
"""What one of which can have a limited share of a round."""
OVER: Final = "over their share"
LATER: Final = "more than a round takes"
MOST_SCALINGS: Final = 8
"""How often quotas are scaled to what shares leave of a class; what is missing then makes the round smaller."""
UNWEIGHTED: Final = "of a class without a weight in training.task_weights"


class TaskClass(StrEnum):
    """The class of a task by its structure; the first that fits."""

    SEVERAL_TURNS = "several_turns"
    """there are earlier turns of the conversation"""
    SEVERAL_TOOLS = "several_tools"
    """the reply called several different tools"""
    ONE_TOOL = "one_tool"
    """it called one tool, once or more often"""
    NO_TOOLS = "no_tools"
    """it called none"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A task that a round may take, and what it counts towards. An empty user and template 0 are not counted. `uses`
    are the rounds that had it."""

    task: int
    conversation: str = ""
    user: str = ""
    template: int = 0
    structure: str = ""
    uses: int = 0


@dataclass(frozen=True, slots=True)
class SelectionRules:
    """A round takes at most `most` tasks, replayed ones included, and `size` new ones; `needed` suffice. `shares` are
    the largest shares of one conversation, user and template (0…1), which `widen` permits to be raised as far as a
    round of `needed` tasks requires. `weights` are the relative numbers of tasks of each class, empty for any;
    `replay` is the number of replayed tasks for each new one."""

    most: int
    needed: int
    shares: Mapping[str, float] = field(default_factory=dict)
    widen: bool = True
    weights: Mapping[str, float] = field(default_factory=dict)
    replay: float = 0.0
    size: int | None = None


@dataclass(frozen=True, slots=True)
class ClassCount:
    """`wanted` is what the class's weight asks for of the `chosen` tasks of all classes; `available` are the
    candidates."""

    wanted: int
    available: int
    chosen: int


@dataclass(frozen=True, slots=True)
class Selection:
    """`tasks` are the new ones and `replayed` those of earlier rounds, in the order of their candidates. `widened`
    are the shares that had to be raised, `left_out` counts the other candidates by reason, and `classes` has a row
    for each weight."""

    tasks: Sequence[int]
    replayed: Sequence[int] = ()
    widened: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    classes: Mapping[str, ClassCount] = field(default_factory=dict)


def select(candidates: Sequence[Candidate], rules: SelectionRules, replayable: Sequence[Candidate] = ()) -> Selection:
    """Choose new tasks among the candidates, and for each of them `rules.replay` of `replayable`. Both are in the
    order in which a round takes them; no task is in both or twice.

    No share of a round is above its limit, except that one task is always allowed. A class with too few candidates
    gives all that fit, and the others are scaled.
    """
    usable = [each for each in candidates if not rules.weights or rules.weights.get(each.structure)]
    most = _most_new(rules, len(replayable))
    taken, widened = _filled(usable, rules, most)
    shares = {**rules.shares, **widened}
    again = min(floor(rules.replay * len(taken) + 1e-9), rules.most - len(taken))
    replayed = _replayed(replayable, taken, shares, again)
    left_out = {
        UNWEIGHTED: len(candidates) - len(usable),
        OVER if len(taken) < most else LATER: len(usable) - len(taken),
    }
    return Selection(
        [each.task for each in taken],
        [each.task for each in replayed],
        widened,
        {reason: count for reason, count in left_out.items() if count},
        _classes(usable, taken, rules.weights),
    )


def _most_new(rules: SelectionRules, replayable: int) -> int:
    """The largest number of new tasks that leaves room for those that are replayed with them."""
    most = rules.most if rules.size is None else min(rules.most, rules.size)
    if not rules.replay or not replayable:
        return most
    whole = (n for n in range(most, 0, -1) if n + min(replayable, floor(rules.replay * n + 1e-9)) <= rules.most)
    return next(whole, 1)


def _filled(
    candidates: Sequence[Candidate], rules: SelectionRules, most: int
) -> tuple[list[Candidate], dict[str, float]]:
    """What a round takes, and the shares that had to be raised for `rules.needed` tasks."""
    taken = _within_shares(candidates, rules, rules.shares, most)
    needed = min(rules.needed, most, len(candidates))
    if len(taken) >= needed or not rules.widen:
        return taken, {}
    limits = {
        name: max(limit, _filling(candidates, name, needed)) for name, limit in _limits(rules.shares, needed).items()
    }

    def with_more(extra: int) -> list[Candidate]:
        return _by_quotas(candidates, rules, {name: limit + extra for name, limit in limits.items()}, needed)

    # Each limit can suffice alone, and not together with the others.
    extra = bisect_left(range(needed), needed, key=lambda extra: len(with_more(extra)))
    raised = {name: min(1.0, (limit + extra) / needed) for name, limit in limits.items()}
    widened = {name: share for name, share in raised.items() if share > rules.shares[name]}
    # With these limits a round can be larger than needed.
    larger = _within_shares(candidates, rules, {**rules.shares, **widened}, most)
    return max(larger, with_more(extra), key=len), widened


def _within_shares(
    candidates: Sequence[Candidate], rules: SelectionRules, shares: Mapping[str, float], most: int
) -> list[Candidate]:
    """What fits into a round of at most `most` tasks. If the limits make it smaller, shares are computed again for
    that size."""
    size = min(most, len(candidates))
    while True:
        taken = _by_quotas(candidates, rules, _limits(shares, size), size)
        if len(taken) >= size:
            return taken
        size = len(taken)


def _limits(shares: Mapping[str, float], size: int) -> dict[str, int]:
    """Most tasks of one conversation, user and template in a round of this size."""
    return {name: max(1, int(share * size + 1e-9)) for name, share in shares.items()}


def _filling(candidates: Sequence[Candidate], name: str, size: int) -> int:
    """The smallest limit with which the candidates fill a round of this size, if it is the only limit."""
    counts = Counter(key for candidate in candidates if (key := getattr(candidate, name)))
    free = len(candidates) - counts.total()
    return bisect_left(range(size), size, key=lambda limit: free + sum(min(n, limit) for n in counts.values()))


def _by_quotas(
    candidates: Sequence[Candidate], rules: SelectionRules, limits: Mapping[str, int], size: int
) -> list[Candidate]:
    """What fits into the limits, at most `size` tasks in the proportion of the classes' weights."""
    if not rules.weights:
        return _fitting(candidates, limits, size)
    supply: Mapping[str, int] = Counter(each.structure for each in candidates)
    taken: list[Candidate] = []
    for _ in range(MOST_SCALINGS):
        wanted = quotas(rules.weights, supply, size)
        taken = _fitting(candidates, limits, size, wanted=wanted)
        got = Counter(each.structure for each in taken)
        short = {name: got[name] for name, number in wanted.items() if got[name] < number}
        if not short:
            break
        # The limits leave less of these classes than there is: the others are scaled.
        supply = {**supply, **short}
    return taken


def quotas(weights: Mapping[str, float], supply: Mapping[str, int], size: int) -> dict[str, int]:
    """How many tasks of each class make `size` tasks, or all there are, in the proportion of the weights. A class
    with too few gives all it has, and the others are scaled."""
    left, scaled, counts = size, {name: weight for name, weight in weights.items() if weight > 0}, dict[str, int]()
    while scaled:
        whole = sum(scaled.values())
        few = [name for name, weight in scaled.items() if supply.get(name, 0) <= left * weight / whole]
        if not few:
            break
        counts |= {name: supply.get(name, 0) for name in few}
        left -= sum(counts[name] for name in few)
        scaled = {name: weight for name, weight in scaled.items() if name not in few}
    return counts | _rounded(scaled, left)


def largest(weights: Mapping[str, float], supply: Mapping[str, int]) -> int:
    """The largest number of tasks that have the proportion of the weights. Classes without any do not count."""
    there = {name: weight for name, weight in weights.items() if weight > 0 and supply.get(name)}
    return floor(
        min((supply[name] / weight for name, weight in there.items()), default=0) * sum(there.values()) + 1e-9
    )


def _rounded(weights: Mapping[str, float], size: int) -> dict[str, int]:
    """`size` in the proportion of the weights, in whole numbers: by largest remainders."""
    whole = sum(weights.values())
    exact = {name: size * weight / whole for name, weight in weights.items()}
    counts = {name: floor(number) for name, number in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: size - sum(counts.values()) if exact else 0]:
        counts[name] += 1
    return counts


def _fitting(
    candidates: Iterable[Candidate],
    limits: Mapping[str, int],
    size: int,
    counts: Counter[tuple[str, object]] | None = None,
    wanted: Mapping[str, int] | None = None,
) -> list[Candidate]:
    """The first `size` candidates that fit, beside what the `counts` hold already."""
    counts = Counter() if counts is None else counts
    taken: list[Candidate] = []
    for candidate in candidates:
        if len(taken) == size:
            break
        keys = [(name, key) for name in limits if (key := getattr(candidate, name))]
        if any(counts[key] >= limits[key[0]] for key in keys):
            continue
        if wanted is not None:
            of_class = "structure", candidate.structure
            if counts[of_class] >= wanted.get(candidate.structure, 0):
                continue
            keys.append(of_class)
        counts.update(keys)
        taken.append(candidate)
    return taken


def _replayed(
    replayable: Sequence[Candidate], taken: Sequence[Candidate], shares: Mapping[str, float], most: int
) -> list[Candidate]:
    """The first ones that fit into the shares of the whole round."""
    most = min(most, len(replayable))
    while True:
        limits = _limits(shares, len(taken) + most)
        counts = Counter((name, key) for each in taken for name in limits if (key := getattr(each, name)))
        found = _fitting(replayable, limits, most, counts)
        if len(found) == most:
            return found
        most = len(found)


def _classes(
    usable: Sequence[Candidate], taken: Sequence[Candidate], weights: Mapping[str, float]
) -> dict[str, ClassCount]:
    available, chosen = (Counter(each.structure for each in some) for some in (usable, taken))
    wanted = _rounded({name: weight for name, weight in weights.items() if weight > 0}, len(taken))
    return {name: ClassCount(number, available[name], chosen[name]) for name, number in wanted.items()}
