"""Makes replies of traces: query, answer, history, trajectory, and why a reply becomes no task.

`extract` is pure: packed rows in, a batch with ledger entries out. It runs in the reader's thread, or in a worker
process while a long history is read.

Interruptions look different in each client. AgentScope 1.0.7 exports no agent span at all, so the reply ends as
unfinished. Later 1.x ends the span with `asyncio.CancelledError`. 2.x ends it as if all were well, with a fixed
sentence; only the last model call (finish reason) or tool result (`is_interrupted`, state) shows the interruption. A
returned message may also say so (`_is_interrupted` in its metadata). The fixed sentence alone proves nothing, as a
model may say it: it counts if no model call of the reply produced it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

from msgspec.structs import replace

from flywheel.records import exclusion
from flywheel.records.chat import Message, blocks_of, chat_of, images_of, is_refusal, text_of, texts_in, unread_in
from flywheel.records.exclusion import TrainedModels
from flywheel.records.repeated_ids import runs_of
from flywheel.records.skipping import AWAITS_TOOLS
from flywheel.records.states import SkipReason
from flywheel.records.task import NO_CONVERSATION, Batch, Entry, RawTrace, entry_of, storable
from flywheel.records.tool_calls import FINISH_FUNCTIONS
from flywheel.records.trace import (
    ChatMessage,
    DeadRow,
    ModelCall,
    Reply,
    ReplySelection,
    SpanStatus,
    is_reminder,
)
from flywheel.sources.spans import attributes as at
from flywheel.sources.spans.recorded_calls import inexact_because, question_of, with_calls
from flywheel.sources.spans.repeated_spans import divided, true_id
from flywheel.sources.spans.span import ANSWERS, NOTHING, QUESTIONS, UNKNOWN, Attributes, Span, SpanKind
from flywheel.sources.spans.trace_tree import Role, Tree
from flywheel.sources.spans.trajectory import Trajectory, error_text, exception, is_interrupted
from flywheel.sources.spans.truncation import cut_answer, cut_question, cuts_in, marked
from flywheel.sources.studio.schema import Schema, excerpt_of

INTERRUPTION_SENTENCES: Final = frozenset(
    {
        "I noticed that you have interrupted me. What can I do for you?",
        "I notice the interruption. How can I help you?",
    }
)
NO_CALLS: Final[Mapping[str, ModelCall]] = MappingProxyType({})
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
BAD_CONTENT = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError)
"""Raised by content of an unexpected shape. It makes its own reply dead, never the batch."""
_FINISH_NAMES: Final = re.compile(rf'"(?:{"|".join(FINISH_FUNCTIONS)})\\?"'.encode())
"""One of them as a JSON text, also within another text."""
_GROUP: Final = 256
"""Replies that become entries together. Larger groups save little time and hold more memory."""


def extract(
    traces: Iterable[RawTrace],
    schema: Schema,
    selection: ReplySelection,
    source: str,
    calls: Mapping[str, ModelCall] = NO_CALLS,
) -> Batch:
    """The entries and dead rows of traces, without a cursor. `source` names the database, `calls` are recorded calls
    by request id."""
    entries: list[Entry] = []
    dead: list[DeadRow] = []
    kinds: Counter[str] = Counter()
    replies: list[Reply] = []
    private: dict[str, None] = {}
    left_out: dict[str, int] = {}
    for rows, is_open in traces:
        own, bad = replies_of(
            schema, rows, selection,
            is_open=is_open, kinds=kinds, calls=calls, private=private, left_out=left_out,
        )  # fmt: skip
        replies += own
        dead += bad
        if len(replies) >= _GROUP:
            entries += entries_or_dead(replies, source, selection.models, dead)
            replies.clear()
    entries += entries_or_dead(replies, source, selection.models, dead)
    return Batch(
        None,
        entries=tuple(entries),
        dead=tuple(dead),
        kinds=dict(kinds),
        private_calls=tuple(private),
        left_out=left_out,
    )


def entries_or_dead(replies: Sequence[Reply], source: str, models: TrainedModels, dead: list[DeadRow]) -> list[Entry]:
    """The entries of replies. A reply that cannot be written becomes a dead row."""
    entries: list[Entry] = []
    for reply in replies:
        try:
            entries.append(entry_of(reply, source, models))
        except BAD_CONTENT as error:
            why = storable(f"it cannot be written as JSON: {error}")[:2000]
            whose = reply.conversation_id, reply.user
            dead.append(DeadRow(0, reply.span_id, reply.trace_id, why, storable(reply.answer)[:500], *whose))
    return entries


def replies_of(
    schema: Schema,
    rows: Mapping[int, bytes],
    selection: ReplySelection,
    *,
    is_open: bool,
    kinds: Counter[str],
    calls: Mapping[str, ModelCall] = NO_CALLS,
    private: dict[str, None] | None = None,
    left_out: dict[str, int] | None = None,
) -> tuple[list[Reply], list[DeadRow]]:
    """The replies and dead rows of one trace, from its packed rows by number.

    `is_open` if spans are missing that may still arrive. `kinds` counts the spans of traces without an agent.
    `calls` are recorded calls by request id. Of a private trace only its replies and dead rows are counted, and the
    request ids of its calls are added to `private`; a run of it that does not refuse is not private (`runs_of`). If
    span ids repeat in it, `left_out` gets the number of spans that fit several runs.
    """
    read: list[Span] = []
    dead: list[DeadRow] = []
    for rowid in sorted(rows):
        span = schema.read(rowid, rows[rowid])
        if isinstance(span, DeadRow):
            dead.append(span)
        else:
            read.append(span)
    spans = {span.span_id: span for span in read}
    unplaced: list[Span] = []
    if is_divided := len(spans) < len(read):
        spans, unplaced = divided(read)
        if left_out is not None:
            left_out[read[0].trace_id] = sum(span.kind is not SpanKind.AGENT for span in unplaced)
    spans = with_calls(marked(spans), calls)
    told = [*spans.values(), *unplaced]
    replies, dead = _replies_of(spans, dead, rows, selection, unplaced, is_open=is_open, kinds=kinds)
    if is_divided:
        replies = [replace(reply, span_id=true_id(reply.span_id)) for reply in replies]
        dead = [replace(row, span_id=true_id(row.span_id)) for row in dead]
    conversations, users = _named(told, [schema.named_in(data) for data in rows.values()]) if dead else ([], [])
    is_all = selection.private.cover(users=users, conversations=conversations, agents=())
    refusing = told if is_all else [span for span in (*told, *spans.values()) if _is_private(span, selection)]
    if is_all or refusing:
        # Rows that cannot be read may have begun at any time.
        dead = [replace(row, error="it cannot be read, and is private", excerpt="") for row in dead]
        runs = runs_of(span.started_ns for span in told)
        covered = [run for run in runs if any(run[0] <= span.started_ns <= run[1] for span in refusing)]
        replies = [reply.without_content() if _is_within(reply, covered) else reply for reply in replies]
        if private is not None:
            own = (span for span in told if any(run[0] <= span.started_ns <= run[1] for run in covered))
            private |= {span.request_id: None for span in own if span.request_id}
    elif dead:
        whose = {"conversation_id": next(iter(conversations), ""), "user": next(iter(users), "")}
        dead = [replace(row, **whose) for row in dead]
    return replies, dead


def _is_within(reply: Reply, runs: Sequence[tuple[int, int]]) -> bool:
    """Whether a reply began in one of these runs."""
    return any(_time(first) <= reply.started_at <= _time(last) for first, last in runs)


def _named(spans: Sequence[Span], rows: Sequence[tuple[list[str], list[str]]]) -> tuple[list[str], list[str]]:
    """The conversations and the users of a trace with rows that cannot be read."""
    conversations = [span.conversation_id for span in spans]
    conversations += [name for names, _ in rows for name in names]
    users = [*map(at.user_id, spans), *(name for _, names in rows for name in names)]
    return [name for name in conversations if name not in NO_CONVERSATION], [name for name in users if name]


def _is_private(span: Span, selection: ReplySelection) -> bool:
    try:
        return at.is_private(span, selection.private)
    except BAD_CONTENT:
        return True  # Its names cannot be read.


def _replies_of(
    spans: dict[str, Span],
    dead: list[DeadRow],
    rows: Mapping[int, bytes],
    selection: ReplySelection,
    unplaced: Sequence[Span],
    *,
    is_open: bool,
    kinds: Counter[str],
) -> tuple[list[Reply], list[DeadRow]]:
    ambiguous = [span for span in unplaced if span.kind is SpanKind.AGENT]
    dead += [_dead(span, rows, "its trace has several spans with the id of its parent") for span in ambiguous]
    unread = {span.span_id for span in unplaced}
    tree = Tree(spans, {row.span_id for row in dead} | unread)
    if not tree.is_plain and (cyclic := tree.cyclic()):
        for span in cyclic:
            dead.append(_dead(span, rows, "its parents form a circle"))
            del spans[span.span_id]
        tree = Tree(spans, {row.span_id for row in dead} | unread)
    if not is_open and not tree.agents and not tree.missing_agents and (callers := tree.callers()):
        spans |= {span.span_id: replace(span, kind=SpanKind.AGENT) for span in callers}
        tree = Tree(spans, {row.span_id for row in dead} | unread)
    if not tree.agents:
        kinds.update(span.kind.value for span in spans.values())
    replies: list[Reply] = []
    for agent in tree.agents:
        try:
            reply = finished_reply(tree, agent, selection)
        except BAD_CONTENT as error:
            dead.append(_dead(agent, rows, f"its content cannot be read: {error}"))
            continue
        if is_open:
            reply = replace(reply, skip=SkipReason.UNFINISHED, skip_detail="a span above the agent's has not arrived")
        replies.append(reply)
    if tree.missing_agents:
        replies += _missing_agents(tree, selection)
    return replies, dead


def _missing_agents(tree: Tree, selection: ReplySelection) -> Iterator[Reply]:
    for parent, children in tree.missing_agents.items():
        try:
            yield unfinished_reply(tree, parent, children, selection)
        except BAD_CONTENT:
            # The children cannot be read either; all that is known is that the reply existed.
            bare = [replace(child, attributes=Attributes(), kind=SpanKind.OTHER, events=()) for child in children]
            yield unfinished_reply(Tree({span.span_id: span for span in bare}), parent, bare, selection)


def _dead(span: Span, rows: Mapping[int, bytes], error: str) -> DeadRow:
    why = storable(error)[:2000]
    return DeadRow(span.rowid, span.span_id, span.trace_id, why, excerpt_of(rows[span.rowid]))


def finished_reply(tree: Tree, agent: Span, selection: ReplySelection) -> Reply:
    """The reply of an agent span. Raises ReprError if its texts are garbled."""
    placement = tree.placement(agent)
    calls = Trajectory(tree.own(agent.span_id))
    handed = at.input_messages(agent)
    output = at.agent_output(agent)
    if not at.has_messages(agent) and agent.status is not SpanStatus.ERROR:
        output = calls.returned()
    answer = text_of(output) if output else ""
    request = _request(handed)
    conversation = calls.first_input()
    resumed: tuple[ChatMessage, ...] = ()
    if not handed:
        conversation, resumed = _resumed(conversation)
        request = conversation[-1]["content"] if conversation and conversation[-1]["role"] != "system" else ""
    history, turn = _history(conversation, request, handed)
    given = conversation + list(resumed)
    asked = placement.asked if placement.role is Role.LAST else agent
    query = request if asked is agent else _request(at.input_messages(asked))
    images = tuple(dict.fromkeys(image for message in handed for image in images_of(message)))
    if not images and calls.first is not None and at.read_conversation(calls.first).has_media:
        question = question_of(at.input_messages(calls.first))
        images = tuple(dict.fromkeys(images_of(question))) if question is not None else ()
    name = at.agent_name(next(iter(tree.merged(agent)), agent))
    steps = calls.steps(answer, resumed)
    has_query = bool(query.strip() or images)
    cut = _what_was_cut(agent, asked, calls, (request, query), output, answer)
    skip, detail = _skip(agent, calls, output, answer, has_query, cut, placement.role, name, selection)
    if skip is None and calls.choices > 1:
        detail = f"first of {calls.choices} answers to the last model call"
    if calls.recorded is not None:
        reason = inexact_because(calls.recorded)
    else:
        reason = prompt_reason(calls.first, given, [*history, {"role": "user", "content": request or query}])
    parts = [*calls.unread(), *(f"a part of type {kind} in the answer" for kind in unread_in(output or {}))]
    unread = dict.fromkeys([*(f"{part} was not read" for part in parts), *cuts_in(agent), *calls.cut()])
    of_models = calls.of_models(selection.models)
    if skip is SkipReason.TRUNCATED or (
        skip in (SkipReason.ERROR, SkipReason.NO_ANSWER, SkipReason.NESTED)
        and all(map(_shows_nothing, tree.agents_above(agent) or [agent]))
    ):
        # Its calls are not claimed: a source of calls shows the reply.
        of_models |= {"calls": (), "missing": ()}
    return Reply(
        span_id=agent.span_id,
        trace_id=agent.trace_id,
        conversation_id=_conversation_id(agent, calls),
        root=agent.attributes.flywheel.root_conversation,
        agent=name,
        query=query,
        answer=answer,
        started_at=_time(agent.started_ns),
        ended_at=_time(agent.ended_ns),
        request=request,
        turn=turn,
        history=history,
        trajectory=steps,
        images=images,
        structured=_structured(agent, calls),
        errors=calls.errors(steps),
        reasoning=calls.reasoning_of(answer),
        is_refusal=(output is not None and is_refusal(output)) or calls.refuses(answer),
        status=agent.status,
        service=agent.service,
        user=at.user_id(agent),
        prompt_reason="; ".join(filter(None, (reason, *unread))),
        skip=skip,
        skip_detail=detail,
        **of_models,
    )


def _conversation_id(agent: Span, calls: Trajectory) -> str:
    """The conversation of an agent's span, or else of one below it: some applications name it there alone."""
    names = (span.conversation_id for span in (agent, *calls.own))
    return next((name for name in names if name not in ("", UNKNOWN)), agent.conversation_id)


def unfinished_reply(tree: Tree, parent_id: str, children: Sequence[Span], selection: ReplySelection) -> Reply:
    """The reply of an agent span that never arrived, from its children."""
    calls = Trajectory(tree.own(parent_id))
    conversation = calls.first_input()
    asked = [m["content"] for m in conversation if m["role"] == "user" and not is_reminder(m["content"])]
    request = asked[-1] if asked else ""
    history, turn = _history(conversation, request, ())
    return Reply(
        span_id=parent_id,
        trace_id=children[0].trace_id,
        conversation_id=children[0].conversation_id,
        agent=next((name for span in calls.models if (name := at.speaker(span))), ""),
        query=request,
        answer="",
        started_at=_time(min(span.started_ns for span in calls.own)),
        ended_at=_time(max(span.ended_ns for span in calls.own)),
        request=request,
        turn=turn,
        history=history,
        trajectory=calls.steps(""),
        status=SpanStatus.UNSET,
        service=children[0].service,
        skip=SkipReason.UNFINISHED,
        skip_detail="the agent's own span has not arrived",
        **calls.of_models(selection.models),
    )


def _request(handed: Sequence[Message]) -> str:
    """The text of the last message with text. The messages before it are history."""
    return next((text for message in reversed(handed) if (text := text_of(message))), "")


def _resumed(conversation: list[ChatMessage]) -> tuple[list[ChatMessage], tuple[ChatMessage, ...]]:
    """The conversation that an agent called without a message answers, and the steps it had taken before.

    It answers what it has observed. Or it continues a reply that stopped at a tool, which a person had to allow or
    which was executed elsewhere: then it answers the question before those steps.
    """
    end = len(conversation)
    while end and (conversation[end - 1]["role"] == "tool" or "tool_calls" in conversation[end - 1]):
        end -= 1
    return conversation[:end], tuple(conversation[end:])


def _history(
    conversation: Sequence[ChatMessage], request: str, handed: Sequence[Message]
) -> tuple[tuple[ChatMessage, ...], int]:
    """The conversation without the request, and the number of earlier turns.

    The request is the last user message with that text, else the last assistant message with it, by which a pipeline
    stage is called, else the last user message.
    Messages behind it (retrieved knowledge, hints) stay, as the model saw them.
    """
    same = [place for place, message in enumerate(conversation) if message["content"] == request]
    asked_at = (
        [place for place in same if conversation[place]["role"] == "user"]
        or [place for place in same if conversation[place]["role"] == "assistant"]
        or [place for place, message in enumerate(conversation) if message["role"] == "user"]
    )
    if not asked_at:
        return tuple(conversation), 0
    place = asked_at[-1]
    before = list(conversation[:place])
    asked = conversation[place]
    if asked["content"] != request and (earlier := _earlier(asked["content"], handed)):
        before.append({**asked, "content": earlier})
    asked_before = sum(message["role"] == "user" and not is_reminder(message["content"]) for message in before)
    return (*before, *conversation[place + 1 :]), max(0, asked_before - _handed_with(handed, before))


def _handed_with(handed: Sequence[Message], before: Sequence[ChatMessage]) -> int:
    """How many messages the agent was handed together with the request. Those up to an answer of its own, which its
    model was sent as such, are earlier turns."""
    answers = {message["content"] for message in before if message["role"] == "assistant"}
    for number, message in enumerate(reversed(handed)):
        if message.get("role") == "assistant" and text_of(message) in answers:
            return max(0, number - 1)
    return max(0, len(handed) - 1)


def _earlier(content: str, handed: Sequence[Message]) -> str:
    """The part of a message that is the conversation before the request; empty if there is none.

    AgentScope's formatters for several agents write a conversation into one message, between tags, with each text
    behind its speaker's name.
    """
    message = next((message for message in reversed(handed) if text_of(message)), None)
    if message is None:
        return ""
    asked = "".join(f"\n{message.get('name')}: {text}" for text in texts_in(blocks_of(message)))
    head, end, _ = content.rpartition("\n</history>")
    if not end or not head.endswith(asked):
        return ""
    head = head[: -len(asked)]
    return "" if head.endswith("<history>") else head + end


def _structured(agent: Span, calls: Trajectory) -> dict[str, Any] | None:
    """Structured output: 1.x has it in the returned message's metadata, 2.x in the finish function's arguments."""
    if agent.attributes.input.kwargs.structured_model != NOTHING:
        metadata = {key: value for key, value in at.returned_metadata(agent).items() if not key.startswith("_")}
        if metadata:
            return metadata
    for tool in reversed(calls.tools):
        arguments = tool.arguments if tool.name in FINISH_FUNCTIONS else None
        # Without a structure to fill, 1.x passes the bare answer under this name.
        if isinstance(arguments, dict) and arguments and arguments.keys() != {"response"}:
            return arguments
    return None


def _skip(
    agent: Span,
    calls: Trajectory,
    output: Message | None,
    answer: str,
    has_query: bool,
    cut: str,
    role: Role,
    name: str,
    selection: ReplySelection,
) -> tuple[SkipReason | None, str]:
    """Why a reply becomes no task, with details for people; None if it becomes one."""
    if name in selection.exclude:
        return SkipReason.AGENT_EXCLUDED, f"ingest.agents.exclude names {name}"
    if skip := agent.attributes.flywheel.skip:
        return SkipReason(skip), agent.attributes.flywheel.detail
    if role is Role.NESTED and name not in selection.include:
        return SkipReason.NESTED, "another agent called it as a tool"
    if role is Role.STAGE and name not in selection.include:
        return SkipReason.PIPELINE_STAGE, "another agent went on from its answer"
    if _was_interrupted(agent, calls, output, answer):
        return SkipReason.INTERRUPTED, "the reply was interrupted"
    if agent.status is SpanStatus.ERROR:
        return SkipReason.ERROR, error_text(agent)
    if cut:
        return SkipReason.TRUNCATED, f"{cut}: raise the limit of the SDK or collector on the length of attributes"
    if output is None:
        why = error_text(agent)
        if not why and calls.models and calls.answers[-1] is None:
            why = error_text(calls.models[-1])
        return (SkipReason.ERROR, why) if why else (SkipReason.NO_ANSWER, _missing(agent, calls))
    # AgentScope 2.x stops for tools that a person must allow, or that are executed elsewhere.
    pause = agent.attributes.agentscope.agent
    pending = (pause.hitl_pending_tools, pause.external_execution_pending_tools)
    if tools := [str(tool) for raw in pending for tool in at.value_of(raw) or ()]:
        return SkipReason.UNFINISHED, f"{AWAITS_TOOLS}{', '.join(tools)} is allowed or carried out elsewhere"
    if not has_query:
        return SkipReason.NO_QUERY, "the agent received neither text nor image"
    return None, ""


def _what_was_cut(
    agent: Span, asked: Span, calls: Trajectory, texts: tuple[str, str], output: Message | None, answer: str
) -> str:
    """Which of question and answer was cut, in words; empty if neither was. `texts` are the requests of the agent and
    of the span that the user asked."""
    if not any(span.cut or span.limit for span in (agent, asked, *calls.models)):
        return ""
    # An agent that was handed nothing answers the question of its first model call.
    is_own = calls.asked is None or agent.cut & QUESTIONS or at.input_messages(agent)
    asker = agent if is_own or calls.asked is None else calls.asked
    for span, text in zip((asker, asked), texts, strict=True):
        if cut := cut_question(span, text, is_read=bool(at.input_messages(span))):
            return f"the question was cut ({cut})"
    answered = agent if at.has_messages(agent) or not calls.models else calls.models[-1]
    cut = cut_answer(answered, answer, is_read=output is not None)
    return f"the answer was cut ({cut})" if cut else ""


def _missing(agent: Span, calls: Trajectory) -> str:
    """What of the answer the spans of an agent that did not fail do not record."""
    recorded = (agent.attributes.gen_ai.output.messages, agent.attributes.output)
    if any(at.value_of(raw) not in (None, {}, []) for raw in recorded):
        return "the output of the agent's span holds no message"
    if at.has_messages(agent):
        return "the agent's span has no output (gen_ai.output.messages)"
    if not calls.models:
        return (
            "the agent's span has no messages (gen_ai.input.messages, gen_ai.output.messages), and there is no model"
            " call below it: does the instrumentation capture content?"
        )
    said = next((said for said in reversed(calls.answers) if said), None)
    if said is None:
        return "neither the agent's span nor its model calls have an output (gen_ai.output.messages)"
    asked = [call["function"]["name"] for message in chat_of(said) for call in message.get("tool_calls", ())]
    return f"its last model call asked for {', '.join(asked)}" if asked else "its last model call answered nothing"


def _shows_nothing(agent: Span) -> bool:
    """Whether an agent's span says neither what it answered nor that it failed: some instrumentations write messages
    elsewhere."""
    try:
        return bool(agent.cut & (QUESTIONS | ANSWERS)) or (not error_text(agent) and at.agent_output(agent) is None)
    except BAD_CONTENT:
        return False


def _was_interrupted(agent: Span, calls: Trajectory, output: Message | None, answer: str) -> bool:
    if agent.events and exception(agent)[0].endswith("CancelledError"):
        return True
    metadata = at.returned_metadata(agent) if output else {}
    if metadata.get("_is_interrupted") is True or metadata.get("is_interrupted") is True:
        return True
    last = next((span for span in reversed(calls.own) if span.kind in (SpanKind.LLM, SpanKind.TOOL)), None)
    if last is not None and is_interrupted(last):
        return True
    if answer not in INTERRUPTION_SENTENCES:
        return False
    answers = [text_of(message) for message in calls.answers if message]
    return bool(answers) and answer not in answers


def _time(ns: int) -> datetime:
    return _EPOCH + timedelta(microseconds=ns // 1000)


def prompt_reason(first: Span | None, given: Sequence[ChatMessage], prompt: Sequence[ChatMessage]) -> str:
    """Why a prompt is not exactly what the model was sent, as far as the trace shows; empty if nothing is missing.

    `first` is the first model call of the reply, `given` its input without an empty message at its end and without
    finish functions.
    """
    if first is None or not given:
        # Also AgentScope 2.0.0 to 2.0.6.
        return exclusion.NOT_RECORDED
    read = at.read_conversation(first)
    chat = read.chat
    called = {call["function"]["name"] for message in chat for call in message.get("tool_calls", ())}
    offered = map(bytes, (first.attributes.gen_ai.tool.definitions, first.attributes.input.kwargs.tools))
    # AgentScope's tracer leaves out hints, such as the runtime reminder of 2.0.6 and later: a message with nothing
    # else is recorded without parts. Models are not sent empty messages.
    has_empty = any(message["content"] == "" and "tool_calls" not in message for message in chat)
    reasons = {
        exclusion.HIDDEN_MESSAGE: has_empty and any(sent.get("parts") == [] for sent in at.input_messages(first)),
        exclusion.OTHER_PROMPT: list(given) != list(prompt) or called & FINISH_FUNCTIONS,
        exclusion.IMAGE: read.has_media,
        exclusion.FINISH_FUNCTION: any(map(_FINISH_NAMES.search, offered)),
        exclusion.TEMPLATE_PARAMETERS: at.sets_template_parameters(first),
        **{f"{part} was not read": True for part in read.unread},
    }
    return "; ".join(reason for reason, applies in reasons.items() if applies)
