"""A model writes tasks from documents. They are held until a person releases them.

The order of the passages depends on their texts and the seed alone, and the key of a task on passage, model and
number: the command given again asks only for what is missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace
from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.config.judge import JudgeSettings
from flywheel.daemon.judging.judging_report import USAGE, cost_of
from flywheel.errors import ConfigError, FlywheelError
from flywheel.judge.client import JudgeClient
from flywheel.judge.prompt import estimate_tokens
from flywheel.judge.task_writer import Assignment, DraftVerdict, TaskWriter, messages
from flywheel.judge.thread_pool import grade_all
from flywheel.judge.usage import Budget, Purpose
from flywheel.records.ground_truth import KEY
from flywheel.records.similarity import Questions
from flywheel.records.states import SkipReason
from flywheel.records.task import ID_OF_LINE, Batch, TaskLine, line_bytes, storable
from flywheel.records.verdict import Verdict
from flywheel.sources.documents import SUFFIXES, Passage, passages_of
from flywheel.sources.jsonl.record import entry_of_line
from flywheel.store import claims, judge_usage, ledger
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import utcnow
from flywheel.store.views import task_list
from flywheel.system.signals import unless_stopped

DOCUMENTS: Final = "documents"
"""The type of the source, and the agent of its tasks, by which `targets.NAME.agents` takes them."""
OUTCOMES: Final = ("held", "refused", "repeated", "undecided")

Documents = tuple[list[Passage], dict[str, str]]
"""The passages of a directory in their order, and why other files are left out."""
Progress = Callable[[int], AbstractContextManager[Callable[[], None]]]
"""Begins to show how many of so many are written."""


def documents_in(directory: Path, seed: int) -> Documents:
    """Raises ConfigError without any text."""
    passages, left_out = passages_of(directory)
    if not passages:
        why = "; ".join([f"no {' or '.join(SUFFIXES)} file there has text", *map(": ".join, left_out.items())])
        attempted = f"write tasks from the documents in {directory}"
        raise ConfigError(attempted, why, "Name a directory with documents in UTF-8.")
    return sorted(passages, key=lambda each: _id(seed, each.text)), left_out


async def write_tasks(
    store: Store,
    config: Config,
    directory: Path,
    found: Documents,
    count: int,
    model: str | None,
    progress: Progress | None,
) -> tuple[dict[str, Any], FlywheelError | None]:
    """Have tasks written and stored; without `progress`, no model is asked. The report, and the error that ended it
    early."""
    passages, left_out = found
    # The prices are those of the configured judge.
    settings = config.judge if model is None else config.judge.model_copy(update={"model": model, "prices": None})
    entering, loop, error = _Entering(config, directory, settings), asyncio.get_running_loop(), None
    due = await store.read(entering.due, passages, count)
    spent = await store.read(judge_usage.tokens_today)

    def write(begun: AbstractContextManager[Callable[[], None]], stop: threading.Event) -> bool:
        with closing(JudgeClient(settings)) as client, begun as step:
            writer, budget = TaskWriter(client, settings), Budget(settings.budget, lambda: spent)
            asked = ((each, each) for each in due)
            for each, verdict in grade_all(writer, asked, settings.max_thread, stop, budget=budget):
                asyncio.run_coroutine_threadsafe(store.write(entering.enter, each, verdict), loop).result()
                step()
        return True

    if due and progress is not None:
        attempted, left = f"write tasks from the documents in {directory}", "What was written is stored."
        try:
            await unless_stopped(partial(write, progress(len(due))), config.daemon.drain_seconds, attempted, left)
        except FlywheelError as ended:
            error = ended
    counts, usage = ({name: entering.counts[name] for name in names} for names in (OUTCOMES, USAGE))
    report = {
        "documents": len({each.document for each in passages}),
        "passages": len(passages),
        "left_out": left_out,
        "wanted": count,
        "written_before": count - len(due),
        **counts,
        "not_asked": len(due) - sum(counts.values()),
        "estimated_tokens": sum(estimate_tokens(messages(each)) for each in due),
        "usage": usage,
        "cost": cost_of(**usage, prices=settings.prices).price,
        "dry_run": progress is None,
        "error": str(error) if error else None,
    }
    return report, error


class _Entering:
    """Enters what a model writes about the documents of a directory; `counts` says what became of it."""

    def __init__(self, config: Config, directory: Path, settings: JudgeSettings) -> None:
        self.counts = Counter[str]()
        self._config, self._directory, self._settings = config, storable(str(directory)), settings
        self._questions = Questions()
        self._of_passage = defaultdict[str, list[str]](list)

    def due(self, conn: Connection, passages: Sequence[Passage], count: int) -> list[Assignment]:
        """One task about each passage, then the next one about each; without those that are stored."""
        for row in task_list.listed(conn, task_list.conditions(agent=DOCUMENTS)):
            self._questions.add(question := row.payload["main_query"])
            self._of_passage[row.payload["metadata"]["trace_id"]].append(question)
        wanted = {}
        for number, at in (divmod(place, len(passages)) for place in range(count)):
            document, text = passages[at]
            key = _id(self._settings.model, text, number)
            wanted[key] = Assignment(key, document, text, number, self._of_passage[_id(text)])
        keys, source = list(wanted), ledger.known_source(conn, self._directory) or 0
        known = ledger.rows_of_tasks(conn, keys).keys() | ledger.incomplete_rows(conn, source, keys).keys()
        return [each for key, each in wanted.items() if key not in known]

    def enter(self, conn: Connection, asked: Assignment, verdict: Verdict) -> None:
        """Store a draft, with the usage of its calls: as a held task, or as a reply that is refused."""
        judge_usage.book_verdict(conn, verdict, Purpose.DOCUMENTS, self._settings.prices)
        self.counts.update({name: getattr(verdict, name) for name in USAGE})
        if not isinstance(verdict, DraftVerdict) or (draft := verdict.draft) is None:
            self.counts["undecided"] += 1
            return
        outcome, why = "held", "written by a model"
        if not draft.is_supported_by(asked.passage):
            outcome, why = "refused", "a quote does not occur in the passage"
        elif not self._questions.add(draft.question):
            outcome, why = "repeated", "it nearly repeats the question of another task"
        self.counts[outcome] += 1
        passage, why = _id(asked.passage), f"{asked.document}: {why}"
        truth = {"answer": draft.answer, "quotes": draft.quotes, "document": asked.document}
        # The tasks of a passage are in one split, as the turns of a conversation are.
        metadata = {"trace_id": passage, "agent_name": DOCUMENTS, "written_by": self._settings.model, KEY: truth}
        line: TaskLine = {"task_id": asked.key, "question": draft.question, "answer": draft.answer}
        text = line_bytes({**line, "metadata": metadata})
        entry = entry_of_line(text, Path(self._directory), datetime.now(UTC), self._config.models_of(None))
        if outcome == "held":
            self._of_passage[passage].append(draft.question)
        else:
            entry = replace(entry, line=b"", skip=SkipReason.REFUSED, detail=why)
        number, split = ledger.source_id(conn, self._directory, DOCUMENTS), self._config.ingest
        ledger.note_source(conn, number, condition="ok", read_at=utcnow())
        batch, ratio = Batch(None, (entry,)), split.train_ratio
        ledger.record_batch(conn, number, batch, train_ratio=ratio, split_seed=split.split_seed)
        claims.hold(conn, [asked.key], why)


def _id(*parts: object) -> str:
    return ID_OF_LINE + hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "replace")).hexdigest()[:20]
