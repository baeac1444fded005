"""`flywheel.open_state`: the tasks, verdicts, rounds and rollouts of a state as flat mappings, for tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, func, select

from flywheel.errors import StoreError
from flywheel.store.kernel.database import STATE_FILE, is_missing, read_once
from flywheel.store.kernel.schema import adapters, judge_models, rounds, tasks, verdicts
from flywheel.store.verdicts import CHAIN, PERSON
from flywheel.system.signals import run_coroutine
from flywheel.training.data import rollout_file

Row = dict[str, Any]
PAGE: Final = 500
_METADATA: Final = ("trace_id", "source", "user_id")


class State:
    """A state directory, read beside a daemon that writes it. Each method reads what is there when it is iterated,
    in pages: rows that are added meanwhile may be included. Raises StoreError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def tasks(self) -> Iterator[Row]:
        """A row per task: id, conversation, agent, adapter that answered, split, state, question and answer."""
        for row in self._pages(_TASKS, tasks.c.id):
            payload = row.pop("payload")
            metadata = payload.get("metadata", {})
            yield {
                **row,
                "question": payload["main_query"],
                "answer": payload["answer"],
                **{name: metadata.get(name) for name in _METADATA},
            }

    def verdicts(self) -> Iterator[Row]:
        """A row per verdict and task: outcome, score, by whom, and of each criterion `passed.ID` and `value.ID`."""
        for row in self._pages(_VERDICTS, verdicts.c.id):
            results, rubric = row.pop("results"), row["rubric_hash"]
            found = {f"{name}.{each['criterion']}": each[name] for each in results for name in ("passed", "value")}
            by = "filter" if rubric.startswith(CHAIN) else "person" if rubric == PERSON else "judge"
            yield {**row, **found, "by": by}

    def rounds(self) -> Iterator[Row]:
        """A row per round, with its adapter and the figures of its comparison: `gain`, `lower`, `upper`, and the mean
        scores of candidate and deployed; None where there was none."""
        for row in self._pages(_ROUNDS, rounds.c.id):
            comparison = row.pop("comparison") or {}
            names = ("gain", "lower", "upper", "candidate_mean", "deployed_mean", "tasks", "conversations")
            yield {**row, **{name: comparison.get(name) for name in names}}

    def rollouts(self, round: str) -> Iterator[Row]:  # noqa: A002 - what it is
        """A row per rollout of a round: step, task, question, answer, reward, and of each criterion `passed.ID`."""
        known = list(self.rounds())
        if not any(row["round"] == round for row in known):
            names = ", ".join(row["round"] for row in known[-10:]) or "none"
            raise StoreError(f"read the rollouts of {round}", "there is no such round", f"The last rounds: {names}.")
        directory = self.directory / "rounds" / round
        prompts = rollout_file.prompts_of(directory)
        for rollout in rollout_file.rollouts(directory):
            yield {
                "round": round,
                **{name: rollout[name] for name in ("step", "task_id")},
                "question": prompts.get(rollout["task_id"], {}).get("query", ""),
                **{
                    name: rollout.get(name)
                    for name in ("answer", "reward", "advantage", "missed", "dropped", "error")
                },
                **{f"passed.{each['criterion']}": each["passed"] for each in rollout["criteria"]},
            }

    def _pages(self, query: Select[Any], number: ColumnElement[int]) -> Iterator[Row]:
        """The rows of a query by its `number`, which they do not have."""
        page, after = query.add_columns(number.label("number")).order_by(number).limit(PAGE), 0
        while found := run_coroutine(read_once(self.directory, _rows, page.where(number > after))):
            after = found[-1]["number"]
            for row in found:
                del row["number"]
                yield row


def open_state(path: str | Path) -> State:
    """The state in a directory (`state.dir`), read-only. Raises StoreError if there is none."""
    directory = Path(path).expanduser()
    if is_missing(directory):
        hint = "Name the state directory: `flywheel status` shows it."
        raise StoreError(f"open the state in {directory}", f"there is no {STATE_FILE}", hint)
    return State(directory)


def _rows(conn: Connection, query: Select[Any]) -> list[Row]:
    return [{**row} for row in conn.execute(query).mappings()]


_TASKS: Final = select(
    tasks.c.key.label("task_id"), tasks.c.conversation_id, tasks.c.agent, tasks.c.adapter, tasks.c.model,
    tasks.c.target, tasks.c.started_at, tasks.c.split, tasks.c.state, tasks.c.payload,
)  # fmt: skip
_VERDICTS: Final = (
    select(
        tasks.c.key.label("task_id"), tasks.c.agent, tasks.c.adapter, tasks.c.split,
        func.coalesce(judge_models.c.model, "").label("judge"), verdicts.c.rubric_hash, verdicts.c.outcome,
        verdicts.c.score, verdicts.c.reason, verdicts.c.error, verdicts.c.calls, verdicts.c.prompt_tokens,
        verdicts.c.completion_tokens, verdicts.c.created_at, verdicts.c.results,
    )
    .join(tasks, tasks.c.id == verdicts.c.task_id)
    .outerjoin(judge_models, judge_models.c.hash == verdicts.c.judge_hash)
)  # fmt: skip
_ROUNDS: Final = select(
    rounds.c.name.label("round"), rounds.c.state, rounds.c.target, rounds.c.parent, rounds.c.trigger,
    rounds.c.attempt, rounds.c.reason, rounds.c.created_at, rounds.c.finished_at, adapters.c.name.label("adapter"),
    rounds.c.result["comparison"].label("comparison"),
).outerjoin(adapters, adapters.c.round_id == rounds.c.id)  # fmt: skip
