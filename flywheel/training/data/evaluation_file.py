"""Reads the answers of the gate that a round has stored, in `evaluation.jsonl`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import orjson

from flywheel.errors import StoreError


def read_answers(path: Path, tasks: Collection[str]) -> list[dict[str, Any]] | None:
    """The answers about these tasks in their order; None without the file, which retention removes.

    Only lines about these tasks are parsed. The incomplete last line of a running round is left out. Raises
    StoreError.
    """
    wanted = [task.encode() for task in tasks]
    found = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n") and any(task in line for task in wanted):
                    answer = _answer(line, path, number)
                    if answer["task_id"] in tasks:
                        found.append(answer)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"read {path}", error.strerror or str(error), "Run it as the user of the state.") from error
    return found


def _answer(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = orjson.loads(line)
        needed = {name: found[name] for name in ("task_id", "side", "seed", "answer", "reward")}
        return {"steps": [], "truncated": False, "criteria": [], "error": "", **found, **needed}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise StoreError(
            f"read {path}", f"line {number} is no answer", "Something else has written to it; delete the line."
        ) from None
