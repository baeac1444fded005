"""Plain reprs are read without a syntax tree, and mean the same as with one; all others are left to it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flywheel.sources.studio import reprs
from flywheel.sources.studio.reprs import ReprError, parse_call, plain_call

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4) | st.tuples(inner),
    max_leaves=12,
)
GARBLING = st.sampled_from(
    ["", "'", '"', "\\", "\n", ", ", "=", "(", ")", "}", "]", "b'x'", " ", "# ", "'''", "\x00", "01"]
)


def message(name: str, content: Any, metadata: Any) -> str:
    """As AgentScope 1.x writes it: the name between quotes as it is."""
    return f"Msg(id='1', name='{name}', content={content!r}, role='user', metadata={metadata!r})"


def through_a_tree(text: str) -> Any:
    with patch.object(reprs, "plain_call", lambda text: None):
        try:
            return parse_call.__wrapped__(text)
        except ReprError:
            return "garbled"


@settings(max_examples=300, deadline=None)
@given(name=st.text(max_size=8), content=VALUES, metadata=VALUES)
@example(name="O'Brien", content="it's", metadata={})
@example(name="x', extra='y", content="", metadata=None)
@example(name="back\\slash", content="new\nline and \\n", metadata={"a": [True, None, -1]})
def test_what_is_read_is_what_the_tree_says(name: str, content: Any, metadata: Any) -> None:
    text = message(name, content, metadata)
    plain = plain_call(text)
    assert plain is None or plain == through_a_tree(text)


@settings(max_examples=300, deadline=None)
@given(content=VALUES, garbling=GARBLING, place=st.integers(0, 200), length=st.integers(0, 3))
def test_what_is_garbled_is_left_to_the_tree(content: Any, garbling: str, place: int, length: int) -> None:
    text = message("Bob", content, None)
    place = min(place, len(text))
    text = text[:place] + garbling + text[place + length :]
    plain = plain_call(text)
    assert plain is None or plain == through_a_tree(text)


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
def test_the_usual_ones_are_plain(content: Any) -> None:
    text = message("Bob", content, {"n": None, "yes": True})
    expected = {"id": "1", "name": "Bob", "content": content, "role": "user", "metadata": {"n": None, "yes": True}}
    assert plain_call(text) == expected
    assert parse_call.__wrapped__(text) == expected
