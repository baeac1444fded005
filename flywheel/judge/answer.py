"""The judge's reply: the schema it is asked to follow, and strict reading of what it says.

A reply counts only as the complete set: every criterion once, one of its choices, a reason each. Anything else is
unreadable, and an unreadable reply is neither a pass nor a fail. The judge is told what was wrong in our own words,
which never quote the reply: it may quote the task.

An object might be a quotation from the task: it counts only if it carries the call's nonce, which no task can know.
That holds under a schema too, which makes a whole reply of whatever the judge copies.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import json_repair

from flywheel.batch import storable
from flywheel.rubric import Criterion
from flywheel.rubric.pattern import visible
from flywheel.verdict import CriterionResult

OPENING = re.compile(r"""\{\s*["']|\{\s*\w+\s*:""")
"""How an object begins, well written or not; braces in prose, such as `\\boxed{4}`, do not."""
CHOOSING = re.compile(r"""\bchoice\s*+["']?\s*+[:=]""", re.IGNORECASE)
FIELD = re.compile(r"""["'\s{,](criteria|check|reason|choice)\s*+["']?\s*+[:=]""", re.IGNORECASE)
THOUGHT = re.compile(
    r"</(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning)>|\[/THINK\]|◁/think▷|<\|channel\|>final<\|message\|>",
    re.IGNORECASE,
)
"""What ends the thoughts of a reasoning model whose server does not take them out. Some servers take out what begins
them, or send it with the prompt."""
THINKING = re.compile(r"\A\s*+<think>", re.IGNORECASE)
MARKUP = "*_`\"'“”„.。 \t\r\n"
"""What some judges put around a choice."""
FENCED = re.compile(r"\A\s*+```(?:json)?[ \t\r]*+\n(.*)```\s*\Z", re.DOTALL | re.IGNORECASE)


class UnreadableError(ValueError):
    """The reply is not a whole set of choices; the message says what is wrong, in words for the judge.

    `formless` is set when the reply does not even begin as an object: a schema had no part in it.
    """

    def __init__(self, problem: str, *, formless: bool = False) -> None:
        super().__init__(problem)
        self.formless = formless


def response_format(criteria: Sequence[Criterion]) -> dict[str, Any]:
    """The JSON schema of the reply, as `response_format` takes it. It is the same for every call: servers keep it."""
    schema = _object(
        {"criteria": _object({c.id: _criterion_schema(c) for c in criteria}), "check": {"type": "string"}}
    )
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


def read(criteria: Sequence[Criterion], text: str, *, nonce: str, shown: str = "") -> tuple[CriterionResult, ...]:
    """The results in a reply, one per criterion that was asked. Raises UnreadableError.

    `shown` is what the judge was shown of the task: a broken object is repaired only if nothing in there looks like a
    part of one. Thoughts, prose or a fence around the object are passed over; two different objects are not chosen
    between.
    """
    text = _without_thoughts(text)
    try:
        return _results(criteria, _own(text, nonce))
    except UnreadableError as unreadable:
        repaired = _repaired(text, shown, len(criteria))
        if repaired is None or not _is_own(repaired, nonce):
            formless = not text.lstrip().startswith("{")
            raise UnreadableError(str(unreadable), formless=formless) from None
        return _results(criteria, repaired["criteria"])


def _without_thoughts(text: str) -> str:
    if text.lstrip().startswith(("{", "```")):
        return text  # the object: what looks like an end of thoughts stands in one of its reasons
    ends = [match.end() for match in THOUGHT.finditer(text)]
    if ends:
        return text[ends[-1] :]
    return "" if THINKING.match(text) else text


def _is_own(verdict: dict[str, Any], nonce: str) -> bool:
    return str(verdict.get("check")).strip().lower() == nonce


def _own(text: str, nonce: str) -> Any:
    """The criteria of the one object that is the judge's own."""
    whole = FENCED.fullmatch(text)
    found = list(_verdicts_in(whole[1] if whole else text))
    if not found:
        raise UnreadableError('there is no JSON object with "criteria" in the reply')
    if any(other != found[0] for other in found[1:]):
        raise UnreadableError("there are several different JSON objects in the reply")
    if not _is_own(found[0], nonce):
        raise UnreadableError('"check" is not the token that was given')
    return found[0]["criteria"]


def _verdicts_in(text: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder(object_pairs_hook=_no_doubles)
    prose: list[str] = []
    end = 0
    position = text.find("{")
    while position >= 0:
        try:
            value, after = decoder.raw_decode(text, position)
        except UnreadableError:
            raise
        except ValueError as error:  # also for a number of more digits than Python reads
            if OPENING.match(text, position):
                raise UnreadableError("there is no JSON object that is whole in the reply") from error
            position = text.find("{", position + 1)
            continue
        except RecursionError as error:
            raise UnreadableError("the JSON is nested too deeply") from error
        if isinstance(value, dict) and "criteria" in value:
            yield value
        prose.append(text[end:position])
        end = after
        position = text.find("{", end)
    if CHOOSING.search("".join([*prose, text[end:]])):
        # Then the object may be no more than a quotation in it.
        raise UnreadableError("there are choices outside of the JSON object")


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) < len(pairs):
        raise UnreadableError("a key stands twice in one object")
    return whole


def _repaired(text: str, shown: str, criteria: int) -> dict[str, Any] | None:
    """A broken object made whole; None where a part of it could be a quotation, or where there is nothing to gain.

    Every field must stand exactly as often as in a whole reply. The last one is the nonce: what was cut off lacks it.
    """
    if FIELD.search(shown):
        return None
    fields = [match.lower() for match in FIELD.findall(text)]
    wanted = {"criteria": 1, "check": 1, "reason": criteria, "choice": criteria}
    if any(fields.count(name) != number for name, number in wanted.items()):
        return None
    rest, _, _ = text[text.find("{") :].partition("```")
    # To its last brace, or, if that one is missing, to the end.
    for candidate in (rest[: rest.rfind("}") + 1], rest):
        try:
            value = json_repair.loads(candidate, skip_json_loads=True, strict=True)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and set(value) == {"criteria", "check"} and _is_exact(value["criteria"]):
            return value
    return None


def _is_exact(criteria: Any) -> bool:
    return isinstance(criteria, dict) and all(
        isinstance(said, dict) and set(said) == {"reason", "choice"} for said in criteria.values()
    )


def _results(criteria: Sequence[Criterion], said: Any) -> tuple[CriterionResult, ...]:
    if not isinstance(said, dict):
        raise UnreadableError('"criteria" is not an object')
    asked = {criterion.id: criterion for criterion in criteria}
    if missing := [name for name in asked if name not in said]:
        raise UnreadableError(f"missing: {', '.join(missing)}")
    if len(said) > len(asked):
        raise UnreadableError(f"there are more criteria than were asked for: {', '.join(asked)}")
    return tuple(_result(criterion, said[name]) for name, criterion in asked.items())


def _result(criterion: Criterion, said: Any) -> CriterionResult:
    if not isinstance(said, dict):
        raise UnreadableError(f"{criterion.id} is not an object with reason and choice")
    reason, choice = said.get("reason"), said.get("choice")
    if not isinstance(reason, str) or not visible(reason):
        raise UnreadableError(f"{criterion.id} has no reason")
    scale = {_folded(name): (name, value) for name, value in criterion.scale.items()}
    words = [_folded(word) for word in _spelled(choice)]
    found = next((scale[word] for word in (*words, *(word.strip(MARKUP) for word in words)) if word in scale), None)
    if found is None:
        raise UnreadableError(f"the choice of {criterion.id} must be one of {', '.join(criterion.scale)}")
    name, value = found
    # Half an emoji, which JSON can spell, cannot be written anywhere.
    return CriterionResult(criterion.id, name, value, criterion.passes(value), storable(reason))


def _spelled(choice: Any) -> list[str]:
    """How a rubric may have written a choice: without a schema, 3 is as good as "3"."""
    if isinstance(choice, float) and choice.is_integer():
        return [str(int(choice)), str(choice)]
    return [str(choice)] if isinstance(choice, str | int) and not isinstance(choice, bool) else []


def _folded(word: str) -> str:
    return unicodedata.normalize("NFC", word.strip().casefold())
