"""Finds attributes that an SDK or a collector has cut at a limit of length, by their texts alone.

Two things show a cut. JSON that breaks off at its end was longer. And where texts of one resource end at the same
length, which none exceeds, in different words and in the middle of a sentence, that length is a limit. Lengths are
counted in characters. Nothing of what a reader makes of a cut text is its content, so JSON that breaks off is removed
from the span; other texts stay, and `Span.limit` tells them.
https://opentelemetry.io/docs/specs/otel/common/#attribute-limits
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from flywheel.records.trace import get_path
from flywheel.sources.spans.attributes import first_argument, items_of, value_of
from flywheel.sources.spans.span import (
    ANSWERS,
    NOTHING,
    QUESTIONS,
    Attributes,
    Longest,
    Messages,
    Span,
    SpanKind,
    TextArguments,
)

LEAST: Final = 64
"""The smallest limit that lengths can show. Many short texts have the same length by chance."""
ENDING: Final = 32
"""Texts that end alike in so many characters are repetitions of one text, and say nothing about a limit."""
_LITERALS: Final = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_LAST_ESCAPES: Final = re.compile(r"(?:\\u[0-9a-fA-F]{0,4})+\Z")
_HALF_NUMBER: Final = re.compile(r"\.|[eE][+-]?")
_ENCODED: Final = re.compile(r"(?:data:[\w./+;=-]*,)?[0-9A-Za-z+/_=-]*")
_MARKS: Final = "<>`´＜＞"
"""Brackets and quotation marks that Unicode counts among the symbols."""
_JSON_PATHS: Final = frozenset(
    {
        "input", "output", "metadata", "agentscope.function.input", "agentscope.function.output",
        "gen_ai.tool.call.arguments", "gen_ai.tool.call.result",
    }
)  # fmt: skip
"""Objects that were JSON text. Others are made of the dots in names, or of JSON that cannot be told from those."""
_RETURNED: Final = ('"Msg(', '["Msg(', '"ToolResponse(', '"ChatResponse(', '{"content":')
"""How what AgentScope's agents, tools and models return begins as JSON text."""
_QUOTE: Final = ord('"')
_BRACE: Final = ord("{")
_BRACKET: Final = ord("[")
_ESCAPE: Final = ord("\\")
_QUOTED_OBJECT: Final = b'"{\\"'
"""Within JSON, a text that begins like an object."""
_NOTHING_CUT: Final = frozenset[str]()
_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_json: Final = json.JSONDecoder(strict=False, parse_int=str).decode


def breaks_off(text: str) -> bool:
    """Whether a text begins like a JSON object, array or text, and is none only because it ends too early.

    JSON is what Python's `json` reads, with NaN and lone surrogates.
    """
    text = text.strip()
    if text[:1] not in ("{", "[", '"'):
        return False
    text = _LAST_ESCAPES.sub("", text)
    try:
        _decode_json(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].strip()
        if not rest or error.msg.startswith("Unterminated string"):
            return True
        if error.msg.startswith("Expecting value"):
            return any(literal.startswith(rest) for literal in _LITERALS)
        return error.msg.startswith("Expecting ','") and _HALF_NUMBER.fullmatch(rest) is not None
    except (ValueError, RecursionError):
        pass
    return False


def longest_of(texts: Iterable[str]) -> Longest:
    """The longest of some texts."""
    length, endings = 0, set[str]()
    for text in texts:
        if len(text) > length:
            length, endings = len(text), set()
        if len(text) == length >= LEAST and _may_be_cut(text):
            endings.add(text[-ENDING:])
    return Longest(length, tuple(sorted(endings)))


def _may_be_cut(text: str) -> bool:
    """Whether a text ends without punctuation of any script, and is not made of hex or base64 digits."""
    last = text[-1]
    return unicodedata.category(last)[0] != "P" and last not in _MARKS and _ENCODED.fullmatch(text) is None


def limit_of(found: Iterable[Longest]) -> int:
    """The limit that the longest texts of one resource show; 0 if they show none."""
    length, endings = 0, set[str]()
    for each in found:
        if each.length > length:
            length, endings = each.length, set()
        if each.length == length:
            endings.update(each.endings)
    return length if len(endings) > 1 else 0


def longest_in(attributes: bytes, floor: int = LEAST) -> Longest:
    """The longest text, or JSON, of attributes as Studio stores them; nothing if none has `floor` characters.

    Only what may be that long is decoded. Elements of arrays count by themselves, and JSON with its own length, as
    which it ends in a bracket and shows no limit. Raises MsgspecError for what is no JSON object.
    """
    floor = max(floor, LEAST)
    is_ascii = attributes.isascii()
    texts: list[Raw] = []
    waiting: list[tuple[str, bytes | Raw]] = [("", attributes)]
    json_length = 0
    while waiting:
        path, within = waiting.pop()
        if len(within) <= floor:
            continue
        for key, raw in _decode_object(within).items():
            # A text of n bytes has fewer characters.
            if len(raw) <= floor:
                continue
            view = memoryview(raw)
            if view[0] == _QUOTE:
                texts.append(raw)
            elif view[0] == _BRACE and (name := path + key) not in _JSON_PATHS:
                waiting.append((f"{name}.", raw))
            elif view[0] == _BRACKET and view[1] == _QUOTE and (items := _texts_of_array(raw)):
                texts += items
            elif view[0] in (_BRACE, _BRACKET):
                length = len(raw) if is_ascii else len(bytes(raw).decode())
                if length >= floor:
                    json_length = floor = length
    found = longest_of(value_of(raw) for raw in texts if len(raw) > floor)
    return found if found.length >= json_length else Longest(json_length)


def _texts_of_array(raw: Raw) -> list[Raw]:
    """The elements of an array that has nothing but texts; empty for any other array."""
    items = msgspec.json.decode(raw, type=list[Raw])
    return items if all(memoryview(item)[0] == _QUOTE for item in items) else []


def marked(spans: Mapping[str, Span]) -> Mapping[str, Span]:
    """The spans of one trace, each with the limit of its resource, and without JSON that breaks off."""
    limits = _limits(spans.values())
    changed: dict[str, Span] = {}
    for span_id, span in spans.items():
        recorded = span.recorded
        # The first test is quick and ends here for many spans: JSON within JSON has escaped quotation marks.
        has_json_text = b"\\" in recorded and b'\\"' in recorded
        cut = _cut_in(span) if has_json_text else _NOTHING_CUT
        limit = limits.get(span.resource, 0) if limits else 0
        if cut or limit:
            attributes = _without(span.attributes, cut) if cut else span.attributes
            changed[span_id] = replace(span, attributes=attributes, cut=cut, limit=limit)
    return {**spans, **changed} if changed else spans


def _limits(spans: Collection[Span]) -> dict[str, int]:
    """The limits that the texts of a trace show, by resource."""
    found: dict[str, list[Longest]] = {}
    floors: dict[str, int] = {}
    values: list[tuple[str, bytes]] = []
    for span in spans:
        resource = span.resource
        if (longest := span.attributes.flywheel.longest).length:
            found.setdefault(resource, []).append(longest)
            length = longest.length
        else:
            length = _json_length(span)
            values.append((resource, span.recorded))
        if length > floors.get(resource, LEAST):
            floors[resource] = length
        for event in span.events:
            if isinstance(attributes := event.get("attributes"), dict):
                values.append((resource, _written(attributes)))
    for resource, recorded in values:
        floor = floors.get(resource, LEAST)
        # Nearly all spans end here, without being decoded: their texts are shorter than JSON of the trace.
        if _may_have_text(recorded, floor) and (longest := _longest_in(recorded, floor)).length >= floor:
            floors[resource] = longest.length
            found.setdefault(resource, []).append(longest)
    limits = {resource: limit_of(each) for resource, each in found.items()}
    return {
        resource: limit for resource, limit in limits.items() if limit and not _is_exceeded(resource, limit, values)
    }


def _is_exceeded(resource: str, length: int, values: Iterable[tuple[str, bytes]]) -> bool:
    """Whether JSON of a resource is longer: where it has no long text, it has not been measured."""
    return any(_longest_in(recorded, length).length > length for own, recorded in values if own == resource)


def _json_length(span: Span) -> int:
    """The length of JSON in a span, in characters, as far as it is quickly found; 0 if none is."""
    gen_ai, given = span.attributes.gen_ai, span.attributes.input
    longest = max(gen_ai.input.messages, gen_ai.tool.definitions, given.args, given.kwargs.tools, key=len)
    if len(longest) <= LEAST:
        return 0
    view = memoryview(longest)
    # An array of texts is no JSON: each of them counts by itself.
    if view[0] == _QUOTE or view[1] == _QUOTE:
        return 0
    return len(longest) if span.recorded.isascii() else len(bytes(longest).decode(errors="replace"))


def _may_have_text(recorded: bytes, length: int) -> bool:
    """Whether JSON may have a text of that many characters: whether so many bytes are without a quotation mark."""
    at = 0
    while at + length < len(recorded):
        end = at + length
        mark = recorded.rfind(b'"', at, end)
        while mark > at and recorded[mark - 1] == _ESCAPE:
            mark = recorded.rfind(b'"', at, mark - 1)
        if mark < 0:
            return True
        at = mark + 1
    return False


def _longest_in(attributes: bytes, floor: int) -> Longest:
    try:
        return longest_in(attributes, floor)
    except msgspec.MsgspecError:
        # Lone surrogates, or NaN.
        return longest_in(_written(json.loads(attributes, parse_constant=str)), floor)
    except RecursionError:
        return Longest(len(attributes))  # What cannot be measured shows no limit.


def _written(value: Any) -> bytes:
    """JSON as Studio writes it; lone surrogates become `?`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _cut_in(span: Span) -> frozenset[str]:
    try:
        return _broken(span)
    except (ValueError, RecursionError):
        return _NOTHING_CUT  # It is reported where it is read.


def _broken(span: Span) -> frozenset[str]:
    """The attributes of a span that by convention hold JSON messages or tools, and break off."""
    attributes = span.attributes
    gen_ai, tool = attributes.gen_ai, attributes.gen_ai.tool
    texts = {
        "gen_ai.input.messages": gen_ai.input.messages,
        "gen_ai.output.messages": gen_ai.output.messages,
        "gen_ai.system_instructions": gen_ai.system_instructions,
        "gen_ai.tool.definitions": tool.definitions,
    }
    cut = {name for name, raw in texts.items() if raw is not NOTHING and _is_broken_object(_text_in(raw))}
    if isinstance(attributes.input, TextArguments) and _is_broken_object(attributes.input.text):
        cut.add("input")
    # Tools, and the arguments of a call, may have been attributes of their own.
    tools, called = tool.definitions, tool.call
    if _QUOTED_OBJECT in bytes(tools) and any(map(_is_broken_object, map(value_of, items_of(tools)))):
        cut.add("gen_ai.tool.definitions")
    if called is not NOTHING:
        call = value_of(called)
        if _is_broken_object(get_path(call, "arguments")):
            cut.add("gen_ai.tool.call.arguments")
        if _is_broken_return(get_path(call, "result"), span.kind):
            cut.add("gen_ai.tool.call.result")
    if _is_broken_return(_text_in(attributes.output), span.kind):
        cut.add("output")
    return frozenset(cut)


def _is_broken_object(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip()[:1] in ("[", "{") and breaks_off(value)


def _is_broken_return(value: Any, kind: SpanKind) -> bool:
    """Whether a value is what AgentScope returned, cut. Agents and tools may also return any text."""
    begins = (*_RETURNED, "{") if kind is SpanKind.LLM else _RETURNED
    return isinstance(value, str) and value.startswith(begins) and breaks_off(value)


def _text_in(raw: Raw) -> str:
    return str(value_of(raw)) if memoryview(raw)[0] == _QUOTE else ""


def _without(attributes: Attributes, cut: frozenset[str]) -> Attributes:
    """Attributes without the messages that were cut."""
    gen_ai = replace(
        attributes.gen_ai,
        input=Messages() if "gen_ai.input.messages" in cut else attributes.gen_ai.input,
        output=Messages() if "gen_ai.output.messages" in cut else attributes.gen_ai.output,
    )
    return replace(attributes, gen_ai=gen_ai, output=NOTHING if "output" in cut else attributes.output)


def texts_in(value: Any) -> Iterator[str]:
    """Each text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts_in(inner)


def cut_question(span: Span, question: str, *, is_read: bool) -> str:
    """The attribute by whose cut the question that a span was asked is not whole; empty if it is whole. `is_read`
    says if messages were read from the span."""
    return _cut(span, QUESTIONS, question, _given(span), is_read=is_read)


def cut_answer(span: Span, answer: str, *, is_read: bool) -> str:
    """The same of the answer that a span gave."""
    return _cut(span, ANSWERS, answer, _returned(span), is_read=is_read)


def _cut(span: Span, names: frozenset[str], said: str, raws: Iterable[Raw], *, is_read: bool) -> str:
    if not is_read and (cut := span.cut & names):
        return min(cut)
    return f"at {span.limit} characters" if any(text in said for text in _at_limit(span, raws)) else ""


def _given(span: Span) -> tuple[Raw, ...]:
    kwargs = span.attributes.input.kwargs
    named = kwargs.msg if span.kind is SpanKind.AGENT else kwargs.messages
    return span.attributes.gen_ai.input.messages, first_argument(span, named)


def _returned(span: Span) -> tuple[Raw, ...]:
    return span.attributes.gen_ai.output.messages, span.attributes.output


def _at_limit(span: Span, raws: Iterable[Raw]) -> Iterator[str]:
    """The texts in some values that are as long as the limit."""
    if span.limit:
        yield from (text for raw in raws for text in texts_in(value_of(raw)) if len(text) == span.limit)


def cuts_in(span: Span) -> Iterator[str]:
    """What of the messages, tools and results of a span was cut, in words."""
    if not span.cut and not span.limit:
        return
    yield from (f"the attribute {name} of {span.name} was cut" for name in sorted(span.cut))
    tool, tools = span.attributes.gen_ai.tool, span.attributes.input.kwargs.tools
    raws = (*_given(span), *_returned(span), tool.definitions, tool.call, tools)
    if next(_at_limit(span, raws), None) is not None:
        yield f"a text of {span.name} was cut at {span.limit} characters"
