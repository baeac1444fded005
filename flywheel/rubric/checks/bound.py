"""How much of a text the checks look at."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from flywheel.verdict import Exchange

MOST: Final = 200_000
"""Characters of a question or an answer. Hardly a model writes as many, and no check of so many takes long."""


def bounded(exchange: Exchange) -> Exchange:
    """The exchange with no more than MOST characters of question and answer, as many from the end as from the
    beginning."""
    if len(exchange.query) <= MOST and len(exchange.answer) <= MOST:
        return exchange
    return replace(exchange, query=_bounded(exchange.query), answer=_bounded(exchange.answer))


def _bounded(text: str) -> str:
    return text if len(text) <= MOST else f"{text[: MOST // 2]}\n{text[-(MOST // 2) :]}"
