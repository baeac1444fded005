"""What judging has used, day by day (UTC): a budget must know it after a restart."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import Connection, insert, select, update

from flywheel.store.schema import judge_days
from flywheel.verdict import Verdict


def add(conn: Connection, verdict: Verdict) -> None:
    """Count what a verdict has cost, today."""
    if not verdict.calls:
        return
    day = _today()
    counted = conn.execute(
        update(judge_days)
        .where(judge_days.c.day == day)
        .values(
            calls=judge_days.c.calls + verdict.calls,
            prompt_tokens=judge_days.c.prompt_tokens + verdict.prompt_tokens,
            completion_tokens=judge_days.c.completion_tokens + verdict.completion_tokens,
        )
    )
    if counted.rowcount == 0:
        conn.execute(
            insert(judge_days).values(
                day=day,
                calls=verdict.calls,
                prompt_tokens=verdict.prompt_tokens,
                completion_tokens=verdict.completion_tokens,
            )
        )


def tokens_today(conn: Connection) -> int:
    """Tokens, sent and received, since midnight."""
    tokens = judge_days.c.prompt_tokens + judge_days.c.completion_tokens
    return int(conn.execute(select(tokens).where(judge_days.c.day == _today())).scalar_one_or_none() or 0)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
