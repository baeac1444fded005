"""The JSON Schema of configuration files, for editors that complete and validate."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from flywheel.config.file import Config

DIALECT: Final = GenerateJsonSchema.schema_dialect


def json_schema() -> dict[str, Any]:
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
