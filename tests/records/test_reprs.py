"""Reprs of messages survive whatever a message can hold."""

from __future__ import annotations

import ast
import contextlib
import datetime
import enum
import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flywheel.records import reprs
from flywheel.records.chat import messages_of, result_text, text_of
from flywheel.records.reprs import ReprError, parse_call

# Quotes, brackets, backslashes, newlines and whole reprs are what broke readers before.
NASTY = st.sampled_from(
    ["'", '"', "'''", "\\", "\\'", "\n", "\r\n", "\t", "]", "[", "}", ")", "(", ",", "', content=", "Msg(id='x'",
     "content='", "<", ">", "<x at 0x1>", "\x00", "\x1b", "\u2028", "中文", "🎉", "\ud83d", "{'type': 'text'}", "#"]
)  # fmt: skip
TEXT = st.lists(st.one_of(NASTY, st.text(max_size=8)), max_size=6).map("".join)
NAME = TEXT.filter(lambda name: "', content=" not in name)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
TEXT_BLOCK = st.builds(lambda text: {"type": "text", "text": text}, TEXT)
BLOCK = st.one_of(
    TEXT_BLOCK,
    st.builds(lambda text: {"type": "thinking", "thinking": text}, TEXT),
    st.builds(lambda text, value: {"type": "tool_use", "id": text, "name": text, "input": value}, TEXT, PLAIN),
    st.builds(
        lambda text, output: {"type": "tool_result", "id": text, "name": text, "output": output},
        TEXT,
        st.lists(TEXT_BLOCK, max_size=2),
    ),
    st.builds(lambda url: {"type": "image", "source": {"type": "url", "url": url}}, TEXT),
)
CONTENT = st.one_of(TEXT, st.lists(BLOCK, max_size=4))

# Neither a slow machine nor the examples database may decide.
PATIENT = settings(max_examples=80, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


def written(content: Any, name: str = "user", metadata: Any = None) -> str:
    """As AgentScope 1.x writes a message."""
    return (
        f"Msg(id='8utofg4dEYFisC72aVRkNu', name='{name}', content={content!r}, role='user', "
        f"metadata={metadata!r}, timestamp='2026-11-21 05:27:01.064', invocation_id='None')"
    )


@PATIENT
@given(CONTENT, NAME, PLAIN)
def test_a_message_comes_back_as_it_was(content: Any, name: str, metadata: Any) -> None:
    assert parse_call(written(content, name, metadata)) == {
        "id": "8utofg4dEYFisC72aVRkNu",
        "name": name,
        "content": content,
        "role": "user",
        "metadata": metadata,
        "timestamp": "2026-11-21 05:27:01.064",
        "invocation_id": "None",
    }


@PATIENT
@given(CONTENT, NAME, PLAIN, st.integers(0, 400), st.integers(0, 3), NASTY)
def test_what_is_read_as_json_is_what_a_syntax_tree_says(
    content: Any, name: str, metadata: Any, place: int, removed: int, put: str
) -> None:
    text = written(content, name, metadata)
    for each in (text, text[:place] + put + text[place + removed :]):
        if (found := reprs.as_json(each)) is not None:
            with contextlib.suppress(SyntaxError, ValueError):
                call = ast.parse(each, mode="eval").body
                assert isinstance(call, ast.Call)
                assert repr(found) == repr({one.arg: ast.literal_eval(one.value) for one in call.keywords})


@pytest.mark.parametrize("content", ["4", 'it\'s "4"\n', [{"type": "text", "text": "=", "n": [1, -2.5, None, True]}]])
def test_a_usual_message_needs_no_syntax_tree(content: Any) -> None:
    found = reprs.as_json(written(content))
    assert found is not None
    assert found["content"] == content


@pytest.mark.parametrize("content", ["\\u0041", "\\/", "\u200b", "\ud83d\ude00"])
def test_escapes_that_json_reads_otherwise_are_left_to_the_syntax_tree(content: str) -> None:
    assert reprs.as_json(written(content)) is None
    assert parse_call(written(content))["content"] == content


@PATIENT
@given(CONTENT)
def test_the_text_is_that_of_the_text_blocks(content: Any) -> None:
    (message,) = messages_of(written(content))
    blocks = [] if isinstance(content, str) else content
    wanted = content if isinstance(content, str) else "\n".join(b["text"] for b in blocks if b["type"] == "text")
    assert text_of(message) == wanted


@PATIENT
@given(st.lists(TEXT_BLOCK, max_size=3), CONTENT)
def test_a_tools_result_with_a_message_inside(blocks: list[dict[str, str]], content: Any) -> None:
    inner = f"{{'success': True, 'response_msg': {written(content)}}}"
    response = f"ToolResponse(content={blocks!r}, metadata={inner}, stream=False, is_last=True, id='1')"
    assert result_text(response) == "\n".join(block["text"] for block in blocks)


class Colour(enum.Enum):
    RED = 1


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    "value",
    [datetime.datetime(2026, 11, 21, 5, 27), Colour.RED, Point(1), object(), print, dict, {1, 2}, float("nan"),
     float("-inf"), 1 + 2j, Ellipsis, b"x", {"deep": [Colour.RED, object()]}, (1, 2)],
)  # fmt: skip
def test_what_is_no_literal_breaks_nothing(value: object) -> None:
    read = parse_call(written('it\'s > "5" <b>', metadata={"value": value, "after": "kept"}))
    assert read["content"] == 'it\'s > "5" <b>'
    assert read["metadata"]["after"] == "kept"
    assert "value" in read["metadata"]


@pytest.mark.parametrize(
    "text", ["Msg(id='x', name='y', content='cut o", "Msg(id='x'", "Msg(id=", "Msg(id='x') or Msg(id='y')"]
)
def test_a_garbled_repr_is_refused(text: str) -> None:
    with pytest.raises(ReprError):
        parse_call(text)


def test_a_repr_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ReprError):
        parse_call(f"Msg(id='x', content={'[' * 100_000}{']' * 100_000})")


def test_nothing_in_a_repr_is_evaluated() -> None:
    read = parse_call("Msg(id='x', content=__import__('os').abort())")
    assert read["content"] == "__import__('os').abort()"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "plain",
        "both ' and \"",
        "lines\n\tand \\ slashes\r",
        "größer 日本 🙂",
        [{"type": "text", "text": "it's"}],
        7,
        [],
        {},
    ],
)
def test_usual_messages_are_parsed(content: Any) -> None:
    text = f"Msg(id='1', name='Bob', content={content!r}, role='user', metadata={{'n': None, 'yes': True}})"
    expected = {"id": "1", "name": "Bob", "content": content, "role": "user", "metadata": {"n": None, "yes": True}}
    assert parse_call(text) == expected


@PATIENT
@given(
    CONTENT,
    st.sampled_from(["", "'", '"', "\\", "\n", "=", "(", ")", "]", "b'x'", "'''", "\x00", "01"]),
    st.integers(0, 200),
)
def test_a_garbled_message_is_parsed_or_refused(content: Any, garbling: str, place: int) -> None:
    text = f"Msg(id='1', name='Bob', content={content!r}, role='user')"
    place = min(place, len(text))
    with contextlib.suppress(ReprError):
        assert isinstance(parse_call(text[:place] + garbling + text[place + 1 :]), dict)


def test_several_readers_parse_at_once() -> None:
    """CPython before 3.11.8 fails here without a lock: a collection in the middle of a parse changes the thread."""

    def parse_many(reader: int) -> int:
        texts = (f"Msg(id='{reader}-{number}', content=[{{'a': [1, [2, {{}}]]}}])" for number in range(1000))
        return sum(parse_call(text)["id"].startswith(f"{reader}-") for text in texts)

    def pause(*_: object) -> None:
        time.sleep(0)

    before, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.callbacks.append(pause)
    try:
        gc.set_threshold(50)
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(4) as readers:
            assert list(readers.map(parse_many, range(4))) == [1000] * 4
    finally:
        gc.callbacks.remove(pause)
        gc.set_threshold(*before)
        sys.setswitchinterval(interval)
