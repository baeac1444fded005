"""What readers find in a source: replies, recorded model calls, dead rows, and where to resume. Plain data, no I/O.

They are structs because a long history creates millions of them, and a frozen dataclass takes ten times as long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, TypedDict

from msgspec import Struct

from flywheel.records.exclusion import ANY_MODEL, TrainedModels
from flywheel.records.privacy import NOBODY, PrivateNames
from flywheel.records.states import SkipReason

ChatMessage = dict[str, Any]
"""One message in the OpenAI chat form: `role`, `content` (text) and, where they apply, `name`, `tool_calls`,
`tool_call_id`, `reasoning_content`. `reasoning_sent` is False where later calls were not sent this reasoning again; a
message of the model with a `weight` of 0 is context, and not trained on."""
ToolDefinition = dict[str, Any]
"""An offered tool in the OpenAI chat form."""


class ToolFunction(TypedDict):
    """A function that is called; `arguments` are JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A tool call of a message, in the OpenAI chat form."""

    id: str
    type: str
    function: ToolFunction


LATEST_NS: Final = 10**19
"""Times from here on (in nanoseconds since 1970: the year 2286), and before 1970, are refused where they are read: at
the ends of the calendar, arithmetic with times overflows."""

TOOL_ERROR: Final = re.compile(r"\A(?:Error|[A-Z]\w*(?:Error|Exception)): ")
"""How agents begin the result of a tool that raised or does not exist."""


class SpanStatus(StrEnum):
    UNSET = "unset"
    OK = "ok"
    ERROR = "error"


class Reply(Struct, frozen=True):
    """One agent invocation, with everything that a task needs.

    - `query`: what the user asked. `request`: what this agent was called with; for the last stage of a pipeline that
      is another agent's text.
    - `root`: the conversation whose split this one takes; empty for its own.
    - `history`: the conversation before the reply, the system prompt first. `turn`: the number of earlier turns.
    - `trajectory`: the model and tool messages between request and answer.
    - `errors`: the steps that failed ("tool search: TimeoutError: …").
    - `reasoning`: of the model before its answer, if that is recorded.
    - `is_refusal`: the answer is the text of the model's refusal.
    - `reference`: the right answer, if the source has one.
    - `adapter`: the version of the alias that answered; empty for the base model or if unknown. `adapter_source`:
      where that is recorded: the `id` or the `model` of the response, the deployment `history`, or nowhere (empty).
    - `prompt`: the messages that the model was sent first, from the call log; empty if that has no such call.
      `parameters`: the other parameters of that call. `calls`: the request ids of all model calls, `missing` those of
      them that were not found in the call log.
    - `extra`: what a task file's line has besides, by key; `metadata` in it are the further keys of its metadata.
    - `prompt_reason`: why the prompt is not exactly what the model was sent; empty if nothing is known to be missing.
    - `input_tokens`, `output_tokens`: of all model calls. `prompt_tokens`: input tokens of the first. 0: unknown.
    - `skip`: why the reply becomes no task, if so; `skip_detail`: the same for people.
    """

    span_id: str
    trace_id: str
    conversation_id: str
    agent: str
    query: str
    answer: str
    started_at: datetime
    ended_at: datetime
    request: str = ""
    root: str = ""
    model: str = ""
    adapter: str = ""
    adapter_source: str = ""
    turn: int = 0
    history: tuple[ChatMessage, ...] = ()
    trajectory: tuple[ChatMessage, ...] = ()
    tools: tuple[ToolDefinition, ...] = ()
    images: tuple[str, ...] = ()
    structured: dict[str, Any] | None = None
    errors: tuple[str, ...] = ()
    reasoning: str = ""
    is_refusal: bool = False
    reference: str = ""
    status: SpanStatus = SpanStatus.OK
    service: str = ""
    user: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    prompt_reason: str = ""
    prompt: tuple[ChatMessage, ...] = ()
    parameters: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    calls: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    skip: SkipReason | None = None
    skip_detail: str = ""

    def without_content(self) -> Reply:
        """What is stored of a private reply: that it exists."""
        return Reply(
            span_id=self.span_id,
            trace_id=self.trace_id,
            conversation_id="",
            agent="",
            query="",
            answer="",
            started_at=self.started_at,
            ended_at=self.ended_at,
            skip=SkipReason.PRIVATE,
        )


class ModelAnswer(Struct, frozen=True):
    """One choice of a response. `tool_calls` are in the OpenAI chat form, with arguments as text.

    If it `is_refusal`, its content is the text of the refusal.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = ""
    is_refusal: bool = False


class ModelCall(Struct, frozen=True):
    """The request and the assembled response.

    - `version`: the adapter that answered, or `base`. `model`: the model as requested.
    - `status`: of the HTTP response, 0 if none began. `error`: why there is no answer, or why it ended early.
    - `is_interrupted`: the response was not sent to its end; `answers` have what was sent.
    - `messages`: as sent, in the OpenAI chat form; those of `/v1/responses` and `/v1/messages` are
      converted, with the instructions.
    - `tools`: in the OpenAI chat form. `parameters`: the other keys of the request.
    - `user`: the `user` of the request. `credential`: a hash of the Authorization header, empty without one.
    - `retry`: which repetition by the client this is, 0 for the first request.
    - `answers`: by choice. The numbers of tokens are None where the response does not say them.
    """

    request_id: str
    path: str = "/v1/chat/completions"
    version: str = ""
    model: str = ""
    started_ns: int = 0
    ended_ns: int = 0
    status: int = 200
    error: str = ""
    is_interrupted: bool = False
    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[ToolDefinition, ...] = ()
    parameters: dict[str, Any] = {}
    user: str = ""
    credential: str = ""
    retry: int = 0
    answers: tuple[ModelAnswer, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class CallOutline(Struct, frozen=True):
    """What says of a recorded call which one it continues; hashes in place of texts.

    - `conversation`, `trace_id`: those that it has if it begins them.
    - `beginnings`: hashes of its messages up to each answer, with their numbers of messages. `ends`: hashes of all
      messages with each answer to them. `last_question`: the number of the last message in which a user asks
      something, 0 without one (frameworks send reminders as messages of the user).
    - `tool_ids`: hashes of the ids of tool calls in its messages. `own_tool_ids`: of those in its answers.
    - `is_answered`: its answer asks for no tool. `is_skipped`: it is no part of a conversation, and nothing continues
      it.
    """

    request_id: str
    conversation: str
    trace_id: str
    model: str
    started_ns: int
    ended_ns: int
    beginnings: tuple[tuple[int, bytes], ...] = ()
    ends: tuple[bytes, ...] = ()
    last_question: int = 0
    tool_ids: tuple[bytes, ...] = ()
    own_tool_ids: tuple[bytes, ...] = ()
    is_answered: bool = True
    is_skipped: bool = False


class PlacedCall(Struct, frozen=True):
    """A recorded call that has its place in a conversation. The calls with one `trace_id`, from a question to its
    answer, are a reply; `root` is the conversation whose split it takes.

    `is_answered`: the call asks for no tool. `is_continued`: another call goes on from it. `is_erased`: it goes on
    from one that was erased.
    """

    request_id: str
    trace_id: str
    conversation: str
    root: str
    started_ns: int
    ended_ns: int
    is_answered: bool = True
    is_continued: bool = False
    is_erased: bool = False


class DeadRow(Struct, frozen=True):
    """A row of a source that cannot be parsed. It affects no other row. `conversation_id` and `user` are those that
    it names, as far as it can be read: it is erased with them."""

    rowid: int
    span_id: str
    trace_id: str
    error: str
    excerpt: str = ""
    conversation_id: str = ""
    user: str = ""


class Cursor(Struct, frozen=True):
    """Where reading resumes: every row up to and including `rowid` has been read.

    `identity` is the file's device and inode, `fingerprint` a hash of the schema, `anchor` the id of the row at
    `rowid`. If one of them has changed, `generation` is increased and reading starts over; the ledger's keys prevent
    duplicates. For a JSONL file, `rowid` is the number of bytes read.
    """

    rowid: int = 0
    identity: str = ""
    fingerprint: str = ""
    generation: int = 0
    anchor: str = ""


class Checkpoint(Struct, frozen=True):
    """The state of a trace when it was last read: its rows by number (in `generation`), and their contents.

    `digest` is the sum of the hashes of the rows, 0 if the trace was not extracted yet. An open trace may get more
    rows, or must be extracted again.
    """

    trace_id: str
    rowids: tuple[int, ...]
    digest: int = 0
    generation: int = 0
    is_open: bool = False


class ReplySelection(Struct, frozen=True):
    """Agents, by name, whose replies become tasks although another agent called them, or never; trained models; and
    of whom nothing is stored."""

    include: frozenset[str] = frozenset()
    exclude: frozenset[str] = frozenset()
    models: TrainedModels = ANY_MODEL
    private: PrivateNames = NOBODY


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning in a message of the model, under a key of its own; empty if it has none."""
    texts = (message.get(key) for key in ("reasoning", "reasoning_content", "thinking"))
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def refusal_of(message: ChatMessage) -> str:
    """The text of the model's refusal in a message: under a key of its own, or in parts; empty if it has none."""
    own, content = message.get("refusal"), message.get("content")
    if isinstance(own, str) and own.strip():
        return own
    parts = content if isinstance(content, list) else []
    texts = [part.get("refusal") for part in parts if isinstance(part, dict) and part.get("type") == "refusal"]
    return "\n".join(text for text in texts if isinstance(text, str) and text.strip())


def sends_reasoning(messages: Iterable[ChatMessage]) -> bool:
    """Whether an agent sends the model's reasoning again with later calls, as far as these messages show: a task's
    prompt and steps."""
    said = (message for message in messages if message.get("role") == "assistant")
    return any(message.get("reasoning_sent", True) and reasoning_of(message) for message in said)


def is_reminder(text: str) -> bool:
    """Whether a text is one `<system-reminder>`, which frameworks send to a model as a message of the user."""
    text = text.strip()
    begin, end = "<system-reminder>", "</system-reminder>"
    return text.startswith(begin) and text.find(end) == len(text) - len(end)


def get_path(value: Any, *keys: str) -> Any:
    """The value at a path of keys in nested mappings; None if there is none."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value
