"""Schemas that come with a trace, and take all time or memory: the daemon goes on, and each costs its own task."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from flywheel.errors import CheckError, CostlyCheckError
from flywheel.judge.rubric.checks import check
from flywheel.judge.rubric.checks.call_format import CallFormat
from flywheel.judge.rubric.checks.json_schema import JsonSchema
from flywheel.records.verdict import Exchange
from flywheel.system import json_schema, limited_call
from flywheel.system.json_schema import problems
from flywheel.system.limited_call import CostlyCallError, FunctionError
from tests.cases import for_each


def chain(length: int, link: Any) -> dict[str, Any]:
    """A schema whose definition 0 applies definition 1 as `link` does, and so on; the last one is a text."""
    steps = {f"d{each}": link({"$ref": f"#/$defs/d{each + 1}"}) for each in range(length)}
    return {"$defs": {**steps, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def nested(depth: int, name: str = "a") -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {name: value}
    return value


LONG = "a" * 60 + "!"
NODE = {"$ref": "#/$defs/n"}
ANCHORED = {
    f"d{each}": {"$dynamicAnchor": f"n{each}", "allOf": [{"$dynamicRef": f"#n{each + 1}"}] * 2} for each in range(34)
}
EXPONENTIAL = {
    "allOf": (chain(36, lambda each: {"allOf": [each, each]}), "x"),
    "oneOf": (chain(36, lambda each: {"oneOf": [each, each]}), "x"),
    "anyOf": (chain(36, lambda each: {"anyOf": [each, each]}), 1),
    "if": (chain(36, lambda each: {"if": each, "then": each}), "x"),
    "dependentSchemas": (chain(36, lambda each: {"allOf": [{"dependentSchemas": {"a": each}}, each]}), {"a": 1}),
    "properties": ({"$defs": {"n": {"allOf": [{"properties": {"a": NODE}}] * 2}}, **NODE}, nested(60)),
    "unevaluated": ({**chain(30, lambda each: {"allOf": [each, each]}), "unevaluatedProperties": False}, {"a": 1}),
    "dynamicRef": ({"$defs": {**ANCHORED, "d34": {"$dynamicAnchor": "n34"}}, "$dynamicRef": "#n0"}, {"a": 1}),
    "enum": ({"items": {"enum": [{"x": each} for each in range(20_000)]}}, [{"x": -1}] * 20_000),
    "anyOf of constants": ({"items": {"anyOf": [{"const": each} for each in range(20_000)]}}, ["x"] * 5_000),
}
"""They exceed the limit."""

DECIDED = {
    "contains": (
        {"$defs": {"n": {"allOf": [{"contains": NODE}] * 2}}, **NODE},
        json.loads("[" * 60 + "]" * 60),
        True,
    ),
    "patternProperties": ({"patternProperties": {"^(a|aa)+$": {}}}, {LONG: 1}, False),
    "pattern": ({"pattern": "^(a|aa)+$"}, LONG, True),
    "pattern of a long text": ({"pattern": "(a+a+)+y"}, "a" * 100_000, True),
    "pattern with lookahead": ({"pattern": "^(?=(a|aa)+$)"}, LONG, True),
    "pattern with a back reference": ({"pattern": r"^(a|aa)+(?!b)\1$"}, LONG, True),
    "propertyNames": ({"propertyNames": {"pattern": "^(a|aa)+$"}}, {LONG: 1}, True),
    "uniqueItems": ({"uniqueItems": True}, [{"x": each} for each in range(20_000)], False),
    "uniqueItems of lists": ({"uniqueItems": True}, [[{"x": [each]}] for each in range(20_000)], False),
    "anyOf": ({"anyOf": [{"const": f"c{each}"} for each in range(20_000)]}, "x", True),
    "$ref to itself": ({"$ref": "#"}, {}, False),
    "allOf of itself": ({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, {}, False),
    "many schemas": ({"properties": {f"p{each}": {"pattern": "^(a|aa)+$"} for each in range(5_000)}}, {}, False),
    "a long message": ({"items": {"type": "string"}}, [[0] * 1_000] * 200, True),
    "half a character": ({"type": "integer"}, "\ud800", True),
    "a tiny divisor": ({"multipleOf": 1e-300}, 1e300, None),
    "a large number": ({"minimum": 10**300}, 1, True),
}
"""What is right of them: None where nothing is."""


@pytest.mark.slow
@for_each("name", list(EXPONENTIAL))
def test_a_schema_over_the_limit_is_remembered_by_its_hash(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_call, "ATTEMPTS", 1)
    schema, value = EXPONENTIAL[name]
    with pytest.raises(CostlyCallError, match="processor time"):
        problems(schema, [value])

    with monkeypatch.context() as patched:
        patched.setattr(limited_call, "_children", None)  # it is not tried again
        with pytest.raises(CostlyCallError):
            problems(schema, [value])
    assert problems({"type": "integer"}, ["x", 1]) == ['at $: "x" is not of type "integer"', ""]


@for_each("name", list(DECIDED))
def test_what_jsonschema_cannot_decide_is_decided(name: str) -> None:
    schema, value, is_wrong = DECIDED[name]
    [found] = problems(schema, [value])
    assert len(found) <= json_schema.MAX_PROBLEM
    assert is_wrong in (None, bool(found))


@for_each(
    "schema",
    [
        {"type": "objekt"},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$ref": "file:///etc/passwd"},
        {"$schema": "http://127.0.0.1:9/schema.json"},
        {"pattern": "("},
        {"pattern": "((a{0,100}){0,100}){0,100}"},
        {"properties": {"\ud800": {"type": "string"}}},
        nested(20_000, "not"),
        "text",
        [],
        None,
    ],
)
def test_what_is_no_schema_says_so(schema: Any) -> None:
    with pytest.raises(FunctionError) as caught:
        problems(schema, [1])
    assert str(caught.value)
    assert not isinstance(caught.value, CostlyCallError)


def called(parameters: Any, arguments: str) -> Exchange:
    function = {"name": "f", "parameters": parameters}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    step = {"role": "assistant", "content": "", "tool_calls": [call]}
    return Exchange("q", "answer", tools=({"type": "function", "function": function},), trajectory=(step,))


FORMAT = CallFormat(id="fmt")


@for_each(
    "digits",
    ["1" + "0" * 400, "9" * 5_000, "1e400", "-1e999999999999", "-" + "9" * 400, "1.5e310"],
)
def test_a_number_that_no_double_holds_is_a_failed_check(digits: str) -> None:
    exchange = called({"properties": {"a": {"multipleOf": 0.1}}}, f'{{"a": {digits}}}')
    found = check(FORMAT, exchange)
    assert (found.value, found.passed) == (0.0, False)
    assert "too large" in found.reason or "Exceeds the limit" in found.reason
    answer = Exchange("q", digits)
    assert not check(JsonSchema(id="js", value={"multipleOf": 0.1}), answer).passed


@pytest.mark.slow
def test_a_costly_schema_leaves_the_criterion_undecided_with_the_reason() -> None:
    schema, value = EXPONENTIAL["properties"]
    exchange = called(
        {"properties": {"v": NODE}, "$defs": schema["$defs"]},
        json.dumps({"v": value}),
    )
    with pytest.raises(CostlyCheckError, match="the schema of the tool 'f' takes more than 1 s of processor time"):
        check(FORMAT, exchange)
    criterion = JsonSchema(id="js", value=schema)
    with pytest.raises(CheckError, match="its schema takes more than"):
        check(criterion, Exchange("q", json.dumps(value)))
    # The schema of a rubric is used for every task: one answer does not end its use.
    assert check(criterion, Exchange("q", "{}")).passed


@pytest.mark.slow
def test_other_threads_run_while_schemas_exceed_the_limit() -> None:
    """The interpreter is not held, and other schemas are applied meanwhile."""
    schema, value = EXPONENTIAL["oneOf"]
    hostile = [{**schema, "title": str(each)} for each in range(2)]
    failed: list[str] = []

    def exceed(schema: Any) -> None:
        with pytest.raises(CostlyCallError):
            problems(schema, [value])
        failed.append(schema["title"])

    threads = [threading.Thread(target=exceed, args=(each,)) for each in hostile]
    for thread in threads:
        thread.start()
    applied = beats = 0
    while any(thread.is_alive() for thread in threads):
        applied += problems({"type": "integer"}, [1]) == [""]
        time.sleep(0.001)
        beats += 1
    for thread in threads:
        thread.join()
    assert sorted(failed) == ["0", "1"]
    assert applied == beats > 1
