"""A record of who was measured on held-out tasks by hand: a person who looks may choose by what they have seen, which
the gate's error budget does not count."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from flywheel.system.files import append_jsonl
from flywheel.system.terminal import moment, quantity

FOLDER: Final = "evaluations"
"""In the directory of the state."""
FILE: Final = "held-out.jsonl"


def add(state_dir: Path, model: Mapping[str, Any], rubric_hash: str, score: Mapping[str, Any]) -> None:
    """Note an evaluation; `score` has mean, bounds and counts."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    append_jsonl(state_dir / FOLDER / FILE, [{"at": at, "model": model, "rubric_hash": rubric_hash, "score": score}])


def read(state_dir: Path, adapter_sha256: str | None = None) -> list[dict[str, Any]]:
    """All evaluations on held-out tasks, or those of an adapter, the oldest first."""
    try:
        lines = (state_dir / FOLDER / FILE).read_bytes().splitlines(keepends=True)
    except OSError:
        return []
    found = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [each for each in found if adapter_sha256 in (None, each["model"].get("adapter_sha256"))]


def sentence(found: list[dict[str, Any]]) -> str:
    """How often somebody has looked, and what they saw last; empty if nobody has."""
    if not found:
        return ""
    last = found[-1]
    score, times = last["score"], quantity(len(found), "time")
    seen = (
        "no score" if score["mean"] is None else f"{score['mean']:.3f} ({score['lower']:.3f} to {score['upper']:.3f})"
    )
    return f"Measured by hand on held-out tasks {times}, last {last['model']['name']} at {moment(last['at'])}: {seen}"
