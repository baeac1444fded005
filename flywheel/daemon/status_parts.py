"""The parts of a status (`status.snapshot`) that each target has, and its servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def by_target(state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The parts of a snapshot that each target has, by its name: samples, gate, deployment. Without targets, the
    snapshot itself under an empty name."""
    return state.get("targets") or {"": state}


def servers_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The servers of a snapshot, each once: with what it serves under all aliases, and the first error, if any."""
    by_url: dict[str, list[dict[str, Any]]] = {}
    for own in by_target(state).values():
        for each in own["replicas"]:
            by_url.setdefault(each["url"], []).append(each)
    return [
        {
            **next((one for one in found if one["error"]), found[0]),
            "serves": ", ".join(one["serves"] for one in found if one["serves"]),
        }
        for found in by_url.values()
    ]
