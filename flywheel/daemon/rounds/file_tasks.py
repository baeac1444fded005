"""The tasks of data sets, such as those of `flywheel train`, as a worker gets them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flywheel.config.file import Config
from flywheel.config.training import AgentProgramSettings
from flywheel.daemon.rounds.round_tasks import RECORDED, round_task
from flywheel.records.reasons import by_reason
from flywheel.records.round import RoundTask
from flywheel.sources.jsonl.data_set import DataSet, lines_of
from flywheel.sources.jsonl.record import DataRow, has_target, rows_of
from flywheel.system.terminal import quantity


@dataclass(frozen=True, slots=True)
class ReadRows:
    """What is known of the rows of data sets, by the id of each one's task.

    Attributes:
        places: The file of each, and its line.
        structures: The class of each (`training.task_weights`).
        left_out: Why it is not trained on.
        notes: What is worth knowing of others: pairs of an id and a sentence.
    """

    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    structures: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def add(self, row: DataRow, task: RoundTask, file: str) -> RoundTask:
        """The task of a row, with an id of its own."""
        key = task.task_id
        while key in self.places:
            key += f"-{len(self.places)}"
        self.places[key], self.structures[key] = (file, row.number), row.structure
        self.notes.extend((key, f"`{name}` is not read") for name in row.unread_keys)
        return task.model_copy(update={"task_id": key})

    def by_reason(self, reasons: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
        """The rows of each file by reason, given pairs of an id and its reason; those of the most rows first."""
        of_file = defaultdict[str, list[tuple[str, str]]](list)
        for task_id, why in sorted(reasons, key=lambda each: self.places[each[0]][1]):
            of_file[self.places[task_id][0]].append((task_id, why))
        found = [
            {"reason": why, "rows": len(tasks), "file": file, "first_line": self.places[tasks[0]][1]}
            for file, own in of_file.items()
            for why, tasks in by_reason(own).items()
        ]
        return sorted(found, key=lambda each: -each["rows"])


def sentence_of(reason: Mapping[str, Any]) -> str:
    """One of `ReadRows.by_reason` in words."""
    first = f"line {reason['first_line']:,} of {reason['file']}"
    return f"{quantity(reason['rows'], 'row')}, the first is {first}: {reason['reason']}"


def rows(datasets: Iterable[DataSet], name: str, config: Config, python: Path) -> Iterator[tuple[str, DataRow]]:
    """The rows of all data sets, each with what is attempted. `name` is that of the data sets in messages. Raises
    ConfigError."""
    # A workflow gets the whole line, and may need no question.
    needs_question = not isinstance(config.rollout.agent, AgentProgramSettings)
    for each in datasets:
        attempted = f"read {name} {each.path}"
        with lines_of(each, python, attempted) as lines:
            for row in rows_of(lines, Path(each.path), attempted, needs_question=needs_question):
                yield attempted, row


def task_of(row: DataRow, config: Config) -> RoundTask:
    """The task of a row, with its replies if a stage trains on them and the model wrote them as text."""
    # As accepted ones: their answers are to be imitated. The judge gets none of them.
    task = round_task(row.task, config, is_accepted=True)
    right = {"metadata": {"reference": row.task["answer"], **task.exchange.line.get("metadata", {})}}
    is_written = row.task["metadata"]["structured_json"] == "null" and has_target(row.reply)
    reply = row.reply if is_written and RECORDED & {*config.training.kinds} else ()
    return task.model_copy(
        update={
            "exchange": replace(task.exchange, reference="", line=right),
            "reply": reply,
            "rejected": row.worse_reply if "dpo" in config.training.kinds else (),
        }
    )
