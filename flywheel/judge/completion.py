"""The body of a chat completion, read with suspicion: an endpoint may answer anything with 200."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. `problem` says why there is no text to read, if there is none.

    `cut_off` is set when the reply was as long as it may be; `calls` is 0 for one that the endpoint did not take.
    """

    text: str
    problem: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cut_off: bool = False
    tells_usage: bool = False
    calls: int = 1


def reply_of(body: bytes) -> Reply:
    """The reply in a body. Raises ValueError for what is no JSON object: a proxy's page, a body that was cut off."""
    try:
        completion = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the answer is not JSON") from None
    if not isinstance(completion, dict):
        raise ValueError("the answer is not a JSON object")
    usage = _dict(completion.get("usage"))
    billed = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    choices = completion.get("choices")
    if not isinstance(choices, list) or not choices:
        said = completion.get("error")
        problem = f"the endpoint answered without a choice{f': {str(said)[:300]}' if said else ''}"
        return Reply("", problem, *billed, tells_usage=bool(usage))
    choice = _dict(choices[0])
    text, problem = _text(_dict(choice.get("message")))
    cut_off = choice.get("finish_reason") == "length"
    return Reply(text, problem, *billed, cut_off=cut_off, tells_usage=bool(usage))


def _text(message: dict[str, Any]) -> tuple[str, str]:
    if refusal := message.get("refusal"):
        return "", f"the judge refused: {str(refusal)[:300]}"
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return "", "the reply has no text"
    return content, ""


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
