"""Replicas: what was found on each server when somebody last looked at it, for `status`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection

from flywheel.store import pipeline_counts
from flywheel.store.transitions import record, utcnow

KIND: Final = "replicas"
"""What events of replicas, and the notes about them, go by."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A replica as it was found. `serves` is what the alias stands for there, empty where that is not known; `error`
    what is wrong and what to do."""

    url: str
    condition: str
    serves: str
    error: str = ""


def note(conn: Connection, alias: str, sightings: Sequence[Sighting]) -> None:
    """Remember what was found just now on every replica; a condition that has changed is an event."""
    before, now = noted(conn, alias), utcnow()
    found: dict[str, dict[str, str]] = {}
    for each in sightings:
        last = before.get(each.url, {})
        if last.get("condition") != each.condition:
            record(conn, KIND, [each.url], last.get("condition"), each.condition, each.error)
        is_as_before = (last.get("condition"), last.get("serves")) == (each.condition, each.serves)
        found[each.url] = {
            "condition": each.condition,
            "serves": each.serves,
            "error": each.error,
            "since": last["since"] if is_as_before else now,
            "looked_at": now,
        }
    pipeline_counts.note(conn, _key(alias), json.dumps(found))


def noted(conn: Connection, alias: str) -> dict[str, Any]:
    """What was found on each replica, by its URL: condition, serves, error, since, looked_at."""
    text = pipeline_counts.noted(conn, _key(alias))
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def _key(alias: str) -> str:
    return f"{KIND} of {alias}"
