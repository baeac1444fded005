"""Similarity of texts: normalised words and numbers, MinHash signatures, and the bands that near-duplicates share.

The split compares conversations by their prompt signatures (`prompt_signatures`), deduplication compares questions by
their fingerprints (`words`, `numbers`, `bands`). Two texts are near-duplicates if they contain the same numbers and
share most of their words. Bands only say which pairs are worth comparing (Broder 1997; Leskovec, Rajaraman, Ullman:
Mining of Massive Datasets, 3.4).

All functions are pure. Their results are stored, so they must be the same in every process and every version. A
MinHash library would import scipy, 70 MB of it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import xxhash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NEAR: Final = 0.8
"""Texts with the same numbers are near-duplicates from this share of common words on."""
BANDS: Final = 16
"""Bands of a fingerprint."""
MISSED: Final = 0.003
"""Share of pairs exactly at the threshold whose fingerprints have no common band."""
SIGNATURE_BANDS: Final = 10
SIGNATURE_ROWS: Final = 4
"""Prompt signatures of two questions that share 80 % of their words have a common band with a probability of
1 - (1 - 0.8^4)^10 = 0.995."""

_SPACED: Final = frozenset({"Sm", "Sc", "So"})
_OPERATORS: Final = {"×": "*", "÷": "/", "\N{MINUS SIGN}": "-"}
_JOINING: Final = "-*/%^#.,:"
"""Punctuation with a meaning beside a number, between one-letter names, or at the end of a name (C#)."""
_MARKS: Final = re.compile(
    r"[-*/%^#.,:](?:"
    r"(?P<number>(?<=\d[.,:])(?=\d))"
    r"|(?P<operator>(?<=[-*/%^])(?:(?<=\d.)|(?<=\d .)|(?= *\d)|(?:(?<=\b\w.)|(?<=\b\w .))(?= *\w\b))|(?<=\w#))"
    r"|)"
)
"""Joining punctuation, in texts without double spaces. The pattern begins with the few characters themselves and
looks around afterwards: that is many times faster than to begin with a look-behind."""
_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
"""Scripts that do not separate words by spaces, or inflect them at their ends: Thai, Lao, Burmese, Khmer, CJK."""
_RUNS: Final = re.compile(f"[{_UNSPACED}]+|[^{_UNSPACED}]+")
_IS_UNSPACED: Final = re.compile(f"[{_UNSPACED}]")
_NUMBERS: Final = re.compile(r"[-*/%^+<>=#\d](?:(?<=\d)\d*(?:[.,:]\d+)*|(?<!\d)(?<!\S.)(?!\S))")
"""Numbers, and operators that stand alone. It begins with the characters for the same reason as `_MARKS`."""


class _Folded(dict[int, str]):
    """The replacement of each character, computed when it is first met."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        category = unicodedata.category(char)
        if char in _OPERATORS:
            folded = _OPERATORS[char]
        elif category == "Pd":
            folded = "-"
        elif char in _JOINING or category[0] in "LN":
            folded = char
        elif category == "Cf" or "\ufe00" <= char <= "\ufe0f":
            folded = ""
        elif category[0] == "M":
            folded = char
        else:
            folded = f" {char} " if category in _SPACED else " "
        self[code] = folded
        return folded


_FOLDED: Final = _Folded()
_SYMBOLS: Final = re.compile("[$+<=>|~]")
_KEPT: Final = f"{_JOINING}$+<=>|~"
_ASCII: Final = bytes(
    ord(char.lower()) if char.isalnum() or char in _KEPT else ord(" ") for char in map(chr, range(128))
) + bytes(128)
"""The same for ASCII in one pass, except for the spaces around symbols."""


def normalised(text: str) -> str:
    """The text without case, character width, punctuation and kinds of white space; operators and decimals stay.

    A text of nothing but punctuation stays as it is.
    """
    return " ".join(_spaced(text).split())


@lru_cache(maxsize=8)
def _spaced(text: str) -> str:
    """The normalised text, with any number of spaces between words."""
    if text.isascii():
        plain = text.casefold()
        folded = _SYMBOLS.sub(r" \g<0> ", text.encode("ascii").translate(_ASCII).decode("ascii"))
    else:
        plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
        folded = plain.translate(_FOLDED)
    if "  " in folded:
        folded = " ".join(folded.split())
    marked = _MARKS.sub(_mark, folded)
    return plain if not marked or marked.isspace() else marked


def _mark(found: re.Match[str]) -> str:
    if found.lastgroup == "number":
        return found[0]
    return f" {found[0]} " if found.lastgroup == "operator" else " "


class _Hashes(dict[str, int]):
    """32-bit hashes of words. Texts repeat words, so up to `MOST` of them are kept (3 MB at most)."""

    MOST: Final = 1 << 14
    LONGEST: Final = 40

    def __missing__(self, word: str) -> int:
        found = xxhash.xxh32_intdigest(word.encode("utf-8", "surrogatepass"))
        if len(word) <= self.LONGEST:
            if len(self) >= self.MOST:
                self.clear()
            self[word] = found
        return found


_hash_of: Final = _Hashes().__getitem__


def words(text: str) -> frozenset[int]:
    """32-bit hashes of the distinct words. Scripts without spaces count by pairs of characters."""
    return frozenset(map(_hash_of, set(terms(text))))


def lexical_diversity(text: str) -> float | None:
    """The share of distinct words among all words (type-token ratio), with words as `words` counts them; None for a
    text without any. It falls with the length of a text."""
    found = terms(text)
    return len(set(found)) / len(found) if found else None


def terms(text: str) -> list[str]:
    """The words of a text in their order; pairs of characters of scripts without spaces."""
    spaced = _spaced(text)
    if spaced.isascii():
        return spaced.split()
    found: list[str] = []
    for word in spaced.split():
        if word.isascii():
            found.append(word)
            continue
        for run in _RUNS.findall(word):
            if len(run) > 1 and _IS_UNSPACED.match(run):
                found += (run[start : start + 2] for start in range(len(run) - 1))
            else:
                found.append(run)
    return found


def numbers(text: str) -> tuple[str, ...]:
    """The numbers in their order, with the operators beside them: 3 + 4 is another question than 3 + 5 or 3 - 4."""
    return tuple(_NUMBERS.findall(_spaced(text)))


def jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    """The share of common words, 0…1. Two texts without words are alike."""
    common = len(a & b)
    either = len(a) + len(b) - common
    return common / either if either else 1.0


class Permutations(NamedTuple):
    """x → factor · x + offset modulo 2^32, a bijection since every factor is odd; both of shape (permutations,)."""

    factors: NDArray[np.uint32]
    offsets: NDArray[np.uint32]


_MOST_WORDS: Final = 4096
"""Of the sets whose signatures are made at once, a matrix of 0.7 MB with 40 permutations. A larger set is alone."""


def minhash(sets: Sequence[Sequence[int]], permutations: Permutations) -> Iterator[bytes]:
    """The MinHash signature of each set of 32-bit hashes: the least value of each permutation, as bytes of uint32.

    No set may be empty.
    """
    import numpy as np

    factors, offsets = permutations
    size = 4 * len(factors)
    end = 0
    while end < len(sets):
        hashes: list[int] = []
        starts: list[int] = []
        while end < len(sets) and (not hashes or len(hashes) + len(sets[end]) <= _MOST_WORDS):
            starts.append(len(hashes))
            hashes += sets[end]
            end += 1
        # (word, permutation); unsigned arithmetic wraps around, which is the modulus.
        values = factors * np.array(hashes, dtype=np.uint32).reshape(-1, 1)
        values += offsets
        least = np.minimum.reduceat(values, starts, axis=0).tobytes()
        yield from (least[place : place + size] for place in range(0, len(least), size))


def bands(words: frozenset[int], *, threshold: float = NEAR) -> tuple[int, ...]:
    """The bands of a fingerprint: 16 keys of 63 bits. Of texts at the `threshold`, all but `MISSED` share one."""
    rows = _rows(threshold)
    size = 4 * rows
    permutations = _drawn_permutations(BANDS * rows)
    # No words have no least value: the largest one stands for it.
    [signature] = minhash([_mixed(sorted(words))], permutations) if words else [b"\xff" * (BANDS * size)]
    return tuple(
        xxhash.xxh3_64_intdigest(signature[band * size : (band + 1) * size], seed=band) >> 1 for band in range(BANDS)
    )


SIGNATURE_SIZE: Final = 64
"""Values of a word signature: the share of common words is estimated with a standard error of 0.06 at most."""


def word_signatures(texts: Sequence[str]) -> NDArray[np.uint8]:
    """The MinHash signatures of texts by their words, of shape (64, texts): two texts agree in about the share of
    their common words. Scripts without spaces count by pairs of characters."""
    import numpy as np

    # A text without words has one that no other has.
    sets = [_mixed(sorted(words(text))) or [0] for text in texts]
    made = b"".join(minhash(sets, _drawn_permutations(SIGNATURE_SIZE)))
    low = np.frombuffer(made, dtype=np.uint32).reshape(len(texts), SIGNATURE_SIZE).astype(np.uint8)
    return np.ascontiguousarray(low.T)


@cache
def _rows(threshold: float) -> int:
    """The most rows per band that hardly ever miss a pair at the threshold: more rows, fewer accidental matches."""
    if threshold >= 1:
        return 8
    # A pair of similarity s shares no band with probability (1 - s^rows)^bands.
    wanted = 1 - MISSED ** (1 / BANDS)
    return max(1, min(8, int(math.log(wanted) / math.log(max(threshold, 0.01)))))


@cache
def _drawn_permutations(number: int) -> Permutations:
    """Permutations of fingerprints, drawn by numpy's legacy generator, whose stream is frozen (NEP 19)."""
    # Imported here: an idle daemon does without numpy.
    import numpy as np

    drawn = np.random.RandomState(1)
    factors = drawn.randint(0, 1 << 31, number, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return Permutations(factors, drawn.randint(0, 1 << 32, number, dtype=np.uint32))


def _mixed(words: list[int]) -> list[int]:
    """Each word through the finalizer of MurmurHash3, a bijection that spreads neighbouring hashes."""
    import numpy as np

    values = np.array(words, dtype=np.uint32)
    values ^= values >> np.uint32(16)
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    values ^= values >> np.uint32(16)
    mixed: list[int] = values.tolist()
    return mixed


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a question is compared by, and what its task counts towards in the shares of a round."""

    scope: int
    """63-bit hash of what must be the same."""
    exact: int
    """63-bit hash of the question and its scope."""
    words: frozenset[int]
    """Hashes of its words."""
    particulars: frozenset[int]
    """Hashes of the words of names and quotations."""
    bands: tuple[int, ...]
    """MinHash bands: near questions share one."""
    query: str
    text: str
    """Hash of the question; the key of its embedding."""
    conversation: str
    user: str
    template: int
    """63-bit hash of the question without numbers, names and quotations."""
    origin: str
    """The user or, if unknown, the source."""
    at: float
    """When it was asked: seconds since 1970."""


class PromptSignature(NamedTuple):
    """What the first question of a conversation is compared by: its words, sorted, and its bands."""

    words: tuple[int, ...] = ()
    bands: tuple[int, ...] = ()


def prompt_signatures(queries: Sequence[str]) -> list[PromptSignature]:
    """The signature of each first question. Bands are keys of 63 bits.

    Only questions with the same numbers share bands: "What is 3 + 4?" is another question than "What is 3 + 5?".
    """
    found = [opening(query) for query in queries]
    return [PromptSignature(tuple(each[0]), keys) for each, keys in zip(found, opening_bands(found), strict=True)]


def opening(query: str) -> tuple[array[int], int]:
    """The words of a first question, sorted, and a 63-bit hash of its numbers."""
    some = array("I", sorted(words(query)))
    return some, xxhash.xxh3_64_intdigest("\0".join(numbers(query)).encode("utf-8", "replace")) >> 1


def opening_bands(openings: Sequence[tuple[array[int], int]]) -> list[tuple[int, ...]]:
    """The bands of first questions by their words and the hash of their numbers. They are found faster together."""
    digest, size = xxhash.xxh3_64_intdigest, 4 * SIGNATURE_ROWS
    found = minhash([some for some, _ in openings if some], _hashed_permutations())
    bands = []
    for some, scope in openings:
        signature = next(found) if some else b""
        keys = (digest(signature[k * size : (k + 1) * size], k) >> 1 ^ scope for k in range(SIGNATURE_BANDS))
        bands.append(tuple(keys) if some else ())
    return bands


@cache
def _hashed_permutations() -> Permutations:
    """Permutations of prompt signatures, from a hash."""
    import numpy as np

    count = range(SIGNATURE_BANDS * SIGNATURE_ROWS)
    factors = np.array([xxhash.xxh32_intdigest(b"factor", seed=k) | 1 for k in count], dtype=np.uint32)
    offsets = np.array([xxhash.xxh32_intdigest(b"offset", seed=k) for k in count], dtype=np.uint32)
    return Permutations(factors, offsets)


class Questions:
    """Questions of which no two are near-duplicates."""

    def __init__(self) -> None:
        self._by_band = defaultdict[int, list[tuple[frozenset[int], str]]](list)

    def add(self, question: str) -> bool:
        """Add a question; False if it is a near-duplicate of another one."""
        [signature] = prompt_signatures([question])
        if self._nearest(signature):
            return False
        for band in signature.bands:
            self._by_band[band].append((frozenset(signature.words), question))
        return True

    def nearest(self, question: str) -> str:
        """The one of which a question is most nearly a duplicate; empty if it is of none."""
        [signature] = prompt_signatures([question])
        return self._nearest(signature)

    def _nearest(self, signature: PromptSignature) -> str:
        own = frozenset(signature.words)
        of_bands = (self._by_band.get(band, ()) for band in signature.bands)
        found = ((jaccard(own, other), text) for questions in of_bands for other, text in questions)
        share, text = max(found, default=(0.0, ""))
        return text if share >= NEAR else ""


def first_question(messages: Sequence[Mapping[str, Any]]) -> str:
    """The first question of a conversation; empty without one."""
    return next((str(message.get("content")) for message in messages if message.get("role") == "user"), "")


def beginning_of(line: Mapping[str, Any]) -> int:
    """A 63-bit hash of how the conversation of a task line begins: system prompt, tools and first question.

    It is the same for every turn of a conversation, as far as its line shows the turns before it.
    """
    begun = [line["metadata"]["tools_json"], line["metadata"]["images_json"]]
    for message in line["prompt"]:
        role = message.get("role")
        begun += str(role), str(message.get("content"))
        if role == "user":
            break
    return xxhash.xxh3_64_intdigest("\0".join(begun).encode("utf-8", "replace")) >> 1
