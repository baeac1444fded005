"""MinHash signatures of sets of 32-bit hashes (Broder 1997), in numpy.

A library would bring scipy into the daemon, seventy megabytes of it. What is made here is stored: the same words and
permutations give the same signature for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_WORDS: Final = 4096
"""Of the sets whose signatures are made at once, a matrix of 0.7 MB with 40 permutations; a larger set is alone."""


class Permutations(NamedTuple):
    """x → factor · x + offset modulo 2^32, a bijection since every factor is odd; both of shape (permutations,)."""

    factors: NDArray[np.uint32]
    offsets: NDArray[np.uint32]


def signatures(sets: Sequence[Sequence[int]], permutations: Permutations) -> Iterator[bytes]:
    """The least value of each permutation over each set, as bytes of uint32. No set may be empty."""
    import numpy as np

    factors, offsets = permutations
    size = 4 * len(factors)
    end = 0
    while end < len(sets):
        words: list[int] = []
        starts: list[int] = []
        while end < len(sets) and (not words or len(words) + len(sets[end]) <= _MOST_WORDS):
            starts.append(len(words))
            words += sets[end]
            end += 1
        # (word, permutation); unsigned arithmetic wraps around, which is the modulus.
        values = factors * np.array(words, dtype=np.uint32).reshape(-1, 1)
        values += offsets
        least = np.minimum.reduceat(values, starts, axis=0).tobytes()
        yield from (least[place : place + size] for place in range(0, len(least), size))
