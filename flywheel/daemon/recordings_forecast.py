"""What to expect of rollouts whose tools answer from recordings, by the state alone and before the first round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.judge.filters.chain import redactor_of
from flywheel.records.exclusion import Exclusion
from flywheel.records.tool_calls import FINISH_FUNCTIONS, functions_by_name
from flywheel.serving.server.model_parsers import TOOLS_REMEDY, template_words, writes_tools
from flywheel.serving.server.vllm_command import chat_arguments, chat_template, parses_tools
from flywheel.store.samples import count_with_tools, recorded_lines
from flywheel.system.terminal import quantity
from flywheel.training.data.groups import MIN_COMPLETE_SHARE
from flywheel.training.recorded.expected_hits import ExpectedHits, expected_hits
from flywheel.training.recorded.recordings import TraceRecording, recording_of, results_of

SAMPLED: Final = 500
"""The newest tasks with tools, from which hits are estimated."""
SAMPLED_CHARACTERS: Final = 64_000_000
"""The most text of their steps."""
MIN_ROLLOUTS: Final = 10
"""Fewer, or fewer calls, are no reason for a warning."""
MIN_HIT_RATE: Final = 0.25
"""Below this, tools of rollouts answer with errors, or end them, nearly always."""
NAMED: Final = 5
_COUNTED: Final = {
    Exclusion.TOOLS: "with recorded results",
    Exclusion.UNCALLED: "without a call",
    Exclusion.UNRECORDED: "whose calls have no recorded result",
    Exclusion.UNDEFINED: "without tool definitions in the trace",
}
_NO_PARSER: Final = "Set serving.tool_call_parser to the format of the model's calls."
_MISSES: Final = (
    "`flywheel round --debug` shows how many rollouts call a tool without a recording. Collect more traces of the"
    " same questions, go on after such calls (`rollout.tools.on_miss: error`), or run your agent (`rollout.agent`)."
)


@dataclass(frozen=True, slots=True)
class RecordingsForecast:
    """`remedy` is empty if nothing has to be done; `figures` are counts of tasks and percentages, by their names."""

    text: str
    figures: dict[str, int]
    remedy: str = ""


def recordings_forecast(conn: Connection, config: Config) -> RecordingsForecast | None:
    """None if no task was offered tools. Raises TrainError for a chat template that writes no tools, with which each
    round would end, and ConfigError for a wrong filter chain."""
    counts = count_with_tools(conn)
    if not counts:
        return None
    figures = {f"{why.value}_tasks": number for why, number in counts.items()}
    total = quantity(sum(counts.values()), "task")
    parts = [f"{total} with tools: " + ", ".join(f"{number:,} {_COUNTED[why]}" for why, number in counts.items())]
    if config.rollout.agent == "reply":
        return RecordingsForecast(f"{parts[0]}; rounds leave them out (`rollout.agent: reply`)", figures)
    base, arguments = config.model.base, chat_arguments(config.model.base, config.serving)
    template = chat_template(arguments)
    if writes_tools(base, template) is False:
        why = f"{total} with tools, but {template_words(base, template)} writes no tools"
        raise TrainError("train on tasks with tools", why, TOOLS_REMEDY)
    remedy = ""
    if not parses_tools(arguments):
        parts.append(f"no parser is known for the tool calls of {base}: when serving and in rounds, they stay text")
        remedy = _NO_PARSER
    sample, finish = list(_sample(conn, config)), config.rollout.finish_tools
    expected = expected_hits(sample, finish)
    best = expected.best
    parts.append(_expectation(expected))
    shares = {"expected_hits_percent": best.rate, "expected_complete_percent": best.complete_share}
    figures |= {name: round(100 * share) for name, share in shares.items() if share is not None}
    if unrecorded := _without_results(sample, finish):
        more = f" and {len(unrecorded) - NAMED} more" if unrecorded[NAMED:] else ""
        parts.append(f"no recorded result of {', '.join(unrecorded[:NAMED])}{more}")
    whole = best.complete_share or 0.0
    if config.rollout.tools.on_miss == "end" and best.rollouts >= MIN_ROLLOUTS and whole < MIN_COMPLETE_SHARE:
        is_repeated = best is expected.repeated
        has = (
            "rollouts are expected to find all recordings"
            if is_repeated
            else "traces only have calls with copied arguments"
        )
        parts.append(f"{whole:.0%} of {has}, while a group needs {MIN_COMPLETE_SHARE:.0%} to be trained on")
        remedy = remedy or _MISSES
    elif best.rate is not None and best.rate < MIN_HIT_RATE and sum(best.calls.values()) >= MIN_ROLLOUTS:
        parts.append("recordings will answer few calls")
        remedy = remedy or _MISSES
    return RecordingsForecast("; ".join(parts), figures, remedy)


def _sample(conn: Connection, config: Config) -> Iterator[TraceRecording]:
    """The newest recordings, in the form that rounds use."""
    redact = redactor_of(config)
    room = SAMPLED_CHARACTERS
    for split, line in recorded_lines(conn, _COUNTED, newest=SAMPLED):
        room -= len(line["metadata"]["trajectory_json"])
        if room < 0:
            return
        yield recording_of(redact(line) if redact is not None else line, split)


def _expectation(expected: ExpectedHits) -> str:
    best = expected.best
    if best.rate is None:
        return "no recorded call to estimate the hit rate from"
    most = sorted(best.calls.items(), key=lambda item: (-item[1], item[0]))[:NAMED]
    by_tool = ", ".join(f"{name} {best.hits.get(name, 0) / calls:.0%}" for name, calls in most)
    how = "of other replies to the same question"
    if best is expected.copied:
        how = "by whether their arguments occur in the conversation (no question was asked twice)"
    calls = quantity(sum(best.calls.values()), "call")
    return f"expected hit rate {best.rate:.0%} ({by_tool}), estimated from {calls} {how}"


def _without_results(sample: list[TraceRecording], finish: list[str]) -> list[str]:
    """Offered tools of which the sample has no result."""
    offered = {name for recording in sample for name in functions_by_name(recording.tools)}
    answered = {result.tool.name for recording in sample for result in results_of(recording, finish).results}
    return sorted(offered - {*FINISH_FUNCTIONS, *finish} - answered)
