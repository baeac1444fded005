"""From an agent span and what lies below it to a reply: question, answer, history, steps, and why it is no task.

Interruption. What is recognisable differs by client. AgentScope 1.0.7 exports no agent span at all then, so such a
reply ends as unfinished; later 1.x ends the span with `asyncio.CancelledError`; 2.x ends it as if all were well, with
a fixed sentence, and only the last model call (finish reason) or tool result (`is_interrupted`, state) tells. A
returned message may also say so itself (`_is_interrupted` in its metadata). The fixed sentence alone proves nothing:
a model may say it. It counts where no model call of the reply produced it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from flywheel.states import SkipReason
from flywheel.studio import attributes as at
from flywheel.studio.content import Message, images_of, text_of
from flywheel.studio.span import Span
from flywheel.studio.tree import Role, Tree
from flywheel.studio.work import Work
from flywheel.trace import ChatMessage, Reply, Selection, SpanStatus

INTERRUPTION_SENTENCES: Final = frozenset(
    {
        "I noticed that you have interrupted me. What can I do for you?",
        "I notice the interruption. How can I help you?",
    }
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def finished_reply(tree: Tree, agent: Span, selection: Selection) -> Reply:
    """The reply of an agent span. Raises ReprError where its texts are garbled."""
    placement = tree.placement(agent)
    work = Work(tree.own(agent.span_id))
    handed = at.agent_input(agent)
    output = at.agent_output(agent)
    answer = text_of(output) if output else ""
    request = _request(handed)
    conversation = work.first_input()
    if not handed:
        # The agent was called without a message: it answers what it had observed before.
        request = next((m["content"] for m in reversed(conversation) if m["role"] != "system"), "")
    history, turn = _history(conversation, request, len(handed))
    asked = placement.asked if placement.role is Role.LAST else agent
    query = request if asked is agent else _request(at.agent_input(asked))
    images: dict[str, None] = {}
    for message in handed:
        images.update(dict.fromkeys(images_of(message)))
    name = at.agent_name(agent)
    steps = work.trajectory(answer)
    is_asked = bool(query.strip() or images)
    skip, detail = _skip(agent, work, output, answer, is_asked, placement.role, name, selection)
    return Reply(
        span_id=agent.span_id,
        trace_id=agent.trace_id,
        conversation_id=agent.conversation_id,
        agent=name,
        query=query,
        answer=answer,
        started_at=_time(agent.started_ns),
        ended_at=_time(agent.ended_ns),
        request=request,
        turn=turn,
        history=history,
        trajectory=steps,
        images=tuple(images),
        structured=_structured(agent, work),
        errors=work.errors(steps),
        status=agent.status,
        service=agent.service,
        user=at.user_id(agent),
        skip=skip,
        skip_detail=detail,
        **work.of_models(),
    )


def unfinished_reply(tree: Tree, parent_id: str, children: Sequence[Span]) -> Reply:
    """The reply of an agent span that never arrived, as far as its children tell."""
    work = Work(tree.own(parent_id))
    conversation = work.first_input()
    request = next((m["content"] for m in reversed(conversation) if m["role"] == "user"), "")
    history, turn = _history(conversation, request, 1)
    return Reply(
        span_id=parent_id,
        trace_id=children[0].trace_id,
        conversation_id=children[0].conversation_id,
        agent=work.speaker(),
        query=request,
        answer="",
        started_at=_time(min(span.started_ns for span in work.own)),
        ended_at=_time(max(span.ended_ns for span in work.own)),
        request=request,
        turn=turn,
        history=history,
        trajectory=work.trajectory(""),
        status=SpanStatus.UNSET,
        service=children[0].service,
        skip=SkipReason.UNFINISHED,
        skip_detail="the agent's own span has not arrived",
        **work.of_models(),
    )


def _request(handed: Sequence[Message]) -> str:
    """The text of the last message with text; those before it are history."""
    for message in reversed(handed):
        if text := text_of(message):
            return text
    return ""


def _history(conversation: Sequence[ChatMessage], request: str, handed: int) -> tuple[tuple[ChatMessage, ...], int]:
    """The conversation without the request, and how many turns came before.

    The request is the last user message of that text; a pipeline stage is handed an assistant's message. What was put
    behind it (retrieved knowledge, hints) stays: the model saw it.
    """
    place = _place_of(conversation, request)
    if place is None:
        return tuple(conversation), 0
    asked_before = 0
    for message in conversation[:place]:
        asked_before += message["role"] == "user"
    return (*conversation[:place], *conversation[place + 1 :]), max(0, asked_before - max(0, handed - 1))


def _place_of(conversation: Sequence[ChatMessage], request: str) -> int | None:
    """Where the request is: what the user said so, else what an assistant said so, else what the user said last."""
    of_assistant = of_user = None
    for place in range(len(conversation) - 1, -1, -1):
        message = conversation[place]
        role = message["role"]
        if role == "user":
            if message["content"] == request:
                return place
            of_user = place if of_user is None else of_user
        elif role == "assistant" and message["content"] == request:
            of_assistant = place if of_assistant is None else of_assistant
    return of_user if of_assistant is None else of_assistant


def _structured(agent: Span, work: Work) -> dict[str, Any] | None:
    """Structured output: 1.x has it in the returned message's metadata, 2.x in the finish function's arguments."""
    if at.wants_structure(agent):
        metadata = {key: value for key, value in at.returned_metadata(agent).items() if not key.startswith("_")}
        if metadata:
            return metadata
    return work.structured()


def _skip(
    agent: Span,
    work: Work,
    output: Message | None,
    answer: str,
    asked: bool,
    role: Role,
    name: str,
    selection: Selection,
) -> tuple[SkipReason | None, str]:
    if name in selection.exclude:
        return SkipReason.AGENT_EXCLUDED, f"ingest.agents.exclude names {name}"
    if role is Role.NESTED and name not in selection.include:
        return SkipReason.NESTED, "another agent called it as a tool"
    if role is Role.STAGE and name not in selection.include:
        return SkipReason.PIPELINE_STAGE, "another agent went on from its answer"
    if _was_interrupted(agent, work, output, answer):
        return SkipReason.INTERRUPTED, "the reply was interrupted"
    if agent.status is SpanStatus.ERROR:
        return SkipReason.ERROR, at.error_text(agent)
    if output is None:
        return SkipReason.ERROR, at.error_text(agent) or "the agent's span has no output"
    if not asked:
        return SkipReason.NO_QUERY, "the agent was handed no text and no image"
    return None, ""


def _was_interrupted(agent: Span, work: Work, output: Message | None, answer: str) -> bool:
    if at.exception(agent)[0].endswith("CancelledError"):
        return True
    metadata = at.returned_metadata(agent) if output else {}
    if metadata.get("_is_interrupted") is True or metadata.get("is_interrupted") is True:
        return True
    if work.was_cut_short():
        return True
    if answer not in INTERRUPTION_SENTENCES:
        return False
    said = work.texts()
    return bool(said) and answer not in said


def _time(ns: int) -> datetime:
    return _EPOCH + timedelta(microseconds=ns // 1000)
