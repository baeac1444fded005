"""The judge's usage: its calls, tokens and cost by day (UTC) and purpose, so that a budget holds after a restart, and
the errors of judgements that left a task undecided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, and_, bindparam, exists, func, select, update
from sqlalchemy.dialects.sqlite import insert

from flywheel.config.judge import JudgePrices
from flywheel.judge.usage import CLOCK, Purpose, UsageFile, Used, today
from flywheel.records.task import storable
from flywheel.records.verdict import Verdict
from flywheel.store.kernel.schema import judge_costs, judge_days, judge_errors, rounds

_COUNTS: Final = ("calls", "prompt_tokens", "completion_tokens")
_ADD_COST: Final = (
    update(judge_costs)
    .where(
        judge_costs.c.day == bindparam("of_day"),
        judge_costs.c.purpose == bindparam("of_purpose"),
        judge_costs.c.currency == bindparam("in_currency"),
    )
    .values(amount=judge_costs.c.amount + bindparam("more"))
)
"""Made once: it runs with every verdict."""
LONGEST: Final = 300
"""Characters of an error that are kept."""
MOST_AN_HOUR: Final = 20
"""Different errors of an hour that are told apart."""
OTHER: Final = "other errors"
NO_REASON: Final = "no reason was given"


def book_verdict(
    conn: Connection, verdict: Verdict, purpose: Purpose = Purpose.FILTER, prices: JudgePrices | None = None
) -> None:
    """Count the cost of a verdict, today."""
    book(conn, [Used(today(), purpose, verdict.calls, verdict.prompt_tokens, verdict.completion_tokens)], prices)


def book(conn: Connection, used: Iterable[Used], prices: JudgePrices | None = None) -> None:
    """Add usage to the counts of its days and purposes, and its cost by the prices of now."""
    for each in (replace(one, day=CLOCK.day_of(one.day)) for one in used if one.calls):
        counts = {name: getattr(each, name) for name in _COUNTS}
        row = insert(judge_days).values(day=each.day, purpose=each.purpose.value, **counts)
        more = {name: judge_days.c[name] + row.excluded[name] for name in _COUNTS}
        conn.execute(row.on_conflict_do_update(index_elements=("day", "purpose"), set_=more))
        if prices is not None:
            _add_cost(conn, each, prices)


def book_round(conn: Connection, round_id: int, round_dir: Path, prices: JudgePrices | None = None) -> list[Used]:
    """Count what the round's worker wrote to its usage file since the last call, and return it.

    How far the file was read is stored in the same transaction, so each line counts once, even after a crash.
    """
    offset = conn.execute(select(rounds.c.usage_read).where(rounds.c.id == round_id)).scalar_one()
    found, end = UsageFile(round_dir).read(offset)
    if end > offset:
        book(conn, found, prices)
        conn.execute(update(rounds).where(rounds.c.id == round_id).values(usage_read=end))
    return found


def booked_of_round(conn: Connection, round_id: int, round_dir: Path) -> int:
    """Tokens of the round's worker, over all its attempts, that are counted already."""
    end = conn.execute(select(rounds.c.usage_read).where(rounds.c.id == round_id)).scalar_one()
    found, _ = UsageFile(round_dir).read(0, end)
    return sum(used.tokens for used in found)


def tokens_today(conn: Connection) -> int:
    """Tokens sent and received since midnight (UTC), for all purposes."""
    tokens = func.sum(judge_days.c.prompt_tokens + judge_days.c.completion_tokens)
    day = CLOCK.today(conn.execute(select(func.max(judge_days.c.day))).scalar_one())
    return int(conn.execute(select(tokens).where(judge_days.c.day == day)).scalar_one() or 0)


class CallCounts(NamedTuple):
    calls: int
    prompt_tokens: int
    completion_tokens: int


def usage_by_purpose(conn: Connection) -> dict[Purpose, CallCounts]:
    """Calls and tokens of all days."""
    sums = [func.sum(judge_days.c[name]).label(name) for name in _COUNTS]
    rows = conn.execute(select(judge_days.c.purpose, *sums).group_by(judge_days.c.purpose)).mappings()
    usage = {row["purpose"]: CallCounts(*(int(row[name]) for name in _COUNTS)) for row in rows}
    return {purpose: usage.get(purpose.value, CallCounts(0, 0, 0)) for purpose in Purpose}


def _add_cost(conn: Connection, used: Used, prices: JudgePrices) -> None:
    """Add the cost of usage that was just added to `judge_days`.

    The first priced usage of a day and purpose brings the cost of all of that day, which may have begun without
    prices.
    """
    key = {"day": used.day, "purpose": used.purpose.value}
    same = [judge_costs.c[name] == value for name, value in key.items()]
    amount = amount_of(used.prompt_tokens, used.completion_tokens, prices)
    added = {"of_day": used.day, "of_purpose": used.purpose.value, "in_currency": prices.currency, "more": amount}
    if conn.execute(_ADD_COST, added).rowcount:
        return
    if conn.execute(select(judge_costs.c.day).where(*same).limit(1)).one_or_none() is None:
        tokens = select(judge_days.c.prompt_tokens, judge_days.c.completion_tokens)
        of_day = conn.execute(tokens.where(*(judge_days.c[name] == value for name, value in key.items()))).one()
        amount = amount_of(of_day.prompt_tokens, of_day.completion_tokens, prices)
    conn.execute(insert(judge_costs).values(**key, currency=prices.currency, amount=amount))


def amount_of(prompt_tokens: int, completion_tokens: int, prices: JudgePrices) -> float:
    return (prompt_tokens * prices.input_per_million + completion_tokens * prices.output_per_million) / 1_000_000


def cost_by_purpose(conn: Connection, prices: JudgePrices | None) -> tuple[dict[Purpose, float], str] | None:
    """What was paid, and the currency: that of `prices`, else the last one. None if no price was ever known.

    Days without a recorded cost, as those before prices were set, count at today's prices. Costs in other currencies
    are left out.
    """
    currency = prices.currency if prices is not None else _last_currency(conn)
    if currency is None:
        return None
    paid = select(judge_costs.c.purpose, func.sum(judge_costs.c.amount)).where(judge_costs.c.currency == currency)
    found = {purpose: float(amount) for purpose, amount in conn.execute(paid.group_by(judge_costs.c.purpose))}
    if prices is not None:
        same = and_(judge_costs.c.day == judge_days.c.day, judge_costs.c.purpose == judge_days.c.purpose)
        sums = [func.sum(judge_days.c[name]) for name in ("prompt_tokens", "completion_tokens")]
        without = select(judge_days.c.purpose, *sums).where(~exists(select(judge_costs.c.day).where(same)))
        for purpose, sent, received in conn.execute(without.group_by(judge_days.c.purpose)):
            found[purpose] = found.get(purpose, 0.0) + amount_of(sent, received, prices)
    return {purpose: round(found.get(purpose.value, 0.0), 6) for purpose in Purpose}, currency


def _last_currency(conn: Connection) -> str | None:
    last = select(judge_costs.c.currency).order_by(judge_costs.c.day.desc()).limit(1)
    return conn.execute(last).scalar_one_or_none()


def add_error(conn: Connection, error: str) -> None:
    """Count an undecided verdict."""
    hour = f"{datetime.now(UTC):%Y-%m-%dT%H}:00:00+00:00"
    text = storable(" ".join(error.split())[:LONGEST]) or NO_REASON
    if _counted(conn, hour, text):
        return
    different = select(func.count()).select_from(judge_errors).where(judge_errors.c.hour == hour)
    if conn.execute(different).scalar_one() >= MOST_AN_HOUR:
        text = OTHER
        if _counted(conn, hour, text):
            return
    conn.execute(insert(judge_errors).values(hour=hour, error=text, count=1))


def _counted(conn: Connection, hour: str, error: str) -> bool:
    """Count an error that is there already; whether it was."""
    same = judge_errors.c.hour == hour, judge_errors.c.error == error
    return bool(conn.execute(update(judge_errors).where(*same).values(count=judge_errors.c.count + 1)).rowcount)


def recent_errors(conn: Connection, hours: int, limit: int) -> Sequence[Any]:
    """The errors of the last hours (`error`, `number`, `first`, `last`), the most frequent first."""
    begin = f"{datetime.now(UTC) - timedelta(hours=hours):%Y-%m-%dT%H}"
    number = func.sum(judge_errors.c.count).label("number")
    first, last = func.min(judge_errors.c.hour).label("first"), func.max(judge_errors.c.hour).label("last")
    query = select(judge_errors.c.error, number, first, last).where(judge_errors.c.hour >= begin)
    grouped = query.group_by(judge_errors.c.error).order_by(number.desc(), judge_errors.c.error)
    return conn.execute(grouped.limit(limit)).all()


def errors_by_hour(conn: Connection, hours: int) -> dict[str, int]:
    """How many verdicts were undecided in each of the last hours, zero included, the oldest first."""
    now = datetime.now(UTC)
    names = [f"{now - timedelta(hours=ago):%Y-%m-%dT%H}:00:00+00:00" for ago in reversed(range(hours))]
    query = select(judge_errors.c.hour, func.sum(judge_errors.c.count)).where(judge_errors.c.hour >= names[0])
    found = {row[0]: int(row[1]) for row in conn.execute(query.group_by(judge_errors.c.hour))}
    return {name: found.get(name, 0) for name in names}
