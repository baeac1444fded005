"""How a conversation begins: its words, and where others that begin alike are found.

The split needs this for every conversation of a long history, and in the daemon's own process. So the signature is
written out here in numpy, without the sixty megabytes that a general library would bring along.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final

import xxhash

from flywheel import likeness

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BANDS: Final = 10
ROWS: Final = 4
"""A pair whose share of common words is 0.8 has a band in common with probability 1 - (1 - 0.8^4)^10 = 0.995."""


@lru_cache(maxsize=256)
def opening_of(query: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The words of a conversation's first question, sorted, and its bands: 63-bit keys.

    Only questions with the same numbers share bands: "What is 3 + 4?" is another question than "What is 3 + 5?".
    """
    words = tuple(sorted(likeness.words(query)))
    numbers = xxhash.xxh3_64_intdigest("\0".join(likeness.numbers(query)).encode("utf-8", "replace")) >> 1
    return words, tuple(band ^ numbers for band in bands(words))


def bands(words: tuple[int, ...]) -> tuple[int, ...]:
    """MinHash with banding (Broder 1997; Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4).

    A permutation of the 32-bit words is x → a·x + b modulo 2^32 with an odd a; the words are hashes already.
    """
    import numpy as np

    if not words:
        return ()
    factors, offsets = _permutations()
    # (permutation, word); unsigned arithmetic wraps around, which is the modulus.
    values = (factors * np.asarray(words, dtype=np.uint32) + offsets).min(axis=1).reshape(BANDS, ROWS)
    return tuple(xxhash.xxh3_64_intdigest(row.tobytes(), seed=band) >> 1 for band, row in enumerate(values))


@cache
def _permutations() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Factors and offsets as columns; from a hash, so that they are the same in every version of numpy."""
    import numpy as np

    def column(name: bytes, bits: int) -> NDArray[Any]:
        numbers = [xxhash.xxh32_intdigest(name, seed=k) | bits for k in range(BANDS * ROWS)]
        return np.array(numbers, dtype=np.uint32).reshape(-1, 1)

    return column(b"factor", 1), column(b"offset", 0)
