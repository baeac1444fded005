"""`trigger.cron` is a crontab(5) in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from flywheel.config.crontab import next_times
from flywheel.config.file import parse
from flywheel.errors import ConfigError
from tests.cases import for_each

SATURDAY = datetime(2026, 11, 28, 12, 1, tzinfo=UTC)
WEEK = [("Sun", 29), ("Mon", 30), ("Tue", 1), ("Wed", 2), ("Thu", 3), ("Fri", 4), ("Sat", 5)]


@for_each(
    "field, days",
    [
        ("0", "Sun"),
        ("7", "Sun"),
        ("sun", "Sun"),
        ("1", "Mon"),
        ("1-5", "Mon Tue Wed Thu Fri"),
        ("mon-fri", "Mon Tue Wed Thu Fri"),
        ("MON-FRI/2", "Mon Wed Fri"),
        ("5-7", "Sun Fri Sat"),
        ("sat-sun", "Sun Sat"),
        ("sun-tue", "Sun Mon Tue"),
        ("6,0,Wed", "Sun Wed Sat"),
        ("*/2", "Sun Tue Thu Sat"),
        ("4/2", "Thu Sat"),
        ("*", "Sun Mon Tue Wed Thu Fri Sat"),
    ],
)
def test_0_and_7_are_sunday(field: str, days: str) -> None:
    wanted = [(day, number) for day, number in WEEK if day in days.split()]
    found = next_times(f"0 3 * * {field}", len(wanted), SATURDAY)
    assert [(f"{at:%a}", at.day) for at in found] == wanted
    assert {(at.hour, at.minute, at.tzinfo) for at in found} == {(3, 0, UTC)}


@for_each(
    "text, times",
    [
        # Day of month or day of week, where both are restricted; both, where one of them begins with `*`.
        ("0 3 1 * 5", ["12-01 03:00", "12-04 03:00", "12-11 03:00"]),
        ("0 3 13 * *", ["12-13 03:00", "01-13 03:00", "02-13 03:00"]),
        ("0 3 */2 * fri", ["12-11 03:00", "12-25 03:00", "01-01 03:00"]),
        ("0 3 4-20 * */7", ["12-06 03:00", "12-13 03:00", "12-20 03:00"]),
        ("0 0 30 2 1", ["02-01 00:00", "02-08 00:00", "02-15 00:00"]),
        ("@hourly", ["11-28 13:00", "11-28 14:00", "11-28 15:00"]),
        ("@daily", ["11-29 00:00", "11-30 00:00", "12-01 00:00"]),
        ("@midnight", ["11-29 00:00", "11-30 00:00", "12-01 00:00"]),
        (" @Weekly ", ["11-29 00:00", "12-06 00:00", "12-13 00:00"]),
        ("@monthly", ["12-01 00:00", "01-01 00:00", "02-01 00:00"]),
        ("@yearly", ["01-01 00:00"]),
        ("@annually", ["01-01 00:00"]),
        ("*/20 * * * *", ["11-28 12:20", "11-28 12:40", "11-28 13:00"]),
        ("5,50-59/9 12-14/2 * * *", ["11-28 12:05", "11-28 12:50", "11-28 12:59", "11-28 14:05"]),
        ("30 */60 */40 jan-dec/5 *", ["01-01 00:30", "06-01 00:30", "11-01 00:30"]),
        ("0 0 last feb,4 *", ["02-28 00:00", "04-30 00:00"]),
    ],
)
def test_a_crontab_fires_as_in_cron(text: str, times: list[str]) -> None:
    found = next_times(text, len(times), SATURDAY)
    assert [f"{at:%m-%d %H:%M}" for at in found] == times
    assert parse({"trigger": {"cron": text}}, "c.yaml", Path()).trigger.cron == text


def test_a_leap_day_is_waited_for() -> None:
    assert [f"{at:%Y-%m-%d}" for at in next_times("0 0 29 2 *", 2, SATURDAY)] == ["2028-02-29", "2032-02-29"]


@for_each(
    "text, complaint",
    [
        *((text, "it must be five fields of crontab") for text in ("", "* * * *", "0 0 3 * * *", "@reboot", "daily")),
        *(
            (f"{term} * * * *", "in the field of the minute")
            for term in ("60", "-1", "5-", "1,", "*/0", "mon", "1-2-3")
        ),
        ("0 24 * * *", "`24` in the field of the hour"),
        ("0 0 0 * *", "`0` in the field of the day of the month"),
        ("0 0 * 0 *", "`0` in the field of the month"),
        ("0 0 * janx *", "`janx` in the field of the month"),
        ("0 0 * * 8", "`8` in the field of the day of the week"),
        ("0 0 * * fri-mon", "`fri-mon` in the field of the day of the week"),
        ("0 0 * * mon#2", "`mon#2` in the field of the day of the week"),
        ("0 0 30 2 *", "it never fires"),
        ("0 0 31 4,6,9,11 *", "it never fires"),
        ("0 0 30 2 */2", "it never fires"),
    ],
)
def test_what_is_no_crontab_or_never_fires_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"trigger": {"cron": text}}, "c.yaml", Path())
    assert "`trigger.cron`: " in str(caught.value)
    assert complaint in str(caught.value)
    assert caught.value.exit_code == 78
