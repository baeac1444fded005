"""Training samples: token sequences of rollouts with a mask and an advantage, and their division into micro-batches.

A rollout has one sample per timeline: a reply is one sample, and turns whose prompts extend each other are one, too.
Plain data and arithmetic; nothing here needs torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A token sequence as the engine processed it. The three lists have the same length.

    `loss_mask` is true for tokens that the policy generated here; the others are context: prompts and observations.
    `logprobs` are the engine's; None for context, and where the engine returned none.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float | None, ...]

    @property
    def trained(self) -> list[int]:
        """Positions of the tokens that carry loss: generated, with a logprob, after at least one token."""
        places = enumerate(zip(self.loss_mask, self.logprobs, strict=True))
        return [place for place, (own, logprob) in places if own and logprob is not None and place]


@dataclass(frozen=True, slots=True)
class Row:
    """A sample to train on. `rollout` is a number; all samples of a rollout have its advantage."""

    rollout: int
    sample: Sample
    advantage: float


def token_counts(rows: Iterable[Row]) -> Counter[int]:
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


def micro_batches(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """The rows, longest first, in batches of at most `max_tokens` with padding. A longer row has its own batch."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: -len(row.sample.token_ids)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].sample.token_ids) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
