"""The JSON Schemas of the files that users write, for editors: configuration, rubrics, filter chains."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from flywheel.config.file import Config
from flywheel.config.section import Section
from flywheel.judge.filters.chain import FILTERS, ChainFile
from flywheel.judge.rubric.criterion import Criterion
from flywheel.judge.rubric.rubric import KINDS, MODEL_TYPE, Rubric

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
    sections = {each.__name__: each for each in _sections(Section)}
    for name, definition in ((model.__name__, schema), *schema.get("$defs", {}).items()):
        definition.pop("title", None)
        said = docstrings(sections[name]) if name in sections else {}
        for key, each in definition.get("properties", {}).items():
            found = each | ({"description": said[key]} if key in said else {})
            part = definition["properties"][key] = dict(sorted(found.items()))
            part.pop("title", None)
            if part.get("default", ...) is None or "$ref" in part:
                part.pop("default", None)
            if "description" in part:
                part["description"] = " ".join(part["description"].split())
    return {"$schema": DIALECT, "title": title, **schema}


def docstrings(section: type[Section]) -> dict[str, str]:
    """What is said of the fields of a section and its bases. Reading this from the source takes as long as importing
    the configuration does otherwise, so pydantic does not do it at each start."""
    found = {}
    for base in reversed(section.__mro__[: section.__mro__.index(Section)]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match text:
                    case ast.Expr(ast.Constant(str(said))):
                        found[field.target.id] = said
    return found


def _sections(section: type[Section]) -> Iterator[type[Section]]:
    yield section
    for each in section.__subclasses__():
        yield from _sections(each)


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
    definitions, common = schema["$defs"], Criterion.model_fields
    kinds, rules = [], []
    for name, model in KINDS.items():
        own = definitions[model.__name__]
        kinds.append({"const": name, "description": own.pop("description")})
        for key, part in own["properties"].items():
            if key in common:
                part.setdefault("description", " ".join(str(common[key].description).split()))
        required = {} if name == MODEL_TYPE else {"required": ["type"]}
        condition = {"properties": {"type": {"const": name}}, **required}
        rules.append({"if": condition, "then": {"$ref": f"#/$defs/{model.__name__}"}})
    kind = {"default": MODEL_TYPE, "description": common["type"].description, "oneOf": kinds}
    definitions["Criterion"] = {"type": "object", "properties": {"type": kind}, "allOf": rules}
    schema["properties"]["criteria"]["items"] = {"$ref": "#/$defs/Criterion"}
    return schema
