"""The tasks of data sets, such as those of `flywheel train`, as a worker gets them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from flywheel.config import AgentProgramSettings, Config
from flywheel.daemon.rounds.round_tasks import RECORDED, round_task
from flywheel.records.round import RoundTask
from flywheel.sources.jsonl.data_set import DataSet, lines_of
from flywheel.sources.jsonl.record import DataRow, has_target, rows_of


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
    reply = row.reply if is_written and RECORDED & {*config.training.stages} else ()
    return task.model_copy(
        update={
            "exchange": replace(task.exchange, reference="", line=right),
            "reply": reply,
            "rejected": row.worse_reply if "dpo" in config.training.stages else (),
        }
    )
