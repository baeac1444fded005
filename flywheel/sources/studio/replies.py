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

from flywheel.sources.studio import attributes as at
from flywheel.sources.studio import outcome
from flywheel.sources.studio.exactness import prompt_reason
from flywheel.sources.studio.messages import Message, images_of, text_of, texts_of
from flywheel.sources.studio.span import Span
from flywheel.sources.studio.trace_tree import Role, Tree
from flywheel.sources.studio.work import Work
from flywheel.states import SkipReason
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
    resumed: tuple[ChatMessage, ...] = ()
    if not handed:
        conversation, resumed = _resumed(conversation)
        request = conversation[-1]["content"] if conversation and conversation[-1]["role"] != "system" else ""
    history, turn = _history(conversation, request, handed)
    given = conversation + list(resumed)
    asked = placement.asked if placement.role is Role.LAST else agent
    query = request if asked is agent else _request(at.agent_input(asked))
    images: dict[str, None] = {}
    for message in handed:
        images.update(dict.fromkeys(images_of(message)))
    name = at.agent_name(agent)
    steps = work.trajectory(answer, resumed)
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
        prompt_reason=prompt_reason(work.first, given, [*history, {"role": "user", "content": request or query}]),
        skip=skip,
        skip_detail=detail,
        **work.of_models(selection.models),
    )


def unfinished_reply(tree: Tree, parent_id: str, children: Sequence[Span], selection: Selection) -> Reply:
    """The reply of an agent span that never arrived, as far as its children tell."""
    work = Work(tree.own(parent_id))
    conversation = work.first_input()
    request = next((m["content"] for m in reversed(conversation) if m["role"] == "user"), "")
    history, turn = _history(conversation, request, ())
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
        **work.of_models(selection.models),
    )


def _request(handed: Sequence[Message]) -> str:
    """The text of the last message with text; those before it are history."""
    for message in reversed(handed):
        if text := text_of(message):
            return text
    return ""


def _resumed(conversation: list[ChatMessage]) -> tuple[list[ChatMessage], tuple[ChatMessage, ...]]:
    """What an agent that was called without a message answers, and the steps that it had taken already.

    It answers what it had observed before. Or it goes on with a reply that had stopped at a tool, to be allowed by a
    person or carried out elsewhere: then it answers the question before those steps.
    """
    end = len(conversation)
    while end and (conversation[end - 1]["role"] == "tool" or "tool_calls" in conversation[end - 1]):
        end -= 1
    return conversation[:end], tuple(conversation[end:])


def _history(
    conversation: Sequence[ChatMessage], request: str, handed: Sequence[Message]
) -> tuple[tuple[ChatMessage, ...], int]:
    """The conversation without the request, and how many turns came before.

    The request is the last user message of that text; a pipeline stage is handed an assistant's message. What was put
    behind it (retrieved knowledge, hints) stays: the model saw it.
    """
    place = _place_of(conversation, request)
    if place is None:
        return tuple(conversation), 0
    before = list(conversation[:place])
    asked = conversation[place]
    if asked["content"] != request and (earlier := _earlier(asked["content"], handed)):
        before.append({**asked, "content": earlier})
    asked_before = 0
    for message in before:
        asked_before += message["role"] == "user"
    return (*before, *conversation[place + 1 :]), max(0, asked_before - max(0, len(handed) - 1))


def _earlier(told: str, handed: Sequence[Message]) -> str:
    """What a message tells of the conversation before the request; empty where it tells nothing else.

    AgentScope's formatters for several agents write a conversation into one message, between tags, each text in it
    behind its speaker's name.
    """
    message = next((message for message in reversed(handed) if text_of(message)), None)
    if message is None:
        return ""
    asked = "".join(f"\n{message.get('name')}: {text}" for text in texts_of(message))
    head, end, _ = told.rpartition("\n</history>")
    if not end or not head.endswith(asked):
        return ""
    head = head[: -len(asked)]
    return "" if head.endswith("<history>") else head + end


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
        return SkipReason.ERROR, outcome.error_text(agent)
    if output is None:
        return SkipReason.ERROR, outcome.error_text(agent) or "the agent's span has no output"
    if waits := outcome.waits_for(agent):
        return SkipReason.UNFINISHED, f"it stopped until {', '.join(waits)} is allowed or carried out elsewhere"
    if not asked:
        return SkipReason.NO_QUERY, "the agent was handed no text and no image"
    return None, ""


def _was_interrupted(agent: Span, work: Work, output: Message | None, answer: str) -> bool:
    if outcome.exception(agent)[0].endswith("CancelledError"):
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
