"""Labels: replies with the verdicts that people gave them, one JSON object per line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from flywheel.errors import ConfigError
from flywheel.verdict import Exchange

VERDICTS: Final[Mapping[str, bool]] = {
    "accept": True, "accepted": True, "good": True, "pass": True, "yes": True, "true": True, "1": True,
    "reject": False, "rejected": False, "bad": False, "fail": False, "no": False, "false": False, "0": False,
}  # fmt: skip
_VERDICT_KEYS: Final = ("verdict", "expected_verdict", "label")
_SHOWN: Final = 10

Lookup = Callable[[list[str]], Mapping[str, dict[str, Any]]]
"""The lines of tasks by their ids, as far as the state has them."""


@dataclass(frozen=True, slots=True)
class Label:
    """One reply; `accept` is what a person decided and `reason` why, `name` what it is called in reports."""

    name: str
    exchange: Exchange
    accept: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a file; `left_out` counts the lines without an answer or without a verdict."""

    labels: tuple[Label, ...]
    left_out: int


class _LineError(ValueError):
    """A line that cannot be used."""


def read_labels(path: Path, lookup: Lookup | None = None) -> Labels:
    """Read a file of labels. A line is a question with an answer, a task line, or the id of a task in the state.

    Raises ConfigError with every line that cannot be used.
    """
    attempted = f"read labels {path}"
    try:
        written = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(attempted, error.strerror or str(error), "Name a file of JSON lines.") from error
    problems: list[str] = []
    lines = list(_lines(written, problems))
    judged = [(number, line, accept) for number, line, accept in lines if accept is not None]
    wanted = [str(line["task_id"]) for _, line, _ in judged if "task_id" in line and _query(line) is None]
    known = lookup(wanted) if lookup is not None and wanted else {}
    labels = []
    for number, line, accept in judged:
        try:
            label = _label(number, line, accept, known)
        except _LineError as error:
            problems.append(f"line {number}: {error}")
            continue
        if label is not None:
            labels.append(label)
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConfigError(attempted, "; ".join(problems[:_SHOWN]) + more, "See `flywheel docs rubrics`.")
    if not labels:
        raise ConfigError(attempted, "it holds no label", "Each line needs a question, an answer and a verdict.")
    return Labels(tuple(labels), len(lines) - len(labels))


def _lines(written: Iterable[bytes], problems: list[str]) -> Iterator[tuple[int, dict[str, Any], bool | None]]:
    """The objects with their line numbers and what they decide; what is none is added to `problems`."""
    for number, text in enumerate(written, 1):
        if not text.strip():
            continue
        try:
            line = orjson.loads(text)
            if not isinstance(line, dict):
                raise _LineError(f"it is a {type(line).__name__}, not an object")
            yield number, line, _verdict(line)
        except (orjson.JSONDecodeError, _LineError) as error:
            problems.append(f"line {number}: {error}")


def _verdict(line: Mapping[str, Any]) -> bool | None:
    """What the line says; None when it leaves it open."""
    key = next((key for key in _VERDICT_KEYS if key in line), None)
    if key is None:
        raise _LineError("it has no `verdict`")
    if line[key] is None:
        return None
    said = str(line[key]).strip().casefold()
    if said not in VERDICTS:
        raise _LineError(f"`{key}` is {line[key]!r}, not accept or reject")
    return VERDICTS[said]


def _query(line: Mapping[str, Any]) -> Any:
    return next((line[key] for key in ("query", "main_query", "question") if key in line), None)


def _label(number: int, line: dict[str, Any], accept: bool, known: Mapping[str, dict[str, Any]]) -> Label | None:
    name = str(line.get("task_id") or line.get("span_id") or f"line {number}")
    reason = str(line.get("reason") or "")
    if _query(line) is None:
        if "task_id" not in line:
            raise _LineError("it has neither a `query` nor a `task_id`")
        if name not in known:
            raise _LineError(f"task {name} is not in the state")
        line = {**known[name], "reason": reason}
    query, answer = _query(line), line.get("answer")
    if answer is None:
        return None
    if not isinstance(query, str) or not isinstance(answer, str):
        raise _LineError("`query` and `answer` must be texts")
    return Label(name, _exchange(query, answer, line), accept, reason)


def _exchange(query: str, answer: str, line: Mapping[str, Any]) -> Exchange:
    given = line.get("metadata")
    metadata: dict[str, Any] = dict(given) if isinstance(given, dict) else {}
    if "reference" in line and line["reference"] is not None:
        metadata.setdefault("reference", line["reference"])
    history = line.get("init_messages") or ()
    trajectory, tools = (_listed(metadata, key) for key in ("trajectory_json", "tools_json"))
    whole = {
        "task_id": str(line.get("task_id", "")),
        "main_query": query,
        "question": query,
        "answer": answer,
        "init_messages": list(history),
        "metadata": {"answer": answer, "trajectory_json": "[]", "tools_json": "[]", **metadata},
    }
    return Exchange(query, answer, history=tuple(history), trajectory=trajectory, tools=tools, line=whole)


def _listed(metadata: Mapping[str, Any], key: str) -> tuple[dict[str, Any], ...]:
    if key not in metadata:
        return ()
    try:
        value = orjson.loads(metadata[key])
    except (orjson.JSONDecodeError, TypeError):
        raise _LineError(f"`metadata.{key}` is not JSON text") from None
    if not isinstance(value, list) or any(not isinstance(part, dict) for part in value):
        raise _LineError(f"`metadata.{key}` is not a list of objects")
    return tuple(value)
