"""Which replies to one prompt are pairs for preference training, in rounds and in `flywheel export`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

ALONE: Final = "no reply with the other verdict to the same prompt"
SAME: Final = "the better and the worse replies to the prompt say the same"
CLOSE: Final = "the scores of the better and the worse replies to the prompt are too close"
USED_UP: Final = "more replies with this verdict than with the other to the same prompt"


class Reply(NamedTuple, Generic[T]):
    """A reply `of` something, with what is equal for replies that say the same, and its score or reward."""

    of: T
    says: object
    score: float


def matched(
    better: Sequence[Reply[T]], worse: Sequence[Reply[T]], margin: float
) -> tuple[list[tuple[Reply[T], Reply[T]]], Counter[str]]:
    """Pairs of replies to one prompt that say something else, and whose scores differ by at least `margin`; and how
    many replies are in none, by reason.

    The best is paired with the worst, then the next ones: few pairs far apart teach more than many close ones. No
    reply is in two pairs.
    """
    free = sorted(worse, key=lambda one: one.score)
    rest, pairs = [], []
    for one in sorted(better, key=lambda one: -one.score):
        found = next((place for place, other in enumerate(free) if _differ(one, other, margin)), None)
        if found is None:
            rest.append(one)
        else:
            pairs.append((one, free.pop(found)))
    left_out = Counter(_why([(one, other) for other in worse], margin) for one in rest)
    left_out.update(_why([(other, one) for other in better], margin) for one in free)
    return pairs, left_out


def are_apart(better: float, worse: float, margin: float) -> bool:
    """Whether the better score is higher, by at least the margin."""
    # Rounded: 0.9 - 0.8 is less than 0.1 in floating point.
    gap = round(better - worse, 9)
    return gap > 0 and gap >= margin


def _differ(better: Reply[T], worse: Reply[T], margin: float) -> bool:
    return better.says != worse.says and are_apart(better.score, worse.score, margin)


def _why(possible: Sequence[tuple[Reply[T], Reply[T]]], margin: float) -> str:
    """Why a reply is in no pair, from all pairs that were possible for it."""
    if not possible:
        return ALONE
    if all(better.says == worse.says for better, worse in possible):
        return SAME
    return USED_UP if any(_differ(better, worse, margin) for better, worse in possible) else CLOSE
