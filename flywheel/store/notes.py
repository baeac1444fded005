"""Notes: short texts under a key that outlive the process, such as what `status` says and how far an export got."""

from __future__ import annotations

from sqlalchemy import Connection, select

from flywheel.store.schema import meta

JUDGE_NOTE = "judge"
"""Key of the note that tells `status` why judging does not go on."""
ROUND_NOTE = "round"
"""Key of the note that tells `status` why no round starts, or what the live one waits for."""


def note(conn: Connection, key: str, value: str) -> None:
    """Store a note; an empty value deletes it."""
    conn.execute(meta.delete().where(meta.c.key == key))
    if value:
        conn.execute(meta.insert().values(key=key, value=value))


def noted(conn: Connection, key: str) -> str:
    """A stored note, or an empty text."""
    value = conn.execute(select(meta.c.value).where(meta.c.key == key)).scalar_one_or_none()
    return str(value) if value is not None else ""
