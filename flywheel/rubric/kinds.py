"""The types of criteria: what each decides, what its `value` may be and which keys only it knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from flywheel.rubric import pattern
from flywheel.rubric.languages import code_of

MODEL_TYPE: Final = "llm-rubric"
QUERY: Final = "query"
"""`value` of a `language` criterion that goes by the question."""

_TEXT: Final = {"type": "string", "pattern": r"\S"}
_NAMES: Final = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}


@dataclass(frozen=True, slots=True)
class Kind:
    """One type. `check` raises ValueError for a value that it cannot use."""

    summary: str
    check: Callable[[Any], None]
    schema: Mapping[str, Any] | None
    """JSON Schema of `value`; None where it has none."""
    needs_value: bool = True
    options: frozenset[str] = frozenset()
    can_take_away: bool = True
    """Whether a negative weight makes sense: not where a good answer is what is found."""
    looks_at_steps: bool = False
    """Whether it looks at the calls of a reply, of which a rollout of one message has none."""


def _text(value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text")


def _pattern(value: Any) -> None:
    _text(value)
    pattern.check(value)


def _count(value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("must be a number of characters")


def _names(value: Any) -> None:
    listed = value if isinstance(value, list) else [value]
    if not listed or any(not isinstance(name, str) or not name.strip() for name in listed):
        raise ValueError("must be a text or a list of texts: names of tools")


def _language(value: Any) -> None:
    if value != QUERY and (not isinstance(value, str) or code_of(value) is None):
        raise ValueError(f"must be `{QUERY}`, or a language by its English name or ISO 639 code, not {value!r}")


def _json_schema(value: Any) -> None:
    if isinstance(value, str) and value.strip():
        return
    if not isinstance(value, dict):
        raise ValueError("must be a JSON Schema, or the name of a file that holds one")
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    kind = validator_for(value)
    try:
        kind.check_schema(value)
    except SchemaError as error:
        where = "".join(f".{part}" for part in error.absolute_path)
        raise ValueError(f"is no JSON Schema: at `value{where}`, {error.message}") from None


def _reference(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError("must be the right answer, a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")


def _function(value: Any) -> None:
    path, _, name = str(value).rpartition(":")
    if not isinstance(value, str) or not path.strip() or not name.isidentifier():
        raise ValueError("must be `path:function`, such as `checks.py:is_polite`")


def _nothing(value: Any) -> None:
    raise ValueError("is not used by this type; leave it out")


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        MODEL_TYPE: Kind(
            "The judge decides whether the statement is true.", _text, _TEXT, options=frozenset({"choices"})
        ),
        "regex": Kind("The pattern is found in the answer.", _pattern, {**_TEXT, "format": "regex"}),
        "not-regex": Kind("The pattern is not found in the answer.", _pattern, {**_TEXT, "format": "regex"}),
        "contains": Kind("The text is in the answer.", _text, _TEXT),
        "min-length": Kind("The answer has at least so many characters.", _count, {"type": "integer", "minimum": 0}),
        "max-length": Kind("The answer has at most so many characters.", _count, {"type": "integer", "minimum": 0}),
        "language": Kind(
            "The answer is in the language of the question, or in this one.", _language, _TEXT, needs_value=False
        ),
        "json-schema": Kind(
            "The answer is JSON that the schema allows.",
            _json_schema,
            {"anyOf": [_TEXT, {"$ref": "https://json-schema.org/draft/2020-12/schema"}]},
        ),
        "math-equal": Kind(
            "The last \\boxed{…} of the answer equals the reference.",
            _reference,
            {"anyOf": [_TEXT, {"type": "number"}]},
            needs_value=False,
            options=frozenset({"reference"}),
        ),
        "tool-called": Kind(
            "Tools of these names were called, so many times together.",
            _names,
            _NAMES,
            options=frozenset({"min", "max"}),
            looks_at_steps=True,
        ),
        "tool-sequence": Kind(
            "The tools were called in this order.",
            _names,
            _NAMES,
            options=frozenset({"match"}),
            looks_at_steps=True,
        ),
        "no-error-span": Kind(
            "No tool call and no model call failed on the way.",
            _nothing,
            None,
            needs_value=False,
            can_take_away=False,
            looks_at_steps=True,
        ),
        "degenerate": Kind(
            "The answer is not degenerate: no loop, no malformed tool call, no broken encoding.",
            _nothing,
            None,
            needs_value=False,
            can_take_away=False,
        ),
        "python": Kind("A function of your own decides.", _function, {"type": "string", "pattern": r"^.*\S.*:\w+$"}),
    }
)
OPTIONS: Final = ("choices", "reference", "min", "max", "match")
"""The keys that only some types know."""
