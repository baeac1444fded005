"""Parses the messages that clients record and converts them to the OpenAI chat form.

Dialects: AgentScope's own messages (`content` is text or a list of blocks), the GenAI convention (`parts`), and the
forms of OpenAI's chats and responses, Anthropic, Bedrock, DashScope, Gemini, LangChain, the Vercel AI SDK and the
Model Context Protocol. `_BY_TYPE` and `_BY_KEY` say how each part is read; `of_turns` reads the dialogs of SAGE.
Reasoning never counts as text. `reasoning_in` reads it, and `unread_in` says what is not understood.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from flywheel.records.reprs import ReprError, is_block, is_message, is_result, parse_call
from flywheel.records.tool_calls import FINISH_FUNCTIONS, is_object
from flywheel.records.trace import ChatMessage, ToolCall, ToolDefinition, get_path, reasoning_of

Message = dict[str, Any]
Block = dict[str, Any]
"""A part of a message."""

MEDIA_TYPES: Final = frozenset(
    {"image", "image_url", "audio", "input_audio", "audio_url", "video", "video_url", "file", "uri", "blob", "data"}
)

ROLES: Final = frozenset({"system", "user", "assistant", "tool", "developer"})


def messages_of(value: Any, *, encoded: bool = False) -> list[Message]:
    """The messages in an attribute: a list, also in an envelope with a version, a single message, reprs of messages,
    plain text, or nothing.

    With `encoded`, a text may also be the JSON of messages. Raises ReprError for a garbled repr.
    """
    if isinstance(value, list):
        for item in value:
            if not isinstance(item, dict) or "role" not in item:
                return _joined([message for item in value for message in messages_of(item)])
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
        value = constructed(value)
        if {"role", "parts", "content"} & value.keys():
            return [value]
        if isinstance(value.get("messages"), list):
            return messages_of(value["messages"])
        # Items of OpenAI's Responses API stand among its messages.
        kind = str(value.get("type"))
        if kind.endswith(("_call", "_output")):
            return [{"role": "tool" if kind.endswith("_output") else "assistant", "content": [value]}]
    return []


_CLASSES: Final = {"human": "user", "ai": "assistant", "function": "tool", "chat": "user"}
"""Roles by LangChain's type of a message, where they differ."""


def constructed(value: Any) -> Any:
    """A message that LangChain has serialised, by its constructor or as data, as a message with a role; any other
    value as it is."""
    if not isinstance(value, dict) or "role" in value:
        return value
    fields: Any = value
    name = value.get("type")
    if name in ("constructor", "not_implemented") and isinstance(value.get("id"), list) and "lc" in value:
        name = str(value["id"][-1] if value["id"] else "")
        fields = value.get("kwargs")
        if not (isinstance(fields, dict) and "content" in fields):
            return {"role": "user", "content": [_unread(name or "constructor")]}
        name = name.removesuffix("Chunk").removesuffix("Message").lower()
    elif not (
        isinstance(name, str) and "content" in value and {"additional_kwargs", "response_metadata"} & value.keys()
    ):
        return value
    given, called = fields["content"], fields.get("tool_calls") or get_path(fields, "additional_kwargs", "tool_calls")
    calls = [call for each in (called, fields.get("invalid_tool_calls")) if isinstance(each, list) for call in each]
    if calls and isinstance(given, list):
        # Anthropic's calls stand among the parts as well.
        given = [part for part in given if get_path(part, "type") not in ("tool_use", "function_call")]
    # DeepSeek's and others' reasoning stands beside what all models have.
    fields = {"reasoning_content": get_path(fields, "additional_kwargs", "reasoning_content"), **fields}
    of_message = ("name", "tool_call_id", "status", "reasoning_content")
    kept = {key: fields[key] for key in of_message if fields.get(key) is not None}
    message: Message = {"role": str(fields.get("role") or _CLASSES.get(name, name)), "content": given, **kept}
    if calls:
        message["tool_calls"] = calls
    return message if name in _CLASSES or name in ROLES else with_unread(message, f"{name} message")


def is_parts(value: Any) -> bool:
    """Whether a value is a list of parts of a message, rather than data that was said."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(item, dict)
            and (isinstance(item.get("type"), str) or (len(item) == 1 and next(iter(item)) in _BY_KEY))
            for item in value
        )
    )


def with_unread(message: Message, kind: str) -> Message:
    """The message with one more part, which was not read."""
    key = "parts" if "parts" in message else "content"
    said = message.get(key)
    parts = said if isinstance(said, list) else [] if said in (None, "") else [_text(said)]
    return {**message, key: [*parts, _unread(kind)]}


_OF_TOOLS: Final = ("tool_id", "arguments", "result")


def of_turns(turns: Sequence[Message]) -> list[Message]:
    """The turns of a dialog of SAGE as messages. Each has a `role`, which is a text.

    A tool's turn has the name of the tool (`tool_id`) and its `result`, else its `content` is that. The call is part
    of the assistant's turn before it. The arguments are a JSON object in `arguments`, or in the `content` beside a
    `result`. A message with a call without them has a part that was not read, and the weight 0.
    """
    messages: list[Message] = []
    for place, turn in enumerate(turns):
        role, content = turn["role"], turn.get("content")
        message = {key: value for key, value in turn.items() if key not in _OF_TOOLS}
        name, given, output = map(turn.get, _OF_TOOLS)
        if role != "tool" or turn.get("tool_call_id"):
            unread = [key for key in _OF_TOOLS if turn.get(key) is not None] if role in ROLES else [f"{role} turn"]
            messages.append({**with_unread(message, ", ".join(unread)), "weight": 0} if unread else message)
            continue
        is_beside = output is not None and content not in (None, "", output)
        given = content if given is None and is_beside else given
        is_known, call_id = is_object(given), f"call-{place}"
        # Whether calls were made at once or one after another is not known.
        is_caller = bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        if name:
            if not is_caller:
                messages.append({"role": "assistant", "content": ""})
            if not is_known:
                messages[-1] = {**with_unread(messages[-1], "call without arguments"), "weight": 0}
            messages[-1] = {**messages[-1], "tool_calls": [call_of(_call(call_id, name, given if is_known else {}))]}
        elif is_caller:
            messages[-1] = {**messages[-1], "weight": 0}
        result = [_result(call_id, name, content if output is None else output)]
        if not name:
            result.append(_unread("result without a tool_id"))
        if is_beside and not (name and is_known and given is content):
            result.append(_unread("text beside a result"))
        messages.append({**message, "tool_call_id": call_id, "name": name, "content": result})
    return messages


def _joined(messages: list[Message]) -> list[Message]:
    """The messages; items that call tools one after another are one message."""
    joined: list[Message] = []
    for message in messages:
        if _is_item(message) and joined and _is_item(joined[-1]):
            joined[-1] = {**message, "content": [*joined[-1]["content"], *message["content"]]}
        else:
            joined.append(message)
    return joined


def _is_item(message: Message) -> bool:
    content = message.get("content")
    return (
        message.get("role") == "assistant"
        and isinstance(content, list)
        and all(str(get_path(block, "type")).endswith("_call") for block in content)
    )


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
        if all(isinstance(item, dict) and item.get("type") in _READ for item in content):
            return content
        return [block for item in content for block in _blocks(item)]
    if isinstance(content, dict):
        return _translated(content)
    return [_text(content)]


def _translated(block: Block) -> list[Block]:
    """A block of any dialect as blocks of the types in `_READ`."""
    kind = block.get("type")
    if isinstance(kind, str):
        if kind in _READ:
            return [block]
        if kind in _BY_TYPE:
            return _BY_TYPE[kind](block)
        if kind.endswith("_tool_result"):
            return [_result(block.get("tool_use_id"), None, block.get("content"))]
        return [_unread(kind)]
    key = next((key for key in _BY_KEY if key in block), None)
    return [_unread(next(iter(block), "without content"))] if key is None else _BY_KEY[key](block)


def _text(text: Any) -> Block:
    return {"type": "text", "text": _plain(text)}


def _thought(text: Any) -> Block:
    return {"type": "thinking", "thinking": text}


def _call(call_id: Any, name: Any, arguments: Any) -> Block:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _result(call_id: Any, name: Any, output: Any) -> Block:
    return {"type": "tool_result", "id": call_id, "name": name, "output": output}


def _unread(kind: str) -> Block:
    """A part that is not understood, or not wholly. Reasons are joined by `; `."""
    return {"type": UNREAD, "kind": " ".join(kind.replace(";", ",").split())[:60]}


def _media(kind: str, **source: Any) -> Block:
    return {"type": kind, "source": source}


def _data(media_type: Any, **source: Any) -> Block:
    """Data of a media type, such as `image/png`."""
    return _media("image" if str(media_type).startswith("image/") else "file", **source)


def _fields(*keys: str) -> Callable[[Block], Block]:
    """What reads these fields of a block as one text, a line each."""
    return lambda block: _text("\n".join(_plain(block.get(key)) for key in keys))


def _calling(call_id: str, arguments: str) -> Callable[[Block], list[Block]]:
    """What reads a block that is a call, with its id and its arguments under these keys."""
    return lambda block: [_call(block.get(call_id), block.get("name"), block.get(arguments))]


def _output_of_responses(block: Block) -> list[Block]:
    return [_result(block.get("call_id"), None, block.get("output"))]


def _shown(block: Block, key: str, kind: str = "file") -> list[Block]:
    """Media of DashScope's interface, which are an address, or of Bedrock's, which have a source."""
    value = block[key]
    return [_media(kind, url=value) if isinstance(value, str) else _media(kind, data=json.dumps(value))]


def _inline(data: Any) -> list[Block]:
    """Data or a file of Gemini's interface."""
    kind = get_path(data, "mimeType") or get_path(data, "mime_type")
    address = get_path(data, "fileUri") or get_path(data, "file_uri")
    source = {"url": address} if address else {"data": get_path(data, "data")}
    return [_data(kind, **source)]


def _gemini_call(block: Block, call: Any) -> list[Block]:
    if not isinstance(call, dict):
        return [_unread("function_call")]
    # AgentScope uses Gemini's signature of a call as the call's id.
    call_id = call.get("id") or block.get("thought_signature") or block.get("thoughtSignature")
    return [_call(call_id, call.get("name"), call.get("args"))]


def _gemini_result(result: Any) -> list[Block]:
    output = get_path(result, "response")
    for key in ("output", "result"):
        if isinstance(output, dict) and output.keys() == {key}:
            output = output[key]
    return [_result(get_path(result, "id"), get_path(result, "name"), output)]


def _bedrock_call(call: Any) -> list[Block]:
    return [_call(*(get_path(call, key) for key in ("toolUseId", "name", "input")))]


def _bedrock_result(result: Any) -> list[Block]:
    return [_result(get_path(result, "toolUseId"), None, get_path(result, "content"))]


def _document(block: Block) -> list[Block]:
    """A document of Anthropic's interface: its title and its text."""
    source = block.get("source")
    titles = [_text(title)] if isinstance(title := block.get("title"), str) and title else []
    match get_path(source, "type"):
        case "text":
            return [*titles, _text(get_path(source, "data"))]
        case "content":
            return [*titles, *_blocks(get_path(source, "content"))]
    return [*titles, _media("file", **source)] if isinstance(source, dict) else [*titles, _unread("document")]


def _resource(block: Block) -> list[Block]:
    """A resource of the Model Context Protocol: a text, or data."""
    resource = block.get("resource")
    if isinstance(text := get_path(resource, "text"), str):
        return [_text(text)]
    return [_data(get_path(resource, "mimeType"), data=get_path(resource, "blob"))]


def _file_of_responses(block: Block) -> list[Block]:
    kind = "image" if block["type"] == "input_image" else "file"
    address = block.get("image_url") or block.get("file_url") or block.get("file_id") or block.get("file_data")
    return [_media(kind, url=_plain(address))]


def _output_of_vercel(block: Block) -> list[Block]:
    output: Any = block.get("output", block.get("result"))
    if get_path(output, "type") in ("text", "json", "content", "error-text", "error-json") and "value" in output:
        output = output["value"]
    return [_result(block.get("toolCallId"), block.get("toolName"), output)]


_BY_TYPE: Final[Mapping[str, Callable[[Block], list[Block]]]] = {
    # OpenAI's Responses API: parts, and items among messages.
    "input_text": lambda block: [_text(block.get("text"))],
    "output_text": lambda block: [_text(block.get("text"))],
    "summary_text": lambda block: [_thought(block.get("text"))],
    "reasoning_text": lambda block: [_thought(block.get("text"))],
    "input_image": _file_of_responses,
    "input_file": _file_of_responses,
    "function_call": lambda block: [
        _call(block.get("call_id") or block.get("id"), block.get("name"), block.get("arguments"))
    ],
    "custom_tool_call": _calling("call_id", "input"),
    "function_call_output": _output_of_responses,
    "custom_tool_call_output": _output_of_responses,
    # Anthropic's Messages API.
    "redacted_thinking": lambda block: [_thought("")],
    "server_tool_use": _calling("id", "input"),
    "mcp_tool_use": _calling("id", "input"),
    "document": _document,
    "search_result": lambda block: [_fields("title", "source")(block), *_blocks(block.get("content"))],
    # The text of a page that a search has found is encrypted.
    "web_search_result": lambda block: [_fields("title", "url")(block), _unread("web_search_result")],
    "web_fetch_result": lambda block: [_fields("url")(block), *_blocks(block.get("content"))],
    # The Model Context Protocol.
    "resource": _resource,
    "resource_link": lambda block: [_fields("name", "uri")(block)],
    # JSON, as Bedrock, Strands and others have it among the parts of a result.
    "json": lambda block: [_text(next((block[key] for key in ("json", "data", "value") if key in block), None))],
    # The Vercel AI SDK.
    "tool-call": lambda block: [
        _call(block.get("toolCallId"), block.get("toolName"), block.get("input", block.get("args")))
    ],
    "tool-result": _output_of_vercel,
    # Where a prompt may be cached says nothing.
    "cache_point": lambda block: [],
    "cachePoint": lambda block: [],
}
"""How blocks with a type are read that is not one of `_READ`."""
_BY_KEY: Final[Mapping[str, Callable[[Block], list[Block]]]] = {
    # Gemini's parts, in both spellings. A thought is a text, too.
    "functionCall": lambda block: _gemini_call(block, block["functionCall"]),
    "function_call": lambda block: _gemini_call(block, block["function_call"]),
    "functionResponse": lambda block: _gemini_result(block["functionResponse"]),
    "function_response": lambda block: _gemini_result(block["function_response"]),
    "inlineData": lambda block: _inline(block["inlineData"]),
    "inline_data": lambda block: _inline(block["inline_data"]),
    "fileData": lambda block: _inline(block["fileData"]),
    "file_data": lambda block: _inline(block["file_data"]),
    # Blocks of Bedrock's Converse API, and of Strands.
    "toolUse": lambda block: _bedrock_call(block["toolUse"]),
    "toolResult": lambda block: _bedrock_result(block["toolResult"]),
    "reasoningContent": lambda block: [_thought(block["reasoningContent"])],
    "citationsContent": lambda block: _blocks(get_path(block["citationsContent"], "content")),
    "guardContent": lambda block: _blocks(get_path(block["guardContent"], "text")),
    "json": lambda block: [_text(block["json"])],
    "cachePoint": lambda block: [],
    "document": lambda block: _shown(block, "document"),
    # DashScope's, too.
    "image": lambda block: _shown(block, "image", "image"),
    "audio": lambda block: _shown(block, "audio", "audio"),
    "video": lambda block: _shown(block, "video", "video"),
    "text": lambda block: [_thought(block["text"]) if block.get("thought") is True else {**block, "type": "text"}],
}
"""How blocks without a type are read, by a key that they have."""


def text_of(message: Message) -> str:
    """The text of a message, without reasoning and tool calls."""
    return "\n".join(texts_in(blocks_of(message)))


def texts_in(blocks: Iterable[Block]) -> list[str]:
    """The texts of those blocks that are text, or the model's refusal."""
    return [_plain(block.get(block["type"], block.get("content"))) for block in blocks if block.get("type") in _TEXTS]


def reasoning_in(message: Message) -> str:
    """The model's reasoning in a message: under a key of its own, else in its blocks; empty if it has none."""
    return reasoning_of(message) or _thought_in([each for each in blocks_of(message) if each["type"] in _THOUGHTS])


_INSIDE: Final = ("thinking", "reasoning", "reasoningText", "text", "content", "summary")
"""Keys of the text in a block of reasoning, or in what stands under one of these keys."""


def _thought_in(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(filter(None, map(_thought_in, value)))
    if isinstance(value, dict):
        return next(filter(None, (_thought_in(value.get(key)) for key in _INSIDE)), "")
    return value if isinstance(value, str) and value.strip() else ""


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


def unread_in(message: Message) -> Iterator[str]:
    """The types of the parts of a message, and of the results in it, that were not read or not wholly."""
    content = message.get("content")
    if message.get("role") == "tool" and isinstance(content, dict | list):
        yield from unread_in_result(content)
    else:
        yield from _unread_of(blocks_of(message))


def unread_in_result(value: Any) -> Iterator[str]:
    """The types of the parts of a tool's result that `result_text` has not read."""
    yield from _unread_of(_result_blocks(value) or ())


def failed_in(message: Message) -> Iterator[str]:
    """The ids of the calls whose results in a message say that they are errors."""
    content = message["parts"] if "parts" in message else message.get("content")
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and any(map(says_error, (block, *block.values()))):
            results = (each for each in _blocks(block) if each["type"] in _RESULTS)
            yield from (_plain(each.get("id", each.get("tool_use_id"))) for each in results)
    if message.get("role") == "tool" and says_error(message) and message.get("tool_call_id"):
        yield str(message["tool_call_id"])


def says_error(value: Any) -> bool:
    """Whether a result says that it is an error, as Anthropic, the Model Context Protocol, Bedrock and LangChain,
    AgentScope, or the Vercel AI SDK write it."""
    return isinstance(value, dict) and (
        value.get("is_error") is True
        or value.get("isError") is True
        or "error" in (value.get("status"), value.get("state"))
        or value.get("type") in ("error-text", "error-json")
    )


def _unread_of(blocks: Iterable[Block]) -> Iterator[str]:
    for block in blocks:
        if block["type"] == UNREAD:
            yield str(block["kind"])
        elif block["type"] in _RESULTS:
            yield from unread_in_result(_result_in(block))


def has_media(message: Message) -> bool:
    """Whether a message, or a result in it, has an image or anything else that is not text."""
    blocks = blocks_of(message)
    inner = (_result_blocks(_result_in(block)) or () for block in blocks if block["type"] in _RESULTS)
    return any(block["type"] in MEDIA_TYPES for each in (blocks, *inner) for block in each)


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
                | {"type": "image_url", "image_url": {"url": str(reference)} | str(reference)}
                | {"type": "image", "image": str(reference)}
                | {"type": "uri", "modality": "image", "uri": str(reference)}
            ):
                is_embedded = reference.startswith("data:")
            case {"type": "image", "source": {"data": str(reference)}} | {"type": "image", "data": str(reference)}:
                is_embedded = True
            case {"type": "blob", "modality": "image", **rest}:
                reference, is_embedded = str(rest.get("content", rest.get("data", ""))), True
            case _:
                continue
        if is_embedded:
            reference = "sha256:" + hashlib.sha256(reference.encode("utf-8", "surrogatepass")).hexdigest()
        references.append(reference)
    return [reference for reference in references if reference]


_AROUND_CONTENT: Final = frozenset(
    {"content", "isError", "is_error", "structuredContent", "structured_content", "_meta", "status", "toolUseId",
     "tool_use_id", "tool_call_id", "type", "id", "name", "role", "metadata", "state", "artifact", "stream",
     "is_last", "is_interrupted", "chunk", "created_at"}
)  # fmt: skip
"""What stands beside the content of a result. An object with other keys, and a text as content, is the tool's own."""


def result_text(value: Any) -> str:
    """The text of a tool's result: a text, blocks, an object with content, a repr, or JSON of blocks."""
    blocks = _result_blocks(value)
    return _plain(value) if blocks is None else "\n".join(texts_in(blocks))


def _result_blocks(value: Any) -> list[Block] | None:
    """The blocks of a tool's result; None for one that is as it stands: a text, or data of the tool's own."""
    if isinstance(value, str):
        if is_result(value):
            try:
                return _result_blocks(parse_call(value).get("content"))
            except ReprError:
                return None
        if not value.startswith(_BLOCKS):
            return None
        try:
            # AgentScope 2.0.7 to 2.0.10 write results in a conversation as the JSON of reprs of blocks.
            decoded = [parse_call(block) if is_block(block) else block for block in json.loads(value)]
        except (ValueError, RecursionError):
            return None
        return _result_blocks(decoded) if all(isinstance(get_path(block, "type"), str) for block in decoded) else None
    value = constructed(value)
    if isinstance(value, dict) and "content" in value:
        # The Model Context Protocol may have it twice: structuredContent repeats it.
        content = value["content"]
        if (blocks := _result_blocks(content)) is not None:
            return blocks
        return [_text(content)] if value.keys() <= _AROUND_CONTENT else None
    if isinstance(value, dict):
        return _read_or_none([value]) if isinstance(value.get("type"), str) else None
    return _read_or_none(value) if isinstance(value, list) else None


def _read_or_none(items: list[Any]) -> list[Block] | None:
    """The blocks in a list; None if it has objects and none of them is a block. Objects without a type are data of
    the tool's own, but for those of one key of `_BY_KEY`."""
    blocks: list[Block] = []
    is_read = not any(isinstance(item, dict) for item in items)
    for item in items:
        if isinstance(item, dict) and "type" not in item and not (len(item) == 1 and next(iter(item)) in _BY_KEY):
            blocks.append(_text(item))
        else:
            found = _blocks(item)
            is_read |= any(block["type"] != UNREAD for block in found)
            blocks += found
    return blocks if is_read else None


def chat_of(message: Message, *, with_reasoning: bool = False) -> list[ChatMessage]:
    """A message in the OpenAI form; several messages if it has tool results between its parts. `with_reasoning`,
    those of the model have theirs as `reasoning_content`."""
    role = message.get("role")
    if role not in ROLES:
        role = "assistant" if role == "model" else "user"
    blocks = blocks_of(message)
    if role == "tool":
        call_id = message.get("tool_call_id")
        results = [block for block in blocks if block.get("type") in _RESULTS]
        if not results:
            content = message.get("content")
            text = result_text(content) if isinstance(content, dict | list) else "\n".join(texts_in(blocks))
            return [_tool_message(call_id, message.get("name"), text)]
        # The message's own name is its author's.
        return [
            _tool_message(block.get("id") or call_id, block.get("name"), result_text(_result_in(block)))
            for block in results
        ]
    own = reasoning_of(message) if with_reasoning and role == "assistant" else ""
    if len(blocks) == 1 and blocks[0].get("type") in _TEXTS and not message.get("tool_calls") and not own:
        return [{"role": role, "content": texts_in(blocks)[0]}]
    chat: list[ChatMessage] = []
    texts: list[Block] = []
    thoughts: list[Any] = [own] if own else []
    calls = [call_of(call) for call in message.get("tool_calls") or () if isinstance(call, dict)]
    for block in blocks:
        kind = block["type"]
        if kind in _TEXTS:
            texts.append(block)
        elif kind in _CALLS:
            calls.append(call_of(block))
        elif kind in _THOUGHTS and with_reasoning and role == "assistant" and not own:
            thoughts.append(block)
        elif kind in _RESULTS:
            if texts or calls or thoughts:
                chat.append(_said(role, texts, calls, thoughts))
                texts, calls, thoughts = [], [], []
            call_id = block.get("id", block.get("tool_use_id"))
            chat.append(_tool_message(call_id, block.get("name"), result_text(_result_in(block))))
    if texts or calls or thoughts or not chat:
        chat.append(_said(role, texts, calls, thoughts))
    return chat


_BLOCKS: Final = ("[{", '["TextBlock(', '["DataBlock(', '["ThinkingBlock(', '["HintBlock(')
_TEXTS: Final = ("text", "refusal")
_CALLS: Final = ("tool_use", "tool_call")
_THOUGHTS: Final = ("thinking", "reasoning")
_RESULTS: Final = ("tool_result", "tool_call_response")
UNREAD: Final = "unread"
_READ: Final = frozenset({*_TEXTS, *_CALLS, *_THOUGHTS, *_RESULTS, *MEDIA_TYPES, "hint", UNREAD})
"""The types of blocks that are understood: AgentScope's, those of the GenAI convention, and media. The framework's
hints are no part of what was said."""


def _result_in(block: Block) -> Any:
    # Anthropic's interface has the result as content, and some clients of the GenAI convention have it as result.
    keys = ("output", "content") if block["type"] == "tool_result" else ("response", "result")
    return next((block[key] for key in keys if key in block), None)


def _said(role: str, texts: list[Block], calls: list[ToolCall], thoughts: list[Any]) -> ChatMessage:
    said: ChatMessage = {"role": role, "content": "\n".join(texts_in(texts))}
    if calls:
        said["tool_calls"] = calls
    if reasoning := _thought_in(thoughts):
        said["reasoning_content"] = reasoning
    return said


def _tool_message(call_id: Any, name: Any, content: str) -> ChatMessage:
    return {"role": "tool", "tool_call_id": _plain(call_id), "name": _plain(name), "content": content}


def call_of(block: Block) -> ToolCall:
    """A tool call in the OpenAI form, from a block, a part or that form itself."""
    function = block.get("function")
    inner = function if isinstance(function, dict) else block
    arguments = next((inner[key] for key in ("arguments", "input", "args") if key in inner), None)
    return {
        "id": _plain(block.get("id")),
        "type": "function",
        "function": {"name": _plain(inner.get("name")), "arguments": _plain({} if arguments is None else arguments)},
    }


_SCHEMAS: Final = ("inputSchema", "input_schema", "parameters_json_schema")
"""What the Vercel AI SDK, Anthropic and Pydantic AI call the parameters of a tool."""


def tool_of(definition: Block) -> ToolDefinition:
    """A tool's definition in the OpenAI form; the GenAI convention writes it flat."""
    if isinstance(definition.get("function"), dict):
        return {"type": "function", "function": definition["function"]}
    function = {key: value for key, value in definition.items() if key != "type"}
    if "parameters" not in function and (key := next((key for key in _SCHEMAS if key in function), None)):
        # The other fields are the client's own.
        named = {key: function[key] for key in ("name", "description") if function.get(key) is not None}
        function = {**named, "parameters": function[key]}
    return {"type": "function", "function": function}


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
