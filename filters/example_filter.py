"""An example of your own filter: a function in a file. `task` is a line of tasks.jsonl as a dictionary.

An exception makes its task a dead letter (`flywheel dead-letters`); other tasks are not affected.
"""

from __future__ import annotations

from typing import Any


def keep(task: dict[str, Any]) -> tuple[bool, str]:
    """Reject answers to questions that are only a greeting."""
    greeting = task["main_query"].strip().casefold().rstrip("!.") in {"hi", "hello", "你好"}
    return not greeting, "only a greeting"
