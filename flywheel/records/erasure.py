"""Erasure: what is left of JSON once tasks are erased whose texts nobody may keep. Plain functions, no I/O.

A JSON object is a record of the task that it names in `task_id`, or in a field whose name ends in `_task_id` (the
other reply of a pair). Records of erased tasks are removed whole, and records of other tasks stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any, Final

from pydantic import ValidationError

from flywheel.records.round import Probe, Recording
from flywheel.records.states import RoundState

BY_TASK: Final = frozenset({"left_out", "unmeasured", "partly", "inexact", "candidates"})
"""Fields with an object that has one entry per task, by its id."""
LISTED: Final = frozenset({"released", "without_gradient", "with_gradient"})
"""Fields with a list of task ids."""
SENTENCES: Final = frozenset({"error", "reason", "refusal", "paused"})
"""Fields with a sentence for people, which can quote what a task said."""
ERASED: Final = "(erased: it could quote a task whose texts were erased)"
"""What is in the place of such a sentence."""


def tasks_named_in(value: Any) -> set[str]:
    """The keys of the tasks of which a JSON value has records."""
    if isinstance(value, list):
        return set().union(*map(tasks_named_in, value))
    if not isinstance(value, dict):
        return set()
    return _names(value) or set().union(*map(tasks_named_in, value.values()))


def _names(record: dict[str, Any]) -> set[str]:
    """The tasks that an object is a record of."""
    of_tasks = (item for key, item in record.items() if key == "task_id" or key.endswith("_task_id"))
    return {item for item in of_tasks if isinstance(item, str) and item}


REMOVED: Final = object()
"""In the place of a value of which nothing is left."""


def without(value: Any, keys: Set[str], system_prompts: Collection[str] | None = None) -> Any:
    """What is left of a JSON value without the tasks of these keys: the same object if nothing is erased, `REMOVED`
    if it is a record of one of them.

    `system_prompts` are given where a round or evaluation used the tasks: only these stay in lists of system prompts,
    as rollouts of other tasks have them, and no sentence stays that is in no record of another task.
    """
    if isinstance(value, list):
        return _of_list(value, keys, system_prompts)
    if not isinstance(value, dict):
        return value
    if names := _names(value):
        return value if names.isdisjoint(keys) else REMOVED
    left = {}
    for key, item in value.items():
        kept = item
        if key in BY_TASK and isinstance(item, dict):
            kept = {task: about for task, about in item.items() if task not in keys}
        elif key in LISTED and isinstance(item, list):
            kept = [task for task in item if task not in keys]
        elif key in SENTENCES and isinstance(item, str):
            is_kept = system_prompts is None or _is_made_of_figures(value)
            kept = item if is_kept else item and ERASED
        elif key == "probe" and item is not None:
            kept = _of_probe(item, keys)
        elif key == "system_prompts" and system_prompts is not None:
            kept = _of_prompts(item, system_prompts)
        else:
            kept = without(item, keys, system_prompts)
        if kept is not REMOVED:
            left[key] = kept
    return value if left == value else left


def _of_list(value: list[Any], keys: Set[str], system_prompts: Collection[str] | None) -> list[Any]:
    found = [without(item, keys, system_prompts) for item in value]
    left = [item for item in found if item is not REMOVED]
    return value if left == value else left


def _is_made_of_figures(decision: Mapping[str, Any]) -> bool:
    """Whether the reason of a decision is the gate's: then its comparison's figures are beside it."""
    return "gain" in decision and decision.get("outcome") != RoundState.FAILED


def _of_prompts(item: Any, system_prompts: Collection[str]) -> Any:
    """System prompts with counts: an object by text, or a list of objects with a `text`."""
    if isinstance(item, dict):
        return {text: count for text, count in item.items() if text in system_prompts}
    return [each for each in item if each["text"] in system_prompts]


def _of_probe(item: Any, keys: Set[str]) -> Any:
    try:
        probe = Probe.model_validate(item)
    except ValidationError:
        return None  # Whose texts it has is unknown.
    left = without_tasks(probe, keys)
    return item if left == probe else left and left.model_dump(mode="json")


def without_tasks(probe: Probe, keys: Set[str]) -> Probe | None:
    """A probe without the texts of these tasks, and its figures about them; None if none is left. A probe that does
    not say whose its texts are is of any task."""
    if len(probe.tasks) != len(probe.texts):
        return None
    texts = [number for number, task in enumerate(probe.tasks) if task not in keys]
    if len(texts) == len(probe.texts):
        return probe
    numbers = {number: place for place, number in enumerate(texts)}
    kept = [at for at, (text, _) in enumerate(probe.places) if text in numbers]
    if not kept:
        return None

    def of(recording: Recording) -> Recording:
        every = {name: getattr(recording, name) for name in Recording.model_fields}
        return Recording(**{name: values and [values[at] for at in kept] for name, values in every.items()})

    return probe.model_copy(
        update={
            "texts": [probe.texts[number] for number in texts],
            "tasks": [probe.tasks[number] for number in texts],
            "places": [(numbers[text], at) for text, at in (probe.places[at] for at in kept)],
            "first": of(probe.first),
            "second": of(probe.second),
        }
    )
