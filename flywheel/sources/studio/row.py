"""The values of one row: packed and unpacked, read as what their columns say, or shown as they are.

A value that cannot be understood raises RowError, or UnicodeDecodeError, and costs its row.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from flywheel.sources.studio.recorded import Attributes, attributes_of

Row = Sequence[Any]

TABLE: Final = "span_table"
MAX_CELL: Final = 32 * 1024 * 1024
"""Bytes of one value above which its row is dead rather than a reason to run out of memory."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST_NS: Final = 10**19
"""The year 2286, within what a datetime can hold."""


class RowError(ValueError):
    """A row that cannot be understood."""


def packed(row: Row) -> bytes:
    """A row without its number, as equal bytes for equal values: to be hashed, kept and sent."""
    # Version 2 of marshal: later ones also write which objects are shared.
    return marshal.dumps(tuple(row[1:]), 2)


def unpacked(rowid: int, data: bytes) -> Row:
    """The row that `packed` packed."""
    return (rowid, *marshal.loads(data))


def shown(value: Any) -> str:
    """A value of a row as text, whatever it is."""
    if isinstance(value, tuple):
        value = value[1]
    if isinstance(value, bytes):
        return value[:2000].decode(errors="replace")
    return "" if value is None else str(value)[:2000]


def text_in(value: Any, column: str) -> str:
    """A text; NULL is an empty one."""
    if isinstance(value, bytes):
        return value.decode()
    if value is None:
        return ""
    raise RowError(f"{column} {what_it_is(value)}, not text")


def what_it_is(value: Any) -> str:
    """What a value is that should be something else."""
    if isinstance(value, tuple):
        return f"has {value[0]:,} bytes, more than {MAX_CELL:,}"
    return f"is a {type(value).__name__}"


def id_in(value: Any, column: str) -> str:
    """A text that is not empty."""
    if isinstance(value, bytes) and value:
        return value.decode()
    raise RowError(f"{column} is empty" if value in (None, b"") else f"{column} {what_it_is(value)}, not text")


def identifiers(row: Row) -> tuple[str, str]:
    """The ids of a row's span and trace. Raises RowError and UnicodeDecodeError."""
    return id_in(row[1], "id"), id_in(row[2], "traceId")


def json_in(value: Any, column: str) -> Any:
    """What some JSON says; NULL is None."""
    if value is None:
        return None
    if not isinstance(value, bytes):
        raise RowError(f"{column} {what_it_is(value)}, not JSON text")
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        pass
    try:
        # Slower and more lenient: lone surrogates and numbers that orjson refuses are valid for Studio.
        return json.loads(value.decode())
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise RowError(f"{column} is not JSON: {error}") from error


def attributes_in(value: Any) -> Attributes:
    """What a span recorded."""
    if value is not None and type(value) is not bytes:
        raise RowError(f"attributes {what_it_is(value)}, not JSON text")
    try:
        return attributes_of(b"null" if value is None else value)
    except TypeError as error:
        raise RowError(f"attributes is {error}") from error
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise RowError(f"attributes is not JSON: {error}") from error


def events_in(value: Any) -> tuple[dict[str, Any], ...]:
    """What happened during a span; what is no list of objects is none."""
    if value == b"[]" or value is None:
        return ()
    events = json_in(value, "events")
    return tuple(event for event in events if isinstance(event, dict)) if isinstance(events, list) else ()


def iso_ns(value: Any, column: str) -> int:
    """A time in ISO 8601, without an offset in UTC, as nanoseconds since 1970."""
    text = text_in(value, column)
    try:
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
        since = moment - _EPOCH
    except (ValueError, OverflowError) as error:
        raise RowError(f"{column} is no time: {text[:40]!r}") from error
    return ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1000


def decimal_ns(value: Any, column: str) -> int:
    """Nanoseconds since 1970, written as a number."""
    try:
        ns = int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RowError(f"{column} is no number of nanoseconds: {shown(value)[:40]!r}") from error
    if not 0 <= ns < _LATEST_NS:
        raise RowError(f"{column} is out of range: {ns}")
    return ns
