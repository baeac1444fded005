"""The judge's reply: the schema it is asked to follow, and strict reading of what it says.

A reply counts only as the complete set: every criterion once, one of its choices, a reason each. Anything else is
unreadable, and an unreadable reply is neither a pass nor a fail. The judge is told what was wrong in our own words,
which never quote the reply: it may quote the task.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from flywheel.rubric import Criterion, Rubric
from flywheel.verdict import CriterionResult

OPENING = re.compile(r"""\{\s*["']|\{\s*\w+\s*:""")
"""How an object begins, well written or not; braces in prose, such as `\\boxed{4}`, do not."""
CHOOSING = re.compile(r"""\bchoice\s*["']?\s*[:=]""", re.IGNORECASE)
THOUGHT = "</think>"
"""What ends the thoughts of a reasoning model whose server does not take them out."""


class UnreadableError(ValueError):
    """The reply is not a whole set of choices; the message says what is wrong, in words for the judge."""


def response_format(rubric: Rubric) -> dict[str, Any]:
    """The JSON schema of the reply, as `response_format` takes it."""
    criteria = {c.id: _criterion_schema(c) for c in rubric.asked}
    schema = _object({"criteria": _object(criteria)})
    return {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}


def _criterion_schema(criterion: Criterion) -> dict[str, Any]:
    # The reason comes first: a choice that is made before its reason is only defended by it.
    return _object({"reason": {"type": "string"}, "choice": {"type": "string", "enum": list(criterion.scale)}})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def read(rubric: Rubric, text: str) -> tuple[CriterionResult, ...]:
    """The results in a reply, one per criterion that was asked. Raises UnreadableError.

    Thoughts, prose or a fence around the object are passed over; two different objects are not chosen between. A
    broken object is never searched for a whole one inside: that would be a verdict which the task quotes.
    """
    if text.lstrip().startswith("<think>"):
        _, ended, text = text.rpartition(THOUGHT)
        text = text if ended else ""
    found = list(_verdicts_in(text))
    if not found:
        raise UnreadableError('there is no JSON object with "criteria" in the reply')
    if any(other != found[0] for other in found[1:]):
        raise UnreadableError("there are several different JSON objects in the reply")
    return _results(rubric, found[0])


def _verdicts_in(text: str) -> Iterator[Any]:
    decoder = json.JSONDecoder(object_pairs_hook=_no_doubles)
    prose, end = "", 0
    position = text.find("{")
    while position >= 0:
        try:
            value, after = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            if OPENING.match(text, position):
                raise UnreadableError("there is no JSON object that is whole in the reply") from error
            position = text.find("{", position + 1)
            continue
        except RecursionError as error:
            raise UnreadableError("the JSON is nested too deeply") from error
        if isinstance(value, dict) and "criteria" in value:
            yield value["criteria"]
        prose, end = prose + text[end:position], after
        position = text.find("{", end)
    if CHOOSING.search(prose + text[end:]):
        # Then the object may be no more than a quotation in it.
        raise UnreadableError("there are choices outside of the JSON object")


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) < len(pairs):
        raise UnreadableError("a key stands twice in one object")
    return whole


def _results(rubric: Rubric, criteria: Any) -> tuple[CriterionResult, ...]:
    if not isinstance(criteria, dict):
        raise UnreadableError('"criteria" is not an object')
    asked = {criterion.id: criterion for criterion in rubric.asked}
    if missing := [name for name in asked if name not in criteria]:
        raise UnreadableError(f"missing: {', '.join(missing)}")
    if len(criteria) > len(asked):
        raise UnreadableError(f"there are more criteria than were asked for: {', '.join(asked)}")
    return tuple(_result(criterion, criteria[name]) for name, criterion in asked.items())


def _result(criterion: Criterion, said: Any) -> CriterionResult:
    if not isinstance(said, dict):
        raise UnreadableError(f"{criterion.id} is not an object with reason and choice")
    reason, choice = said.get("reason"), said.get("choice")
    if not isinstance(reason, str):
        raise UnreadableError(f"{criterion.id} has no reason")
    scale = {name.casefold(): (name, value) for name, value in criterion.scale.items()}
    if not isinstance(choice, str) or choice.strip().casefold() not in scale:
        raise UnreadableError(f"the choice of {criterion.id} must be one of {', '.join(criterion.scale)}")
    name, value = scale[choice.strip().casefold()]
    return CriterionResult(criterion.id, name, value, criterion.passes(value), reason)
