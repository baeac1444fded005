"""Erasure: what is left of JSON once tasks are erased whose texts nobody may keep. Plain functions, no I/O.

A JSON object is a record of the task that it names in `task_id`, or in a field whose name ends in `_task_id` (the
other reply of a pair). Records of erased tasks are removed whole, and records of other tasks stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

from pydantic import ValidationError

from flywheel.records.round import Probe, Recording
from flywheel.records.task import TaskLine, trace_parts
from flywheel.records.trace import reasoning_of

BY_TASK: Final = frozenset({"left_out", "unmeasured", "partly", "inexact", "candidates"})
"""Fields with an object that has one entry per task, by its id."""
LISTED: Final = frozenset({"released", "without_gradient", "with_gradient"})
"""Fields with a list of task ids."""
SENTENCES: Final = frozenset({"error", "reason", "refusal", "paused", "reward_by"})
"""Fields with a sentence for people, which may quote what a task said."""
ERASED: Final = "(erased: it quoted a task whose texts were erased)"
"""What is in the place of such a sentence."""
PIECE: Final = 16
"""Bytes of a text that a sentence has in common with it if it quotes it. Most coincidences are shorter."""
SHORTEST: Final = 8
"""Bytes of the shortest text that a sentence can quote: a number or a word is in many sentences."""


@dataclass(frozen=True)
class ErasedTasks:
    """The keys of erased tasks (`task_id` in files), and their texts: what was asked, answered and returned by tools.

    The texts are only for sentences that may quote them.
    """

    keys: frozenset[str]
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, lines: Iterable[TaskLine]) -> Self:
        """Those of the lines of the task file. System prompts are no texts of a task: others have them, too."""
        keys, texts = set(), dict[str, None]()
        for line in lines:
            keys.add(line["task_id"])
            messages = (*line["init_messages"], *line["prompt"], *trace_parts(line).steps)
            own = [message for message in messages if message.get("role") != "system"]
            said = (text for message in own for text in (message.get("content"), reasoning_of(message)))
            thought = line["metadata"].get("answer_reasoning")
            every = (line["main_query"], line["answer"], thought, *said)
            texts |= dict.fromkeys(text for text in every if isinstance(text, str) and text)
        return cls(frozenset(keys), tuple(texts))

    def quoted_in(self, sentence: str) -> bool:
        """Whether a sentence has a whole text, or at least `2 * PIECE - 1` bytes of one, whatever the white space."""
        said = _plain(sentence)
        pieces = (said[at : at + PIECE] for at in range(len(said) - PIECE + 1))
        return any(text in said for text in self._short) or any(piece in self._pieces for piece in pieces)

    @cached_property
    def _short(self) -> list[bytes]:
        return [text for text in map(_plain, self.texts) if SHORTEST <= len(text) < 2 * PIECE - 1]

    @cached_property
    def _pieces(self) -> frozenset[bytes]:
        # Of all pieces of a sentence, one begins where a piece of the text does.
        texts = [text for text in map(_plain, self.texts) if len(text) >= 2 * PIECE - 1]
        return frozenset(text[at : at + PIECE] for text in texts for at in range(0, len(text) - PIECE + 1, PIECE))


def _plain(text: str) -> bytes:
    return " ".join(text.split()).encode("utf-8", "replace")


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


class Removed:
    """In the place of a value of which nothing is left."""


REMOVED: Final = Removed()


def without(value: Any, erased: ErasedTasks, system_prompts: Collection[str] | None = None) -> Any:
    """What is left of a JSON value: the same object if nothing is erased, `REMOVED` if it is a record of an erased
    task. Where `system_prompts` are given, only these stay in lists of system prompts: rollouts of other tasks have
    them."""
    if isinstance(value, list):
        return _of_list(value, erased, system_prompts)
    if not isinstance(value, dict):
        return value
    if names := _names(value):
        return value if names.isdisjoint(erased.keys) else REMOVED
    left = {}
    for key, item in value.items():
        kept = item
        if key in BY_TASK and isinstance(item, dict):
            kept = {task: about for task, about in item.items() if task not in erased.keys}
        elif key in LISTED and isinstance(item, list):
            kept = [task for task in item if task not in erased.keys]
        elif key in SENTENCES and isinstance(item, str):
            kept = ERASED if erased.quoted_in(item) else item
        elif key == "probe" and item is not None:
            kept = _of_probe(item, erased)
        elif key == "system_prompts" and system_prompts is not None:
            kept = _of_prompts(item, system_prompts)
        else:
            kept = without(item, erased, system_prompts)
        if kept is not REMOVED:
            left[key] = kept
    return value if left == value else left


def _of_list(value: list[Any], erased: ErasedTasks, system_prompts: Collection[str] | None) -> list[Any]:
    found = [without(item, erased, system_prompts) for item in value]
    left = [item for item in found if item is not REMOVED]
    return value if len(left) == len(value) and all(map(_is, left, value)) else left


def _is(one: Any, other: Any) -> bool:
    return one is other


def _of_prompts(item: Any, system_prompts: Collection[str]) -> Any:
    """System prompts with counts: an object by text, or a list of objects with a `text`."""
    if isinstance(item, dict):
        return {text: count for text, count in item.items() if text in system_prompts}
    return [each for each in item if each["text"] in system_prompts]


def _of_probe(item: Any, erased: ErasedTasks) -> Any:
    try:
        probe = Probe.model_validate(item)
    except ValidationError:
        return None  # Whose texts it has is unknown.
    left = without_tasks(probe, erased.keys)
    return item if left == probe else left and left.model_dump(mode="json")


def without_tasks(probe: Probe, keys: Collection[str]) -> Probe | None:
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
