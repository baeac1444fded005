"""An example of a filter of your own: one function in one file. `task` is a line of tasks.jsonl.

A task that it raises on becomes a dead letter (`flywheel dead-letters`); the others go on.
"""

from __future__ import annotations

from typing import Any


def keep(task: dict[str, Any]) -> tuple[bool, str]:
    """Drop answers to questions that only say hello."""
    greeting = task["main_query"].strip().casefold().rstrip("!.") in {"hi", "hello", "你好"}
    return not greeting, "only a greeting"
