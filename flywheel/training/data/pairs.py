"""Pairs of a better and a worse reply to one prompt, for preference training: which replies are pairs, in rounds and
in `flywheel export`, and those of rounds, from groups of rollouts and from recorded replies.

A reply of a pair of a round is one sample and whole: one whose turns do not continue each other, or that reached a
limit, is left out and counted, and nothing is cut.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from flywheel.records.reasons import in_one_clause
from flywheel.records.trace import ChatMessage
from flywheel.system.files import json_line, write_atomic
from flywheel.training.data import chat_messages
from flywheel.training.data.chat_messages import LeftOut
from flywheel.training.data.samples import Pair, RecordedReply, Sample

if TYPE_CHECKING:
    # Not loaded, because the command line imports this module.
    from flywheel.records.round import RoundTask
    from flywheel.training.data.rollout import Rollout, RolloutBatch

T = TypeVar("T")

ALONE: Final = "no reply with the other verdict to the same prompt"
SAME: Final = "the better and the worse replies to the prompt say the same"
CLOSE: Final = "the scores of the better and the worse replies to the prompt are too close"
USED_UP: Final = "more replies with this verdict than with the other to the same prompt"
PAIRS_FILE: Final = "pairs.jsonl"
"""The pairs of a stage as TRL reads them, in the stage's folder."""
SEVERAL: Final = "rollouts whose turns do not continue each other"
TOO_LONG: Final = "rollouts that reached their maximum length"
FEW: Final = "fewer than two of its rollouts are whole and have a reward"
MISSES: Final = "it has too many calls without a recorded result"
UNRENDERED: Final = "its replies are not one sample each"


class Reply(NamedTuple, Generic[T]):
    """A reply `of` something, with what is equal for replies that say the same, and its score or reward."""

    of: T
    says: object
    score: float


def matched(
    better: Sequence[Reply[T]], worse: Sequence[Reply[T]], margin: float
) -> tuple[list[tuple[Reply[T], Reply[T]]], Counter[str]]:
    """Pairs of replies to one prompt that say something else, and whose scores differ by at least `margin`; and how
    many replies are in none, by reason.

    The best is paired with the worst, then the next ones: few pairs far apart teach more than many close ones. No
    reply is in two pairs.
    """
    free = sorted(worse, key=lambda one: one.score)
    rest, pairs = [], []
    for one in sorted(better, key=lambda one: -one.score):
        found = next((place for place, other in enumerate(free) if _differ(one, other, margin)), None)
        if found is None:
            rest.append(one)
        else:
            pairs.append((one, free.pop(found)))
    left_out = Counter(_why([(one, other) for other in worse], margin) for one in rest)
    left_out.update(_why([(other, one) for other in better], margin) for one in free)
    return pairs, left_out


def are_apart(better: float, worse: float, margin: float) -> bool:
    """Whether the better score is higher, by at least the margin."""
    # Rounded: 0.9 - 0.8 is less than 0.1 in floating point.
    gap = round(better - worse, 9)
    return gap > 0 and gap >= margin


def _differ(better: Reply[T], worse: Reply[T], margin: float) -> bool:
    return better.says != worse.says and are_apart(better.score, worse.score, margin)


def _why(possible: Sequence[tuple[Reply[T], Reply[T]]], margin: float) -> str:
    """Why a reply is in no pair, from all pairs that were possible for it."""
    if not possible:
        return ALONE
    if all(better.says == worse.says for better, worse in possible):
        return SAME
    return USED_UP if any(_differ(better, worse, margin) for better, worse in possible) else CLOSE


@dataclass(slots=True)
class Pairs:
    """`lines` are the same pairs for the file. `left_out` has the reason of each task that is in none, `rollouts`
    counts those that could be in none, by reason."""

    pairs: list[Pair] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    rollouts: Counter[str] = field(default_factory=Counter)

    def add_rollouts(self, batch: RolloutBatch, margin: float) -> None:
        """Of each group the rollouts with the highest and the lowest reward, of those that differ in their tokens, if
        their rewards differ by `margin`."""
        groups: dict[int, list[Rollout]] = defaultdict(list)
        for rollout in batch.rollouts:
            groups[rollout.request.group].append(rollout)
        with_misses = {group for group, reason in batch.dropped.items() if reason == "misses"}
        for group, rollouts in groups.items():
            task = rollouts[0].request.prompt.task
            if group in with_misses:
                self.left_out[task.task_id] = MISSES
                continue
            usable = [
                Reply(rollout, rollout.completion.samples[0].token_ids, rollout.reward)
                for rollout in rollouts
                if rollout.reward is not None and self._is_whole(rollout)
            ]
            if len(usable) < 2:
                self.left_out[task.task_id] = FEW
                continue
            pairs, why = matched(usable, usable, margin)
            if pairs:
                best, worst = pairs[0]
                self._add(task, _end(best), _end(worst))
            else:
                self.left_out[task.task_id] = next(iter(why))

    def add_recorded(
        self,
        tasks: Sequence[RoundTask],
        chosen: Mapping[str, RecordedReply],
        rejected: Mapping[str, RecordedReply],
        refused: Mapping[str, str],
    ) -> None:
        """Of each task its `reply` and its `rejected` one, given the samples of both by task, or why one of them is
        `refused`."""
        for task in tasks:
            made = chosen.get(task.task_id), rejected.get(task.task_id)
            samples = [reply.samples[0] for reply in made if reply is not None and len(reply.samples) == 1]
            if len(samples) < len(made):
                self.left_out[task.task_id] = refused.get(task.task_id, UNRENDERED)
            else:
                self._add(task, (samples[0], task.reply, None), (samples[1], task.rejected, None))

    def write(self, folder: Path) -> None:
        """Write the pairs in TRL's format of preferences."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / PAIRS_FILE, b"".join(map(json_line, self.lines)))

    @property
    def reasons(self) -> str:
        """What was left out, in one clause; empty if nothing was."""
        counts = (f"{number} {reason}" for reason, number in self.rollouts.most_common())
        return "; ".join(filter(None, (in_one_clause(self.left_out), *counts)))

    def _is_whole(self, rollout: Rollout) -> bool:
        """Whether a rollout can be in a pair; if not, it is counted."""
        completion = rollout.completion
        if completion.truncated:
            self.rollouts[TOO_LONG] += 1
        elif len(completion.samples) != 1 or not completion.samples[0].trained:
            self.rollouts[SEVERAL] += 1
        else:
            return True
        return False

    def _add(self, task: RoundTask, better: _End, worse: _End) -> None:
        (chosen, chosen_messages, high), (rejected, rejected_messages, low) = better, worse
        if chosen.token_ids == rejected.token_ids:
            self.left_out[task.task_id] = SAME
            return
        self.pairs.append(Pair(task.task_id, chosen, rejected, high, low))
        self.lines.append(
            {
                "prompt": _converted(task.prompt),
                "chosen": _converted(chosen_messages),
                "rejected": _converted(rejected_messages),
                "tools": list(task.exchange.tools),
                "chosen_score": high,
                "rejected_score": low,
                "task_id": task.task_id,
                **_origins(task, is_recorded=high is None),
            }
        )


_End = tuple[Sample, Sequence[ChatMessage], float | None]
"""One side of a pair: its tokens, its messages, and its reward if it is a rollout."""


def _origins(task: RoundTask, *, is_recorded: bool) -> dict[str, str]:
    """Where the replies of a pair come from. Recorded ones may be of other tasks with the same prompt."""
    if not is_recorded:
        return {"source": "rollouts"}
    replies = {"chosen": task.reply_task_id, "rejected": task.rejected_task_id}
    return {"source": "recorded"} | {f"{side}_task_id": other or task.task_id for side, other in replies.items()}


def _end(reply: Reply[Rollout]) -> _End:
    completion = reply.of.completion
    answer = {"role": "assistant", "content": completion.text}
    return completion.samples[0], [*completion.steps, answer], reply.score


def _converted(given: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages as chat templates take them; as they are if a call's arguments are no JSON object."""
    try:
        return chat_messages.messages(given)
    except LeftOut:
        return list(given)
