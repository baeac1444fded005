"""A page of a server's call log, as the daemon reads it: what the server says is checked before it is used."""

from __future__ import annotations

import itertools
import time
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from flywheel.serving.calls.call_log import EXPANSION, PAGE_BYTES, LogState, RecordedCall
from flywheel.serving.calls.request_parts import MAX_PARTS

Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""More calls than a server answers. SQLite and sums of such numbers have room for it."""
Time = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, msgspec.Meta(max_length=4096)]
Text = str | tuple[str]


class CallPage(NamedTuple):
    """Calls with their numbers, and the state of the log they are from. `erased` counts the calls before the first
    one, or up to the newest number, that were erased there."""

    state: LogState
    calls: list[tuple[int, RecordedCall]]
    erased: int = 0


class _CallJson(msgspec.Struct):
    number: Number
    request_id: Name
    path: Name
    version: Name
    credential: Name
    retry: Number
    started_ns: Time
    ended_ns: Time
    status: Number
    is_complete: bool
    media_type: Name
    request: Annotated[list[Number], msgspec.Meta(max_length=MAX_PARTS)]
    response: Text
    # Older servers do not say these.
    unit: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")] = ""
    arm: Literal["new", "old", ""] = ""
    unit_kind: Literal["conversation", "session", "fallback", ""] = ""
    conversation: Name = ""
    user: Name = ""


class _PageJson(msgspec.Struct):
    log: Name
    oldest: Number
    newest: Number
    dropped: Number
    texts: list[Text]
    calls: list[_CallJson]
    refused: Number = 0
    erased: Number = 0


_decode: Final = msgspec.json.Decoder(_PageJson).decode


def read_page(text: str | bytes, after: int) -> CallPage:
    """Reads what `CallLog.page_json` wrote of the calls behind the number `after`. Raises ValueError for anything
    else, and for a page that repeats calls or leaves out those that it announces.

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
        plain = {name: getattr(call, name) for name in RecordedCall.__slots__}
        plain |= {"ended_ns": min(call.ended_ns, now), "started_ns": min(call.started_ns, call.ended_ns, now)}
        plain |= {"request": b"".join(texts[place] for place in call.request), "response": _bytes(call.response)}
        calls.append((call.number, RecordedCall(**plain)))
    return CallPage(LogState(page.log, page.oldest, page.newest, page.dropped, page.refused), calls, page.erased)


def _bytes(text: Text) -> bytes:
    return text.encode() if isinstance(text, str) else text[0].encode("latin-1")
