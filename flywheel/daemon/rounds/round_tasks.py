"""The tasks of a round as its worker gets them, with the recordings that answer their tools."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson
from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.config.training import AgentProgramSettings
from flywheel.judge.filters.chain import redactor_of
from flywheel.judge.rubric.checks.math_equal import right_answer
from flywheel.records.exclusion import WORDS, Exclusion
from flywheel.records.ground_truth import KEY as GROUND_TRUTH
from flywheel.records.ground_truth import raw_ground_truth
from flywheel.records.round import RoundTask
from flywheel.records.states import Split
from flywheel.records.task import TaskLine, conversation_key, is_traced, trace_parts, whole_line
from flywheel.records.tool_calls import SharedRecordings, said_in
from flywheel.records.trace import ChatMessage, sends_reasoning
from flywheel.records.verdict import Exchange
from flywheel.store import labels, rounds
from flywheel.store.samples import recorded_lines, rejected_lines, scores
from flywheel.training.data.pairs import Reply, matched
from flywheel.training.recorded.recordings import (
    RecordingPool,
    recording_of,
    results_of,
    tools_by_name,
    trace_results,
)

log = logging.getLogger(__name__)

Redactor = Callable[[dict[str, Any]], dict[str, Any]]

RECORDED: Final = {"sft", "dpo"}
"""Stages that train on recorded replies."""


@dataclass(slots=True)
class RoundTasks:
    """`left_out` are tasks that are not trained on, by id, with the reason. `shared` is for training, `shared_gate`
    for the gate."""

    train: list[RoundTask]
    held_out: list[RoundTask]
    left_out: dict[str, str]
    shared: SharedRecordings = field(default_factory=SharedRecordings)
    shared_gate: SharedRecordings = field(default_factory=SharedRecordings)


def round_tasks(conn: Connection, train: Sequence[int], held_out: Sequence[int], config: Config) -> RoundTasks:
    """The tasks with these numbers, and what their rollouts may use of other traces."""
    # Tasks may have been stored before the chain had the filter.
    redact = redactor_of(config)
    left_out: dict[str, str] = {}
    not_asked: dict[str, str] = {}
    found = RoundTasks(
        _tasks(conn, train, Split.TRAIN, config, redact, left_out),
        _tasks(conn, held_out, Split.HELD_OUT, config, redact, not_asked),
        left_out,
    )
    for task, why in not_asked.items():
        log.warning("the gate does not ask %s: %s", task, why)
    _share(conn, found, config, redact)
    return found


def _tasks(
    conn: Connection,
    ids: Sequence[int],
    split: Split,
    config: Config,
    redact: Redactor | None,
    left_out: dict[str, str],
) -> list[RoundTask]:
    rejected, lines = rounds.rejected(conn, ids), rounds.payloads(conn, ids)
    people = labels.decisions(conn, [line["task_id"] for line in lines])
    found = []
    for line in lines:
        is_accepted = line["task_id"] not in rejected
        # The judge takes a reference for an accepted answer: a rejected one is left out. People know better than it.
        is_good = people.get(line["task_id"], is_accepted)
        task = round_task(redact(line) if redact is not None else line, config, is_accepted=is_good)
        if why := _unanswerable(task, split, config, is_accepted=is_accepted):
            left_out[task.task_id] = why
        else:
            found.append(task)
    if split is Split.TRAIN and "dpo" in config.training.kinds:
        return _paired(conn, found, config, redact)
    return found


def _paired(conn: Connection, asked: Sequence[RoundTask], config: Config, redact: Redactor | None) -> list[RoundTask]:
    """The tasks, each with the best accepted and the worst rejected reply to its prompt, of those that say something
    else, if their scores differ by `training.dpo.margin`. Of replies that people decided, an accepted one counts as 1
    and a rejected one as 0."""
    accepted, rejected = defaultdict[str, list[RoundTask]](list), defaultdict[str, list[RoundTask]](list)
    for task in asked:
        if task.reply:
            accepted[_prompt_key(task)].append(task)
    for line in rejected_lines(conn, config.takes.train):
        shown = redact(line) if redact is not None else line
        task = round_task(shown, config, is_accepted=False)
        if (key := _prompt_key(task)) in accepted and (reply := _reply(shown, trace_parts(shown).steps)):
            rejected[key].append(task.model_copy(update={"rejected": reply}))
    keys = [task.task_id for key, worse in rejected.items() for task in (*accepted[key], *worse)]
    score = scores(conn, keys) | {name: float(good) for name, good in labels.decisions(conn, keys).items()}
    updates = {}
    for key, worse in rejected.items():
        pairs, _ = matched(
            [Reply(task, said_in(task.reply), score.get(task.task_id, 1.0)) for task in accepted[key]],
            [Reply(task, said_in(task.rejected), score.get(task.task_id, 0.0)) for task in worse],
            config.training.dpo.margin,
        )
        if pairs:
            best, worst = (each.of for each in pairs[0])
            updates[key] = {
                "reply": best.reply, "reply_task_id": best.task_id, "is_of_teacher": best.is_of_teacher,
                "rejected": worst.rejected, "rejected_task_id": worst.task_id,
            }  # fmt: skip
    return [task.model_copy(update=updates.get(_prompt_key(task), {})) for task in asked]


def _prompt_key(task: RoundTask) -> str:
    return json.dumps([task.prompt, task.exchange.tools], sort_keys=True)


def round_task(line: dict[str, Any], config: Config, *, is_accepted: bool) -> RoundTask:
    """The task of a line of the task file. Only an accepted answer is a reference for the judge."""
    metadata = line["metadata"]
    parts = trace_parts(line)
    configured = config.rollout.agent
    agent: Literal["reply", "recorded", "program"]
    if isinstance(configured, AgentProgramSettings):
        agent = "program"
    else:
        agent = configured or ("recorded" if parts.tools else "reply")
    has_recordings = agent == "recorded" and bool(parts.tools)
    right = {"reference": metadata.get("reference"), GROUND_TRUTH: raw_ground_truth(line)}
    given = {name: value for name, value in right.items() if value}
    return RoundTask(
        task_id=line["task_id"],
        exchange=Exchange(
            query=line["main_query"],
            answer="",
            history=tuple(line["init_messages"]),
            tools=parts.tools,
            reference=line["answer"] if is_accepted else "",
            line={"metadata": given} if given else {},
        ),
        prompt=line["prompt"],
        output_tokens=metadata.get("output_tokens", 0),
        conversation=conversation_key(metadata["conversation_id"], metadata["trace_id"]),
        prompt_tokens=_tokens_sent(metadata, config),
        agent=agent,
        reply=_reply(line, parts.steps) if is_accepted and RECORDED & {*config.training.kinds} else (),
        is_of_teacher=config.is_teacher(metadata["model"], metadata["adapter"]),
        line=program_line(line, is_accepted=is_accepted) if agent == "program" else {},
        steps=parts.steps if has_recordings else (),
        errors=parts.errors if has_recordings else (),
        sends_reasoning=has_recordings and sends_reasoning([*line["prompt"], *parts.steps]),
    )


def program_line(line: TaskLine, *, is_accepted: bool) -> TaskLine:
    """The task of a line as the user's agent and judge get it: `metadata.answer` is the right answer as judges of
    AgentJet expect it. That of a data set is unchanged; of a reply, it is the result that `math-equal` would compare
    with, and empty for a rejected one."""
    whole = whole_line(line)
    if reference := line["metadata"].get("reference"):
        answer = right_answer(reference)
    elif is_traced(line):
        answer = (right_answer(line["answer"]) or line["answer"]) if is_accepted else ""
    else:
        return whole
    return {**whole, "metadata": {**whole["metadata"], "answer": answer}}


def _reply(line: dict[str, Any], steps: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """The messages of an accepted reply, to imitate; none for one that the model did not write as text."""
    if not line["answer"].strip() or orjson.loads(line["metadata"]["structured_json"]) is not None:
        return ()
    reasoning = line["metadata"].get("answer_reasoning")
    thought = {"reasoning_content": reasoning} if reasoning else {}
    return (*steps, {"role": "assistant", "content": line["answer"], **thought})


def _tokens_sent(metadata: dict[str, Any], config: Config) -> int:
    """The tokens of a prompt as this round's model counts them; 0 where they cannot be compared."""
    model, adapter = metadata["model"], metadata["adapter"]
    is_own = metadata["adapter_source"] == "id" or config.models_of(None).is_own(model, adapter)
    if not is_own or not (model or adapter) or Exclusion.INEXACT in config.takes.train.exclusions:
        return 0
    return int(metadata["prompt_tokens"])


def _unanswerable(task: RoundTask, split: Split, config: Config, *, is_accepted: bool) -> str:
    """Why no round may ask a task with tools; empty if one may. The settings, and which of its functions are finish
    tools, may be others than when it was chosen."""
    if not task.exchange.tools or task.agent == "program":
        return ""
    if task.agent == "reply":
        return WORDS[Exclusion.TOOLS].why
    rollout = config.rollout
    results = trace_results(task.exchange.tools, task.steps, task.errors, rollout.finish_tools)
    if split is Split.TRAIN:
        may_ask = results.trains(use_uncalled=rollout.tools.uncalled == "use")
    else:
        may_ask = results.gates(accepted=is_accepted)
    if may_ask:
        return ""
    if results.calls:
        return WORDS[Exclusion.UNRECORDED].why
    return "the agent called no tool but those of `rollout.finish_tools`"


def _share(conn: Connection, found: RoundTasks, config: Config, redact: Redactor | None) -> None:
    """Read the recordings of all decided tasks once, for training and the gate."""
    for_train, for_gate = _offered(found.train), _offered(found.held_out)
    if not (for_train | for_gate) or config.rollout.tools.share == "off":
        return
    with (
        closing(RecordingPool(Split.TRAIN, for_train)) as train,
        closing(RecordingPool(Split.HELD_OUT, for_gate)) as gate,
    ):
        for split, line in recorded_lines(conn):
            recording = recording_of(redact(line) if redact is not None else line, split)
            results = results_of(recording, config.rollout.finish_tools)
            for pool in (train, gate):
                pool.add(recording, results)
        found.shared, found.shared_gate = train.shared(), gate.shared()


def _offered(tasks: Iterable[RoundTask]) -> set[str]:
    """The digests of the tools of recorded rollouts."""
    recorded = (task for task in tasks if task.agent == "recorded")
    return {tool.digest for task in recorded for tool in tools_by_name(task.exchange.tools).values()}
