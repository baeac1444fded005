"""`flywheel.judge_replies`: judges replies from Python as `flywheel filter --tasks` judges those of a file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, Final, Protocol

from rich.console import Console
from rich.progress import Progress

from flywheel.config.file import Config, load, parse
from flywheel.daemon.judging.judging import TaskJudging, state_of
from flywheel.daemon.judging.judging_report import TaskResult
from flywheel.errors import ConfigError
from flywheel.judge.rubric.file import load_rubric, parse_rubric
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.verdict import Outcome, Verdict
from flywheel.sources.jsonl.record import entries_of, rows_of
from flywheel.store import verdicts
from flywheel.system.signals import run_coroutine

ATTEMPTED: Final = "judge replies"
_MISSING: Final = frozenset({"NAType", "NaTType"})
"""Types of pandas' missing values, beside NaN."""


class Table(Protocol):
    """A DataFrame of pandas: `to_dict("records")` has its rows."""

    def to_dict(self, orient: Any, /) -> Any: ...


class _ValueError(ValueError):
    """A value that JSON does not have. The text names its field."""


def judge_replies(
    rubric: Rubric | Mapping[str, Any] | str | Path,
    replies: Iterable[Mapping[str, Any]] | Table,
    *,
    judge: Config | Mapping[str, Any] | str | Path,
    cache: str | Path | None = None,
    progress: bool = False,
) -> list[Verdict]:
    """Judge replies; the verdicts are in their order, and those of `flywheel filter` on the same.

    Also in a notebook, whose event loop goes on.

    Args:
        rubric: A rubric, its file, or what is in the file.
        replies: Replies as in task files: `question` and `answer`, or `messages`, and perhaps `history`, `tools`,
            `metadata`. Or a DataFrame with these columns, a reply for each row. Missing values (None, NaN) are left
            out.
        judge: The section `judge` of the settings (`base_url`, `model`, `api_key_env`, …), or a configuration file,
            whose filter chain then applies as well.
        cache: A directory in which verdicts are kept: the judge is not asked about the same again. Default: none.
        progress: Whether a bar on stderr shows how many replies are judged.

    A reply that the judge does not decide has the outcome `undecided` and an `error`. Raises ConfigError for a wrong
    rubric, setting or reply, which it names by its place, from 1, with the field; and JudgeError if the judge cannot
    be used.
    """
    return run_coroutine(ajudge_replies(rubric, replies, judge=judge, cache=cache, progress=progress))


async def ajudge_replies(
    rubric: Rubric | Mapping[str, Any] | str | Path,
    replies: Iterable[Mapping[str, Any]] | Table,
    *,
    judge: Config | Mapping[str, Any] | str | Path,
    cache: str | Path | None = None,
    progress: bool = False,
) -> list[Verdict]:
    """`judge_replies` in the caller's event loop."""
    lines = rows_of(_lines(replies), Path("replies"), ATTEMPTED, called="reply")
    entries = entries_of(lines, ATTEMPTED, called="reply")
    directory = None if cache is None else Path(cache)
    async with state_of(entries) as store, state_of(entries, directory) as kept:
        judging = TaskJudging(store, _config(judge), rubric=_rubric(rubric))
        keys, found = [entry.key for entry in entries], dict[str, Verdict]()
        await store.write(verdicts.copy, await kept.read(verdicts.decided, keys))
        try:
            with Progress(console=Console(stderr=True), disable=not progress) as bar:
                drawn = bar.add_task("judging", total=len(keys))

                def note(result: TaskResult) -> None:
                    found[result.task.key] = result.verdict or _undecided(result.error)
                    bar.advance(drawn)

                report = await judging.run(on_judged=note)
        finally:  # What was paid for is kept, also if it is interrupted.
            await kept.write(verdicts.copy, await store.read(verdicts.decided, keys))
        if report.error is not None:
            raise report.error
    return [found.get(key, _undecided()) for key in keys]


def _undecided(why: str = "") -> Verdict:
    return Verdict(Outcome.UNDECIDED, None, error=why or "it was not judged")


def _rows(replies: Iterable[Mapping[str, Any]] | Table) -> Iterable[Any]:
    """The rows of a DataFrame, whose own iterator gives the names of its columns; anything else as it is."""
    records = getattr(replies, "to_dict", None)
    if records is None or (isinstance(replies, Iterable) and isinstance(next(iter(replies), None), Mapping)):
        return replies  # type: ignore[return-value]
    with suppress(TypeError):  # of a Series
        return records("records")  # type: ignore[no-any-return]
    return replies  # type: ignore[return-value]


def _lines(replies: Iterable[Mapping[str, Any]] | Table) -> Iterator[bytes]:
    """Raises ConfigError for a reply that is no JSON object."""
    for number, given in enumerate(_rows(replies), 1):
        try:
            if not isinstance(given, Mapping):
                raise _ValueError(f"it is of the type {type(given).__name__}, not a mapping")
            fields = {str(name): _plain(value, str(name)) for name, value in given.items()}
            reply = {name: value for name, value in fields.items() if value is not None}
            text = json.dumps({name: value for name, value in reply.items() if name != "task_id"}, sort_keys=True)
            # By content: a kept verdict is never one on another reply with the same id.
            yield json.dumps({**reply, "task_id": hashlib.sha256(text.encode()).hexdigest()}).encode()
        except (_ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            hint = "Each reply is a mapping of texts, numbers, lists and mappings."
            raise ConfigError(ATTEMPTED, f"reply {number}: {why}", hint) from None


def _plain(value: Any, field: str) -> Any:
    """A value as JSON has it, at the path `field`: arrays as lists, times as text, and missing values as None."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise _ValueError(f"`{field}` is infinite, which is not JSON serializable")
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {str(name): _plain(each, f"{field}.{name}") for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{field}[{place}]") for place, each in enumerate(value)]
    if (kind := type(value).__name__) in _MISSING:
        return None
    if isinstance(value, date):
        return value.isoformat()
    if hasattr(value, "tolist"):  # arrays and numbers of numpy
        return _plain(value.tolist(), field)
    raise _ValueError(f"`{field}` is of the type {kind}, which is not JSON serializable")


def _config(judge: Config | Mapping[str, Any] | str | Path) -> Config:
    if isinstance(judge, Config):
        return judge
    if isinstance(judge, Mapping):
        return parse({"judge": {**judge}, "sources": []}, "`judge`", Path.cwd())
    return load(Path(judge))


def _rubric(rubric: Rubric | Mapping[str, Any] | str | Path) -> Rubric:
    if isinstance(rubric, Rubric):
        return rubric
    if isinstance(rubric, Mapping):
        return parse_rubric({**rubric}, "the rubric")
    return load_rubric(Path(rubric), "Name a rubric in YAML.")
