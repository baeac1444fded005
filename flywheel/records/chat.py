"""Parses the messages that clients record and converts them to the OpenAI chat form.

Dialects: AgentScope's own messages (`content` is text or a list of blocks), the GenAI convention (`parts`), and the
output of formatters in the form of OpenAI, Anthropic, DashScope or Gemini. Reasoning never counts as text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from flywheel.records.reprs import ReprError, is_block, is_message, is_result, parse_call
from flywheel.records.tool_calls import FINISH_FUNCTIONS
from flywheel.records.trace import ChatMessage, ToolCall, ToolDefinition

Message = dict[str, Any]
Block = dict[str, Any]
"""A part of a message."""

MEDIA_TYPES: Final = frozenset(
    {"image", "image_url", "audio", "input_audio", "audio_url", "video", "video_url", "file", "uri", "blob", "data"}
)

ROLES: Final = frozenset({"system", "user", "assistant", "tool", "developer"})


def messages_of(value: Any, *, encoded: bool = False) -> list[Message]:
    """The messages in an attribute: a list, a single message, reprs of messages, plain text, or nothing.

    With `encoded`, a text may also be the JSON of messages. Raises ReprError for a garbled repr.
    """
    if isinstance(value, list):
        for item in value:
            if not isinstance(item, dict) or "role" not in item:
                return [message for item in value for message in messages_of(item)]
        return value
    if isinstance(value, str):
        if is_message(value):
            return [parse_call(value)]
        if encoded and value[:1] in ("[", "{"):
            try:
                return messages_of(json.loads(value))
            except (ValueError, RecursionError):
                pass
        return [{"role": "user", "content": value}] if value else []
    if isinstance(value, dict):
        return [value] if {"role", "parts", "content"} & value.keys() else []
    return []


def blocks_of(message: Message) -> list[Block]:
    """The blocks or parts of a message; plain text is one text block, and so is a refusal."""
    blocks = _blocks(message["parts"] if "parts" in message else message.get("content"))
    if isinstance(refusal := message.get("refusal"), str) and refusal.strip():
        blocks = [*(blocks if message.get("content") != "" else ()), {"type": "refusal", "refusal": refusal}]
    return blocks


def _blocks(content: Any) -> list[Block]:
    if content is None:
        return []
    if isinstance(content, list):
        for item in content:
            if not isinstance(item, dict) or "type" not in item:
                return [block for item in content for block in _blocks(item)]
        return content
    if isinstance(content, dict):
        return [content if "type" in content else _typed(content)]
    return [{"type": "text", "text": _plain(content)}]


def _typed(block: Block) -> Block:
    """A block of DashScope's or Gemini's interface, which has no type, with its type."""
    match block:
        case {"thought": True}:
            return {"type": "thinking", **block}
        case {"text": str()}:
            return {"type": "text", **block}
        case {"image": str(url)}:
            return {"type": "image", "source": {"url": url}}
        case {"function_call": {"name": name, **call}}:
            # AgentScope uses Gemini's signature of a call as the call's id.
            call_id = call.get("id") or block.get("thought_signature")
            return {"type": "tool_use", "id": call_id, "name": name, "input": call.get("args")}
        case {"function_response": {"name": name, **result}}:
            output = result.get("response")
            output = output["output"] if isinstance(output, dict) and "output" in output else output
            return {"type": "tool_result", "id": result.get("id"), "name": name, "output": output}
    return block


def text_of(message: Message) -> str:
    """The text of a message, without reasoning and tool calls."""
    return "\n".join(texts_in(blocks_of(message)))


def texts_in(blocks: Iterable[Block]) -> list[str]:
    """The texts of those blocks that are text, or the model's refusal."""
    return [_plain(block.get(block["type"], block.get("content"))) for block in blocks if block.get("type") in _TEXTS]


def is_refusal(message: Message) -> bool:
    """Whether all that a message says is the model's refusal."""
    said = [block for block in blocks_of(message) if block.get("type") in (*_TEXTS, *_CALLS)]
    return (
        not message.get("tool_calls")
        and any(block["type"] == "refusal" for block in said)
        and all(
            block["type"] == "refusal" or (block["type"] == "text" and not texts_in([block])[0]) for block in said
        )
    )


def _plain(value: Any) -> str:
    """A value as text. Servers decode loosely: a text that was also JSON may arrive as a number or an object."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def images_of(message: Message) -> list[str]:
    """References to the images of a message. Embedded data has no address, so its hash is the reference."""
    references: list[str] = []
    for block in blocks_of(message):
        match block:
            case (
                {"type": "image", "source": {"url": str(reference)}}
                | {"type": "image_url", "image_url": {"url": str(reference)}}
                | {"type": "uri", "modality": "image", "uri": str(reference)}
            ):
                is_embedded = reference.startswith("data:")
            case {"type": "image", "source": {"data": str(reference)}}:
                is_embedded = True
            case {"type": "blob", "modality": "image", **rest}:
                reference, is_embedded = str(rest.get("content", rest.get("data", ""))), True
            case _:
                continue
        if is_embedded:
            reference = "sha256:" + hashlib.sha256(reference.encode("utf-8", "surrogatepass")).hexdigest()
        references.append(reference)
    return [reference for reference in references if reference]


def result_text(value: Any) -> str:
    """The text of a tool's result: a text, blocks, an object with content, a repr, or JSON of blocks."""
    if isinstance(value, str):
        if is_result(value):
            try:
                return result_text(parse_call(value).get("content"))
            except ReprError:
                return value
        if value.startswith(_BLOCKS):
            try:
                # AgentScope 2.0.7 to 2.0.10 write results in a conversation as the JSON of reprs of blocks.
                decoded = [parse_call(block) if is_block(block) else block for block in json.loads(value)]
            except (ValueError, RecursionError):
                return value
            if all(isinstance(block, dict) and "type" in block for block in decoded):
                return "\n".join(texts_in(decoded))
        return value
    if isinstance(value, dict) and "content" in value:
        return result_text(value["content"])
    if isinstance(value, list):
        blocks = _blocks(value)
        if all("type" in block for block in blocks):
            return "\n".join(texts_in(blocks))
    return _plain(value)


def chat_of(message: Message) -> list[ChatMessage]:
    """A message in the OpenAI form; several messages if it has tool results between its parts."""
    role = message.get("role")
    if role not in ROLES:
        role = "assistant" if role == "model" else "user"
    blocks = blocks_of(message)
    if role == "tool":
        call_id = message.get("tool_call_id")
        results = [block for block in blocks if block.get("type") in _RESULTS]
        if not results:
            return [_tool_message(call_id, message.get("name"), "\n".join(texts_in(blocks)))]
        # The message's own name is its author's.
        return [
            _tool_message(block.get("id") or call_id, block.get("name"), result_text(_result_in(block)))
            for block in results
        ]
    if len(blocks) == 1 and blocks[0].get("type") in _TEXTS and not message.get("tool_calls"):
        return [{"role": role, "content": texts_in(blocks)[0]}]
    chat: list[ChatMessage] = []
    texts: list[Block] = []
    calls = [call_of(call) for call in message.get("tool_calls") or () if isinstance(call, dict)]
    for block in blocks:
        kind = block.get("type")
        if kind in _TEXTS:
            texts.append(block)
        elif kind in _CALLS:
            calls.append(call_of(block))
        elif kind in _RESULTS:
            if texts or calls:
                chat.append(_said(role, texts, calls))
                texts, calls = [], []
            call_id = block.get("id", block.get("tool_use_id"))
            chat.append(_tool_message(call_id, block.get("name"), result_text(_result_in(block))))
    if texts or calls or not chat:
        chat.append(_said(role, texts, calls))
    return chat


_BLOCKS: Final = ("[{", '["TextBlock(', '["DataBlock(', '["ThinkingBlock(', '["HintBlock(')
_TEXTS: Final = ("text", "refusal")
_CALLS: Final = ("tool_use", "tool_call")
_RESULTS: Final = ("tool_result", "tool_call_response")


def _result_in(block: Block) -> Any:
    # Anthropic's interface has the result as content.
    return block.get("output", block.get("content")) if block["type"] == "tool_result" else block.get("response")


def _said(role: str, texts: list[Block], calls: list[ToolCall]) -> ChatMessage:
    said: ChatMessage = {"role": role, "content": "\n".join(texts_in(texts))}
    if calls:
        said["tool_calls"] = calls
    return said


def _tool_message(call_id: Any, name: Any, content: str) -> ChatMessage:
    return {"role": "tool", "tool_call_id": _plain(call_id), "name": _plain(name), "content": content}


def call_of(block: Block) -> ToolCall:
    """A tool call in the OpenAI form, from a block, a part or that form itself."""
    function = block.get("function")
    inner = function if isinstance(function, dict) else block
    arguments = inner.get("arguments", inner.get("input"))
    return {
        "id": _plain(block.get("id")),
        "type": "function",
        "function": {"name": _plain(inner.get("name")), "arguments": _plain({} if arguments is None else arguments)},
    }


def tool_of(definition: Block) -> ToolDefinition:
    """A tool's definition in the OpenAI form; the GenAI convention writes it flat."""
    if isinstance(definition.get("function"), dict):
        return {"type": "function", "function": definition["function"]}
    return {"type": "function", "function": {key: value for key, value in definition.items() if key != "type"}}


def without_finish(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages without calls of finish functions and without their results."""
    finished: set[str] = set()
    kept: list[ChatMessage] = []
    names: dict[str, str] = {}
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            own = [call for call in calls if call["function"]["name"] not in FINISH_FUNCTIONS]
            finished |= {call["id"] for call in calls if call["function"]["name"] in FINISH_FUNCTIONS}
            # Some models number their calls from 0 in every answer.
            finished -= {call["id"] for call in own}
            names |= {call["id"]: call["function"]["name"] for call in own}
            if own:
                kept.append({**message, "tool_calls": own})
            elif message["content"]:
                kept.append({key: value for key, value in message.items() if key != "tool_calls"})
        elif message["role"] == "tool":
            if message["tool_call_id"] not in finished and message["name"] not in FINISH_FUNCTIONS:
                kept.append({**message, "name": message["name"] or names.get(message["tool_call_id"], "")})
        else:
            kept.append(message)
    return kept
