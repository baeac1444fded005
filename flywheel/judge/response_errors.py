"""What an HTTP answer says of a call: a reply, or why there is none and whether it is worth asking again."""

from __future__ import annotations

import re
from typing import Final

from flywheel.judge.completion import Reply, reply_of
from flywheel.transport import Answer

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


def read_answer(answer: Answer) -> Reply:
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
