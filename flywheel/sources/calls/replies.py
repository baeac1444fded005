"""Replies that are made of recorded calls alone: the calls are put below an agent's span, as a trace has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from flywheel.records.states import SkipReason
from flywheel.records.task import Batch, storable
from flywheel.records.trace import DeadRow, ModelCall, PlacedCall, Reply, ReplySelection, SpanStatus
from flywheel.sources.calls.conversations import id_of, skipped_because, wanted_tools
from flywheel.sources.spans.attributes import is_private
from flywheel.sources.spans.recorded_calls import with_calls
from flywheel.sources.spans.replies import BAD_CONTENT, entries_or_dead, finished_reply
from flywheel.sources.spans.span import (
    Agent,
    Attributes,
    FlywheelAttributes,
    GenAi,
    ModelResponse,
    Person,
    Span,
    SpanKind,
)
from flywheel.sources.spans.trace_tree import Tree


def batch_of(
    found: Sequence[Sequence[PlacedCall]],
    calls: Mapping[str, ModelCall],
    aliases: Sequence[str],
    selection: ReplySelection,
    source: str,
) -> Batch:
    """The entries and dead rows of replies, given by their calls, of which `calls` has those that are there; and the
    request ids of private ones. An agent has the name of the alias that it called."""
    replies: list[Reply] = []
    dead: list[DeadRow] = []
    private: list[str] = []
    for reply in found:
        agent, *below = _spans(reply, calls, aliases)
        spans = with_calls({span.span_id: span for span in (agent, *below)}, calls)
        try:
            replies.append(finished_reply(Tree(spans), spans[agent.span_id], selection))
            if any(is_private(span, selection.private) for span in spans.values()):
                replies[-1] = replies[-1].without_content()
                private += [call.request_id for call in reply]
        except BAD_CONTENT as error:
            why = storable(f"its content cannot be read: {error}")[:2000]
            whose = agent.conversation_id, str(agent.attributes.user.id)
            dead.append(DeadRow(0, agent.span_id, agent.trace_id, why, "", *whose))
    entries = entries_or_dead(replies, source, selection.models, dead)
    return Batch(None, entries=tuple(entries), dead=tuple(dead), private_calls=tuple(private))


def outcome_of(reply: Sequence[PlacedCall], calls: Mapping[str, ModelCall]) -> tuple[SkipReason | None, str]:
    """Why a reply becomes no task, if so, with details for people."""
    last = calls.get(reply[-1].request_id)
    if not reply[-1].is_answered:
        tools = f"the one that asked for {', '.join(wanted_tools(last))}" if last is not None else "its last one"
        before = "the user went on before an answer; " if reply[-1].is_continued else ""
        return SkipReason.UNFINISHED, f"{before}no call followed {tools}"
    # A call that is no part of a conversation is a reply of its own.
    return skipped_because(last) if last is not None and len(reply) == 1 else (None, "")


def _spans(reply: Sequence[PlacedCall], calls: Mapping[str, ModelCall], aliases: Sequence[str]) -> list[Span]:
    """The span of an agent, and those of its calls."""
    asked = calls.get(reply[0].request_id, ModelCall(""))
    name = asked.model if asked.model in aliases else aliases[0]
    skip, detail = outcome_of(reply, calls)
    agent = Span(
        rowid=0,
        span_id=id_of("agent", reply[0].request_id, 8),
        trace_id=reply[0].trace_id,
        parent_id="",
        name=f"invoke_agent {name}",
        kind=SpanKind.AGENT,
        started_ns=min(call.started_ns for call in reply),
        ended_ns=max(call.ended_ns for call in reply),
        status=SpanStatus.OK,
        status_message="",
        conversation_id=reply[0].conversation,
        attributes=Attributes(
            gen_ai=GenAi(agent=Agent(name=name)),
            user=Person(storable(asked.user)),
            flywheel=FlywheelAttributes(reply[0].root, skip or "", storable(detail)),
        ),
    )
    below = []
    for rowid, call in enumerate(reply, 1):
        error = storable(calls[call.request_id].error) if call.request_id in calls else ""
        of_call = replace(
            agent,
            rowid=rowid,
            span_id=id_of("call", call.request_id, 8),
            parent_id=agent.span_id,
            kind=SpanKind.LLM,
            started_ns=call.started_ns,
            ended_ns=call.ended_ns,
            status=SpanStatus.ERROR if error else SpanStatus.OK,
            status_message=error,
            attributes=Attributes(gen_ai=GenAi(response=ModelResponse(id=call.request_id))),
        )
        below.append(of_call)
    return [agent, *below]
