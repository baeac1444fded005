"""The body of a chat completion, read with suspicion: an endpoint may answer anything with 200."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from flywheel.files import json_line
from flywheel.judge.response_formats import ResponseFormat
from flywheel.model_http_client import HttpAnswer

TOOL_NAME: Final = "verdict"
"""The function that a judge calls to give its verdict, where it is asked by a tool call."""
MAX_COUNT: Final = 100_000_000
"""More tokens than a call can have: whoever tells more is not believed."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. `problem` says why there is no text to read, if there is none.

    `cut_off` is set when the reply was as long as it may be; `calls` is 0 for one that the endpoint did not take.
    `error_status` is the status that an error object claims which came with 200. `means` is how it was asked for,
    and `judge` says who gave it.
    """

    text: str
    problem: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cut_off: bool = False
    tells_usage: bool = False
    calls: int = 1
    error_status: int = 0
    means: ResponseFormat = ResponseFormat.TEXT
    judge: str = ""


def reply_of(body: bytes) -> Reply:
    """The reply in a body. Raises ValueError for what is no JSON object: a proxy's page, a body that was cut off."""
    completion = _completion_in(body)
    usage = _dict(completion.get("usage"))
    billed = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    choices = completion.get("choices")
    if not isinstance(choices, list) or not choices:
        error = completion.get("error")
        problem = f"the endpoint answered without a choice{f': {str(error)[:300]}' if error else ''}"
        return Reply("", problem, *billed, tells_usage=bool(usage), error_status=_status(error))
    choice = _dict(choices[0])
    text, problem = _text(_dict(choice.get("message")))
    cut_off = choice.get("finish_reason") == "length"
    return Reply(text, problem, *billed, cut_off=cut_off, tells_usage=bool(usage))


def _completion_in(body: bytes) -> dict[str, Any]:
    try:
        completion = orjson.loads(body)
    except orjson.JSONDecodeError:
        completion = _with_halves(body) or _of_stream(body)
    if not isinstance(completion, dict):
        raise ValueError("the answer is not a JSON object")
    return completion


def _with_halves(body: bytes) -> Any:
    """Half a character, at which some servers cut a text, is replaced; None for what is no JSON otherwise."""
    try:
        return storable_value(json.loads(body.decode(json.detect_encoding(body), "replace")))
    except (ValueError, RecursionError):
        return None


def storable_value(value: Any) -> Any:
    """What JSON said, without the halves of characters that it can spell and nothing can hold."""
    return json.loads(json_line(value))


def _of_stream(body: bytes) -> dict[str, Any]:
    """The completion that a stream of server-sent events adds up to: some proxies stream whatever is asked."""
    text, arguments, finished, ended = "", "", None, False
    usage: Any = None
    error: Any = None
    name = ""
    for event in _events(body):
        if event == "[DONE]":
            ended = True
            continue
        try:
            chunk = _dict(storable_value(json.loads(event)))
        except (ValueError, RecursionError):
            raise ValueError("the answer is a stream that is not JSON") from None
        usage, error = chunk.get("usage") or usage, chunk.get("error") or error
        for choice in chunk.get("choices") or ():
            delta = _dict(_dict(choice).get("delta"))
            text += _said(delta.get("content"))
            for call in delta.get("tool_calls") or ():
                function = _dict(_dict(call).get("function"))
                name = name or str(function.get("name") or "")
                arguments += str(function.get("arguments") or "")
            finished = choice.get("finish_reason") or finished
    if not ended and finished is None and error is None:
        raise ValueError("the answer is a stream that was cut off")
    message: dict[str, Any] = {"content": text}
    if name:
        message["tool_calls"] = [{"function": {"name": name, "arguments": arguments}}]
    choices = [{"message": message, "finish_reason": finished}] if finished is not None else []
    return {"choices": choices, "usage": usage, "error": error}


def _events(body: bytes) -> Iterator[str]:
    lines = body.decode("utf-8", "replace").splitlines()
    events = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    if not events or any(line and not line.startswith(("data:", "event:", "id:", "retry:", ":")) for line in lines):
        raise ValueError("the answer is not JSON")
    yield from events


def _text(message: dict[str, Any]) -> tuple[str, str]:
    """Text, which may be what the verdict's function was called with, and problem."""
    if refusal := message.get("refusal"):
        return "", f"the judge refused: {str(refusal)[:300]}"
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = _dict(_dict(call).get("function"))
        if function.get("name") == TOOL_NAME and isinstance(arguments := function.get("arguments"), str):
            return arguments, ""
    content = _said(message.get("content"))
    return (content, "") if content.strip() else ("", "the reply has no text")


def _said(content: Any) -> str:
    """The text of a message: most endpoints give it as it is, some in parts, with thoughts between them."""
    if isinstance(content, str):
        return content
    parts = [_dict(part) for part in content] if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if part.get("type", "text") == "text")
    return "".join(text for text in texts if isinstance(text, str))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _status(error: Any) -> int:
    code = _dict(error).get("code")
    return _count(int(code) if isinstance(code, str) and code.isdecimal() and len(code) <= 4 else code)


def _count(value: Any) -> int:
    is_count = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return int(min(value, MAX_COUNT)) if is_count else 0


RETRIED: Final = frozenset({408, 409, 429})
NOT_OURS: Final = frozenset({401, 402, 403, 404})
"""What is refused to us whatever we ask: the key, the account, the model."""

THE_KEY: Final = re.compile(
    r"\b(?:invalid|incorrect|wrong|expired|missing|revoked) (?:\w+ )?(?:api[ _-]?key|token(?! (?:id|count|at|in)\b))",
    re.I,
)
"""What some endpoints say of the key in a 400, where others answer 401."""


class CallError(Exception):
    """An attempt that brought no reply. `status` is that of the answer, 0 where none came."""

    def __init__(self, said: str, *, status: int = 0, retry_after: float | None = None, final: bool = False) -> None:
        super().__init__(said)
        self.said = said
        self.status = status
        self.retry_after = retry_after
        self._final = final

    @property
    def can_pass(self) -> bool:
        """Whether the same call may succeed in a moment."""
        return not self._final and (self.status == 0 or self.status in RETRIED or self.status >= 500)


def read_answer(answer: HttpAnswer) -> Reply:
    """The reply in an answer. Raises CallError for one that holds none."""
    if not answer.is_good:
        said = f"it answered {answer.status} ({answer.words})"
        status = 401 if answer.status == 400 and THE_KEY.search(answer.words) else answer.status
        raise CallError(said, status=status, retry_after=answer.retry_after)
    try:
        reply = reply_of(answer.body)
    except ValueError as error:
        raise CallError(str(error)) from error
    failed = CallError(reply.problem, status=reply.error_status)
    # What was billed is kept, though it is no verdict; what was not can be had again, or says what is wrong with all.
    told = reply.error_status and (failed.can_pass or reply.error_status in NOT_OURS)
    if told and not reply.prompt_tokens + reply.completion_tokens:
        raise failed
    return reply
