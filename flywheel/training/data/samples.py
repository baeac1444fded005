"""Training samples: token sequences of rollouts with a mask and an advantage, and their division into micro-batches.

A rollout has one sample per timeline of its model calls: a reply is one sample, and turns whose prompts extend each
other are one, too.
Plain data and arithmetic; nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from flywheel.records.trace import get_path


@dataclass(frozen=True, slots=True)
class CallTokens:
    """A call of the model.

    Attributes:
        prompt_ids: What the engine was given.
        token_ids: What it returned, with the token that ends the turn.
        logprobs: Of `token_ids`; None where the engine returned none.
        texts: Of `token_ids`.
        identity: Its tools and each of its messages (`identity_of`).
        reply: The returned message (`message_identity`).
        prompt_texts: Of `prompt_ids`; empty if unknown.
        finish_reason: As the server returned it; empty if time ran out.
        messages: The request's.
        answer: The returned message.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    texts: tuple[str | None, ...]
    identity: tuple[str, ...]
    reply: str
    prompt_texts: tuple[str | None, ...] = ()
    finish_reason: str = ""
    messages: tuple[Any, ...] = ()
    answer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timelines:
    """`texts` are those of the tokens of each sample, None where unknown. `calls` are those of each sample. `forks`
    counts calls that extend no earlier one."""

    samples: tuple[Sample, ...] = ()
    texts: tuple[tuple[str | None, ...], ...] = ()
    calls: tuple[tuple[CallTokens, ...], ...] = ()
    forks: int = 0


def identity_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """What a chat request may not change when it extends an earlier one: its tools, and the roles and tool calls of
    its messages. Templates that leave something of that out make equal tokens of different conversations."""
    messages = body.get("messages")
    known = [message_identity(message) for message in messages] if isinstance(messages, Sequence) else []
    return (digest(body.get("tools") or []), *known)


def message_identity(message: Any) -> str:
    """The role and the tool calls of a message. Calls are compared by name and parsed arguments: ids and the
    formatting of JSON may change on the way through an agent."""
    if not isinstance(message, Mapping):
        return digest(message)
    calls = message.get("tool_calls")
    return digest([message.get("role"), [_call(call) for call in calls or ()] if isinstance(calls, list) else []])


def timelines(calls: Iterable[CallTokens]) -> Timelines:
    """The samples of a rollout, in the order of their first calls.

    A call extends a timeline only if its prompt begins with all ids, and its messages with all messages, that the
    timeline holds; of several, the longest. Otherwise it begins a new one. Each generated token is in the loss mask
    of the sample of its own call; where it is repeated in a later prompt, it is context.
    """
    found: list[_Timeline] = []
    for call in calls:
        extended = [each for each in found if each.is_extended_by(call)]
        if not extended:
            found.append(_Timeline())
        longest = max(extended or found[-1:], key=lambda each: len(each.ids))
        longest.add(call)
    samples = tuple(Sample(tuple(each.ids), tuple(each.mask), tuple(each.logprobs)) for each in found)
    texts = tuple(tuple(each.texts) for each in found)
    return Timelines(samples, texts, tuple(tuple(each.calls) for each in found), max(0, len(found) - 1))


@dataclass(slots=True)
class _Timeline:
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)
    identity: tuple[str, ...] = ()
    calls: list[CallTokens] = field(default_factory=list)

    def is_extended_by(self, call: CallTokens) -> bool:
        return (
            call.identity[: len(self.identity)] == self.identity
            and list(call.prompt_ids[: len(self.ids)]) == self.ids
        )

    def add(self, call: CallTokens) -> None:
        self.calls.append(call)
        new = len(call.prompt_ids) - len(self.ids)
        self.texts += call.prompt_texts[len(self.ids) :] or [None] * new
        self.texts += call.texts
        self.ids += (*call.prompt_ids[len(self.ids) :], *call.token_ids)
        self.mask += (*(False for _ in range(new)), *(True for _ in call.token_ids))
        self.logprobs += (*(None for _ in range(new)), *call.logprobs)
        self.identity = (*call.identity, call.reply)


def _call(call: Any) -> Any:
    name, arguments = get_path(call, "function", "name"), get_path(call, "function", "arguments")
    try:
        return [name, json.loads(arguments)]
    except (TypeError, ValueError, RecursionError):
        return [name, arguments]


def digest(value: Any) -> str:
    """The SHA-256 of a value of JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A token sequence as the engine processed it. The three lists have the same length.

    `loss_mask` is true for tokens that the policy generated here; the others are context: prompts and observations.
    `logprobs` are the engine's; None for context, and where the engine returned none. It is
    empty for a recorded reply, whose tokens all have the weight 1.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float | None, ...] = ()

    @property
    def trained(self) -> list[int]:
        """Positions of the tokens that carry loss: generated, with a logprob, after at least one token."""
        logprobs = self.logprobs or (0.0,) * len(self.token_ids)
        places = enumerate(zip(self.loss_mask, logprobs, strict=True))
        return [place for place, (own, logprob) in places if own and logprob is not None and place]


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A recorded reply of a task as samples: the messages of the model are trained on, the results of its tools are
    context. `without` is what of it is in no sample, in words."""

    task_id: str
    samples: tuple[Sample, ...]
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A sample to train on. `rollout` is a number; all samples of a rollout have its advantage."""

    rollout: int
    sample: Sample
    advantage: float

    @property
    def tokens(self) -> int:
        """Its length, context included."""
        return len(self.sample.token_ids)


@dataclass(frozen=True, slots=True)
class Pair:
    """A better and a worse reply to one prompt, with the reward or score of each."""

    task_id: str
    chosen: Sample
    rejected: Sample
    chosen_score: float | None = None
    rejected_score: float | None = None

    @property
    def tokens(self) -> int:
        """The length of both as rows of one tensor, context and padding included."""
        return 2 * max(len(self.chosen.token_ids), len(self.rejected.token_ids))


def token_counts(rows: Iterable[TrainingRow]) -> Counter[int]:
    """Number of trained tokens of each rollout, over all its samples."""
    counts: Counter[int] = Counter()
    for row in rows:
        counts[row.rollout] += len(row.sample.trained)
    return counts


def token_weights(
    counts: Mapping[int, int], loss_type: LossType, *, tokens: int, rollouts: int, longest: int
) -> dict[int, float]:
    """The weight of each trained token of a rollout. The loss is the weighted sum of token losses over `tokens`.

    `tokens` and `rollouts` are those of the whole step. `dapo` (and `bnpo`, which is the same for a whole step) is
    the mean over all tokens, `grpo` the mean over each rollout's tokens and then over rollouts, `dr_grpo` the sum
    over each rollout's tokens by the maximum length, and then the mean over rollouts.
    """
    if loss_type == "grpo":
        return {rollout: tokens / (count * rollouts) for rollout, count in counts.items()}
    weight = tokens / (longest * rollouts) if loss_type == "dr_grpo" else 1.0
    return dict.fromkeys(counts, weight)


Item = TypeVar("Item", TrainingRow, "Pair")


@dataclass(frozen=True, slots=True)
class StepSize:
    """Of all items of a step, in whichever process they are: their number (rollouts or pairs) and the trained tokens
    of rollouts."""

    items: int
    tokens: int = 0

    @classmethod
    def of(cls, items: Sequence[TrainingRow] | Sequence[Pair]) -> StepSize:
        rows = [item for item in items if isinstance(item, TrainingRow)]
        counts = token_counts(rows)
        return cls(len(counts), sum(counts.values())) if rows else cls(len(items))


def micro_batches(items: Sequence[Item], max_tokens: int) -> list[list[Item]]:
    """Rows or pairs, longest first, in batches of at most `max_tokens` with padding. A longer one has its own
    batch."""
    batches: list[list[Item]] = []
    for item in sorted(items, key=lambda item: -item.tokens):
        if batches and (len(batches[-1]) + 1) * batches[-1][0].tokens <= max_tokens:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def divided(items: Sequence[Item], parts: int) -> list[list[Item]]:
    """Rows or pairs for several processes, in their order. All rows of a rollout are in one part.

    The longest rollout or pair first, each goes to the part that has the fewest tokens so far. So parts differ by at
    most the tokens of one, and the first part is empty only if there are no items.
    """
    units = [item.rollout if isinstance(item, TrainingRow) else place for place, item in enumerate(items)]
    lengths: Counter[int] = Counter()
    for unit, item in zip(units, items, strict=True):
        lengths[unit] += item.tokens
    filled, part_of = [0] * parts, dict[int, int]()
    for unit, tokens in lengths.most_common():
        part_of[unit] = filled.index(min(filled))
        filled[part_of[unit]] += tokens
    return [[item for unit, item in zip(units, items, strict=True) if part_of[unit] == part] for part in range(parts)]


def rows_of(replies: Sequence[RecordedReply]) -> list[TrainingRow]:
    """The rows of a batch: each has the advantage 1, and no engine, so that GRPO's loss of them is the mean negative
    log-likelihood of their tokens (`stage_settings`). A reply of several samples is one rollout."""
    return [TrainingRow(number, sample, 1.0) for number, reply in enumerate(replies) for sample in reply.samples]


def longest_of(items: Sequence[RecordedReply] | Sequence[Pair]) -> int:
    """Number of tokens of the longest recorded reply; 0 for pairs, whose loss does not depend on it."""
    lengths = (len(sample.token_ids) for item in items for sample in getattr(item, "samples", ()))
    return max(lengths, default=0)


def minibatches(count: int, size: int, epochs: int, seed: int) -> list[list[int]]:
    """Numbers below `count` in batches of `size`, the last of an epoch perhaps smaller. Each epoch has all of them,
    in an order that depends on the seed and the epoch."""
    batches = []
    for epoch in range(epochs):
        order = list(range(count))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        batches += [order[start : start + size] for start in range(0, count, size)]
    return batches
