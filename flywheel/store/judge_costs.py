"""What judging has cost, by the prices at the time of the calls."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, and_, bindparam, exists, func, insert, select, update

from flywheel.config import JudgePrices
from flywheel.judge.usage import Purpose, Used
from flywheel.store.kernel.schema import judge_costs, judge_days

_ADD: Final = (
    update(judge_costs)
    .where(
        judge_costs.c.day == bindparam("of_day"),
        judge_costs.c.purpose == bindparam("of_purpose"),
        judge_costs.c.currency == bindparam("in_currency"),
    )
    .values(amount=judge_costs.c.amount + bindparam("more"))
)
"""Made once: it runs with every verdict."""


def add(conn: Connection, used: Used, prices: JudgePrices) -> None:
    """Add the cost of usage that was just added to `judge_days`.

    The first priced usage of a day and purpose brings the cost of all of that day, which may have begun without
    prices.
    """
    key = {"day": used.day, "purpose": used.purpose.value}
    same = [judge_costs.c[name] == value for name, value in key.items()]
    amount = amount_of(used.prompt_tokens, used.completion_tokens, prices)
    added = {"of_day": used.day, "of_purpose": used.purpose.value, "in_currency": prices.currency, "more": amount}
    if conn.execute(_ADD, added).rowcount:
        return
    if conn.execute(select(judge_costs.c.day).where(*same).limit(1)).one_or_none() is None:
        tokens = select(judge_days.c.prompt_tokens, judge_days.c.completion_tokens)
        of_day = conn.execute(tokens.where(*(judge_days.c[name] == value for name, value in key.items()))).one()
        amount = amount_of(of_day.prompt_tokens, of_day.completion_tokens, prices)
    conn.execute(insert(judge_costs).values(**key, currency=prices.currency, amount=amount))


def amount_of(prompt_tokens: int, completion_tokens: int, prices: JudgePrices) -> float:
    return (prompt_tokens * prices.input_per_million + completion_tokens * prices.output_per_million) / 1_000_000


def by_purpose(conn: Connection, prices: JudgePrices | None) -> tuple[dict[Purpose, float], str] | None:
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
