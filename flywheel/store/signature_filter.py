"""Which bands the large table of openings may have: a Bloom filter (Bloom 1970), stored beside it.

Most conversations begin like none before them. To find that out band by band would read a page of the table for each,
anywhere in it; this says so for all but a few without a look.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec import Struct
from sqlalchemy import Connection, func, select

from flywheel.store.bulk import insert_many, sql_text
from flywheel.store.schema import openings
from flywheel.store.schema import openings_filter as filters

BITS: Final = 8
"""For each band, at least: with two of them set by each, one look in twenty is in vain."""
GROWTH: Final = 4
"""How many times the bits are multiplied when they no longer suffice."""
SMALLEST: Final = 1 << 20

_STAMP: Final = sql_text(select(filters.c.stamp))
_READ: Final = sql_text(select(filters.c.stamp, filters.c.bands, filters.c.bits))
_ENTERED: Final = sql_text(select(func.count()).select_from(openings))
_ALL: Final = sql_text(select(openings.c.band))
_PORTION: Final = 1_000
"""Rows that are fetched at once, of two million."""
_KEPT: Final = "flywheel.openings_filter"
"""What is remembered of the filter with a connection, so that it is read once."""
_SECOND: Final = 32
"""Bands are hashes of 63 bits: one bit's place comes from their low half, the other's from their high one."""


class _Filter(Struct, frozen=True):
    stamp: int
    bands: int
    bits: bytearray

    def may_have(self, bands: Sequence[int]) -> list[int]:
        bits, mask = self.bits, 8 * len(self.bits) - 1
        found = []
        for band in bands:
            low, high = band & mask, band >> _SECOND & mask
            if bits[low >> 3] >> (low & 7) & 1 and bits[high >> 3] >> (high & 7) & 1:
                found.append(band)
        return found

    def with_more(self, bands: Iterable[int]) -> _Filter:
        """The filter for these bands too, in the same memory: a bit too many is no error."""
        bits, mask = self.bits, 8 * len(self.bits) - 1
        count = self.bands
        for band in bands:
            low, high = band & mask, band >> _SECOND & mask
            bits[low >> 3] |= 1 << (low & 7)
            bits[high >> 3] |= 1 << (high & 7)
            count += 1
        return _Filter(secrets.randbits(63), count, bits)


def may_have(conn: Connection, bands: Sequence[int]) -> list[int]:
    """Those of the bands that the large table may have; it surely has none of the others."""
    known = _stored(conn) if bands else None
    return known.may_have(bands) if known is not None else []


def add(conn: Connection, bands: Iterable[int], count: int) -> None:
    """Note that the large table has these bands too; to be called in the transaction that enters them."""
    known = _stored(conn)
    if known is None or BITS * (known.bands + count) > 8 * len(known.bits):
        make(conn)
    else:
        _store(conn, known.with_more(bands))


def make(conn: Connection) -> None:
    """Make the filter anew from what the large table has."""
    count = int(conn.exec_driver_sql(_ENTERED).scalar_one())
    if not count:
        return
    size = SMALLEST
    while size < BITS * count:
        size *= GROWTH
    _store(conn, _Filter(0, 0, bytearray(size // 8)).with_more(bands_in(conn, _ALL)))


def bands_in(conn: Connection, query: str) -> Iterator[int]:
    """The bands that a statement finds, a few at a time: there are millions."""
    for some in conn.exec_driver_sql(query).partitions(_PORTION):
        for (band,) in some:
            yield band


def _stored(conn: Connection) -> _Filter | None:
    """The filter as it is in this transaction; None as long as the large table is empty."""
    stamp = conn.exec_driver_sql(_STAMP).scalar_one_or_none()
    if stamp is None:
        return None
    kept = conn.info.get(_KEPT)
    if not isinstance(kept, _Filter) or kept.stamp != stamp:
        # Read for the first time, changed by another process, or a transaction that had changed it was undone.
        stamp, bands, bits = conn.exec_driver_sql(_READ).one()
        kept = _Filter(stamp, bands, bytearray(bits))
        conn.info[_KEPT] = kept
    return kept


def _store(conn: Connection, made: _Filter) -> None:
    row = (1, made.stamp, made.bands, made.bits)
    insert_many(conn, filters, ("id", "stamp", "bands", "bits"), [row], replace=True)
    conn.info[_KEPT] = made
