"""What calls of a judge really took, for estimates to learn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, select

from flywheel.store.schema import verdicts

NEWEST: Final = 200
"""So many verdicts are looked at."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums over calls; `estimated_tokens` is what `prompt_tokens` was thought to be before."""

    calls: int = 0
    prompt_tokens: int = 0
    estimated_tokens: int = 0
    completion_tokens: int = 0


def of_judge(conn: Connection, judge_hash: str) -> Usage:
    """Of the newest verdicts of a judge, as far as its endpoint told what it used."""
    rows = conn.execute(
        select(verdicts.c.judgements)
        .where(verdicts.c.judge_hash == judge_hash, verdicts.c.calls > 0)
        .order_by(verdicts.c.id.desc())
        .limit(NEWEST)
    ).scalars()
    told = [each for judgements in rows for each in judgements if each.get("estimated_tokens")]
    return Usage(*(sum(each[name] for each in told) for name in Usage.__slots__))
