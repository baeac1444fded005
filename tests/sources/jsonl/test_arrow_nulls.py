"""The nulls that Arrow adds to rows are removed; those of the author stay."""

from __future__ import annotations

from typing import Any

import pytest

from flywheel.sources.jsonl.arrow_nulls import of_arguments, of_tool, takes_null

OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Sku"}
"""As pydantic writes an optional text."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sku": OPTIONAL, "n": {"type": "integer", "default": 1}, "where": {"type": "object"}},
    "required": ["n"],
}
TOOL = {
    "type": "function",
    "function": {"name": "stock", "description": "Counts.", "parameters": SCHEMA, "strict": None},
}


def test_a_definition_without_nulls_of_arrow_is_unchanged() -> None:
    assert of_tool(TOOL) == TOOL
    values = {"type": "object", "properties": {"a": {"enum": ["x", None], "const": None, "examples": [None]}}}
    assert of_tool({"name": "f", "parameters": values}) == {"name": "f", "parameters": values}


def test_what_other_rows_have_is_removed() -> None:
    properties = {**SCHEMA["properties"], "city": None}
    properties["n"] = {**properties["n"], "anyOf": None, "title": None}
    parameters = {**SCHEMA, "properties": properties, "description": None, "required": ["n", None]}
    function = {**TOOL["function"], "parameters": parameters, "returns": None}  # type: ignore[dict-item]
    assert of_tool({"type": "function", "function": function, "name": None}) == TOOL
    assert of_tool({"name": "f", "description": None, "parameters": {"$defs": {"A": None, "B": {"type": None}}}}) == {
        "name": "f",
        "parameters": {"$defs": {"B": {}}},
    }


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        (None, False),
        ({}, True),
        (True, True),
        ({"type": "string"}, False),
        ({"type": ["string", "null"]}, True),
        (OPTIONAL, True),
        ({"enum": ["a"]}, False),
        ({"enum": ["a", None]}, True),
        ({"const": "a"}, False),
        ({"type": "string", "nullable": True}, True),
        ({"$ref": "#/$defs/A"}, False),
    ],
)
def test_whether_null_is_a_value(schema: Any, taken: bool) -> None:
    assert takes_null(schema) is taken


def test_arguments_lose_the_nulls_that_their_schema_does_not_take() -> None:
    given = {"sku": None, "n": None, "city": None, "where": {"x": None, "y": 1}}
    assert of_arguments(given, SCHEMA) == {"sku": None, "where": {"y": 1}}
    assert of_arguments(given, None) == {"where": {"y": 1}}
    assert of_arguments([{"a": None}], None) == [{}]
