"""A check of tasks with tools: whether recordings will answer their calls in rollouts, and the server parses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from sqlalchemy import Connection

from flywheel.cli.doctor.finding import Finding, Result
from flywheel.config import AgentProgramSettings, Config
from flywheel.errors import FlywheelError
from flywheel.judge.filters.chain import redactor_of
from flywheel.records.exclusion import Exclusion
from flywheel.records.tool_calls import FINISH_FUNCTIONS, functions_by_name
from flywheel.serving.server.inference_server import chat_arguments
from flywheel.store.kernel.database import found_version, read_once
from flywheel.store.samples import count_with_tools, recorded_lines
from flywheel.system.terminal import quantity
from flywheel.training.data.groups import MIN_COMPLETE_SHARE
from flywheel.training.recorded.expected_hits import ExpectedHits, HitRate, expected_hits
from flywheel.training.recorded.recordings import Recording, recording_of, results_of

SAMPLED: Final = 500
"""The newest tasks with tools, from which hits are estimated."""
SAMPLED_CHARACTERS: Final = 64_000_000
"""The most text of their steps."""
MIN_ROLLOUTS: Final = 10
"""Fewer are no reason for a warning."""
NAMED: Final = 5
_COUNTED: Final = {
    Exclusion.TOOLS: "with recorded results",
    Exclusion.UNCALLED: "without a call",
    Exclusion.UNRECORDED: "whose calls have no recorded result",
}
_NO_PARSER: Final = "Set serving.tool_call_parser to the format of the model's calls."
_UNSURE: Final = (
    "`flywheel round --debug` shows how many rollouts miss. If many do, let them go on:"
    " `rollout.tools.on_miss: error`."
)
_LOW: Final = (
    "Collect more traces of the same questions, or let rollouts go on after a miss: `rollout.tools.on_miss: error`."
)


async def check_recordings(config: Config) -> Finding:
    """What to expect of rollouts with tools, before the first round."""
    if isinstance(config.rollout.agent, AgentProgramSettings):
        return Finding("recordings", Result.SKIPPED, "rollouts run the agent of `rollout.agent` with its own tools")
    try:
        if not found_version(config.state_dir):
            return Finding("recordings", Result.SKIPPED, "there is no state yet")
        return await read_once(config.state_dir, _recordings, config)
    except FlywheelError as error:
        return Finding.of("recordings", error)


def _recordings(conn: Connection, config: Config) -> Finding:
    counts = count_with_tools(conn)
    if not counts:
        return Finding("recordings", Result.SKIPPED, "no task was offered tools")
    figures = {f"{each.value}_tasks": number for each, number in counts.items()}
    total = quantity(sum(counts.values()), "task")
    parts = [f"{total} with tools: " + ", ".join(f"{number:,} {_COUNTED[each]}" for each, number in counts.items())]
    if config.rollout.agent == "reply":
        parts.append("rounds leave them out (`rollout.agent: reply`)")
        return Finding("recordings", Result.OK, "; ".join(parts), figures=figures)
    problems = []
    if not _is_parsed(config):
        base = config.model.base
        parts.append(f"no parser is known for the tool calls of {base}: they stay text, in service and in rounds")
        problems.append(_NO_PARSER)
    sample = list(_sample(conn, config))
    expected = expected_hits(sample, config.rollout.finish_tools)
    parts.append(_expectation(expected))
    figures |= _percentages(expected.best)
    if unrecorded := _without_results(sample, config):
        more = f" and {len(unrecorded) - NAMED} more" if unrecorded[NAMED:] else ""
        parts.append(f"no recorded result of {', '.join(unrecorded[:NAMED])}{more}")
    share = expected.best.complete_share or 0.0
    is_known = expected.best.rollouts >= MIN_ROLLOUTS
    if config.rollout.tools.on_miss == "end" and is_known and share < MIN_COMPLETE_SHARE:
        dropped = f"groups in which fewer than {MIN_COMPLETE_SHARE:.0%} have none are dropped"
        if expected.best is expected.repeated:
            parts.append(f"{share:.0%} of rollouts are expected to have no miss, and {dropped}")
            problems.append(_LOW)
        else:
            only = f"{share:.0%} of traces have only such calls"
            parts.append(f"{only}; rollouts with other words in theirs miss, and {dropped}")
            problems.append(_UNSURE)
    result = Result.WARNING if problems else Result.OK
    return Finding("recordings", result, "; ".join(parts), " ".join(problems[:1]), figures=figures)


def _is_parsed(config: Config) -> bool:
    """Whether the server parses tool calls, by its parser or by one in its own arguments."""
    from flywheel.training.engine.chat_rendering import served_format

    return bool(served_format(chat_arguments(config.model.base, config.serving)).tool_parser)


def _sample(conn: Connection, config: Config) -> Iterator[Recording]:
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
    by_tool = ", ".join(f"{name} {best.hits.get(name, 0) / calls:.0%}" for name, calls in _largest(best.calls))
    how = "that other replies to the same question made"
    if best is expected.copied:
        how = "by whether the conversation shows their arguments, as no question was asked twice"
    calls = quantity(sum(best.calls.values()), "call")
    return f"expected hit rate {best.rate:.0%} ({by_tool}), estimated from {calls} {how}"


def _largest(calls: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(calls.items(), key=lambda each: (-each[1], each[0]))[:NAMED]


def _percentages(best: HitRate) -> dict[str, int]:
    shares = {"expected_hits_percent": best.rate, "expected_complete_percent": best.complete_share}
    return {name: round(100 * share) for name, share in shares.items() if share is not None}


def _without_results(sample: list[Recording], config: Config) -> list[str]:
    """Offered tools of which the sample has no result."""
    finish = config.rollout.finish_tools
    offered = {name for each in sample for name in functions_by_name(each.tools)} - {*FINISH_FUNCTIONS, *finish}
    answered = {recorded.tool.name for each in sample for recorded in results_of(each, finish).results}
    return sorted(offered - answered)
