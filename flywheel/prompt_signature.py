"""How a conversation begins: exactly, its words, and where others that begin alike are found.

The split needs this for every conversation of a long history, and in the daemon's own process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import xxhash

from flywheel import likeness
from flywheel.minhash import Permutations, signatures

if TYPE_CHECKING:
    from numpy.typing import NDArray

BANDS: Final = 10
ROWS: Final = 4
"""A pair whose share of common words is 0.8 has a band in common with probability 1 - (1 - 0.8^4)^10 = 0.995
(Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4)."""

_BAND: Final = ROWS * 4
_BANDS: Final = [(slice(band * _BAND, (band + 1) * _BAND), band) for band in range(BANDS)]
"""Where the bytes of each band are in those of a signature, and the band's seed."""

Opening = tuple[tuple[int, ...], tuple[int, ...]]
"""Words and bands."""


def beginning_of(line: Mapping[str, Any]) -> int:
    """A 63-bit hash of what the conversation of a task line begins with: system prompt, tools and first question.

    Every turn of a conversation has the same one, as far as its line shows the turns before it.
    """
    # States of earlier versions hold lines without some of these.
    metadata = line.get("metadata", {})
    begun = [metadata.get("tools_json", "[]"), metadata.get("images_json", "[]")]
    for message in line.get("prompt", ()):
        role = message.get("role")
        begun += str(role), str(message.get("content"))
        if role == "user":
            break
    return xxhash.xxh3_64_intdigest(_encoded("\0".join(begun))) >> 1


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def opening_of(query: str) -> Opening:
    """The words of a conversation's first question, sorted, and its bands: 63-bit keys.

    Only questions with the same numbers share bands: "What is 3 + 4?" is another question than "What is 3 + 5?".
    """
    return openings_of((query,))[0]


def openings_of(queries: Sequence[str]) -> list[Opening]:
    """`opening_of` each of them; many take a good deal less time at once."""
    # Words and numbers of a question right after each other: its normalised text is kept for a moment only.
    texts = [(tuple(sorted(likeness.words(query))), likeness.numbers(query)) for query in queries]
    found = signatures([words for words, _ in texts if words], _permutations())
    return [(words, _bands(next(found), numbers) if words else ()) for words, numbers in texts]


def _bands(signature: bytes, numbers: tuple[str, ...]) -> tuple[int, ...]:
    digest = xxhash.xxh3_64_intdigest
    scope = digest(_encoded("\0".join(numbers))) >> 1
    return tuple([digest(signature[place], seed) >> 1 ^ scope for place, seed in _BANDS])


@cache
def _permutations() -> Permutations:
    """From a hash, so that they are the same in every version of numpy."""
    import numpy as np

    def row(name: bytes, bits: int) -> NDArray[Any]:
        return np.array([xxhash.xxh32_intdigest(name, seed=k) | bits for k in range(BANDS * ROWS)], dtype=np.uint32)

    return Permutations(row(b"factor", 1), row(b"offset", 0))
