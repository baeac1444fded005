"""The JSON Schema of rubric files, for editors."""

from __future__ import annotations

from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema

from flywheel.judge.rubric.criterion import KINDS, MODEL_TYPE, OPTIONS, Criterion
from flywheel.judge.rubric.rubric import Rubric

DIALECT: Final = GenerateJsonSchema.schema_dialect


def json_schema() -> dict[str, Any]:
    """Draft 2020-12, from the models. Whatever it rejects, `flywheel rubric check` rejects as well."""
    schema = Rubric.model_json_schema()
    for definition in (schema, *schema["$defs"].values()):
        for key, part in definition["properties"].items():
            part.pop("title", None)
            if part.get("default", ...) is None:
                del part["default"]
            if key == "version":
                part["default"] = 1
    criterion = schema["$defs"][Criterion.__name__]
    kinds = criterion["properties"]["type"]
    kinds["oneOf"] = [{"const": name, "description": kind.summary} for name, kind in KINDS.items()]
    del kinds["enum"], kinds["type"]
    reference = criterion["properties"]["reference"]
    criterion["properties"]["reference"] = {"description": reference["description"], "type": ["string", "number"]}
    criterion["properties"]["choices"] = _choices(criterion["properties"]["choices"])
    criterion["allOf"] = [_rules(name) for name in KINDS]
    title = "A Flywheel rubric"
    return {"$schema": DIALECT, "title": title, **{key: part for key, part in schema.items() if key != "title"}}


def _choices(described: dict[str, Any]) -> dict[str, Any]:
    word = {"type": ["string", "boolean", "number"]}
    values = {"type": "object", "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1}}
    listed = {"type": "array", "items": word, "minItems": 2, "uniqueItems": True}
    return {"description": described["description"], "anyOf": [listed, {**values, "minProperties": 2}]}


def _rules(name: str) -> dict[str, Any]:
    """The keys that criteria of one type must and must not have."""
    kind = KINDS[name]
    allowed: dict[str, Any] = {option: False for option in OPTIONS if option not in kind.options}
    allowed["value"] = False if kind.value.schema is None else dict(kind.value.schema)
    reward, penalty = {"minimum": 0}, {"maximum": 0}
    required = ["value"] if kind.needs_value else []
    if kind.finds_fault is True:
        allowed["weight"] = penalty
        required.append("weight")
    elif not kind.allows_negative_weight and not kind.finds_fault:
        allowed["weight"] = reward
    is_type: dict[str, Any] = {"properties": {"type": {"const": name}}}
    if name != MODEL_TYPE:
        is_type["required"] = ["type"]
    then: dict[str, Any] = {"properties": allowed}
    if required:
        then["required"] = required
    if isinstance(kind.finds_fault, str):
        then["if"] = {"properties": {"value": {"const": kind.finds_fault}}, "required": ["value"]}
        then["then"] = {"properties": {"weight": penalty}, "required": ["weight"]}
        then["else"] = {"properties": {"weight": reward}}
    return {"if": is_type, "then": then}
