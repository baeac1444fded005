"""Costs by the prices at the time of the calls, and errors of the judge by hour."""

from __future__ import annotations

from sqlalchemy import Connection, select

from flywheel.config.judge import JudgePrices
from flywheel.judge.usage import Purpose, Used
from flywheel.store import judge_usage
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import judge_costs as table

CHEAP = JudgePrices(input_per_million=1, output_per_million=2)
DEAR = JudgePrices(input_per_million=10, output_per_million=20)
EURO = JudgePrices(input_per_million=3, output_per_million=3, currency="EUR")


def used(day: str, tokens: int = 1_000_000, purpose: Purpose = Purpose.FILTER) -> list[Used]:
    return [Used(day, purpose, 1, tokens, tokens)]


async def paid(store: Store, prices: JudgePrices | None) -> tuple[float, str] | None:
    found = await store.read(judge_usage.cost_by_purpose, prices)
    return None if found is None else (found[0][Purpose.FILTER], found[1])


async def test_a_later_price_changes_no_earlier_cost(store: Store) -> None:
    await store.write(judge_usage.book, used("2026-01-01"), CHEAP)
    await store.write(judge_usage.book, used("2026-01-01"), CHEAP)
    assert await paid(store, DEAR) == (6.0, "USD")
    await store.write(judge_usage.book, used("2026-01-02"), DEAR)
    assert await paid(store, CHEAP) == (36.0, "USD")
    assert await paid(store, None) == (36.0, "USD")


async def test_days_without_a_recorded_price_count_at_those_of_now(store: Store) -> None:
    assert await paid(store, None) is None
    await store.write(judge_usage.book, used("2026-01-01"))
    assert await paid(store, None) is None
    assert await paid(store, CHEAP) == (3.0, "USD")
    # The first priced call of a day brings what the day had used without prices, and nothing is counted twice.
    await store.write(judge_usage.book, used("2026-01-01"), CHEAP)
    assert await paid(store, CHEAP) == (6.0, "USD")
    await store.write(judge_usage.book, used("2026-01-01", purpose=Purpose.GATES), CHEAP)
    assert await paid(store, CHEAP) == (6.0, "USD")


async def test_currencies_are_never_added(store: Store) -> None:
    await store.write(judge_usage.book, used("2026-01-01"), CHEAP)
    await store.write(judge_usage.book, used("2026-01-01"), EURO)
    assert await paid(store, CHEAP) == (3.0, "USD")
    assert await paid(store, EURO) == (6.0, "EUR")

    def rows(conn: Connection) -> list[tuple[str, float]]:
        return sorted((row.currency, row.amount) for row in conn.execute(select(table)))

    assert await store.read(rows) == [("EUR", 6.0), ("USD", 3.0)]


async def test_errors_are_counted_and_many_different_ones_are_one(store: Store) -> None:
    for error in ("timeout\n after 60 s", "timeout after 60 s", "", "x" * 1000, "\ud800 broken"):
        await store.write(judge_usage.add_error, error)
    found = await store.read(judge_usage.recent_errors, 24, 10)
    assert (found[0].error, found[0].number) == ("timeout after 60 s", 2)
    assert {judge_usage.NO_REASON, "x" * judge_usage.LONGEST} <= {row.error for row in found}
    for number in range(100):
        await store.write(judge_usage.add_error, f"error {number}")
    found = await store.read(judge_usage.recent_errors, 24, 100)
    assert sum(row.number for row in found) == 105
    assert len(found) <= 2 * (judge_usage.MOST_AN_HOUR + 1)
    assert found[0].error == judge_usage.OTHER
    by_hour = await store.read(judge_usage.errors_by_hour, 24)
    assert (len(by_hour), sum(by_hour.values())) == (24, 105)
