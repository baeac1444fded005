"""The check `language`: the answer is in the language of the question, or in a named one.

A false alarm costs a good answer, so a criterion fails only in clear cases: the answer is long enough, no part of it
is in the expected language, the question's language is as clear, and the question names no other language.
"""

from __future__ import annotations

import json
import re
import threading
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import WithJsonSchema

from flywheel.judge.rubric.criterion import A_TEXT, Criterion, Files, checked
from flywheel.judge.rubric.text import words_only
from flywheel.records.verdict import Exchange

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

LANGUAGES: Final[Mapping[str, list[str]]] = json.loads(
    Path(__file__).parents[1].joinpath("language_names.json").read_text(encoding="utf-8")
)
"""By ISO 639-1 code the English name of a language, then stems of its own name and of its names in neighbouring
languages."""
QUERY: Final = "query"
"""The `value` that expects the language of the question."""
MIN_LETTERS: Final = 40
"""Letters that suffice to identify a language; a letter of a script of syllables or words counts as three."""
CERTAIN: Final = 0.98
"""From this probability on, a language is taken for certain."""
EXCLUDED: Final = 0.01
"""Up to this probability, a language is taken for excluded."""
_DENSE_SCRIPTS: Final = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "YI ")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?。！？…:;])\s+|\n+|(?<=[。！？])")
_CONFUSABLE: Final = (
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
"""Languages that short texts do not tell apart: each counts as the others of its groups."""
_ALIKE: Final = {
    code: frozenset().union(*(others for others in _CONFUSABLE if code in others))
    for group in _CONFUSABLE
    for code in group
}
_identifier: Final[list[LanguageIdentifier]] = []
"""The language model once it is loaded."""
_identifier_lock = threading.Lock()


def language_code(name: str) -> str | None:
    """The code of a language by its code (`de`, `de-AT`), English name or own name; None if it is unknown."""
    name = name.strip().casefold()
    if (code := name.replace("_", "-").partition("-")[0]) in LANGUAGES:
        return code
    return next((code for code, names in LANGUAGES.items() if name in map(str.casefold, names)), None)


def _check_language(value: Any) -> None:
    if value != QUERY and (not isinstance(value, str) or language_code(value) is None):
        raise ValueError(f"it must be `{QUERY}`, or a language by its English name or ISO 639 code, not {value!r}")


class Language(Criterion):
    """The answer is in the language of the question, or in this one."""

    type: Literal["language"] = "language"
    value: Annotated[str, checked(_check_language, optional=True), WithJsonSchema(A_TEXT)] = ""

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        answer = words_only(exchange.answer)
        if _count_letters(answer) < MIN_LETTERS:
            return True, "the answer is too short to tell its language"
        named = self.value or QUERY
        if named != QUERY:
            wanted = language_code(named) or named
        else:
            question = words_only(exchange.query)
            ranking = _rank(question)
            wanted = ranking[0][0]
            if _count_letters(question) < MIN_LETTERS / 2 or _probability(ranking, wanted) < CERTAIN:
                return True, "the language of the question is not clear"
            if _names_another_language(exchange.query, wanted):
                return True, "the question names a language"
        ranking = _rank(answer)
        found = ranking[0][0]
        is_clear = _probability(ranking, found) >= CERTAIN and _probability(ranking, wanted) <= EXCLUDED
        wanted_name, found_name = (LANGUAGES.get(code, [code])[0] for code in (wanted, found))
        if found in _ALIKE.get(wanted, {wanted}) or not is_clear:
            return True, f"the answer is in {wanted_name}, as far as can be told"
        if _has_part_in(answer, wanted):
            return True, f"a part of the answer is in {wanted_name}"
        return False, f"the answer is in {found_name}, not in {wanted_name}"


def _rank(text: str) -> list[tuple[str, float]]:
    """ISO 639 codes with their probabilities, the most likely language first."""
    # Loading takes a second; threads that need the model at once wait for the one that loads it.
    with _identifier_lock:
        if not _identifier:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier

            _identifier.append(LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True))
        identifier = _identifier[0]
    return [(str(code), float(probability)) for code, probability in identifier.rank(text)]


def forget_model() -> None:
    """Free the 75 MB of the model, which the next text loads again."""
    with _identifier_lock:
        _identifier.clear()


def _probability(ranking: list[tuple[str, float]], code: str) -> float:
    """How likely a text is in a language or in one that is confusable with it."""
    alike = _ALIKE.get(code, {code})
    return sum(probability for other, probability in ranking if other in alike)


def _names_another_language(question: str, asked: str) -> bool:
    """Whether a question names a language other than its own: the answer may have to be in that one."""
    text = question.casefold()
    for code, names in LANGUAGES.items():
        for name in map(str.casefold, names) if code != asked else ():
            # Names are stems, which end anywhere. Where the script has spaces, they begin a word.
            has_spaces = unicodedata.name(name[0], "").startswith(("LATIN", "CYRILLIC", "GREEK"))
            if re.search((r"\b" if has_spaces else "") + re.escape(name), text):
                return True
    return False


def _has_part_in(answer: str, wanted: str) -> bool:
    """Whether a sentence of the answer, or several short ones in a row, is in the language."""
    sentences: list[str] = []
    letters = 0
    for sentence in _SENTENCE_END.split(answer):
        sentences.append(sentence)
        letters += _count_letters(sentence)
        if letters >= MIN_LETTERS:
            if _rank(" ".join(sentences))[0][0] in _ALIKE.get(wanted, {wanted}):
                return True
            sentences, letters = [], 0
    return False


def _count_letters(text: str) -> int:
    """Letters of a text; one of a script of syllables or words counts as three."""
    letters = [char for char in text if char.isalpha()]
    dense = (not char.isascii() and unicodedata.name(char, "").startswith(_DENSE_SCRIPTS) for char in letters)
    return len(letters) + 2 * sum(dense)
