"""The demo's questions and their true answers.

Owns what the demo asks and how a question's text is checked; must not know who asks or who answers.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

SYSTEM_PROMPT: Final = "You answer questions of arithmetic."

PHRASES: Final = ("What is {}?", "How much is {}?", "Please compute {}.")

_OPERATIONS: Final[dict[str, Callable[[int, int], int]]] = {
    "plus": operator.add,
    "minus": operator.sub,
    "times": operator.mul,
}
_EXPRESSION: Final = re.compile(r"(?<![\w.])(\d+) (plus|minus|times) (\d+)(?![\w]|\.\d)")


@dataclass(frozen=True, slots=True)
class Question:
    """A question as the user words it, with its true answer."""

    text: str
    answer: int


def expressions() -> Iterator[str]:
    """Every expression that is asked: sums up to 12 + 12, differences that are not negative, the small tables."""
    for a in range(13):
        for b in range(13):
            yield f"{a} plus {b}"
            if a >= b:
                yield f"{a} minus {b}"
            if a < 10 and b < 10:
                yield f"{a} times {b}"


def questions() -> list[Question]:
    """Every question in every wording, always in the same order."""
    return [_question(phrase.format(text)) for text in expressions() for phrase in PHRASES]


def sample(rng: random.Random) -> Question:
    """One question at random."""
    return rng.choice(_ALL)


def large_sum(rng: random.Random) -> tuple[int, int, Question]:
    """Two numbers of three digits, and the question for their sum: too large to be learnt by heart."""
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    return a, b, _question(rng.choice(PHRASES).format(f"{a} plus {b}"))


def solve(text: str) -> int | None:
    """The true answer of the last arithmetic expression in `text`; None when there is none."""
    expressions_asked = _EXPRESSION.findall(text)
    if not expressions_asked:
        return None
    left, operation, right = expressions_asked[-1]
    return _OPERATIONS[operation](int(left), int(right))


def _question(text: str) -> Question:
    answer = solve(text)
    assert answer is not None
    return Question(text, answer)


_ALL: Final = questions()
