"""Sends the judge's verdicts to Langfuse as scores (`export.langfuse`): at least once, beside the daemon's work.

Each reply has a score for its acceptance, its total and each criterion, by `POST /api/public/scores`, which every
version of Langfuse has. The id of a score follows from reply and name, and its time is the reply's. A score of the
same id, name and day replaces another: one sent twice is one, and a new verdict replaces the last. Each is read from
the state just before it is sent, so that nothing is sent that was erased before it.
https://langfuse.com/docs/evaluation/evaluation-methods/scores-via-sdk
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Row

from flywheel.config.export import LangfuseSettings
from flywheel.daemon.notifier import Target
from flywheel.judge.annotations import OWN_SCORES
from flywheel.records.verdict import Outcome
from flywheel.secrets import redact_secrets
from flywheel.store import notices, scores
from flywheel.store.kernel import database
from flywheel.store.kernel.database import Store
from flywheel.store.reply_names import run_of

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)

EVENTS_AT_ONCE: Final = 200
"""Events whose scores are sent before the position among the events is stored."""
REFUSED: Final = frozenset({207, 400, 413, 422})
"""Answers that concern one score: sent again, it would be refused again. 207 has errors inside."""
PATH: Final = "/api/public/scores"
HEADERS: Final = {"content-type": "application/json", "user-agent": "flywheel"}
_TRACE: Final = re.compile("[0-9a-f]{32}")
_SPAN: Final = re.compile("[0-9a-f]{16}")


class LangfuseExport(Target):
    """Where scores are sent. Its note has the position among the events, and counts what was sent and what not."""

    def __init__(self, store: Store, settings: LangfuseSettings) -> None:
        hint = "They are sent later; check export.langfuse.host."
        super().__init__(store, f"send scores to Langfuse at {settings.server}", hint)
        self._settings = settings
        self._note: dict[str, Any] = {"event": None, "sent": 0, "refused": 0, "untraced": 0}
        self._counts = Counter[str]()
        """What was sent behind the stored position. No text is kept: it may be erased before it is sent again."""
        self._done: dict[str, str] = {}
        """The scores that were sent behind the stored position, by their ids, each as a hash: another verdict of the
        same reply is sent again."""

    async def begin(self) -> None:
        if known := await self._store.read(database.noted, self._settings.note_key):
            self._note = json.loads(known)
            self._position = self._stored = self._note["event"]
        else:
            self._position = self._stored = await self._store.read(notices.newest_event)
            await self._keep(self._position)

    async def _next(self) -> tuple[Sequence[tuple[Row[Any], Row[Any]]], int]:
        return await self._store.read(scores.judged_after, self._position, EVENTS_AT_ONCE)

    async def _keep(self, position: int) -> None:
        counts = {name: self._note[name] + number for name, number in self._counts.items()}
        note = self._note | {"event": position, **counts}
        await self._store.write(database.note, self._settings.note_key, json.dumps(note))
        self._note = note
        self._counts.clear()
        self._done.clear()

    def _scores(self, reply: Row[Any], verdict: Row[Any]) -> Iterator[dict[str, Any]]:
        """The scores of a reply, as Langfuse takes them."""

        def score(name: str, value: float, reason: str, kind: str = "NUMERIC") -> dict[str, Any]:
            span = run_of(reply.span_id, reply.trace_id).span_id
            of = f"{reply.trace_id}\0{reply.span_id}\0{name}"
            return {
                "id": OWN_SCORES + hashlib.sha256(of.encode()).hexdigest()[:32],
                "traceId": reply.trace_id,
                **({"observationId": span} if _SPAN.fullmatch(span) else {}),
                "name": f"flywheel.{name}",
                "value": value,
                "dataType": kind,
                "timestamp": reply.started_at,
                "metadata": {"task": reply.key, "rubric": verdict.rubric_hash, "judge": verdict.judge_hash},
                **({"comment": redact_secrets(reason)} if self._settings.comments and reason else {}),
            }

        yield score("accepted", int(verdict.outcome == Outcome.ACCEPTED), verdict.reason, "BOOLEAN")
        yield score("score", verdict.score, "")
        for each in verdict.results:
            yield score(f"criteria.{each['criterion']}", each["value"], each["reason"])

    async def _next_score(self, number: int) -> dict[str, Any] | None:
        """The next score of this reply to send, from the state as it is now; None without one."""
        found = await self._store.read(scores.of_reply, number)
        each = self._scores(*found) if found else ()
        return next((score for score in each if self._done.get(score["id"]) != _hash(score)), None)

    async def _send(self, judged: Sequence[tuple[Row[Any], Row[Any]]], /) -> None:
        """Send the scores of these replies. Raises NotifyError where Langfuse cannot be reached or takes nothing."""
        traced = [reply.id for reply, _ in judged if _TRACE.fullmatch(reply.trace_id)]
        keys = self._settings.keys
        if traced and (missing := [name for name, key in keys.items() if not key]):
            raise self._failure(f"the variable {missing[0]} with the key is not set", "Put the key into it.")
        public, secret = keys.values()
        async with self._client(self._settings.host, self._settings.timeout_seconds) as client:
            for number in traced:
                while (score := await self._next_score(number)) is not None:
                    content = redact_secrets(json.dumps(score).encode())
                    answer = await client.post(PATH, content=content, headers=HEADERS, auth=(public, secret))
                    self._check(answer, score)
        self._counts["untraced"] += len(judged) - len(traced)

    def _check(self, answer: httpx2.Response, score: dict[str, Any]) -> None:
        """Count an answer. Raises NotifyError if the score is to be sent again."""
        if is_refused := answer.status_code in REFUSED:
            why = " ".join(redact_secrets(answer.text).split())[:300]
            log.warning("Langfuse refused %s of trace %s: %s", score["name"], score["traceId"], why)
        elif answer.status_code in (401, 403):
            hint = f"Check the keys of the project in ${' and $'.join(self._settings.keys)}."
            raise self._failure(f"it refuses the keys ({answer.status_code})", hint)
        elif not answer.is_success:
            raise self._refusal(answer)
        self._counts["refused" if is_refused else "sent"] += 1
        self._done[score["id"]] = _hash(score)


def _hash(score: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(score).encode()).hexdigest()
