"""What a source tells: the replies of agents, and where reading resumes. Plain data, no I/O.

Structs, because a long history makes millions of them: a frozen dataclass takes ten times as long to make.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import Struct

from flywheel.exclusion import ANY_MODEL, TrainedModels
from flywheel.states import SkipReason

ChatMessage = dict[str, Any]
"""One message in the OpenAI chat form: `role`, `content` (text) and, where they apply, `name`, `tool_calls`,
`tool_call_id`."""


class SpanStatus(StrEnum):
    UNSET = "unset"
    OK = "ok"
    ERROR = "error"


class Reply(Struct, frozen=True):
    """One agent invocation, with everything a task needs. `skip` says why it must not become one, if so.

    `history` is the conversation before the reply, the system prompt first; `request` is what this agent was handed
    (for the last stage of a pipeline that is another agent's text, while `query` is what the user had asked).
    `trajectory` holds the model and tool messages between request and answer, `errors` the steps that failed on the
    way ("tool search: TimeoutError: …"). `reference` is the right answer, where a source knows it.
    `adapter` is the version of the alias that answered, empty for the base model and where that is not known;
    `adapter_source` says what told it: the response's `id`, the `model` of the response, the deployment `history`, or
    nothing (empty). `prompt_reason` says why the prompt is not exactly what the model was sent, empty where nothing
    is known to be missing; `prompt_tokens` are the input tokens of the first model call, 0 where they are not known.
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
    model: str = ""
    adapter: str = ""
    adapter_source: str = ""
    turn: int = 0
    history: tuple[ChatMessage, ...] = ()
    trajectory: tuple[ChatMessage, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    images: tuple[str, ...] = ()
    structured: dict[str, Any] | None = None
    errors: tuple[str, ...] = ()
    reference: str = ""
    status: SpanStatus = SpanStatus.OK
    service: str = ""
    user: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    prompt_reason: str = ""
    skip: SkipReason | None = None
    skip_detail: str = ""


class DeadRow(Struct, frozen=True):
    """A row of a source that could not be understood; it costs itself and nothing else."""

    rowid: int
    span_id: str
    trace_id: str
    error: str
    excerpt: str = ""


class Cursor(Struct, frozen=True):
    """Where reading resumes: every row up to and including `rowid` has been seen.

    `identity` is the file's device and inode, `fingerprint` a hash of the schema, `anchor` the id of the row at
    `rowid`. When one of them no longer holds, the generation is counted up and reading starts over (the ledger's
    keys stop duplicates). For a file of lines, `rowid` is the number of bytes read.
    """

    rowid: int = 0
    identity: str = ""
    fingerprint: str = ""
    generation: int = 0
    anchor: str = ""


class Checkpoint(Struct, frozen=True):
    """What is remembered of a trace: where its rows are (in `generation`), and what they were when it was told.

    `digest` is the sum of the hashes of its rows, 0 of a trace that was not told yet. An open trace is waited for.
    """

    trace_id: str
    rowids: tuple[int, ...]
    digest: int = 0
    generation: int = 0
    is_open: bool = False


class Selection(Struct, frozen=True):
    """Which replies become tasks beyond the visible ones, by the agent's name, and which models' are trained on."""

    include: frozenset[str] = frozenset()
    exclude: frozenset[str] = frozenset()
    models: TrainedModels = ANY_MODEL


def get_path(value: Any, *keys: str) -> Any:
    """The value below nested keys, or None where there is no such path."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value
