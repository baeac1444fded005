"""Metrics of an agent's replies against the ground truth of their tasks, by the names of SAGE's evaluator.

Arithmetic on messages only. `training/gate/intervals.py` has means and intervals over tasks.

The definitions differ from SAGE's code in that calls are read from messages and not by patterns from a text; a plan
is the calls themselves and not words such as "first … then"; a reply that failed counts 0 and is not left out; and
without ground truth there is no value, where SAGE has 0.5, 0.8 or 3 steps.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from flywheel.errors import ConfigError
from flywheel.records.ground_truth import GroundTruth
from flywheel.records.tool_calls import FINISH_FUNCTIONS, Call, calls_in
from flywheel.records.trace import ChatMessage, get_path

METRICS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tool_selection_accuracy": "F1 of the names of the called tools and of the target tools",
        "plan_success_rate": "whether the target tools were called in their order, all without error",
        "step_efficiency": "the optimal number of calls divided by that of the reply, at most 1; 0 if not successful",
        "timing_precision": "share of assistant turns that call or answer where the reference trajectory does",
        "end_to_end_success": "whether the rubric accepts",
    }
)
"""What each metric is, by name. Every value is in 0…1, and more is better."""
SHORT_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tool_accuracy": "tool_selection_accuracy",
        "plan_success": "plan_success_rate",
        "planning": "plan_success_rate",
        "efficiency": "step_efficiency",
        "timing": "timing_precision",
    }
)
"""SAGE's short names."""
SCORE: Final = "score"
"""The score of the rubric, which `flywheel evaluate` shows beside the metrics."""
_TAKEN: Final = frozenset({*METRICS, *SHORT_NAMES, SCORE, "retrieval", "all"})


@dataclass(frozen=True, slots=True)
class Attempt:
    """What an agent did with a task.

    Attributes:
        steps: The messages after the question, in the OpenAI chat format: the model's with their tool calls, and
            the tools'. The answer may be their last one.
        answer: The final answer; empty without one.
        accepted: Whether the rubric accepts; None while that is undecided.
        failed: Whether there is no reply to measure: the agent raised, or the endpoint failed. Everything counts 0.
        errors: The steps that failed, as in `metadata.errors_json` of a task.
    """

    steps: Sequence[ChatMessage]
    answer: str
    accepted: bool | None
    failed: bool = False
    errors: Sequence[str] = ()


def metric_of(criterion: str) -> str:
    """The name of a criterion's values among metrics: its id, or `criterion:ID` if a metric can be asked for by that
    id."""
    return f"criterion:{criterion}" if criterion in _TAKEN else criterion


def metric_names(requested: Iterable[str], criteria: Collection[str] = ()) -> tuple[str, ...]:
    """The full names of metrics, each once, in the order in which they were requested. `criteria` are the ids of a
    rubric's criteria, which are metrics as well (`metric_of`).

    Raises ConfigError for `retrieval` and for an unknown name.
    """
    names, own = [], [metric_of(criterion) for criterion in criteria]
    for name in requested:
        full = SHORT_NAMES.get(name, name)
        if full == "retrieval":
            raise ConfigError(
                "measure retrieval",
                "it is SAGE's metric of searching a catalogue of tools, and replies show calls, not searches",
                "Measure it with `flywheel retrieval evaluate`. tool_selection_accuracy is about the offered tools.",
            )
        if full not in METRICS and full not in own:
            close = difflib.get_close_matches(name, [*METRICS, *SHORT_NAMES, *own], n=1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise ConfigError(f"measure {name}", "there is no such metric", f"{hint}There are: {', '.join(METRICS)}.")
        names.append(full)
    return tuple(dict.fromkeys(names))


def requested_metrics(requested: str, criteria: Collection[str]) -> tuple[str, ...]:
    """The full names of metrics, given names separated by commas or `all`, and the ids of a rubric's criteria. Raises
    ConfigError for another name."""
    names = [name.strip() for name in requested.split(",") if name.strip()]
    return metric_names([*METRICS, *map(metric_of, criteria)] if names == ["all"] else names, criteria)


def measure(attempt: Attempt, truth: GroundTruth) -> dict[str, float | None]:
    """The value of each metric, by name and in the order of METRICS. None: not measured, because the ground truth
    does not have what the metric needs, or because it is not decided whether the reply is accepted."""
    if attempt.failed:
        values: dict[str, float | None] = dict.fromkeys(METRICS, 0.0)
    else:
        targets, accepted = truth.target_tools or (), attempt.accepted
        calls = own_calls(calls_in(attempt.steps, attempt.errors), targets)
        values = {
            "tool_selection_accuracy": tool_selection_accuracy([call.name for call in calls], targets),
            "plan_success_rate": plan_success_rate(calls, targets),
            "step_efficiency": None
            if accepted is None
            else step_efficiency(len(calls), truth.optimal_steps or 0, successful=accepted),
            "timing_precision": timing_precision(attempt.steps, attempt.answer, truth.trajectory or ()),
            "end_to_end_success": None if accepted is None else float(accepted),
        }
    needed: dict[str, object] = {
        "tool_selection_accuracy": truth.target_tools,
        "plan_success_rate": truth.target_tools,
        "step_efficiency": truth.optimal_steps,
        "timing_precision": truth.trajectory,
    }
    return {name: None if needed.get(name, True) is None else value for name, value in values.items()}


def own_calls(calls: Iterable[Call], targets: Collection[str] = ()) -> list[Call]:
    """The calls that count. One of AgentScope's finish functions is an answer, unless it is a target itself."""
    return [call for call in calls if call.name not in FINISH_FUNCTIONS or call.name in targets]


def tool_selection_accuracy(called: Iterable[str], targets: Iterable[str]) -> float:
    """F1 of two sets of names, as SAGE computes it: how often a tool is called does not count. Both empty is 1, one
    of them empty 0."""
    ours, theirs = set(called), set(targets)
    if not ours and not theirs:
        return 1.0
    # F1 is 2·P·R / (P + R) with P = both / ours and R = both / theirs.
    return 2 * len(ours & theirs) / (len(ours) + len(theirs))


def plan_success_rate(calls: Iterable[Call], targets: Iterable[str]) -> float:
    """1 if the calls without error have the targets as a subsequence, else 0: other calls may stand between them, and
    a failed call may be repeated. A call without a recorded result has no known error."""
    succeeded = iter([call.name for call in calls if not call.failed])
    return float(all(name in succeeded for name in targets))


def step_efficiency(calls: int, optimal: int, *, successful: bool) -> float:
    """min(1, optimal / calls) if the task was solved, else 0. Without any call it is 1, also if `optimal` is 0."""
    if not successful:
        return 0.0
    return min(1.0, optimal / calls) if calls else 1.0


def timing_precision(steps: Iterable[ChatMessage], answer: str, reference: Iterable[ChatMessage]) -> float:
    """The share of assistant turns in which "call or answer" is the same in both, place by place.

    An answer ends both: it is one more turn where the messages do not end with it, but for a reply without any. If
    the numbers of turns differ, the longer one counts, and its further turns do not agree: a reply that answers too
    early, or goes on calling, is not better than one that has a wrong turn.
    """
    ours, theirs = _turns(steps, answer), _turns(reference)
    agreeing = sum(one == other for one, other in zip(ours, theirs, strict=False))
    return agreeing / max(len(ours), len(theirs))


def _turns(messages: Iterable[ChatMessage], answer: str | None = None) -> list[bool]:
    """Whether each assistant turn calls a tool. `answer` is that of a reply, None for a reference."""
    said = [message for message in messages if message.get("role") == "assistant"]
    turns = [_is_call(message) for message in said]
    ends = bool(turns) and not turns[-1] and (answer is None or _is_answer(said[-1], answer))
    if not ends and (answer is None or answer.strip()):
        turns.append(False)
    return turns


def _is_call(message: ChatMessage) -> bool:
    calls = message.get("tool_calls")
    return isinstance(calls, list) and any(
        get_path(call, "function", "name") not in FINISH_FUNCTIONS for call in calls
    )


def _is_answer(last: ChatMessage, answer: str) -> bool:
    """Whether a message without a call is the answer itself, and not a text before it: a finish function, or the same
    text."""
    return bool(last.get("tool_calls")) or str(last.get("content")).strip() == answer.strip()
