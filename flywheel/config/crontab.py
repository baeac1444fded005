"""Schedules of crontab(5) as triggers of APScheduler, whose `from_crontab` counts week days from Monday, and combines
day of the month and day of the week by "and"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger

NICKNAMES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_DAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_MONTHS: Final = ("", "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_FIELDS: Final[dict[str, tuple[range, Sequence[str]]]] = {
    "minute": (range(60), ()),
    "hour": (range(24), ()),
    "day of the month": (range(1, 32), ()),
    "month": (range(1, 13), _MONTHS),
    "day of the week": (range(8), _DAYS),
}
"""The values of each field, and their names, by index."""
_TERM: Final = re.compile(r"(?:\*|(\d+)(?:-(\d+))?)(?:/(0*[1-9]\d*))?", re.ASCII)


def cron_trigger(text: str) -> OrTrigger:
    """The trigger, in UTC, of five fields or of a nickname such as `@daily`. Raises ValueError for another text.

    As in cron, day of the month or day of the week suffices if neither field begins with `*`. APScheduler's `last`,
    the last day of a month, is taken as well.
    """
    fields = NICKNAMES.get(text.strip().lower(), text.lower()).split()
    if len(fields) != len(_FIELDS):
        names = ", ".join(NICKNAMES)
        raise ValueError(f"it must be five fields of crontab(5), for example `0 3 * * *`, or one of {names}")
    minute, hour, day, month, week_day = map(_values, fields, _FIELDS)
    week_day = ",".join(_DAYS[int(number) % 7] for number in week_day.split(","))
    days = [{"day": day, "day_of_week": week_day}]
    if not fields[2].startswith("*") and not fields[4].startswith("*"):
        days = [{"day": day}, {"day_of_week": week_day}]
    return OrTrigger([CronTrigger(minute=minute, hour=hour, month=month, timezone=UTC, **each) for each in days])


def next_times(text: str, most: int, now: datetime) -> list[datetime]:
    """The next times at which a schedule fires, in UTC; fewer than `most` only if it never fires again.
    Raises ValueError."""
    trigger, times = cron_trigger(text), list[datetime]()
    while len(times) < most and (at := trigger.get_next_fire_time(None, now)) is not None:
        times.append(at)
        now = at + timedelta(seconds=1)
    return times


def _values(field: str, name: str) -> str:
    """The numbers that a field lists, separated by commas; `last` stays. Raises ValueError."""
    allowed, names = _FIELDS[name]
    found = list[str]()
    for term in field.split(","):
        if term == "last" and name == "day of the month":
            found.append(term)
            continue
        numbers = re.sub("[a-z]+", lambda word: str(names.index(word[0])) if word[0] in names else word[0], term)
        listed = range(0)
        if match := _TERM.fullmatch(numbers):
            first, last, step = (None if number is None else int(number) for number in match.groups())
            start = allowed[0] if first is None else first
            stop = last if last is not None else start if first is not None and not step else allowed[-1]
            if names is _DAYS and stop == 0 < start:
                stop = 7  # `sat-sun`
            if start in allowed and stop in allowed:
                listed = range(start, stop + 1, step or 1)
        if not listed:
            raise ValueError(f"`{term}` in the field of the {name} is not of crontab(5)")
        found += map(str, listed)
    return ",".join(found)
