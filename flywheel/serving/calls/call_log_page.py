"""A page of a server's call log: what the server sends, and what the daemon takes of it after a check."""

from __future__ import annotations

import itertools
import time
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec.structs import asdict

from flywheel.serving.calls.call_log import (
    EXPANSION,
    MAX_PAGE_BYTES,
    PAGE_BYTES,
    CallFacts,
    CallLog,
    LogState,
    Name,
    Number,
    RecordedCall,
)
from flywheel.serving.calls.stored_parts import MAX_PARTS

Text = str | tuple[str]
"""A text that is not UTF-8 is a list of one text with a character for each byte."""


class CallPage(NamedTuple):
    """Calls with their numbers, and the state of the log they are from. `erased` counts the calls before the first
    one, or up to the newest number, that were erased there."""

    state: LogState
    calls: list[tuple[int, RecordedCall]]
    erased: int = 0


class _SentCall(CallFacts, frozen=True, kw_only=True):
    """`request` has the places of its parts in the texts of the page."""

    number: Number
    request: Annotated[list[Number], msgspec.Meta(max_length=MAX_PARTS)]
    response: Text


class _SentPage(msgspec.Struct):
    log: Name
    oldest: Number
    newest: Number
    dropped: Number
    texts: list[Text]
    calls: list[_SentCall]
    # Older servers do not say these.
    refused: Number = 0
    erased: Number = 0


_decode: Final = msgspec.json.Decoder(_SentPage).decode


def page_json(log: CallLog, after: int, max_calls: int, max_bytes: int, dropped: int = 0) -> bytes:
    """The calls of a log with numbers above `after`, as `CallLog.after` limits them; each part of their requests is
    written once. `dropped` is added to the count of the log. Raises CallLogError."""
    with log.reading():
        found, contents = log.after(after, max_calls, max_bytes)
        state = log.state()
        erased = log.erased_between(after, found[0].number if found else state.newest + 1)
    places = {part: place for place, part in enumerate(contents)}
    calls: list[dict[str, Any]] = []
    for number, call, parts in found:
        request = [places[part] for part in parts]
        calls.append({"number": number, **asdict(call), "request": request, "response": _text(call.response)})
    counts = {"dropped": state.dropped + dropped, "refused": state.refused, "erased": erased}
    texts = [_text(part) for part in contents.values()]
    numbers = {"oldest": state.oldest, "newest": state.newest, **counts}
    return msgspec.json.encode({"log": state.log_id, **numbers, "texts": texts, "calls": calls})


def read_page(text: str | bytes, after: int) -> CallPage:
    """Reads what `page_json` wrote of the calls behind the number `after`. Raises ValueError for anything else, and
    for a page that repeats calls or leaves out those that it announces.

    Calls of the future end now: a clock that is wrong would keep them for ever.
    """
    try:
        page = _decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    numbers = [call.number for call in page.calls]
    if any(later <= earlier for earlier, later in itertools.pairwise([after, *numbers])):
        raise ValueError(f"its calls are not those after number {after}, in their order")
    to_come = page.newest - max(after, page.oldest - 1)
    if max(numbers, default=0) > page.newest or (not numbers and to_come > page.erased):
        raise ValueError(f"its newest call is number {page.newest}, which its calls contradict")
    texts = [_bytes(each) for each in page.texts]
    now, room = time.time_ns(), EXPANSION * PAGE_BYTES
    calls = []
    for call in page.calls:
        if max(call.request, default=-1) >= len(texts):
            raise ValueError(f"call {call.number} names a text that is not there")
        room -= sum(len(texts[place]) for place in call.request)
        if room < 0:
            raise ValueError(f"its requests are longer than {EXPANSION * PAGE_BYTES:,} bytes")
        facts = asdict(call)
        facts |= {"ended_ns": min(call.ended_ns, now), "started_ns": min(call.started_ns, call.ended_ns, now)}
        facts |= {"request": b"".join(texts[place] for place in call.request), "response": _bytes(call.response)}
        calls.append((facts.pop("number"), RecordedCall(**facts)))
    return CallPage(LogState(page.log, page.oldest, page.newest, page.dropped, page.refused), calls, page.erased)


def fits_a_page(call: RecordedCall) -> bool:
    """Whether a page has room for the call: in JSON, a byte takes six at most."""
    bodies = (call.request, call.response)
    most = MAX_PAGE_BYTES - PAGE_BYTES
    return sum(map(len, bodies)) * 6 < most or sum(len(msgspec.json.encode(_text(each))) for each in bodies) < most


def _text(content: bytes) -> Text:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return (content.decode("latin-1"),)


def _bytes(text: Text) -> bytes:
    return text.encode() if isinstance(text, str) else text[0].encode("latin-1")
