"""Task files that AgentJet began: what is in them is known by the hash of question and answer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from flywheel.errors import StoreError


class QaHashes:
    """SHA-256 of question, newline and answer, of which 64 bits are kept: a file can have a million."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._known)

    def __contains__(self, qa_hash: object) -> bool:
        return _short(qa_hash) in self._known

    def add(self, qa_hash: object) -> None:
        if (short := _short(qa_hash)) is not None:
            self._known.add(short)


def _short(qa_hash: object) -> int | None:
    try:
        return int(qa_hash[:16], 16) if isinstance(qa_hash, str) else None
    except ValueError:
        return None


def hashes_in(task_file: Path) -> QaHashes:
    """What stands in a file of AgentJet's at this place, and in those that were set aside from there.

    Raises StoreError (retryable) when one cannot be read.
    """
    found = QaHashes()
    try:
        # One after the other: whoever sets the first one aside meanwhile has given it a number.
        for path in filter(is_agentjets, itertools.chain([task_file], numbered(task_file))):
            with path.open("rb") as file:
                for line in file:
                    found.add(_metadata(line).get("qa_hash"))
    except OSError as error:
        raise StoreError(
            f"read {error.filename or task_file}, which AgentJet wrote",
            error.strerror or str(error),
            "Check its permissions: what is in it is not judged again.",
            retryable=True,
        ) from error
    return found


def is_agentjets(path: Path) -> bool:
    """Whether the first line is a task as AgentJet writes it, and not as Flywheel does. Raises OSError."""
    try:
        with path.open("rb") as file:
            metadata = _metadata(file.readline())
    except (FileNotFoundError, IsADirectoryError):
        return False
    return "qa_hash" in metadata and "split" not in metadata


def numbered(path: Path) -> Iterator[Path]:
    """The names `tasks-1.jsonl`, `tasks-2.jsonl`, … beside a task file, as far as there are files of them."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    return itertools.takewhile(os.path.lexists, names)


def _metadata(line: bytes) -> dict[str, Any]:
    try:
        metadata = orjson.loads(line)["metadata"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {}
    return metadata if isinstance(metadata, dict) else {}
