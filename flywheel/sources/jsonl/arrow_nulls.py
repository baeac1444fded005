"""Removes the nulls that Arrow adds: each row of a table has the keys of all rows, and null where a row had none.

A null goes only where JSON Schema, or the schema of an argument, permits none; others may be the author's.
https://json-schema.org/draft/2020-12/json-schema-core
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from flywheel.records.trace import ToolDefinition

_VALUES: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are values of the instance: any of them may be null."""
_SCHEMAS_BY_NAME: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def of_tool(tool: ToolDefinition) -> ToolDefinition:
    """A tool's definition, in which `strict` alone may be null."""
    of_key: dict[str, Callable[[Any], Any]] = {"function": of_tool, "parameters": of_schema}
    return {
        key: of_key[key](value) if key in of_key and isinstance(value, dict) else value
        for key, value in tool.items()
        if value is not None or key == "strict"
    }


def of_schema(schema: Any) -> Any:
    """A JSON schema without nulls that it cannot have."""
    if isinstance(schema, list):
        return [of_schema(each) for each in schema if each is not None]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _VALUES else _named(value) if key in _SCHEMAS_BY_NAME else of_schema(value)
        for key, value in schema.items()
        if value is not None or key in _VALUES
    }


def _named(schemas: Any) -> Any:
    if not isinstance(schemas, dict):
        return schemas
    return {name: of_schema(schema) for name, schema in schemas.items() if schema is not None}


def of_arguments(arguments: Any, schema: Any) -> Any:
    """The arguments of a call, or a value in them, without nulls that their schema (None: unknown) does not take."""
    if isinstance(arguments, list):
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [of_arguments(each, items) for each in arguments]
    if not isinstance(arguments, dict):
        return arguments
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    of_each = properties if isinstance(properties, Mapping) else {}
    return {
        name: of_arguments(value, of_each.get(name))
        for name, value in arguments.items()
        if value is not None or takes_null(of_each.get(name))
    }


_ARGUMENTS: Final = frozenset({"arguments", "input", "args", "parameters"})
_RETURNED: Final = frozenset({"output", "response", "result", "json", "toolResult", "functionResponse"})
"""What a tool has returned is data: its nulls stay."""


def of_message(value: Any, functions: Mapping[str, Mapping[str, Any]]) -> Any:
    """A message, or a part of one, as a new object without nulls and without objects that had nothing else.
    `functions` are the definitions of offered tools, by name."""
    if isinstance(value, list):
        return [of_message(each, functions) for each in value]
    if not isinstance(value, dict):
        return value
    is_result = {str(value.get("role")), str(value.get("type"))} & {"tool", "function", "tool_result"}
    returned = {*_RETURNED, "content"} if is_result else _RETURNED
    found = {}
    for key, each in value.items():
        if key in _ARGUMENTS and isinstance(each, dict):
            name = str(value.get("name") or value.get("toolName"))
            found[key] = of_arguments(each, functions.get(name, {}).get("parameters"))
        elif each is not None:
            kept = each if key in returned else of_message(each, functions)
            if kept != {} or each == {}:
                found[key] = kept
    return found


def takes_null(schema: Any) -> bool:
    """Whether null is a value of a schema; not if there is no schema."""
    if not isinstance(schema, Mapping):
        return schema is True
    if schema.get("nullable") is True:
        return True
    if any(key in schema for key in ("anyOf", "oneOf")):
        return any(takes_null(each) for key in ("anyOf", "oneOf") for each in schema.get(key) or ())
    if schema.get("enum") is not None:
        return None in schema["enum"]
    kinds = schema.get("type")
    if kinds is None:
        return "const" not in schema and "$ref" not in schema
    return "null" in (kinds if isinstance(kinds, list) else [kinds])
