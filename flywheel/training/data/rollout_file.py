"""Reads the rollouts that a round has stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from flywheel.errors import StoreError
from flywheel.records.round import SPEC_FILE

_KEYS: Final = {"step", "group", "task_id", "reward", "missed", "dropped", "criteria", "samples"}

DROPPED: Final = {
    "misses": "too many of its rollouts ended at a call without a recorded result",
    "rewards": "fewer than 4 rollouts have a reward",
    "spread": "its rewards are equal",
    "surplus": "the step had enough groups without it",
}
"""Why a group is not trained on, by `flywheel.training.data.groups.Drop`."""
PROBABILITIES: Final = (0.9, 0.5, 0.1, 0.0)
"""The classes in which trained tokens are shown: the least probability that they were sampled with."""


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """The rollouts in their order. The incomplete last line of a running round is left out. Raises StoreError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield parse_rollout(line, path, f"line {number}")
    except OSError as error:
        raise StoreError(f"read {path}", error.strerror or str(error), "Run it as the user of the state.") from error


def prompts_of(directory: Path) -> dict[str, Mapping[str, Any]]:
    """The tasks of a round by id, with `query` and `prompt` (messages); empty when its specification has no tasks."""
    try:
        spec = orjson.loads((directory / SPEC_FILE).read_bytes())
        return {task["task_id"]: task for task in (*spec["train"], *spec["held_out"])}
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return {}


def probability_class(logprob: float) -> int:
    """The class of a trained token, an index of `PROBABILITIES`."""
    return next(place for place, least in enumerate(PROBABILITIES) if math.exp(logprob) >= least)


def parse_rollout(line: bytes, path: Path, place: str) -> dict[str, Any]:
    """The rollout of a line; `place` says where it is in the file. Raises StoreError."""
    try:
        rollout = orjson.loads(line)
    except orjson.JSONDecodeError:
        rollout = None
    if not isinstance(rollout, dict) or not rollout.keys() >= _KEYS:
        raise StoreError(
            f"read {path}", f"{place} is no rollout", "Something else has written to it; delete the line."
        )
    return rollout
