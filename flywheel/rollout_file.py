"""Reads the rollouts that a round has stored, in the format of this and of earlier versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from flywheel.errors import StoreError
from flywheel.round import SPEC_FILE


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """The rollouts in their order. The incomplete last line of a running round is left out. Raises StoreError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield _rollout(line, path, number)
    except OSError as error:
        raise StoreError(f"read {path}", error.strerror or str(error), "Run it as the user of the state.") from error


def prompts_of(directory: Path) -> dict[str, Mapping[str, Any]]:
    """The tasks of a round by id, with `query` and `prompt` (messages); empty when its specification has no tasks."""
    try:
        spec = orjson.loads((directory / SPEC_FILE).read_bytes())
        return {task["task_id"]: task for task in (*spec["train"], *spec["held_out"])}
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return {}


def _rollout(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        found = orjson.loads(line)
        if "samples" in found:
            return {"dropped": None, **found}
        return _of_early_version(found)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise StoreError(
            f"read {path}", f"line {number} is no rollout", "Something else has written to it; delete the line."
        ) from None


def _of_early_version(found: dict[str, Any]) -> dict[str, Any]:
    """A single completion without token text, whose failed criteria have only names."""
    tokens = {name: found.pop(name) for name in ("token_ids", "loss_mask", "logprobs")}
    failed = found.pop("failed")
    del found["prompt_tokens"]
    return {
        **found,
        "steps": [],
        "advantage": None,
        "dropped": None,
        "criteria": [
            {"criterion": name, "choice": "", "value": None, "passed": False, "reason": ""} for name in failed
        ],
        "samples": [{**tokens, "text": [None] * len(tokens["token_ids"])}],
    }
