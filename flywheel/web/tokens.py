"""The tokens of a rollout as runs of one class, by mask, by log-probability or by advantage; also as text.

A class has a name that the style sheet colours, and a legend in words. Tokens of one class that follow each other are
one run, except where each has a figure of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flywheel.training.data.rollout_file import PROBABILITIES, probability_class

VIEWS: Final = {"logprob": "probability", "advantage": "advantage", "mask": "mask", "text": "text"}
"""What tokens can be shown by, with the name of each."""
PER_PAGE: Final = 2_000
"""Tokens of a sample that are shown at once."""
CONTEXT: Final = "t-context"
_MASK: Final = {"t-trained": "trained", CONTEXT: "context, not trained on"}
_LOGPROB: Final = {
    **{
        f"t-p{place}": f"probability {least:g} or more" if least else f"less than {PROBABILITIES[place - 1]:g}"
        for place, least in enumerate(PROBABILITIES)
    },
    "t-unknown": "probability unknown",
    CONTEXT: "context, not trained on",
}
_ADVANTAGES: Final = ((1.0, "t-a4", "1 or more"), (0.25, "t-a3", "0.25 to 1"), (-0.25, "t-a2", "-0.25 to 0.25"),
                      (-1.0, "t-a1", "-1 to -0.25"), (-math.inf, "t-a0", "less than -1"))  # fmt: skip
_NO_ADVANTAGE: Final = "t-none"
_ADVANTAGE: Final = {
    **{name: f"advantage {words}" for _, name, words in _ADVANTAGES},
    _NO_ADVANTAGE: "generated, without an advantage",
    CONTEXT: "context, not trained on",
}
LEGENDS: Final[Mapping[str, Mapping[str, str]]] = {
    "logprob": _LOGPROB, "advantage": _ADVANTAGE, "mask": _MASK, "text": {},
}  # fmt: skip
"""The classes of each view in words."""


@dataclass(slots=True)
class Run:
    """Tokens that are shown as one piece. `said` is the probability of a single token in words, else empty."""

    kind: str
    text: str
    said: str = ""
    tokens: int = 1


def runs(sample: Mapping[str, Any], advantage: float | None, view: str, start: int = 0) -> list[Run]:
    """A page of the tokens of a sample from the token `start`."""
    found: list[Run] = []
    for run in _tokens(sample, advantage, view, start):
        if found and not run.said and (found[-1].kind, found[-1].said) == (run.kind, ""):
            found[-1].text += run.text
            found[-1].tokens += 1
        else:
            found.append(run)
    return found


def _tokens(sample: Mapping[str, Any], advantage: float | None, view: str, start: int) -> Iterator[Run]:
    shown = slice(start, start + PER_PAGE)
    for token, mask, logprob, text in zip(
        *(sample[name][shown] for name in ("token_ids", "loss_mask", "logprobs", "text")), strict=True
    ):
        words = f"<{token}>" if text is None else text
        if not mask:
            yield Run(CONTEXT, words)
            continue
        # A line feed is a token to be seen, too. The line still ends there.
        ends = "\n" if words.endswith("\n") else ""
        words = words.replace("\n", "↵")
        if view == "text":
            yield Run("t-plain", f"⟦{words}|{'null' if logprob is None else f'{logprob:.2f}'}⟧{ends}")
        elif view == "mask":
            yield Run("t-trained", words + ends)
        elif view == "advantage":
            yield Run(_of_advantage(advantage), words + ends)
        elif logprob is None:
            yield Run("t-unknown", words + ends, "probability unknown")
        else:
            yield Run(
                f"t-p{probability_class(logprob)}", words + ends, f"{math.exp(logprob):.1%}, logprob {logprob:.2f}"
            )


def _of_advantage(advantage: float | None) -> str:
    if advantage is None:
        return _NO_ADVANTAGE
    return next(name for least, name, _ in _ADVANTAGES if advantage >= least)
