"""The key of a tool call."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flywheel.training.recorded.recordings import call_key, tools_by_name, with_defaults
from tests.cases import for_each
from tests.training.recorded.recordings import ADD, identity, tool

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.0, 1.0, 2.5])
    | st.sampled_from(["", "1", "é"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON, max_size=3)


def key(arguments: dict[str, Any], of: dict[str, Any] = ADD) -> str:
    (found,) = tools_by_name([of]).values()
    return call_key(found, arguments)


@given(OBJECTS, OBJECTS)
def test_calls_have_one_key_exactly_if_their_arguments_are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (key(one) == key(other)) == (identity(one) == identity(other))


@given(OBJECTS)
def test_order_and_spaces_of_arguments_do_not_matter(arguments: dict[str, Any]) -> None:
    again = json.loads(json.dumps(dict(reversed(arguments.items())), indent=2))
    assert key(arguments) == key(again)


def test_the_key_has_the_name_and_the_whole_definition() -> None:
    keys = {
        key({"a": 1}),
        key({"a": 1}, tool("plus")),
        key({"a": 1}, tool("add", "Add.")),
        key({"a": 1}, tool("add", a={"type": "integer"})),
    }
    assert len(keys) == 4


def test_a_flat_definition_is_the_same_tool() -> None:
    assert key({"a": 1}) == key({"a": 1}, {"type": "function", **ADD["function"]})
    assert tools_by_name([{"type": "function"}, {"name": 3}]) == {}


PAGE = {
    "$defs": {
        "Page": {"properties": {"size": {"default": 10}, "next": {"$ref": "#/$defs/Page"}}},
        "Circle": {"$ref": "#/$defs/Circle"},
    },
    "properties": {
        "unit": {"default": "km"},
        "page": {"$ref": "#/$defs/Page", "default": {"size": 5}},
        "pages": {"type": "array", "items": {"$ref": "#/$defs/Page"}},
        "circle": {"$ref": "#/$defs/Circle"},
        "remote": {"$ref": "https://example.org/schema"},
    },
}


@for_each(
    ("given_arguments", "filled"),
    [
        ({}, {"unit": "km", "page": {"size": 5}}),
        ({"unit": "m", "page": {}}, {"unit": "m", "page": {"size": 10}}),
        ({"unit": None, "page": None}, {"unit": None, "page": None}),
        ({"page": {"next": {}}}, {"unit": "km", "page": {"size": 10, "next": {"size": 10}}}),
        ({"page": 1, "pages": [{}, 3]}, {"unit": "km", "page": 1, "pages": [{"size": 10}, 3]}),
        ({"page": 1, "circle": {}, "remote": {}}, {"unit": "km", "page": 1, "circle": {}, "remote": {}}),
    ],
)
def test_defaults_are_filled_in(given_arguments: dict[str, Any], filled: dict[str, Any]) -> None:
    before = json.dumps(given_arguments)
    assert with_defaults(given_arguments, PAGE) == filled
    assert json.dumps(given_arguments) == before


@given(OBJECTS, JSON)
def test_any_schema_and_any_arguments_have_a_key(arguments: dict[str, Any], schema: Any) -> None:
    definition = {"name": "x", "parameters": {"properties": schema, "items": schema}}
    assert key(arguments, definition) == key(arguments, definition)


@given(OBJECTS, st.dictionaries(st.sampled_from("abc"), JSON, max_size=3))
def test_a_call_that_gives_the_defaults_is_the_one_that_leaves_them_out(
    arguments: dict[str, Any], defaults: dict[str, Any]
) -> None:
    of = tool(**{name: {"default": value} for name, value in defaults.items()} or {"z": {}})
    assert key(arguments, of) == key({**defaults, **arguments}, of)
