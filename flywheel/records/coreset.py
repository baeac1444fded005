"""The order in which a coreset takes its candidates: each text once before any is repeated, and among these at
random, or first those that differ most from what was taken.

The latter is farthest-point sampling (Gonzalez 1985) on MinHash signatures of the words: each candidate in turn is
the one whose most similar one among those before it is the least similar. A pure function of its arguments.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import xxhash

from flywheel.records.selection import Candidate
from flywheel.records.similarity import normalised, word_signatures

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Order = Literal["random", "diversity"]
ORDERS: Final[Mapping[Order, str]] = {
    "random": "at random, those of the fewest rounds first",
    "diversity": "those first that differ most from those before",
}


def text_of(history: Sequence[Mapping[str, Any]], query: str) -> str:
    """What a task is compared by: the messages of the user."""
    return "\n".join([*(str(said.get("content")) for said in history if said.get("role") == "user"), query])


def once_each(candidates: Sequence[Candidate], texts: Mapping[int, str]) -> list[Candidate]:
    """The candidates in their order, but the first of each text before any that repeats one, and so on."""
    repeats = _repeats(candidates, texts)
    return sorted(candidates, key=lambda each: repeats[each.task])


def _repeats(candidates: Sequence[Candidate], texts: Mapping[int, str]) -> dict[int, int]:
    """How many candidates before each one have the same text."""
    seen: Counter[int] = Counter()
    repeats: dict[int, int] = {}
    for each in candidates:
        text = xxhash.xxh3_64_intdigest(normalised(texts[each.task]).encode("utf-8", "replace"))
        repeats[each.task] = seen[text]
        seen[text] += 1
    return repeats


def in_order(
    candidates: Sequence[Candidate], texts: Mapping[int, str], order: Order, size: int, seed: int, begin: int = 1
) -> list[Candidate]:
    """The candidates with their texts by task, for a coreset of `size`. They come in the order of the fewest uses and
    of age, which decides between equally different ones; for `diversity`, the first `begin` are taken already. Only
    twice as many as it has are compared with each other: limits may leave some of them out."""
    if order == "random":
        drawn = random.Random(seed)
        places = sorted(range(len(candidates)), key=lambda place: (candidates[place].uses, drawn.random()))
        return once_each([candidates[place] for place in places], texts)
    repeats = _repeats(candidates, texts)
    first = [each for each in candidates if not repeats[each.task]]
    begin = sum(not repeats[each.task] for each in candidates[:begin])
    signatures = word_signatures([texts[each.task] for each in first])
    rank = {first[place].task: rank for rank, place in enumerate(farthest(signatures, 2 * size, begin))}
    return sorted(candidates, key=lambda each: (repeats[each.task], rank.get(each.task, len(rank))))


def farthest(signatures: NDArray[np.uint8], most: int, begin: int = 1) -> list[int]:
    """The first `most` columns of signatures, of shape (rows, items), in the order of farthest-point sampling; the
    first `begin` ones come first. Of equally different ones, the first."""
    import numpy as np

    count = signatures.shape[1]
    # Rows that agree with the most similar one that was taken; 255 for those that were.
    nearest = np.zeros(count, dtype=np.uint8)
    places: list[int] = []
    while len(places) < min(most, count):
        place = len(places) if len(places) < begin else int(nearest.argmin())
        places.append(place)
        nearest[place] = 255
        same = (signatures == signatures[:, place, None]).sum(axis=0, dtype=np.uint8)
        np.maximum(nearest, same, out=nearest)
    return places
