"""The formats of `flywheel export`: how task lines become records, and which writer stores them.

AgentJet and Trinity-RFT are AgentScope's own trainers. Those of TRL are conversational: prompts for GRPO, whole
replies for SFT, pairs of replies for DPO. That of verl has the columns of its `RLHFDataset`. `csv` and `parquet` are
for analysis: a row for each reply, a column for each criterion.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal

import orjson

from flywheel.errors import ExportError
from flywheel.records.states import ACCEPTED, TaskState
from flywheel.records.tool_calls import said_in
from flywheel.records.trace import ChatMessage
from flywheel.system import own_package
from flywheel.system.files import json_line
from flywheel.training.data import chat_messages
from flywheel.training.data.chat_messages import LeftOut
from flywheel.training.data.pairs import Reply

if TYPE_CHECKING:
    from flywheel.store.views.task_list import ExportedTask

Record = dict[str, Any]

_TEXT_MESSAGE = frozenset({"role", "content"})
"""The keys of a message that is only text."""
AGENTJET = ("main_query", "init_messages", "task_id", "env_type", "metadata")
DATA_SOURCE = "flywheel"
"""verl chooses the reward function by this name. It has none for it, so that one must be configured."""
ROW_GROUP = 1000
"""Rows that are written together."""
FACTS: Final = (
    "conversation_id", "trace_id", "span_id", "agent_name", "model", "adapter", "source", "split", "started_at",
    "ended_at", "input_tokens", "output_tokens",
)  # fmt: skip
"""Columns from the metadata of the task line."""
COLUMNS: Final = ("task_id", *FACTS, "state", "accepted", "score", "rubric")
TEXTS: Final = ("question", "answer", "prompt")
DECIDED: Final = {
    **dict.fromkeys(ACCEPTED, True),
    TaskState.REJECTED: False,
}


class FormatName(StrEnum):
    AGENTJET = "agentjet"
    TRINITY = "trinity"
    TRL_GRPO = "trl-grpo"
    TRL_SFT = "trl-sft"
    TRL_DPO = "trl-dpo"
    VERL = "verl"
    CSV = "csv"
    PARQUET = "parquet"


States = Literal["accepted", "pending", "rejected", "all"]
Splits = Literal["train", "held-out", "all"]
Write = Callable[[Record], object]


@contextlib.contextmanager
def json_lines(file: BinaryIO, typed: frozenset[str]) -> Iterator[Write]:
    """Writes one JSON object per line, UTF-8."""
    yield lambda record: file.write(json_line(record))


@dataclass(frozen=True, slots=True)
class Format:
    """One export format."""

    name: FormatName
    suffix: str
    record: Callable[..., Record]
    """Converts one sample or, if `paired`, the better and the worse of two replies to one prompt. Raises LeftOut."""
    writer: Callable[[BinaryIO, frozenset[str]], contextlib.AbstractContextManager[Write]]
    """Takes the file and the typed columns of all records that will be written. When it ends, the file has all of
    them and stays open."""
    paired: bool = False
    is_table: bool = False
    """One row for each reply, in their order, for analysis and not for training."""

    def columns(self, record: Record) -> frozenset[str]:
        """What the writer must know of a record."""
        return frozenset(record) if self.is_table else typed_columns(record)


def typed_columns(record: Record) -> frozenset[str]:
    """The columns of a record whose type a reader cannot infer from records with fewer values.

    Readers infer the types of a JSONL file from its beginning (`datasets`: the first 10 MB). After a column of nulls,
    or of messages with text only, a number or a tool call would be an error.
    """
    return frozenset(name for name, value in record.items() if _has_own_type(value))


def _has_own_type(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, dict) and "role" in item and item.keys() != _TEXT_MESSAGE for item in value)
    return isinstance(value, float)


def agentjet(sample: ExportedTask) -> Record:
    """The fields of AgentJet's `Task`, for its `jsonl` task reader."""
    return {key: sample.line[key] for key in AGENTJET}


def trinity(sample: ExportedTask) -> Record:
    """A row for Trinity-RFT: `question` and `answer` for its workflows, `messages` for its SFT reader.

    `messages` and `tools` are JSON text, which its formatter decodes: lists of objects would be aligned to one schema
    by the `datasets` versions that it allows.
    """
    line = sample.line
    given = chat_messages.prompt(line)
    return {
        "task_id": line["task_id"],
        "system_prompt": "\n\n".join(m["content"] for m in given if m["role"] in ("system", "developer")),
        "question": line["question"],
        "answer": line["answer"],
        "prompt": json.dumps(given, ensure_ascii=False),
        "messages": json.dumps([*given, *chat_messages.reply(line)], ensure_ascii=False),
        "tools": chat_messages.tools(line),
    }


def grpo(sample: ExportedTask) -> Record:
    """A prompt; the other columns are what reward functions get as keyword arguments."""
    line = sample.line
    return {
        "prompt": chat_messages.prompt(line),
        "answer": line["answer"],
        "structured": line["metadata"]["structured_json"],
        "tools": chat_messages.tools(line),
        "task_id": line["task_id"],
        "agent_name": line["metadata"]["agent_name"],
        "score": sample.score,
    }


def sft(sample: ExportedTask) -> Record:
    """Prompt and completion, so that the loss is on this reply alone: earlier turns had verdicts of their own."""
    line = sample.line
    return {
        "prompt": chat_messages.prompt(line),
        "completion": chat_messages.reply(line),
        "tools": chat_messages.tools(line),
        "task_id": line["task_id"],
        "score": sample.score,
    }


def dpo(chosen: ExportedTask, rejected: ExportedTask) -> Record:
    """One prompt with a better and a worse reply."""
    return {
        "prompt": chat_messages.prompt(chosen.line),
        "chosen": chat_messages.reply(chosen.line),
        "rejected": chat_messages.reply(rejected.line),
        "tools": chat_messages.tools(chosen.line),
        "chosen_score": chosen.score,
        "rejected_score": rejected.score,
        "chosen_task_id": chosen.line["task_id"],
        "rejected_task_id": rejected.line["task_id"],
    }


def reply_of(sample: ExportedTask) -> tuple[bytes, Reply[int]]:
    """The hash of a reply's prompt and tools, and the reply with that of all it says. Raises LeftOut for one that
    cannot be in a pair."""
    line = sample.line
    said = said_in(chat_messages.reply(line))
    if sample.score is None:
        raise LeftOut("there is no score")
    of_prompt = _digest([chat_messages.prompt(line), chat_messages.tools(line)])
    return of_prompt, Reply(sample.id, _digest(said), sample.score)


def _digest(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def verl(sample: ExportedTask) -> Record:
    line = sample.line
    about = line["metadata"]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [_flat(message) for message in chat_messages.prompt(line)],
        "ability": "agent",
        "reward_model": {"style": "rule", "ground_truth": line["answer"]},
        "extra_info": {
            "task_id": line["task_id"],
            "split": about["split"],
            "question": line["question"],
            "answer": line["answer"],
            "agent_name": about["agent_name"],
            "score": sample.score,
            "tools_json": chat_messages.tools(line),
            "structured_json": about["structured_json"],
        },
    }


def _flat(message: ChatMessage) -> ChatMessage:
    """The message with the arguments of tool calls as JSON text: they differ by tool, and a column has one type."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {"name": call["function"]["name"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def verl_schema(pa: Any, typed: frozenset[str]) -> Any:
    """The columns. Messages have the fields of tool calls only if one of them has any: a template that tests whether
    a message has tool calls would take a null for one."""
    text = pa.string()
    message = [("role", text), ("content", text)]
    if "prompt" in typed:
        function = pa.struct([("name", text), ("arguments", text)])
        call = pa.struct([("id", text), ("type", text), ("function", function)])
        message += [("tool_calls", pa.list_(call)), ("tool_call_id", text), ("name", text)]
    about = ("task_id", "split", "question", "answer", "agent_name", "tools_json", "structured_json")
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct(message))),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct([*((name, text) for name in about), ("score", pa.float64())])),
        ]
    )


@contextlib.contextmanager
def parquet(
    file: BinaryIO, typed: frozenset[str], *, schema: Callable[[Any, frozenset[str]], Any]
) -> Iterator[Write]:
    """Writes records with the columns of a schema, which `schema` makes of pyarrow and the typed columns."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter
    except ImportError as error:
        raise ExportError(
            "write parquet",
            "pyarrow is not installed",
            f"Install it: pip install {own_package.requirement('cpu')} (or [gpu]), or just: pip install pyarrow.",
        ) from error
    columns = schema(pa, typed)
    rows: list[Record] = []

    def write_rows() -> None:
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=columns))
            rows.clear()

    def write(record: Record) -> None:
        # Through JSON: lone surrogates, which traces can hold, become "?" as in JSON lines.
        rows.append(orjson.loads(json_line(record)))
        if len(rows) >= ROW_GROUP:
            write_rows()

    with ParquetWriter(file, columns) as writer:
        yield write
        write_rows()


def row(sample: ExportedTask) -> Record:
    """A reply. Criteria are named by their rubric, so that those of two rubrics are never one column:
    `value.RUBRIC.ID` and `passed.RUBRIC.ID`."""
    line, rubric = sample.line, sample.rubric
    # The hash of the rubric, or that of a filter chain behind its mark.
    mark, short = rubric[: rubric.find(":") + 9], dict[str, Any]()
    for each in sample.results:
        short[f"value.{mark}.{each['criterion']}"] = each["value"]
        short[f"passed.{mark}.{each['criterion']}"] = each["passed"]
    return {
        "task_id": line["task_id"],
        **{name: line["metadata"][name] for name in FACTS},
        "state": sample.state.value,
        "accepted": DECIDED.get(sample.state),
        "score": sample.score,
        "rubric": rubric,
        **short,
        "question": line["question"],
        "answer": line["answer"],
        "prompt": json.dumps(line["prompt"], ensure_ascii=False),
    }


def named(columns: frozenset[str]) -> dict[str, str]:
    """The columns of a table in their order, with their names in it. If there are criteria of one rubric alone, they
    are named without it."""
    criteria = sorted(columns.difference(COLUMNS, TEXTS), key=lambda name: (name.partition(".")[2], name))
    parts = {name: name.split(".", 2) for name in criteria}
    is_one = len({rubric for _, rubric, _ in parts.values()}) == 1
    of_criteria = {name: f"{kind}.{of}" if is_one else name for name, (kind, _, of) in parts.items()}
    return {**dict(zip(COLUMNS, COLUMNS, strict=True)), **of_criteria, **dict(zip(TEXTS, TEXTS, strict=True))}


@contextlib.contextmanager
def csv_rows(file: BinaryIO, columns: frozenset[str]) -> Iterator[Write]:
    """Writes RFC 4180 in UTF-8, texts as they are. What is missing is empty."""
    names = named(columns)
    rows = csv.writer(SimpleNamespace(write=lambda text: file.write(text.encode("utf-8", "replace"))))
    rows.writerow(names.values())
    yield lambda record: rows.writerow([record.get(name) for name in names])


@contextlib.contextmanager
def parquet_rows(file: BinaryIO, columns: frozenset[str]) -> Iterator[Write]:
    """Writes the table as parquet. What is missing is null."""
    names = named(columns)

    def schema(pa: Any, _: frozenset[str]) -> Any:
        types = {
            "score": pa.float64(), "value": pa.float64(), "accepted": pa.bool_(), "passed": pa.bool_(),
            "input_tokens": pa.int64(), "output_tokens": pa.int64(),
        }  # fmt: skip
        return pa.schema([(to, types.get(name.partition(".")[0], pa.string())) for name, to in names.items()])

    with parquet(file, columns, schema=schema) as write:
        yield lambda record: write({to: record.get(name) for name, to in names.items()})


FORMATS: Final = {
    known.name: known
    for known in (
        Format(FormatName.AGENTJET, "jsonl", agentjet, json_lines),
        Format(FormatName.TRINITY, "jsonl", trinity, json_lines),
        Format(FormatName.TRL_GRPO, "jsonl", grpo, json_lines),
        Format(FormatName.TRL_SFT, "jsonl", sft, json_lines),
        Format(FormatName.TRL_DPO, "jsonl", dpo, json_lines, paired=True),
        Format(FormatName.VERL, "parquet", verl, partial(parquet, schema=verl_schema)),
        Format(FormatName.CSV, "csv", row, csv_rows, is_table=True),
        Format(FormatName.PARQUET, "parquet", row, parquet_rows, is_table=True),
    )
}
