"""Pairs of replies for preference training: an accepted and a rejected one to the same prompt.

Uses hashes and scores and not texts, so that a large state needs little memory.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from flywheel.records.tool_calls import said_in
from flywheel.training.data.formats import messages
from flywheel.training.data.formats.export_format import ExportSample, LeftOut

ALONE = "no reply with the other verdict to the same prompt"
SAME = "the accepted and the rejected replies to the prompt say the same"
CLOSE = "the scores of the accepted and the rejected replies to the prompt are too close"
USED_UP = "more replies with this verdict than with the other to the same prompt"


@dataclass(frozen=True, slots=True)
class PairCandidate:
    """A reply that can be in a pair. `prompt` and `answer` are hashes, that of the whole reply."""

    id: int
    prompt: bytes
    answer: bytes
    score: float


def candidate(number: int, sample: ExportSample) -> PairCandidate:
    """Raises LeftOut for a reply that cannot be in a pair."""
    line = sample.line
    reply = said_in(messages.reply(line))
    if sample.score is None:
        raise LeftOut("there is no score")
    given = [messages.prompt(line), messages.tools(line)]
    return PairCandidate(number, _digest(json.dumps(given, sort_keys=True)), _digest(json.dumps(reply)), sample.score)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Pairing:
    """Collects candidates and pairs them. Add all rejected ones before the accepted ones."""

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self._rejected: dict[bytes, list[PairCandidate]] = defaultdict(list)
        self._accepted: dict[bytes, list[PairCandidate]] = defaultdict(list)
        self.left_out: Counter[str] = Counter()

    def add_rejected(self, one: PairCandidate) -> None:
        self._rejected[one.prompt].append(one)

    def add_accepted(self, one: PairCandidate) -> None:
        if one.prompt in self._rejected:
            self._accepted[one.prompt].append(one)
        else:
            self.left_out[ALONE] += 1

    def pairs(self) -> list[tuple[int, int]]:
        """The ids of (accepted, rejected) replies, by accepted id. No reply is in two pairs."""
        found: list[tuple[int, int]] = []
        for prompt, rejected in self._rejected.items():
            accepted = self._accepted.get(prompt, [])
            if accepted:
                found += self._match(accepted, rejected)
            else:
                self.left_out[ALONE] += len(rejected)
        return sorted(found)

    def _match(self, accepted: Sequence[PairCandidate], rejected: Sequence[PairCandidate]) -> list[tuple[int, int]]:
        """Pair the best with the worst, then the next ones: few pairs far apart teach more than many close ones."""
        free = sorted(rejected, key=lambda one: (one.score, one.id))
        rest: list[PairCandidate] = []
        found = []
        for better in sorted(accepted, key=lambda one: (-one.score, one.id)):
            worse = next((one for one in free if self._differ(better, one)), None)
            if worse is None:
                rest.append(better)
            else:
                free.remove(worse)
                found.append((better.id, worse.id))
        for one in rest:
            self.left_out[self._why([(one, other) for other in rejected])] += 1
        for one in free:
            self.left_out[self._why([(other, one) for other in accepted])] += 1
        return found

    def _differ(self, better: PairCandidate, worse: PairCandidate) -> bool:
        # Rounded: 0.9 - 0.8 is less than 0.1 in floating point.
        gap = round(better.score - worse.score, 9)
        return better.answer != worse.answer and gap > 0 and gap >= self._margin

    def _why(self, possible: Sequence[tuple[PairCandidate, PairCandidate]]) -> str:
        """Why a reply is in no pair, from all pairs that were possible for it."""
        if all(better.answer == worse.answer for better, worse in possible):
            return SAME
        return USED_UP if any(self._differ(better, worse) for better, worse in possible) else CLOSE
