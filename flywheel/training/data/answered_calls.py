"""Tool calls of rollouts as they were answered, and their figures for a line of `metrics.jsonl`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flywheel.records.tool_calls import ToolResult


class Outcome(StrEnum):
    """How a call was answered."""

    TRACE = "trace"
    SHARED = "shared"
    MISS = "miss"
    UNKNOWN_TOOL = "unknown tool"
    UNPARSEABLE = "unparseable arguments"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call of a rollout.

    Attributes:
        call_id: The rollout's own id of it.
        result: What the policy was answered; None after a miss that ends the rollout, and for a finish tool.
        repeats_trace: Whether tool and arguments equal those of a call in the task's own trace.
    """

    call_id: str
    name: str
    outcome: Outcome
    result: ToolResult | None = None
    repeats_trace: bool = False

    @property
    def is_hit(self) -> bool:
        """Whether a recorded result answers it."""
        return self.outcome in (Outcome.TRACE, Outcome.SHARED)

    @property
    def is_miss(self) -> bool:
        return self.outcome is Outcome.MISS


def tool_metrics(rollouts: Sequence[Sequence[AnsweredCall]]) -> dict[str, Any]:
    """The figures of rollouts, given the calls of each. A share is None where it would be one of nothing.

    - `call_share`: rollouts with a call, finish tools aside. `miss_share`: rollouts with a miss.
    - `hit_rate`, `hit_rate_by_tool`: well-formed calls of offered tools that a recorded result answers.
    - `argument_accuracy`: calls of offered tools that equal a call of the task's own trace.
    - `tool_calls`: number of calls by outcome.
    """
    outcomes: Counter[Outcome] = Counter()
    hits: Counter[str] = Counter()
    lookups: Counter[str] = Counter()
    repeating = 0
    for call in (call for calls in rollouts for call in calls):
        outcomes[call.outcome] += 1
        repeating += call.repeats_trace
        hits[call.name] += call.is_hit
        lookups[call.name] += call.is_hit or call.is_miss
    calling = [any(call.outcome is not Outcome.FINISH for call in calls) for calls in rollouts]
    missing = [any(call.is_miss for call in calls) for calls in rollouts]
    return {
        "call_share": _share(sum(calling), len(rollouts)),
        "miss_share": _share(sum(missing), len(rollouts)),
        "hit_rate": _share(hits.total(), lookups.total()),
        "hit_rate_by_tool": {name: hits[name] / count for name, count in sorted(lookups.items()) if count},
        "argument_accuracy": _share(repeating, lookups.total() + outcomes[Outcome.UNPARSEABLE]),
        "tool_calls": {outcome.value: outcomes[outcome] for outcome in Outcome},
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
