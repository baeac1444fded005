"""Candidates that the gate passed: what they wait for before they are promoted, and how long."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row

from flywheel.config.file import Config
from flywheel.records.states import RoundState
from flywheel.store import deployments, rounds
from flywheel.store.views.round_list import RoundFacts


def waits_for(conn: Connection, config: Config, row: Row[Any] | RoundFacts) -> str:
    """What the candidate of a round that the gate passed waits for; empty if it is to be promoted now. `config` is
    that of the round's target."""
    if _needs_person(conn, config, row):
        return f"a person: `flywheel deploy {row.name}`"
    watched = deployments.watched(conn, config.model.alias)
    return f"the watch of {watched}, which is undecided" if watched else ""


def told(conn: Connection, config: Config, row: Row[Any] | RoundFacts) -> dict[str, Any]:
    """For people: `waits_for` and `waits_until` of a round whose candidate waits; empty for others, and for those of
    a target that is no longer configured."""
    own = config.by_target().get(row.target)
    if row.state != RoundState.PASSED or own is None:
        return {}
    until = waits_until(conn, own, row)
    return {
        "waits_for": waits_for(conn, own, row) or "the daemon, or the next `flywheel run`, which deploys it",
        "waits_until": until.isoformat(timespec="seconds") if until is not None else None,
    }


def waits_until(conn: Connection, config: Config, row: Row[Any] | RoundFacts) -> datetime | None:
    """When the round is rejected if no person has decided by then; None if it does not wait for one."""
    since = rounds.waits_since(conn, row.id)
    if since is None or not _needs_person(conn, config, row):
        return None
    return datetime.fromisoformat(since) + timedelta(days=config.deploy.approval_days)


def expired(conn: Connection, config: Config, row: Row[Any]) -> str:
    """Why a waiting round is rejected: no person has decided in time; empty as long as it may wait."""
    until = waits_until(conn, config, row)
    if until is None or datetime.now(UTC) < until:
        return ""
    return f"nobody deployed it within {config.deploy.approval_days:g} days (deploy.approval_days)"


def _needs_person(conn: Connection, config: Config, row: Row[Any] | RoundFacts) -> bool:
    return config.gate.mode == "manual" and not rounds.is_approved(conn, row.id)
