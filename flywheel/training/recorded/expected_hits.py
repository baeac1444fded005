"""An estimate, before the first round, of how many tool calls recordings will answer."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flywheel.config.section import leaves
from flywheel.records.tool_calls import FINISH_FUNCTIONS, Call, Tool, calls_in
from flywheel.records.trace import ChatMessage, get_path
from flywheel.training.recorded.recorded_rollout import RecordedTools
from flywheel.training.recorded.recordings import (
    TraceRecording,
    TraceResults,
    results_of,
    tools_by_name,
    with_defaults,
)


@dataclass(frozen=True, slots=True)
class HitRate:
    """Of `calls` by tool, `hits` are expected to be answered; `complete` of the `rollouts` are expected to have no
    miss."""

    hits: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)
    rollouts: int = 0
    complete: int = 0

    @property
    def rate(self) -> float | None:
        """The expected hit rate; None without calls."""
        total = sum(self.calls.values())
        return sum(self.hits.values()) / total if total else None

    @property
    def complete_share(self) -> float | None:
        """The expected share of rollouts without a miss; None without rollouts."""
        return self.complete / self.rollouts if self.rollouts else None


@dataclass(frozen=True, slots=True)
class ExpectedHits:
    """`usable` of the tasks that were `offered` tools have recorded results of their own.

    `repeated` is measured between traces of one question: each trace answers the calls of the next one, in a circle.
    `copied` is measured on all usable traces: a call counts as a hit if all values of its arguments are in the
    conversation before it, so that other replies to the question make the same call.
    """

    offered: int
    usable: int
    repeated: HitRate = HitRate()
    copied: HitRate = HitRate()

    @property
    def best(self) -> HitRate:
        """That of repeated questions, if there are any."""
        return self.repeated if self.repeated.calls else self.copied


def expected_hits(recordings: Iterable[TraceRecording], finish_tools: Collection[str] = ()) -> ExpectedHits:
    """What to expect of rollouts on these tasks.

    A rollout and its task's trace are two replies to one question. Only traces with results take part, as in a round.
    The estimate is for the policy that made the traces, and does not count results that are shared with other
    questions.
    """
    finish_tools = FINISH_FUNCTIONS.union(finish_tools)
    offered = 0
    same: defaultdict[str, list[tuple[TraceRecording, TraceResults]]] = defaultdict(list)
    for recording in recordings:
        offered += bool(recording.tools)
        results = results_of(recording, finish_tools)
        if recording.tools and results.trains(use_uncalled=False):
            same[recording.question].append((recording, results))
    usable = [each for asked in same.values() for each in asked]
    repeated = (
        pair for asked in same.values() if len(asked) > 1 for pair in zip(asked, [*asked[1:], asked[0]], strict=True)
    )
    return ExpectedHits(
        offered,
        len(usable),
        _summed(list(_answered(*one, other, finish_tools)) for one, (other, _) in repeated),
        _summed(list(_copied(recording, finish_tools)) for recording, _ in usable),
    )


def _summed(rollouts: Iterable[Sequence[tuple[str, bool]]]) -> HitRate:
    """The rate over the calls of rollouts, each a tool and whether it hits."""
    hits: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    count = complete = 0
    for made in rollouts:
        calls.update(name for name, _ in made)
        hits.update(name for name, is_hit in made if is_hit)
        count += 1
        complete += all(is_hit for _, is_hit in made)
    return HitRate(dict(hits), dict(calls), count, complete)


def _answered(
    one: TraceRecording, results: TraceResults, other: TraceRecording, finish_tools: Collection[str]
) -> Iterator[tuple[str, bool]]:
    """The calls of another trace, looked up in this one."""
    tools = RecordedTools(one.tools, results, on_miss="error")
    for step in other.steps:
        made = step.get("tool_calls") or ()
        own_calls = [call for call in made if get_path(call, "function", "name") not in finish_tools]
        for call in tools.answer(own_calls).calls:
            if call.is_hit or call.is_miss:
                yield call.name, call.is_hit


def _copied(recording: TraceRecording, finish_tools: Collection[str]) -> Iterator[tuple[str, bool]]:
    """The calls of a trace, and whether the conversation before shows their arguments."""
    tools = tools_by_name(recording.tools)
    text = "\n".join(map(_text, recording.messages))
    for step in recording.steps:
        for call in calls_in([step]):
            if call.name in tools and call.name not in finish_tools:
                yield call.name, _is_in(call, tools[call.name], text)
        text += f"\n{_text(step)}" if step.get("role") == "tool" else ""


def _is_in(call: Call, tool: Tool, text: str) -> bool:
    defaults = with_defaults({}, tool.definition.get("parameters"))
    try:
        own = {name: value for name, value in call.parsed.items() if defaults.get(name, _NONE) != value}
        return all(_shows(text, value) for _, value in leaves(own) if value != [])
    except (ValueError, RecursionError):
        return False


_NONE: Any = object()


def _shows(text: str, value: Any) -> bool:
    """Whether a text has a value: a number as a whole, other values anywhere."""
    if isinstance(value, bool) or value is None or value == "":
        return True
    if isinstance(value, int | float):
        return re.search(rf"(?<![\w.]){re.escape(str(value))}(?![\w]|\.\d)", text) is not None
    return str(value).casefold() in text


def _text(message: ChatMessage) -> str:
    content = message.get("content")
    return (content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)).casefold()
