"""Usable samples over time, and what the next round waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, insert, select

from flywheel.store.kernel.schema import available_samples
from flywheel.store.kernel.transitions import utcnow

SHOWN: Final = 200


def note(conn: Connection, usable: int, needed: int, waits_for: str, target: str = "") -> None:
    """Note the supply of a target, if it is another one than the last."""
    last = newest(conn, 1, target)
    now = (usable, needed, waits_for)
    if not last or (last[0].usable, last[0].needed, last[0].waits_for) != now:
        # Two changes within a millisecond are one.
        values = {"usable": usable, "needed": needed, "waits_for": waits_for, "target": target}
        conn.execute(insert(available_samples).prefix_with("OR REPLACE").values(at=utcnow(), **values))


def newest(conn: Connection, limit: int = SHOWN, target: str = "") -> Sequence[Row[Any]]:
    """Those of a target, the newest first."""
    own = select(available_samples).where(available_samples.c.target == target)
    return conn.execute(own.order_by(available_samples.c.at.desc()).limit(limit)).all()
