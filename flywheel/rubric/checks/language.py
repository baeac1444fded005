"""Whether the answer is in the language of the question, or in a named one.

A false alarm costs a good answer, so only what is plain counts: an answer long enough to tell, no part of which is in
the expected language, to a question whose language is as plain and that does not speak of languages itself.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from flywheel.rubric import Criterion, Rubric
from flywheel.rubric.checks.found import Found, found
from flywheel.rubric.checks.markdown import words_only
from flywheel.rubric.criterion import QUERY
from flywheel.rubric.language_names import NAMES, code_of, english_name
from flywheel.verdict import Exchange

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

ENOUGH: Final = 40
"""Letters that tell a language; a letter of a script that writes syllables or words counts for three."""
SURE: Final = 0.98
IMPOSSIBLE: Final = 0.01
"""From and below which probability a language is taken for certain, or for excluded."""
_loading = threading.Lock()
_DENSE: Final = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "YI ")
_SENTENCE: Final = re.compile(r"(?<=[.!?。！？…:;])\s+|\n+|(?<=[。！？])")
_ALIKE: Final = (
    frozenset({"bs", "hr", "sr", "sl", "mk", "bg"}),
    frozenset({"da", "no", "nb", "nn", "sv", "fo", "is"}),
    frozenset({"cs", "sk"}),
    frozenset({"id", "ms", "jv", "su"}),
    frozenset({"es", "gl", "ca", "pt", "an", "ast", "ext", "oc"}),
    frozenset({"nl", "af", "li", "fy"}),
    frozenset({"ru", "uk", "be", "bg", "mk", "sr"}),
    frozenset({"hi", "mr", "ne", "sa", "gom", "bho", "mai"}),
    frozenset({"zh", "wuu", "yue"}),
    frozenset({"ar", "ary", "arz", "apc"}),
    frozenset({"fa", "ps", "ur", "sd", "ckb"}),
    frozenset({"tr", "az", "tk", "crh"}),
    frozenset({"de", "lb", "als", "nds", "fy"}),
    frozenset({"fr", "wa", "oc", "ca", "gcf", "gcr"}),
    frozenset({"it", "vec", "lmo", "nap", "scn", "co"}),
    frozenset({"en", "sco", "pcm"}),
    frozenset({"el", "grc"}),
    frozenset({"fi", "et"}),
    frozenset({"th", "lo"}),
)
"""Languages that a few words do not tell apart: one may stand for the other."""


def is_in_language(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> Found:
    answer = words_only(exchange.answer)
    if _weight(answer) < ENOUGH:
        return found(True, "the answer is too short to tell its language")
    if criterion.language != QUERY:
        wanted = code_of(criterion.language) or criterion.language
    else:
        question = words_only(exchange.query)
        asked, sure = identify(question)
        if _weight(question) < ENOUGH / 2 or sure < SURE:
            return found(True, "the language of the question is not plain")
        if names_language(exchange.query, asked):
            return found(True, "the question speaks of a language")
        wanted = asked
    spoken, sure = identify(answer)
    if alike(spoken, wanted) or sure < SURE or probability(answer, wanted) > IMPOSSIBLE:
        return found(True, f"the answer is in {english_name(wanted)}, as far as can be told")
    if _has_part_in(answer, wanted):
        return found(True, f"a part of the answer is in {english_name(wanted)}")
    return found(False, f"the answer is in {english_name(spoken)}, not in {english_name(wanted)}")


def identify(text: str) -> tuple[str, float]:
    """The most likely language of a text, as ISO 639 code, and the probability of it and those like it."""
    code = str(_identifier().classify(text)[0])
    return code, probability(text, code)


def probability(text: str, code: str) -> float:
    """How likely a text is in a language, or in one that is hard to tell from it."""
    return sum(float(sure) for other, sure in _identifier().rank(text) if alike(str(other), code))


def _identifier() -> LanguageIdentifier:
    # Threads that need it at once wait for the one that loads it, which takes a second.
    with _loading:
        return _load()


@lru_cache(maxsize=1)
def _load() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def alike(one: str, other: str) -> bool:
    """Whether two codes are the same language, or languages that are easily taken for each other."""
    return one == other or any(one in group and other in group for group in _ALIKE)


def names_language(question: str, asked: str) -> bool:
    """Whether a question names a language other than its own: it may want the answer in that one."""
    text = question.casefold()
    return any(_speaks_of(text, name.casefold()) for code, names in NAMES.items() if code != asked for name in names)


def _speaks_of(text: str, name: str) -> bool:
    # Stems of the own names end anywhere; a word may not begin before them. Scripts without spaces have no words.
    start = r"\b" if unicodedata.name(name[0], "").startswith(("LATIN", "CYRILLIC", "GREEK")) else ""
    return re.search(start + re.escape(name), text) is not None


def _has_part_in(answer: str, wanted: str) -> bool:
    """Whether a sentence of the answer, or several short ones beside each other, is in the language."""
    together: list[str] = []
    weight = 0
    for sentence in _SENTENCE.split(answer):
        together.append(sentence)
        weight += _weight(sentence)
        if weight < ENOUGH:
            continue
        if alike(identify(" ".join(together))[0], wanted):
            return True
        together, weight = [], 0
    return False


def _weight(text: str) -> int:
    total = 0
    for letter in text:
        if letter.isalpha():
            total += 3 if not letter.isascii() and unicodedata.name(letter, "").startswith(_DENSE) else 1
    return total
