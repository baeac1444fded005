"""What an HTTP answer says of a call: a reply, or why there is none and whether it is worth asking again."""

from __future__ import annotations

import time
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

import orjson

from flywheel.judge.completion import Reply, reply_of
from flywheel.judge.transport import Answer

RETRIED: Final = frozenset({408, 409, 429})
NOT_OURS: Final = frozenset({401, 402, 403, 404})
"""What is refused to us whatever we ask: the key, the account, the model."""


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


def read_answer(answer: Answer) -> Reply:
    """The reply in an answer. Raises CallError for one that holds none."""
    if not 200 <= answer.status < 300:
        said = f"it answered {answer.status} ({_words(answer)})"
        raise CallError(said, status=answer.status, retry_after=seconds(answer.headers.get("retry-after", "")))
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


def _words(answer: Answer) -> str:
    if location := answer.headers.get("location"):
        return f"look at {location[:200]}"
    try:
        body = orjson.loads(answer.body)
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message", error) if isinstance(error, dict) else error
    except orjson.JSONDecodeError:
        text = answer.body[:2000].decode("utf-8", "replace")
    return " ".join(str(text).split())[:300]


def seconds(asked: str) -> float | None:
    """Seconds that the endpoint asked us to wait, if it did: as a number, or as the time to come back at."""
    try:
        if asked[:1].isdigit():
            return max(0.0, float(asked))
        at = parsedate_to_datetime(asked)
        # HTTP's dates are UTC, also where they do not say so.
        return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
