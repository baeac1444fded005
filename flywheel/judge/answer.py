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
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from flywheel.judge.chat_completions import JudgeReply, storable_value, strict_format, strict_object
from flywheel.judge.rubric.criterion import Criterion
from flywheel.judge.rubric.text import visible
from flywheel.records.trace import ChatMessage
from flywheel.records.verdict import CriterionResult

REASONING_END = re.compile(
    r"</(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning)>|\[/THINK\]|◁/think▷|<\|channel\|>final<\|message\|>",
    re.IGNORECASE,
)
"""The end of a reasoning model's thoughts, where the server does not remove them. Some servers remove their start, or
send it with the prompt."""
REASONING_START = re.compile(r"\A\s*+<think>", re.IGNORECASE)
MARKUP = "*_`\"'“”„.。 \t\r\n"
"""Characters that some judges put around a choice."""
FENCE = "```"
OBJECT_ATTEMPTS = 2
T = TypeVar("T")


class UnreadableError(ValueError):
    """The reply is not a complete answer. The message is the problem, in words for the judge."""


def response_format(criteria: Sequence[Criterion]) -> dict[str, Any]:
    """The value of `response_format`, with the JSON schema. Equal for equal criteria: servers cache the schema."""
    # The reason comes first: a reason after the choice only defends it.
    results = {
        each.id: strict_object({"reason": {"type": "string"}, "choice": {"type": "string", "enum": list(each.scale)}})
        for each in criteria
    }
    return strict_format("verdict", {"criteria": strict_object(results), "check": {"type": "string"}})


def read(criteria: Sequence[Criterion], text: str, *, nonce: str) -> tuple[CriterionResult, ...]:
    """The results in a reply to the call with this nonce, one for each criterion. Raises UnreadableError."""
    answer = object_in(text)
    check = answer.get("check")
    if not isinstance(check, str | int) or str(check).strip().lower() != nonce:
        raise UnreadableError('"check" is not the token that was given')
    return _results(criteria, answer.get("criteria"))


def object_in(text: str) -> dict[str, Any]:
    """The JSON object in a reply, from the first brace to the last one, without thoughts and a fence around it. Lone
    surrogates become `?`. Raises UnreadableError."""
    if not text.lstrip().startswith(("{", FENCE)):  # else what looks like an end of reasoning is part of the object
        ends = [match.end() for match in REASONING_END.finditer(text)]
        text = text[ends[-1] :] if ends else "" if REASONING_START.match(text) else text
    _, _, fenced = text.partition(FENCE)
    if fenced and not text.lstrip().startswith("{"):
        text = fenced.rpartition(FENCE)[0] or fenced
    # One pass over the text: a decoder that looks for an object at each brace is quadratic.
    whole = text[text.find("{") : text.rfind("}") + 1]
    try:
        found: dict[str, Any] = storable_value(json.loads(whole, strict=False, object_pairs_hook=_unique))
    except RecursionError as error:
        raise UnreadableError("the JSON is nested too deeply") from error
    except UnreadableError:
        raise
    except ValueError as error:
        raise UnreadableError("the reply has no complete JSON object") from error
    return found


def ask_for_object(
    ask: Callable[[list[ChatMessage]], JudgeReply],
    write: Callable[[str], list[ChatMessage]],
    read: Callable[[dict[str, Any]], T],
) -> T:
    """What `read` makes of the object in a model's reply. After one that it cannot use, the model is asked once more.

    `write` gets the problem of an earlier reply, at first an empty one; `ask` is `JudgeClient.ask` with arguments.
    Raises UnreadableError when no reply can be used, and JudgeError.
    """
    problem = ""
    for _ in range(OBJECT_ATTEMPTS):
        reply = ask(write(problem))
        try:
            return read(object_in(reply.text))
        except (UnreadableError, msgspec.ValidationError) as error:
            problem = reply.problem or str(error)
    raise UnreadableError(problem)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) < len(pairs):
        raise UnreadableError("a key stands twice in one object")
    return whole


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
        results.append(CriterionResult(criterion.id, name, value, criterion.passes(value), reason))
    return tuple(results)


def _fold(word: str) -> str:
    return unicodedata.normalize("NFC", word.strip().casefold())
