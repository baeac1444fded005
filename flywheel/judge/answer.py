"""The judge's answer: its JSON schema, and its strict parsing.

An answer counts only if it is complete: every criterion once, with one of its choices and a reason. Everything else
is unreadable, which is neither a pass nor a fail. The judge is told the problem in words that never quote the reply,
because a reply can quote the task.

A JSON object in a reply can be a quotation of the task. It counts only with the call's nonce, which no task can know.
That applies under a schema too, which turns whatever the judge copies into a complete object.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import json_repair

from flywheel.judge.chat_completions import strict_format, strict_object
from flywheel.judge.rubric import Criterion
from flywheel.judge.rubric.text import visible
from flywheel.records.task import storable
from flywheel.records.verdict import CriterionResult

OBJECT_START = re.compile(r"""\{\s*["']|\{\s*\w+\s*:""")
"""Well-formed or not. Braces in prose, such as `\\boxed{4}`, do not match."""
CHOICE = re.compile(r"""\bchoice\s*+["']?\s*+[:=]""", re.IGNORECASE)
FIELD = re.compile(r"""["'\s{,](criteria|check|reason|choice)\s*+["']?\s*+[:=]""", re.IGNORECASE)
REASONING_END = re.compile(
    r"</(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning)>|\[/THINK\]|◁/think▷|<\|channel\|>final<\|message\|>",
    re.IGNORECASE,
)
"""The end of a reasoning model's thoughts, where the server does not remove them. Some servers remove their start, or
send it with the prompt."""
REASONING_START = re.compile(r"\A\s*+<think>", re.IGNORECASE)
MARKUP = "*_`\"'“”„.。 \t\r\n"
"""Characters that some judges put around a choice."""
FENCED = re.compile(r"\A\s*+```(?:json)?[ \t\r]*+\n(.*)```\s*\Z", re.DOTALL | re.IGNORECASE)


class UnreadableError(ValueError):
    """The reply is not a complete answer. The message is the problem, in words for the judge.

    `formless` is set when the reply does not begin as an object: the schema was ignored.
    """

    def __init__(self, problem: str, *, formless: bool = False) -> None:
        super().__init__(problem)
        self.formless = formless


def response_format(criteria: Sequence[Criterion]) -> dict[str, Any]:
    """The value of `response_format`, with the JSON schema. Equal for equal criteria: servers cache the schema."""
    # The reason comes first: a reason after the choice only defends it.
    results = {
        each.id: strict_object({"reason": {"type": "string"}, "choice": {"type": "string", "enum": list(each.scale)}})
        for each in criteria
    }
    return strict_format("verdict", {"criteria": strict_object(results), "check": {"type": "string"}})


def read(criteria: Sequence[Criterion], text: str, *, nonce: str, shown: str = "") -> tuple[CriterionResult, ...]:
    """The results in a reply, one for each criterion. Raises UnreadableError.

    Reasoning, prose or a fence around the object are skipped. Two different objects are an error.

    Args:
        criteria: The criteria of the call.
        text: The reply.
        nonce: The nonce of the call.
        shown: What the judge was shown of the task. A malformed object is repaired only if nothing in there looks
            like a part of one.
    """
    if not text.lstrip().startswith(("{", "```")):  # else what looks like an end of reasoning is part of the object
        ends = [match.end() for match in REASONING_END.finditer(text)]
        text = text[ends[-1] :] if ends else "" if REASONING_START.match(text) else text
    fenced = FENCED.fullmatch(text)
    try:
        found = _objects(fenced[1] if fenced else text)
        if not found:
            raise UnreadableError('there is no JSON object with "criteria" in the reply')
        if any(other != found[0] for other in found[1:]):
            raise UnreadableError("there are several different JSON objects in the reply")
        if str(found[0].get("check")).strip().lower() != nonce:
            raise UnreadableError('"check" is not the token that was given')
        return _results(criteria, found[0]["criteria"])
    except UnreadableError as unreadable:
        repaired = _repaired(text, shown, len(criteria))
        if repaired is None or str(repaired["check"]).strip().lower() != nonce:
            formless = not text.lstrip().startswith("{")
            raise UnreadableError(str(unreadable), formless=formless) from None
        return _results(criteria, repaired["criteria"])


def _objects(text: str) -> list[dict[str, Any]]:
    """All objects with "criteria". Raises UnreadableError for a malformed object, and for choices outside of them."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    found: list[dict[str, Any]] = []
    prose: list[str] = []
    end = 0
    position = text.find("{")
    while position >= 0:
        try:
            value, after = decoder.raw_decode(text, position)
        except UnreadableError:
            raise
        except ValueError as error:  # also for a number with more digits than Python reads
            if OBJECT_START.match(text, position):
                raise UnreadableError("there is no JSON object that is whole in the reply") from error
            position = text.find("{", position + 1)
            continue
        except RecursionError as error:
            raise UnreadableError("the JSON is nested too deeply") from error
        if isinstance(value, dict) and "criteria" in value:
            found.append(value)
        prose.append(text[end:position])
        end = after
        position = text.find("{", end)
    if CHOICE.search("".join([*prose, text[end:]])):
        # The object may be a quotation in it.
        raise UnreadableError("there are choices outside of the JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) < len(pairs):
        raise UnreadableError("a key stands twice in one object")
    return whole


def _repaired(text: str, shown: str, criteria: int) -> dict[str, Any] | None:
    """A malformed object, repaired. None where a part of it can be a quotation, and where it is incomplete.

    Every field must occur exactly as often as in a complete answer. The last one is the nonce, which a truncated
    answer lacks.
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
        if isinstance(value, dict) and set(value) == {"criteria", "check"} and isinstance(value["criteria"], dict):
            results = value["criteria"].values()
            if all(isinstance(each, dict) and set(each) == {"reason", "choice"} for each in results):
                return value
    return None


def _results(criteria: Sequence[Criterion], answers: Any) -> tuple[CriterionResult, ...]:
    if not isinstance(answers, dict):
        raise UnreadableError('"criteria" is not an object')
    ids = [criterion.id for criterion in criteria]
    if missing := [name for name in ids if name not in answers]:
        raise UnreadableError(f"missing: {', '.join(missing)}")
    if len(answers) > len(ids):
        raise UnreadableError(f"there are more criteria than were asked for: {', '.join(ids)}")
    results = []
    for criterion in criteria:
        answer = answers[criterion.id]
        if not isinstance(answer, dict):
            raise UnreadableError(f"{criterion.id} is not an object with reason and choice")
        reason, choice = answer.get("reason"), answer.get("choice")
        if not isinstance(reason, str) or not visible(reason):
            raise UnreadableError(f"{criterion.id} has no reason")
        # A rubric may write a choice as a number: without a schema, 3 is as good as "3".
        words = [str(choice)] if isinstance(choice, str | int) and not isinstance(choice, bool) else []
        if isinstance(choice, float) and choice.is_integer():
            words = [str(int(choice)), str(choice)]
        folded = [_fold(word) for word in words]
        scale = {_fold(name): (name, value) for name, value in criterion.scale.items()}
        chosen = [scale[word] for word in (*folded, *(word.strip(MARKUP) for word in folded)) if word in scale]
        if not chosen:
            raise UnreadableError(f"the choice of {criterion.id} must be one of {', '.join(criterion.scale)}")
        name, value = chosen[0]
        # JSON can spell half an emoji, which UTF-8 cannot hold.
        results.append(CriterionResult(criterion.id, name, value, criterion.passes(value), storable(reason)))
    return tuple(results)


def _fold(word: str) -> str:
    return unicodedata.normalize("NFC", word.strip().casefold())
