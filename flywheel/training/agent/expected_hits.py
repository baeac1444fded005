"""An estimate, before the first round, of how many tool calls recordings will answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from flywheel.finish_functions import FINISH_FUNCTIONS
from flywheel.training.agent.recorded_tools import RecordedTools
from flywheel.training.agent.recordings import Recording, results_of


@dataclass(frozen=True, slots=True)
class ExpectedHits:
    """`lookups` are calls, by tool, that another trace of the same question was asked; `hits` are those that it
    answered. `usable` of the tasks that were `offered` tools have recorded results of their own."""

    offered: int
    usable: int
    hits: Mapping[str, int] = field(default_factory=dict)
    lookups: Mapping[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float | None:
        """The expected hit rate; None if no question was asked twice."""
        total = sum(self.lookups.values())
        return sum(self.hits.values()) / total if total else None


def expected_hits(recordings: Iterable[Recording], finish_tools: Collection[str] = ()) -> ExpectedHits:
    """What to expect of rollouts on these tasks.

    A rollout and its task's trace are two replies to one question. So are two traces of the same question: each is
    asked the calls of the next one, in a circle. Only traces with results take part, as in a round. The estimate is
    for the policy that made the traces, and does not count results that are shared with other questions.
    """
    offered = [recording for recording in recordings if recording.tools]
    same: defaultdict[str, list[Recording]] = defaultdict(list)
    usable = 0
    for recording in offered:
        if results_of(recording, finish_tools).trains(use_uncalled=False):
            usable += 1
            same[recording.question].append(recording)
    hits: defaultdict[str, int] = defaultdict(int)
    lookups: defaultdict[str, int] = defaultdict(int)
    for asked in same.values():
        for one, other in zip(asked, [*asked[1:], asked[0]], strict=True):
            if one is other:
                continue
            tools = RecordedTools(one.tools, results_of(one, finish_tools), on_miss="error")
            for step in other.steps:
                ends = FINISH_FUNCTIONS.union(finish_tools)
                own_calls = [call for call in step.get("tool_calls") or () if _name(call) not in ends]
                for call in tools.answer(own_calls).calls:
                    hits[call.name] += call.is_hit
                    lookups[call.name] += call.is_hit or call.is_miss
    return ExpectedHits(len(offered), usable, dict(hits), {name: count for name, count in lookups.items() if count})


def _name(call: Mapping[str, object]) -> object:
    function = call.get("function")
    return function.get("name") if isinstance(function, Mapping) else None
