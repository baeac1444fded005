"""The JSON Schema of rubrics: as generated, and of one mind with the check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema_rs import Draft202012Validator, meta

from flywheel.judge.file_schemas import rubric_schema
from flywheel.judge.rubric.file import load_rubric
from flywheel.judge.rubric.rubric import KINDS, Rubric
from flywheel.system import files

FOLDER = files.shipped_folder() / "rubrics"
SHIPPED = sorted(FOLDER.glob("*.yaml"))
YES = {"id": "a", "value": "It is so."}


def refused(raw: Any) -> bool:
    return not Draft202012Validator(rubric_schema()).is_valid(raw)


def test_the_shipped_schema_is_the_generated_one() -> None:
    assert json.loads((FOLDER / "rubric.schema.json").read_text()) == rubric_schema()
    assert rubric_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    meta.validate(rubric_schema())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_rubric_names_the_schema_and_validates(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=rubric.schema.json\n")
    Draft202012Validator(rubric_schema()).validate(yaml.safe_load(text))


def test_every_key_and_every_type_is_described() -> None:
    schema = rubric_schema()
    parts = [schema, *schema["$defs"].values()]
    bare = [key for part in parts for key, value in part["properties"].items() if "description" not in value]
    assert [key for key in bare if key not in ("judge", "escalate")] == []
    kinds = schema["$defs"]["Criterion"]["properties"]["type"]["oneOf"]
    assert {kind["const"] for kind in kinds} == set(KINDS)
    assert all(kind["description"] for kind in kinds)
    assert "files" not in schema["properties"]
    assert set(schema["properties"]) == set(Rubric.model_fields) - {"files"}


@pytest.mark.parametrize(
    "criteria",
    [
        [{**YES, "wieght": 2}],
        [{"id": "a"}],
        [{"value": "x"}],
        [{"id": "a", "type": "rgx", "value": "x"}],
        [{"id": "a b", "value": "x"}],
        [{"id": "a", "value": "  "}],
        [{"id": "a", "value": ["x"]}],
        [{"id": "a", "type": "regex"}],
        [{"id": "a", "type": "min-length", "value": "10"}],
        [{"id": "a", "type": "max-length", "value": -1}],
        [{"id": "a", "type": "degenerate", "value": "x"}],
        [{"id": "a", "type": "no-error-span", "weight": -1}],
        [{"id": "a", "type": "redundant-call"}],
        [YES, {"id": "b", "type": "timeout", "weight": 1}],
        [YES, {"id": "b", "type": "timeout", "weight": -1, "value": 0}],
        [{"id": "a", "type": "step-efficiency", "weight": -1}],
        [{"id": "a", "type": "call-format", "weight": -1}],
        [YES, {"id": "b", "type": "call-format", "value": "invalid"}],
        [{"id": "a", "type": "call-format", "value": "good"}],
        [{"id": "a", "type": "regex", "value": "x", "choices": ["a", "b"]}],
        [{**YES, "choices": ["one"]}],
        [{**YES, "choices": {"bad": 0, "good": 2}}],
        [{**YES, "min": 1}],
        [{"id": "a", "type": "tool-called", "value": "x", "match": "exact"}],
        [{"id": "a", "type": "tool-called", "value": []}],
        [{"id": "a", "type": "tool-sequence", "value": ["x"], "match": "any"}],
        [{"id": "a", "type": "expected-tools", "order": "sorted"}],
        [{"id": "a", "type": "expected-tools", "value": ["x"]}],
        [{"id": "a", "type": "optimal-steps", "weight": -1}],
        [{"id": "a", "type": "python", "value": "checks.py"}],
        [{"id": "a", "type": "json-schema", "value": {"type": "objekt"}}],
        [{"id": "a", "type": "math-equal", "reference": ["7"]}],
        [{**YES, "weight": "3"}],
    ],
)
def test_what_the_check_refuses_the_schema_refuses(criteria: list[dict[str, Any]]) -> None:
    assert refused({"id": "r", "criteria": criteria})


@pytest.mark.parametrize(
    "more",
    [
        {"treshold": 0.5}, {"threshold": 2}, {"version": 2}, {"judge": {"repeat": 3}}, {"judge": {"repeats": 0}},
        {"examples": [{"query": "q", "answer": "a", "verdict": "maybe"}]}, {"examples": [{"query": "q"}]},
        {"judge": {"escalate": {"repeats": 3}}}, {"id": ""}, {"files": {}},
    ],
)  # fmt: skip
def test_wrong_keys_of_the_rubric_are_refused(more: dict[str, Any]) -> None:
    assert not refused({"id": "r", "criteria": [YES]})
    assert refused({"id": "r", "criteria": [YES], **more})


RIGHT: dict[str, dict[str, Any]] = {
    "llm-rubric": {"value": "It is so.", "choices": ["poor", "fair", "good"]},
    "regex": {"value": "x"},
    "not-regex": {"value": "x", "weight": -1},
    "contains": {"value": "x"},
    "min-length": {"value": 1},
    "max-length": {"value": 100},
    "language": {},
    "json-schema": {"value": {"type": "object"}},
    "math-equal": {"reference": 7},
    "tool-called": {"value": ["x", "y"], "min": 1, "max": 3},
    "tool-sequence": {"value": ["x", "y"], "match": "exact"},
    "expected-tools": {"order": "as-listed"},
    "optimal-steps": {},
    "no-error-span": {},
    "redundant-call": {"value": ["x"], "weight": -0.2},
    "step-efficiency": {"max": 5},
    "call-format": {"value": "invalid", "weight": -0.1},
    "timeout": {"value": 60.5, "weight": -1},
    "degenerate": {},
    "python": {"value": "checks.py:decide"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_taken_by_both(kind: str, tmp_path: Path) -> None:
    raw = {"id": "r", "criteria": [YES | {"id": "b"}, {"id": "a", "type": kind, **RIGHT[kind]}]}
    assert not refused(raw)
    (tmp_path / "checks.py").write_text("def decide(task):\n    return True\n")
    (tmp_path / "r.yaml").write_text(json.dumps(raw))
    assert load_rubric(tmp_path / "r.yaml").criteria[1].type == kind


def test_the_page_names_every_key_and_every_type() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "rubrics-and-filters.md").read_text()
    schema = rubric_schema()
    keys = {key for part in (schema, *schema["$defs"].values()) for key in part["properties"]}
    assert [name for name in (*keys, *KINDS) if f"`{name}`" not in page and f"`{name}:" not in page] == []
    examples = next(block for block in page.split("```yaml\n") if block.startswith("id: one-of-each"))
    every = yaml.safe_load(examples.split("```")[0])
    assert {criterion["type"] for criterion in every["criteria"]} == set(KINDS)
    assert not refused(every)
