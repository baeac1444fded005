"""The JSON Schema of filter chains, for editors that complete and validate."""

from __future__ import annotations

from typing import Any

from flywheel.config.schema import described
from flywheel.judge.filters.chain import FILTERS, ChainFile


def json_schema() -> dict[str, Any]:
    """Draft 2020-12, from the models; each type of filter has parameters of its own."""
    schema = described(ChainFile, "A Flywheel filter chain")
    entry = schema["$defs"]["FilterEntry"]
    kinds = []
    for name, (_, model) in FILTERS.items():
        params = described(model, name)
        schema["$defs"] |= params.pop("$defs", {})
        schema["$defs"][name] = {key: params[key] for key in params if key not in ("$schema", "title")}
        kinds.append({"const": name, "description": params["description"]})
        properties = {"params": {"$ref": f"#/$defs/{name}"}}
        then = {"properties": properties, **({"required": ["params"]} if "required" in params else {})}
        # The parameters of a disabled filter are not looked at.
        enabled = {"not": {"properties": {"enabled": {"const": False}}, "required": ["enabled"]}}
        condition = {"properties": {"type": {"const": name}}, "required": ["type"], **enabled}
        entry.setdefault("allOf", []).append({"if": condition, "then": then})
    entry["properties"]["type"] = {"description": "What the filter does.", "oneOf": kinds}
    return schema
