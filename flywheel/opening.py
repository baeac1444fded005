"""How a conversation begins: its words, and where others that begin alike are found.

The split needs this for every conversation of a long history, and in the daemon's own process. So the signature is
written out here in numpy, without the sixty megabytes that a general library would bring along.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import xxhash

from flywheel import likeness

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BANDS: Final = 10
ROWS: Final = 4
"""A pair whose share of common words is 0.8 has a band in common with probability 1 - (1 - 0.8^4)^10 = 0.995
(Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4)."""

_MOST_WORDS: Final = 4096
"""Of the questions whose signatures are made at once, in a matrix of 0.7 MB; a longer one is alone."""

_BAND: Final = ROWS * 4
_BANDS: Final = [(slice(band * _BAND, (band + 1) * _BAND), band) for band in range(BANDS)]
"""Where the bytes of each band are in those of a signature, and the band's seed."""

Opening = tuple[tuple[int, ...], tuple[int, ...]]
"""Words and bands."""


def opening_of(query: str) -> Opening:
    """The words of a conversation's first question, sorted, and its bands: 63-bit keys.

    Only questions with the same numbers share bands: "What is 3 + 4?" is another question than "What is 3 + 5?".
    """
    return openings_of((query,))[0]


def openings_of(queries: Sequence[str]) -> list[Opening]:
    """`opening_of` each of them; many take a good deal less time at once."""
    # Words and numbers of a question right after each other: its normalised text is kept for a moment only.
    texts = [(tuple(sorted(likeness.words(query))), likeness.numbers(query)) for query in queries]
    signatures = _signatures([words for words, _ in texts if words])
    return [(words, _bands(next(signatures), numbers) if words else ()) for words, numbers in texts]


def _bands(signature: bytes, numbers: tuple[str, ...]) -> tuple[int, ...]:
    digest = xxhash.xxh3_64_intdigest
    scope = digest("\0".join(numbers).encode("utf-8", "replace")) >> 1
    return tuple([digest(signature[place], seed) >> 1 ^ scope for place, seed in _BANDS])


def _signatures(texts: Sequence[tuple[int, ...]]) -> Iterator[bytes]:
    """MinHash (Broder 1997): the least value of each permutation over the words of each text, as bytes.

    A permutation of the 32-bit words is x → a·x + b modulo 2^32 with an odd a; the words are hashes already.
    """
    import numpy as np

    factors, offsets = _permutations()
    end = 0
    while end < len(texts):
        words: list[int] = []
        starts: list[int] = []
        while end < len(texts) and (not words or len(words) + len(texts[end]) <= _MOST_WORDS):
            starts.append(len(words))
            words += texts[end]
            end += 1
        # (word, permutation); unsigned arithmetic wraps around, which is the modulus.
        values = factors * np.array(words, dtype=np.uint32).reshape(-1, 1)
        values += offsets
        least = np.minimum.reduceat(values, starts, axis=0).tobytes()
        size = BANDS * _BAND
        yield from (least[place : place + size] for place in range(0, len(least), size))


@cache
def _permutations() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Factors and offsets; from a hash, so that they are the same in every version of numpy."""
    import numpy as np

    def row(name: bytes, bits: int) -> NDArray[Any]:
        return np.array([xxhash.xxh32_intdigest(name, seed=k) | bits for k in range(BANDS * ROWS)], dtype=np.uint32)

    return row(b"factor", 1), row(b"offset", 0)
