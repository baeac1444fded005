"""Attributes as types: what is passed over changes nothing, what has another type is not there, numbers are exact."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw, Struct

from flywheel.records.trace import SpanStatus
from flywheel.sources.spans.attributes import attributes_of, items_of, user_id, value_of
from flywheel.sources.spans.span import NOTHING, Attributes, Span, SpanKind

DATA = Path(__file__).parent.parent.parent / "data" / "studio"

ABSENT = object()
SPAN: dict[str, Any] = {
    "gen_ai": {
        "operation": {"name": "chat"},
        "agent": {"name": "Solver"},
        "request": {"model": "m"},
        "response": {"model": "m@r0001", "finish_reasons": ["stop"]},
        "input": {"messages": [{"role": "user", "parts": []}]},
        "usage": {"input_tokens": 3},
        "tool": {"name": "add", "call": {"id": "c1"}},
    },
    "agentscope": {"function": {"input": {"args": [[1], 2], "kwargs": {"msg": "hi"}}, "output": "done"}},
    "user": {"id": "u1"},
}


def told(value: Any) -> Any:
    """A struct as plain values, its JSON read."""
    if isinstance(value, Struct):
        return {name: told(getattr(value, name)) for name in value.__struct_fields__}
    return value_of(value) if isinstance(value, Raw) else value


def changed(value: Any, *path: str) -> bytes:
    """`SPAN` with another value at one place, or with none."""
    span = json.loads(json.dumps(SPAN))
    inner = span
    for key in path[:-1]:
        inner = inner[key]
    if value is ABSENT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(span).encode()


def rows(name: str) -> list[bytes]:
    with sqlite3.connect(f"file:{DATA / name}.sqlite?mode=ro", uri=True) as database:
        database.text_factory = bytes
        found = [row[0] for row in database.execute("SELECT attributes FROM span_table")]
    database.close()
    return found


@pytest.mark.parametrize("name", ["old", "new_v1", "new_v2", "new_oldclient", "migrated"])
def test_lenient_reading_finds_what_strict_reading_does(name: str) -> None:
    for data in rows(name):
        # A lone surrogate, where nobody looks, is what only the lenient way reads.
        lenient = data[:-1] + (b"," if len(data) > 2 else b"") + b'"passed over":"\\ud800"}'
        assert told(attributes_of(lenient)) == told(attributes_of(data))


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("gen_ai",), [1]),
        (("gen_ai",), None),
        (("gen_ai", "agent"), "Solver"),
        (("gen_ai", "agent", "name"), [7]),
        (("gen_ai", "response", "model"), None),
        (("gen_ai", "input"), []),
        (("agentscope", "function"), "reply"),
        (("agentscope", "function", "input"), 3),
        (("user",), "u1"),
    ],
)
def test_what_has_another_type_is_not_there_and_the_rest_is(path: tuple[str, ...], wrong: Any) -> None:
    assert told(attributes_of(changed(wrong, *path))) == told(attributes_of(changed(ABSENT, *path)))


@pytest.mark.parametrize(("wrong", "text"), [(12345, "12345"), (1.5, "1.5"), (True, "true"), ("007", "007")])
def test_a_text_that_looked_like_a_number_is_the_text_again(wrong: Any, text: str) -> None:
    """Servers decode attributes loosely: "12345" arrives as a number."""
    assert attributes_of(changed(wrong, "gen_ai", "agent", "name")).gen_ai.agent.name == text
    found = attributes_of(changed(wrong, "user", "id"))
    assert user_id(span_with(found)) == text
    lenient = changed(wrong, "user", "id")[:-1] + b',"passed over":"\\ud800"}'
    assert user_id(span_with(attributes_of(lenient))) == text


def span_with(found: Attributes) -> Span:
    return Span(1, "s", "t", "", "", SpanKind.AGENT, 0, 0, SpanStatus.OK, "", "", found)


def test_the_recorded_function_is_found_at_the_root_and_below_agentscope() -> None:
    function = SPAN["agentscope"]["function"]
    for data in (function, {"agentscope": {"function": function}}):
        check_function(attributes_of(json.dumps(data).encode()))


def check_function(found: Attributes) -> None:
    assert told(found.input.kwargs.msg) == "hi"
    assert value_of(items_of(found.input.args)[0]) == [1]
    assert value_of(found.output) == "done"


@pytest.mark.parametrize("number", [2**63, 10**30, -(10**30), 0.1, 1e300])
def test_numbers_stay_exact(number: float) -> None:
    found = attributes_of(changed(number, "agentscope", "function", "output"))
    assert value_of(found.output) == number
    assert type(value_of(found.output)) is type(number)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"{broken", ValueError),
        (b'{"passed over": 01}', ValueError),
        (b'{"passed over": "\xff"}', UnicodeDecodeError),
        (b'{"gen_ai": {"usage": "\xff"}}', UnicodeDecodeError),
        (b'{"passed over": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", RecursionError),
        (b"[]", TypeError),
        (b"null", TypeError),
    ],
)
def test_what_cannot_be_read_is_said_wherever_it_is(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        attributes_of(data)


def test_what_is_not_there_is_nothing() -> None:
    found = attributes_of(b"{}")
    assert found.gen_ai.usage is NOTHING
    assert value_of(NOTHING) is None
    assert items_of(NOTHING) == []
    assert items_of(Raw(b'"text"')) == []
    assert value_of(Raw(b'"\\ud800"')) == "\ud800"
    assert [value_of(item) for item in items_of(Raw(b'["\\ud800", 1]'))] == ["\ud800", 1]
