"""The JSON Schemas of the files that users write, for editors: configuration, rubrics, filter chains."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from flywheel.config.file import Config
from flywheel.judge.filters.chain import FILTERS, ChainFile
from flywheel.judge.rubric.rubric import KINDS, MODEL_TYPE, OPTIONS, Criterion, Rubric

DIALECT: Final = GenerateJsonSchema.schema_dialect


def config_schema() -> dict[str, Any]:
    """Draft 2020-12, from the settings themselves. Checks across several keys are not in it."""
    schema = described(Config, "A Flywheel configuration")
    # `false` turns it off, `true` is the default.
    schema["$defs"]["ServingSettings"]["properties"]["call_log"] = {
        "anyOf": [{"$ref": "#/$defs/CallLogSettings"}, {"type": "boolean"}]
    }
    return schema


def described(model: type[BaseModel], title: str) -> dict[str, Any]:
    """The schema of a model without what pydantic adds: titles, and defaults of sections, which have their own."""
    schema = model.model_json_schema()
    for definition in (schema, *schema.get("$defs", {}).values()):
        definition.pop("title", None)
        for part in definition.get("properties", {}).values():
            part.pop("title", None)
            if part.get("default", ...) is None or "$ref" in part:
                part.pop("default", None)
            if "description" in part:
                part["description"] = " ".join(part["description"].split())
    return {"$schema": DIALECT, "title": title, **schema}


def filters_schema() -> dict[str, Any]:
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


def rubric_schema() -> dict[str, Any]:
    """Draft 2020-12, from the models. Whatever it rejects, `flywheel rubric check` rejects as well."""
    schema = described(Rubric, "A Flywheel rubric")
    criterion = schema["$defs"][Criterion.__name__]
    kinds = criterion["properties"]["type"]
    kinds["oneOf"] = [{"const": name, "description": kind.summary} for name, kind in KINDS.items()]
    del kinds["enum"], kinds["type"]
    reference = criterion["properties"]["reference"]
    criterion["properties"]["reference"] = {"description": reference["description"], "type": ["string", "number"]}
    criterion["properties"]["choices"] = _choices(criterion["properties"]["choices"])
    criterion["allOf"] = [_rules(name) for name in KINDS]
    return schema


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
