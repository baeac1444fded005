"""Likeness of texts: what is left of a text when its looks are taken away, its words, and where to look for its like.

Pure functions, the same in every process and after every restart: their results are stored. Two texts are near when
they hold the same numbers and share most of their words; MinHash only says which pairs are worth comparing.
"""

from __future__ import annotations

import math
import re
import unicodedata
from functools import cache, lru_cache
from typing import Final

import xxhash

from flywheel.minhash import Permutations, signatures

NEAR: Final = 0.8
"""The share of common words from which on texts with the same numbers are near-duplicates."""
BANDS: Final = 16
"""Keys per text, at most: what is stored and looked up for each."""
MISSED: Final = 0.003
"""How seldom a pair that is exactly at the threshold may share no band."""

_SPACED: Final = frozenset({"Sm", "Sc", "So"})
_OPERATORS: Final = {"×": "*", "÷": "/", "\N{MINUS SIGN}": "-"}
_JOINING: Final = "-*/%^#.,:"
"""Punctuation that means something beside a number, between one-letter names, or at the end of one (C#)."""
_MARKS: Final = re.compile(
    r"[-*/%^#.,:](?:"
    r"(?P<number>(?<=\d[.,:])(?=\d))"
    r"|(?P<operator>(?<=[-*/%^])(?:(?<=\d.)|(?<=\d .)|(?= *\d)|(?:(?<=\b\w.)|(?<=\b\w .))(?= *\w\b))|(?<=\w#))"
    r"|)"
)
"""Joining punctuation where nothing is wider than one space. What stands around it is looked at after it: a pattern
that begins with the few characters themselves is found many times faster."""
_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
"""Scripts whose words are not parted by spaces, or change at their ends: Thai, Lao, Burmese, Khmer, CJK."""
_RUNS: Final = re.compile(f"[{_UNSPACED}]+|[^{_UNSPACED}]+")
_IS_UNSPACED: Final = re.compile(f"[{_UNSPACED}]")
_NUMBERS: Final = re.compile(r"[-*/%^+<>=#\d](?:(?<=\d)\d*(?:[.,:]\d+)*|(?<!\d)(?<!\S.)(?!\S))")
"""Numbers, and operators that stand alone; it begins with the characters for the same reason."""


class _Folded(dict[int, str]):
    """What each character becomes; filled as characters are met."""

    def __missing__(self, code: int) -> str:
        self[code] = folded = self._fold(chr(code))
        return folded

    @staticmethod
    def _fold(char: str) -> str:
        if char in _OPERATORS:
            return _OPERATORS[char]
        category = unicodedata.category(char)
        if category == "Pd":
            return "-"
        if char in _JOINING or category[0] in "LN":
            return char
        if category[0] == "M":
            return "" if "\ufe00" <= char <= "\ufe0f" else char
        if category == "Cf":
            return ""
        return f" {char} " if category in _SPACED else " "


_FOLDED: Final = _Folded()
_SYMBOLS: Final = re.compile("[$+<=>|~]")
_ASCII: Final = bytes(ord(_FOLDED[ord(chr(code).casefold())].strip() or " ") for code in range(128)) + bytes(128)
"""The same for ASCII in one pass, but for the spaces around the symbols."""


def normalised(text: str) -> str:
    """The text without case, width, punctuation and the kind of its white space; operators and decimals stay.

    A text of nothing but punctuation stays as it is.
    """
    return " ".join(_spaced(text).split())


@lru_cache(maxsize=8)
def _spaced(text: str) -> str:
    """The text normalised but for the number of its spaces."""
    if text.isascii():
        plain = text.casefold()
        folded = _SYMBOLS.sub(r" \g<0> ", text.encode("ascii").translate(_ASCII).decode("ascii"))
    else:
        plain = _composed(_composed(text).casefold())
        folded = plain.translate(_FOLDED)
    if "  " in folded:
        folded = " ".join(folded.split())
    marked = _MARKS.sub(_mark, folded)
    return plain if not marked or marked.isspace() else marked


def _composed(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _mark(found: re.Match[str]) -> str:
    match found.lastgroup:
        case "number":
            return found[0]
        case "operator":
            return f" {found[0]} "
    return " "


class _Hashes(dict[str, int]):
    """32-bit hashes of words, of which texts repeat a few again and again; three megabytes at most."""

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
    """32-bit hashes of the different words; scripts without spaces count by pairs of characters."""
    spaced = _spaced(text)
    if spaced.isascii():
        return frozenset(map(_hash_of, spaced.split()))
    found: set[str] = set()
    for word in spaced.split():
        if word.isascii():
            found.add(word)
            continue
        for run in _RUNS.findall(word):
            if len(run) > 1 and _IS_UNSPACED.match(run):
                found.update(run[start : start + 2] for start in range(len(run) - 1))
            else:
                found.add(run)
    return frozenset(map(_hash_of, found))


def numbers(text: str) -> tuple[str, ...]:
    """The numbers in their order, with the operators beside them: 3 + 4 is another question than 3 + 5 or 3 - 4."""
    return tuple(_NUMBERS.findall(_spaced(text)))


def likeness(a: frozenset[int], b: frozenset[int]) -> float:
    """The share of common words (Jaccard), 0…1; two texts without words are alike."""
    common = len(a & b)
    either = len(a) + len(b) - common
    return common / either if either else 1.0


def is_near(
    words_a: frozenset[int],
    numbers_a: tuple[str, ...],
    words_b: frozenset[int],
    numbers_b: tuple[str, ...],
    *,
    threshold: float = NEAR,
) -> bool:
    """Whether two texts are near-duplicates: the same numbers, and at least `threshold` of the words in common."""
    return numbers_a == numbers_b and likeness(words_a, words_b) >= threshold


def bands(words: frozenset[int], *, threshold: float = NEAR) -> tuple[int, ...]:
    """63-bit keys, at most 16. Texts as alike as `threshold` share one but for `MISSED` of them; others may, too.

    MinHash with banding (Broder 1997; Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4).
    """
    rows = _rows(threshold)
    size = 4 * rows
    permutations = _permutations(BANDS * rows)
    # Nothing is the least value of no words: the largest one stands for it.
    [signature] = signatures([_mixed(sorted(words))], permutations) if words else [b"\xff" * (BANDS * size)]
    return tuple(
        xxhash.xxh3_64_intdigest(signature[band * size : (band + 1) * size], seed=band) >> 1 for band in range(BANDS)
    )


@cache
def _rows(threshold: float) -> int:
    """The most rows per band that hardly ever miss a pair at the threshold: more rows, fewer chance hits."""
    if threshold >= 1:
        return 8
    # A pair of likeness s shares no band with probability (1 - s^rows)^bands.
    wanted = 1 - MISSED ** (1 / BANDS)
    return max(1, min(8, int(math.log(wanted) / math.log(max(threshold, 0.01)))))


@cache
def _permutations(number: int) -> Permutations:
    """Drawn by numpy's legacy generator, whose stream is frozen (NEP 19): what is made with them is stored."""
    # Here, not above: a daemon that waits needs no numpy.
    import numpy as np

    drawn = np.random.RandomState(1)
    factors = drawn.randint(0, 1 << 31, number, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return Permutations(factors, drawn.randint(0, 1 << 32, number, dtype=np.uint32))


def _mixed(words: list[int]) -> list[int]:
    """Each word through the finalizer of MurmurHash3, a bijection that spreads hashes which are near each other."""
    import numpy as np

    values = np.array(words, dtype=np.uint32)
    values ^= values >> np.uint32(16)
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    values ^= values >> np.uint32(16)
    mixed: list[int] = values.tolist()
    return mixed
