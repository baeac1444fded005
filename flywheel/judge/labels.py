"""Label files: replies with the verdicts of people, one JSON object per line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from flywheel.errors import ConfigError
from flywheel.records.states import Label
from flywheel.records.verdict import Exchange
from flywheel.system.files import MAX_GIVEN_DATA_BYTES, json_problem, read_given

VERDICTS: Final[Mapping[str, bool]] = {
    "accept": True, "accepted": True, "good": True, "pass": True, "yes": True, "true": True, "1": True,
    "reject": False, "rejected": False, "bad": False, "fail": False, "no": False, "false": False, "0": False,
}  # fmt: skip
QUERIES: Final = ("query", "main_query", "question")
"""The keys of a line's question."""
_MAX_PROBLEMS: Final = 10

Lookup = Callable[[list[str]], Mapping[str, dict[str, Any]]]
"""Returns the task lines by task id, as far as the state has them."""


@dataclass(frozen=True, slots=True)
class PersonLabel:
    """What one person says of a whole reply, or of one criterion. `at` is empty for now."""

    by: str
    label: Label
    comment: str
    is_blind: bool = False
    criterion: str = ""
    at: str = ""


@dataclass(frozen=True, slots=True)
class LabelledReply:
    """One reply with the verdict of people and its reason; `name` identifies it in reports.

    `task_id` is empty where the line names no task, and `people` where it does not say who labelled it.
    """

    name: str
    exchange: Exchange
    accept: bool
    reason: str = ""
    task_id: str = ""
    people: tuple[PersonLabel, ...] = ()


@dataclass(frozen=True, slots=True)
class LabelFile:
    """The labels of a file; `left_out` counts the lines without an answer or without a verdict."""

    labels: tuple[LabelledReply, ...]
    left_out: int

    def by_task(self, by: str) -> list[tuple[str, PersonLabel]]:
        """The labels by the ids of their tasks. `by` labelled where the file does not say who did."""
        return [
            (each.task_id, person)
            for each in self.labels
            for person in each.people
            or (PersonLabel(by, Label.ACCEPT if each.accept else Label.REJECT, each.reason),)
        ]


class _LineError(ValueError):
    """A line that cannot be used."""


def text_of(path: Path) -> str:
    """The text of a file in UTF-8, UTF-16 or UTF-32, as its first bytes say, without its byte order mark."""
    data = read_given(path, MAX_GIVEN_DATA_BYTES)
    return data.decode(json.detect_encoding(data), "replace").removeprefix("\ufeff")


def lines_of(text: str) -> list[str]:
    """Its lines, of which JSON texts may have characters that Python takes for ends of lines."""
    return list(io.StringIO(text, newline=None))


def read_labels(path: Path, lookup: Lookup | None = None) -> LabelFile:
    """Read a label file. A line is a question with an answer, a task line, or the id of a task in the state.

    Raises ConfigError that names every invalid line.
    """
    attempted = f"read labels {path}"
    try:
        texts = lines_of(text_of(path))
    except OSError as error:
        raise ConfigError(attempted, error.strerror or str(error), "Name a file of JSON lines.") from error
    problems: list[str] = []
    decided: list[tuple[int, dict[str, Any], bool]] = []
    count = 0
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        count += 1
        try:
            line = orjson.loads(text)
            if (accept := _verdict(line)) is not None:
                decided.append((number, line, accept))
        except orjson.JSONDecodeError as error:
            problems.append(f"line {number}: it is {json_problem(error)}")
        except _LineError as error:
            problems.append(f"line {number}: {error}")
    named_tasks = [str(line["task_id"]) for _, line, _ in decided if "task_id" in line and _query(line) is None]
    tasks = lookup(named_tasks) if lookup is not None and named_tasks else {}
    labels = []
    for number, line, accept in decided:
        try:
            exchange = _exchange(line, tasks)
        except _LineError as error:
            problems.append(f"line {number}: {error}")
            continue
        if exchange is not None:
            task = str(line.get("task_id") or "")
            name = task or str(line.get("span_id") or f"line {number}")
            labels.append(LabelledReply(name, exchange, accept, str(line.get("reason") or ""), task, _people(line)))
    if problems:
        more = f" and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
        raise ConfigError(
            attempted, "; ".join(problems[:_MAX_PROBLEMS]) + more, "See `flywheel docs write-a-rubric`."
        )
    if not labels:
        raise ConfigError(attempted, "it has no label", "Each line needs a question, an answer and a verdict.")
    return LabelFile(tuple(labels), count - len(labels))


def _verdict(line: Any) -> bool | None:
    """Whether the line accepts; None when it leaves that open."""
    if not isinstance(line, dict):
        raise _LineError(f"it is a {type(line).__name__}, not an object")
    key = next((key for key in ("verdict", "expected_verdict", "label") if key in line), None)
    if key is None:
        raise _LineError("it has no `verdict`")
    if line[key] is None:
        return None
    verdict = str(line[key]).strip().casefold()
    if verdict not in VERDICTS:
        raise _LineError(f"`{key}` is {line[key]!r}, not accept or reject")
    return VERDICTS[verdict]


def _people(line: Mapping[str, Any]) -> tuple[PersonLabel, ...]:
    """Who said what, in a line that Flywheel wrote; other programs may use the key for something else."""
    with suppress(TypeError, KeyError, ValueError, AttributeError):
        return tuple(
            PersonLabel(str(said["by"]), Label(said["label"]), str(said.get("comment") or ""), said["blind"] is True)
            for said in line.get("labels") or ()
        )
    return ()


def _query(line: Mapping[str, Any]) -> Any:
    return next((line[key] for key in QUERIES if key in line), None)


def _exchange(line: Mapping[str, Any], tasks: Mapping[str, dict[str, Any]]) -> Exchange | None:
    """The exchange of a line, or of the task that it names; None without an answer."""
    if _query(line) is None:
        if "task_id" not in line:
            raise _LineError("it has neither a `query` nor a `task_id`")
        if str(line["task_id"]) not in tasks:
            raise _LineError(f"task {line['task_id']} is not in the state")
        line = tasks[str(line["task_id"])]
    query, answer = _query(line), line.get("answer")
    if answer is None:
        return None
    if not isinstance(query, str) or not isinstance(answer, str):
        raise _LineError("`query` and `answer` must be texts")
    raw_metadata = line.get("metadata")
    metadata: dict[str, Any] = dict(raw_metadata) if isinstance(raw_metadata, dict) else {}
    if line.get("reference") is not None:
        metadata.setdefault("reference", line["reference"])
    history = line.get("init_messages") or []
    if not isinstance(history, list) or any(not isinstance(message, dict) for message in history):
        raise _LineError("`init_messages` is not a list of messages")
    trajectory, tools = (_objects(metadata, key) for key in ("trajectory_json", "tools_json"))
    partial_line = {"task_id": str(line.get("task_id", "")), "metadata": metadata}
    return Exchange(query, answer, tuple(history), trajectory, tools, line=partial_line)


def _objects(metadata: Mapping[str, Any], key: str) -> tuple[dict[str, Any], ...]:
    try:
        value = orjson.loads(metadata.get(key, "[]"))
    except (orjson.JSONDecodeError, TypeError):
        raise _LineError(f"`metadata.{key}` is not JSON text") from None
    if not isinstance(value, list) or any(not isinstance(part, dict) for part in value):
        raise _LineError(f"`metadata.{key}` is not a list of objects")
    return tuple(value)
