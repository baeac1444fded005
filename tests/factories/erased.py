"""A conversation that is erased from a state at once, without files."""

from __future__ import annotations

from sqlalchemy import Connection

from flywheel.store import erasures
from flywheel.store.erasures import ErasureState, Kind


def erase_rows(conn: Connection, kind: Kind, subject: str, *, blocks: bool = False) -> int:
    """Erase what the state has of a conversation or a user; how many replies that were."""
    wanted = {subject} if kind is Kind.CONVERSATION else erasures.conversations_of_user(conn, subject)
    number = erasures.begin(conn, kind, subject, wanted, blocks=blocks)
    found = erasures.touched(conn, wanted, user=subject if kind is Kind.USER else "")
    erasures.scrub(conn, found)
    erasures.note(conn, number, ErasureState.ERASED, {})
    return len(found.replies)
