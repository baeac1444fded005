"""Likeness: what looks different and is the same, what looks alike and is not, and keys that last."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.records import similarity

QUESTION = "What is 90% of 160?"


def near(a: str, b: str, threshold: float = similarity.NEAR) -> bool:
    same_numbers = similarity.numbers(a) == similarity.numbers(b)
    return same_numbers and similarity.jaccard(similarity.words(a), similarity.words(b)) >= threshold


def share_a_band(a: str, b: str) -> bool:
    keys = [set(similarity.bands(similarity.words(text), threshold=similarity.NEAR)) for text in (a, b)]
    return bool(keys[0] & keys[1])


@pytest.mark.parametrize(
    "other",
    [
        "what is 90% of 160",
        "WHAT IS 90% OF 160?",
        "Please: What is 90% of 160?",
        "What  is 90%\tof 160 ?",
        "What is 90%\nof 160?\n",
        "What is “90 %” of 160…",
        "Ｗｈａｔ ｉｓ ９０％ ｏｆ １６０？",
    ],
)
def test_other_looks_are_near(other: str) -> None:
    assert near(QUESTION, other)
    assert share_a_band(QUESTION, other)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (QUESTION, "What is 90% of 140?"),
        (QUESTION, "What is 160% of 90?"),
        ("Compute 3 + 4 and show every single step of it", "Compute 3 - 4 and show every single step of it"),
        ("Add 3.5 to it", "Add 3, 5 to it"),
        ("Simplify x*y for me", "Simplify x/y for me"),
        ("Write hello world in C", "Write hello world in C#"),
        ("Which model is gpt4?", "Which model is gpt5?"),
        ("今天北京的天气怎么样？", "明天上海的气温是多少？"),
        ("👍", "👎"),
        ("?", "!!"),
    ],
)
def test_other_questions_are_not_near(a: str, b: str) -> None:
    assert not near(a, b)
    assert similarity.normalised(a) != similarity.normalised(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("请问今天北京的天气怎么样", "今天北京的天气怎么样？"),
        ("東京の天気を詳しく教えてください。", "東京の天気を詳しく教えてください"),
        ("हिन्दी भाषा क्या है?", "हिन्दी भाषा क्या है"),
        ("3-4", "3 − 4"),
        ("3 × 4", "3*4"),
        ("**Bold** and `code`.", "bold and code"),
        ("Straße", "STRASSE"),
        ("cafe\u0301", "café"),
        ("zero\u200bwidth", "zerowidth"),
    ],
)
def test_scripts_and_marks(a: str, b: str) -> None:
    assert near(a, b)


def test_numbers_keep_their_order_and_operators() -> None:
    assert similarity.numbers("From 12:30 add 1,000 to 3.5 in 2024") == ("12:30", "1,000", "3.5", "2024")
    assert similarity.numbers("3+4") == ("3", "+", "4")
    assert similarity.numbers("no number, well-known") == ()


def test_likeness_is_the_share_of_common_words() -> None:
    assert similarity.jaccard(frozenset({1, 2, 3}), frozenset({2, 3, 4})) == 0.5
    assert similarity.jaccard(frozenset(), frozenset()) == 1.0
    assert similarity.jaccard(frozenset({1}), frozenset()) == 0.0


@pytest.mark.slow
def test_bands_are_the_same_in_another_process() -> None:
    here = similarity.bands(similarity.words(QUESTION), threshold=0.8)
    code = f"from flywheel.records import similarity as l; print(l.bands(l.words({QUESTION!r}), threshold=0.8))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(here)
    assert len(here) <= 16
    assert all(0 <= key < 2**63 for key in here)
    # They are stored: a new library or a new Flywheel must make the same of the same words.
    assert similarity.bands(frozenset({1, 2, 3}), threshold=0.8)[:2] == (5034900094060010541, 8650509208115666858)


@pytest.mark.parametrize(
    ("threshold", "digest"), [(0.5, "f45d453ef1e9043b"), (0.8, "463e7d144dd1b8a4"), (1.0, "45764c724afa854d")]
)
def test_what_is_stored_of_earlier_questions_still_finds_their_like(threshold: float, digest: str) -> None:
    sets = [frozenset(range(7, 7 + size * 991, 991)) for size in (0, 1, 40)]
    made = repr([similarity.bands(words, threshold=threshold) for words in sets])
    assert hashlib.sha256(made.encode()).hexdigest()[:16] == digest


@pytest.mark.slow
def test_comparing_brings_no_scipy_into_the_daemon() -> None:
    code = (
        "import sys; from flywheel.records import similarity as l; "
        "l.bands(l.words('a b')); print('scipy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_the_daemon_does_not_load_numpy_before_there_is_something_to_compare() -> None:
    code = "import sys; from flywheel.records import similarity as l; l.words('a b'); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9])
def test_pairs_at_the_threshold_meet_and_unlike_ones_seldom_do(threshold: float) -> None:
    drawn = random.Random(7)
    met = chance = 0
    for _ in range(300):
        pool = drawn.sample(range(2**32), 100)
        common, only = pool[:40], round(40 * (1 - threshold) / threshold / 2)
        a, b = frozenset(common + pool[40 : 40 + only]), frozenset(common + pool[70 : 70 + only])
        c = frozenset(pool[90:] + common[:2])
        keys = [set(similarity.bands(words, threshold=threshold)) for words in (a, b, c)]
        met += bool(keys[0] & keys[1])
        chance += bool(keys[0] & keys[2])
    assert met >= 290
    assert chance <= (30 if threshold >= 0.8 else 300)


@given(st.text(max_size=200))
def test_any_text_can_be_folded_and_folding_twice_changes_nothing_that_counts(text: str) -> None:
    similarity.bands(similarity.words(text), threshold=0.8)
    assert similarity.words(text) == similarity.words(f"  {text}\n")
    if text.strip():
        assert similarity.normalised(text) or not text.strip().isprintable()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None), ("one two three", 1.0), ("No, no, no, no!", 0.25), ("to be or not to be", 4 / 6),
        ("早上好", 1.0), ("好好好好", 1 / 3), ("早上早上", 2 / 3),
        ("yes 早上 yes", 2 / 3),
    ],
)  # fmt: skip
def test_lexical_diversity_is_the_share_of_distinct_words(text: str, expected: float | None) -> None:
    """A text in a script without spaces is not one word."""
    assert similarity.lexical_diversity(text) == (expected if expected is None else pytest.approx(expected))
