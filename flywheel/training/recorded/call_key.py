"""The key of a tool call: calls with equal keys ask the same of the same tool.

It is a hash of the tool's name, its definition, and the parsed arguments with the schema's defaults filled in. Types
are kept: 1, 1.0, "1" and true are four values. A key that is too fine causes a miss; one that is too coarse would
return the result of another call.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from flywheel.records.tool_calls import Tool, functions_by_name
from flywheel.records.trace import get_path


def tools_by_name(tools: Iterable[Mapping[str, Any]]) -> dict[str, Tool]:
    """The offered tools (`functions_by_name`) with the digests of their definitions."""
    return {name: Tool(name, function, _digest(function)) for name, function in functions_by_name(tools).items()}


def call_key(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """The key of a call with these parsed arguments. Raises ValueError if they are nested too deeply."""
    schema = tool.definition.get("parameters")
    try:
        return _digest([tool.name, tool.digest, with_defaults(arguments, schema)])
    except RecursionError:
        raise ValueError("they are nested too deeply") from None


def with_defaults(value: Any, schema: Any, root: Any = None) -> Any:
    """The value with the defaults of the properties that it leaves out, also in the objects within it.

    Follows `properties`, `items` and references within the schema (`root`). A default is taken as it is written. The
    branches of an `anyOf` are not followed.
    """
    root = schema if root is None else root
    schema = _resolved(schema, root)
    if isinstance(value, Mapping):
        properties = get_path(schema, "properties")
        if not isinstance(properties, dict):
            return value
        filled = {name: with_defaults(item, properties.get(name), root) for name, item in value.items()}
        for name, about in properties.items():
            if name not in filled and isinstance(about, dict) and "default" in about:
                filled[name] = about["default"]
        return filled
    if isinstance(value, list) and isinstance(items := get_path(schema, "items"), dict):
        return [with_defaults(item, items, root) for item in value]
    return value


def _resolved(schema: Any, root: Any) -> Any:
    """The schema that local references lead to; None for other references and for circles."""
    seen: set[str] = set()
    while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
        if reference in seen or not reference.startswith("#"):
            return None
        seen.add(reference)
        path = [part.replace("~1", "/").replace("~0", "~") for part in reference[1:].split("/")[1:]]
        schema = get_path(root, *path)
    return schema


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
