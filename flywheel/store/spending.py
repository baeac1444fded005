"""What judging has used, day by day (UTC) and by what it was for: a budget must know it after a restart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import Connection, func, select, update
from sqlalchemy.dialects.sqlite import insert

from flywheel.judge_usage import Purpose, UsageFile, Used, today
from flywheel.store.schema import judge_days, rounds
from flywheel.verdict import Verdict

_COUNTS = ("calls", "prompt_tokens", "completion_tokens")


def add(conn: Connection, verdict: Verdict, purpose: Purpose = Purpose.FILTER) -> None:
    """Count what a verdict has cost, today."""
    book(conn, [Used(today(), purpose, verdict.calls, verdict.prompt_tokens, verdict.completion_tokens)])


def book(conn: Connection, used: Iterable[Used]) -> None:
    """Count all of it."""
    for each in used:
        if not each.calls:
            continue
        counts = {name: getattr(each, name) for name in _COUNTS}
        row = insert(judge_days).values(day=each.day, purpose=each.purpose.value, **counts)
        more = {name: judge_days.c[name] + row.excluded[name] for name in _COUNTS}
        conn.execute(row.on_conflict_do_update(index_elements=("day", "purpose"), set_=more))


def book_round(conn: Connection, round_id: int, round_dir: Path) -> list[Used]:
    """Count what the round's worker has written down since it was last looked at, and return it.

    How far the file is booked is stored in the same transaction: each line counts once, whoever dies when.
    """
    offset = conn.execute(select(rounds.c.usage_read).where(rounds.c.id == round_id)).scalar_one()
    found, end = UsageFile(round_dir).read(offset)
    if end > offset:
        book(conn, found)
        conn.execute(update(rounds).where(rounds.c.id == round_id).values(usage_read=end))
    return found


def booked_of_round(conn: Connection, round_id: int, round_dir: Path) -> int:
    """Tokens of the round's worker, of all its attempts, that are counted already."""
    end = conn.execute(select(rounds.c.usage_read).where(rounds.c.id == round_id)).scalar_one()
    found, _ = UsageFile(round_dir).read(0, end)
    return sum(used.tokens for used in found)


def tokens_today(conn: Connection) -> int:
    """Tokens, sent and received, since midnight, for whatever."""
    tokens = func.sum(judge_days.c.prompt_tokens + judge_days.c.completion_tokens)
    return int(conn.execute(select(tokens).where(judge_days.c.day == today())).scalar_one() or 0)


def by_purpose(conn: Connection) -> dict[Purpose, dict[str, int]]:
    """Calls and tokens of all days."""
    sums = [func.sum(judge_days.c[name]).label(name) for name in _COUNTS]
    rows = conn.execute(select(judge_days.c.purpose, *sums).group_by(judge_days.c.purpose)).mappings()
    found = {row["purpose"]: {name: int(row[name]) for name in _COUNTS} for row in rows}
    return {purpose: found.get(purpose.value, dict.fromkeys(_COUNTS, 0)) for purpose in Purpose}
