"""The ground truth of a task: what its author says about a right solution. Plain data, no I/O.

A line of a task file has it in `metadata.ground_truth`, for example
`{"target_tools": ["search", "read"], "optimal_steps": 2, "answer": "7 °C", "trajectory": [messages]}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from flywheel.errors import ConfigError
from flywheel.records.trace import ChatMessage, get_path

KEY: Final = "ground_truth"
"""In the metadata of a task's line."""


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """A part that is None was not given; an empty list says that there is nothing to call.

    Attributes:
        target_tools: Names of the tools that a right solution calls, in their order.
        optimal_steps: The smallest number of tool calls that solves the task.
        answer: The right answer.
        trajectory: The messages of a right solution after the question, in the OpenAI chat format.
    """

    target_tools: tuple[str, ...] | None = None
    optimal_steps: int | None = None
    answer: str | None = None
    trajectory: tuple[ChatMessage, ...] | None = None


def parse_ground_truth(raw: Any) -> GroundTruth:
    """The ground truth as JSON, or null. Keys that it does not have are ignored, since data sets have others.

    Raises ValueError, which names the key, if a part has another type.
    """
    if raw is None:
        return GroundTruth()
    if not isinstance(raw, Mapping):
        raise _wrong("", raw, "an object")
    tools, steps, answer, trajectory = (
        raw.get(key) for key in ("target_tools", "optimal_steps", "answer", "trajectory")
    )
    if tools is not None and not (isinstance(tools, list) and all(isinstance(name, str) and name for name in tools)):
        raise _wrong(".target_tools", tools, "a list of names of tools")
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 0):
        raise _wrong(".optimal_steps", steps, "a whole number of at least 0")
    if answer is not None and (not isinstance(answer, str | int | float) or isinstance(answer, bool)):
        raise _wrong(".answer", answer, "a text or a number")
    if trajectory is not None and not (
        isinstance(trajectory, list) and all(isinstance(get_path(each, "role"), str) for each in trajectory)
    ):
        raise _wrong(".trajectory", trajectory, "a list of messages, each with a `role`")
    return GroundTruth(
        None if tools is None else tuple(tools),
        steps,
        None if answer is None else str(answer),
        None if trajectory is None else tuple(trajectory),
    )


def _wrong(key: str, value: Any, wanted: str) -> ValueError:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return ValueError(f"`metadata.{KEY}{key}` is {shown[:80]}, not {wanted}")


def raw_ground_truth(line: Mapping[str, Any]) -> Any:
    """What a task's line has as its ground truth, unchecked; None without one. In the task file of Flywheel it is
    within `metadata.extra_json`, as all keys of the user's are."""
    metadata = line.get("metadata")
    if not isinstance(metadata, dict):
        return None
    if KEY in metadata:
        return metadata[KEY]
    extra = metadata.get("extra_json")
    if not isinstance(extra, str) or KEY not in extra:
        return None
    try:
        return get_path(json.loads(extra), "metadata", KEY)
    except ValueError:
        return None


def ground_truth_of(line: Mapping[str, Any]) -> GroundTruth:
    """The ground truth of a task's line, in which every part may be missing. Raises ConfigError if a part has a wrong
    type."""
    try:
        return parse_ground_truth(raw_ground_truth(line))
    except ValueError as error:
        name = line.get("task_id")
        task = f"task {name}" if isinstance(name, str) and name else "a task"
        raise ConfigError(
            f"read the ground truth of {task}",
            str(error),
            "Correct it in the task file; see `flywheel docs rubrics-and-filters`.",
        ) from None
