"""Checks of the data: the state and its disk, each source, and the recordings for rollouts with tools."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from flywheel.cli.doctor import Finding, Result
from flywheel.cli.tables import forecast_text
from flywheel.config.file import Config
from flywheel.config.ingest import CallsSource, JsonlSource, OtlpSource, StudioSource, host_and_port
from flywheel.config.training import AgentProgramSettings
from flywheel.daemon.forecast import forecast
from flywheel.errors import FlywheelError
from flywheel.judge.filters.chain import redactor_of
from flywheel.records.exclusion import Exclusion
from flywheel.records.round import METRICS_FILE
from flywheel.records.tool_calls import FINISH_FUNCTIONS, functions_by_name
from flywheel.serving.server.model_parsers import TOOLS_REMEDY, template_words, writes_tools
from flywheel.serving.server.vllm_command import chat_arguments, chat_template, parses_tools
from flywheel.sources.call_puller import pulled_servers
from flywheel.sources.jsonl.reader import JsonlFile, files_of, unread_in
from flywheel.sources.otlp.inbox import own_file
from flywheel.sources.studio.database import Database
from flywheel.sources.studio.schema import schema_of
from flywheel.store.kernel.database import found_version, read_once
from flywheel.store.samples import count_with_tools, recorded_lines
from flywheel.system.lock import holder
from flywheel.system.terminal import byte_size, duration, quantity
from flywheel.training.data.groups import MIN_COMPLETE_SHARE
from flywheel.training.data.round_progress import read_steps
from flywheel.training.data.step_figures import figures_of, times_of
from flywheel.training.recorded.expected_hits import ExpectedHits, HitRate, expected_hits
from flywheel.training.recorded.recordings import TraceRecording, recording_of, results_of

_WAITS: Final = {
    "generate": "generation",
    "grade": "waiting for the judge",
    "sync": "loading weights",
    "train": "updates",
}
MIN_FREE: Final = 200 << 20
"""Bytes. With less, the next transaction or the next round's log may fail."""
LOW_FREE: Final = 5 << 30
"""Bytes that a few rounds take with their adapters and logs."""
NETWORK: Final = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|9p|ceph|glusterfs|lustre|afs|fuse\.(sshfs|s3fs|glusterfs|rclone)"
)
"""File system types on which other machines write without an event on this one."""
_CONNECT_SECONDS: Final = 5.0
Source = StudioSource | JsonlSource | OtlpSource | CallsSource
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
_NOTHING_USABLE: Final = (
    "Change the settings named, if rounds are to use such tasks; `flywheel status` explains each reason."
)
_NO_PARSER: Final = "Set serving.tool_call_parser to the format of the model's calls."
_UNSURE: Final = (
    "`flywheel round --debug` shows how many rollouts miss. If many do, let them go on:"
    " `rollout.tools.on_miss: error`."
)
_MISSES: Final = "Collect more traces of the same questions, or let rollouts run your agent: `rollout.agent`."
_LOW: Final = (
    "Collect more traces of the same questions, or let rollouts go on after a miss: `rollout.tools.on_miss: error`."
)


def check_state(config: Config) -> Iterator[Finding]:
    """The state's directory and database, and the disk below them."""
    try:
        directory = config.state_dir
        version, pid = found_version(directory), holder(directory)
    except FlywheelError as error:
        yield Finding.from_error("state", error)
        return
    paths = (directory, *directory.absolute().parents)
    existing = next((path for path in paths if os.path.lexists(path)), Path("/"))
    remedy = "Set state.dir (or $FLYWHEEL_HOME) to a directory on a disk of this machine that you can write to."
    text = f"{directory}, schema version {version}" if version else f"{directory}: no state yet"
    if pid is not None:
        text = f"{text}; locked by process {pid}"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "cannot be written by this user" if existing.is_dir() else "is not a directory"
        yield Finding("state", Result.FAILED, f"{existing} {why}", remedy)
        if not existing.exists():  # a link to nothing has no disk
            return
    elif is_network(kind := file_system(existing)):
        text = f"{text}; on {kind}, where SQLite's write-ahead log and locks are not reliable"
        yield Finding("state", Result.WARNING, text, remedy)
    else:
        yield Finding("state", Result.OK, text, figures={} if pid is None else {"pid": pid})
    free = shutil.disk_usage(existing).free
    result, remedy = Result.OK, ""
    if free < LOW_FREE:
        result = Result.FAILED if free < MIN_FREE else Result.WARNING
        remedy = "Free space: `flywheel prune --dry-run` shows what old rounds take."
    text = f"{byte_size(free)} free at {existing}"
    yield Finding("disk", result, text, remedy, figures={"free_bytes": free})


def check_sources(config: Config) -> Iterator[Finding]:
    """One finding for each source."""
    if not config.sources:
        yield Finding(
            "source", Result.WARNING, "no source is configured, so nothing is read", "Add one to `sources`."
        )
    for source in config.sources:
        subject = _subject(config, source)
        try:
            yield Finding("source", *_source(config, source, subject))
        except FlywheelError as error:
            yield Finding.from_error("source", error, subject=subject)


def _subject(config: Config, source: Source) -> str:
    match source:
        case OtlpSource():
            return source.listen
        case CallsSource():
            return str(own_file(source, config.state_dir))
    return str(source.path.absolute())


def _source(config: Config, source: Source, subject: str) -> tuple[Result, str, str, str, dict[str, int]]:
    """The fields of its finding."""
    path, figures, unread = Path(subject), dict[str, int](), ""
    match source:
        case OtlpSource():
            return *_receiver(config, source), subject, figures
        case CallsSource() if not path.exists():
            return Result.OK, "no reply was found in recorded calls yet", "", subject, figures
        case CallsSource():
            calls, size = sum(each.calls for each in pulled_servers(path).values()), path.stat().st_size
            text, figures = f"{quantity(calls, 'recorded call')}, {byte_size(size)}", {"calls": calls, "bytes": size}
        case JsonlSource():
            files = files_of(path)
            for file in files:
                JsonlFile(file).close()
            size = sum(file.stat().st_size for file in files)
            text, figures = (
                f"task lines, {quantity(len(files), 'file')}, {byte_size(size)}",
                {"files": len(files), "bytes": size},
            )
            unread = unread_in(path)
            text = "; ".join(filter(None, (text, unread)))
        case _:
            with Database(path) as database:
                database.identity()
                schema, _ = schema_of(database)
                spans, size = database.last_rowid(), path.stat().st_size
            text, figures = (
                f"{schema.name}, about {quantity(spans, 'span')}, {byte_size(size)}",
                {"spans": spans, "bytes": size},
            )
    if is_network(kind := file_system(path)):
        remedy = "Run Flywheel on the machine that writes it: locks and events may not reach over a network."
        return Result.WARNING, f"{text}; on {kind}", remedy, subject, figures
    if not next(iter(figures.values())):
        remedy = "Let an agent write its traces or task lines there, or correct the path."
        return Result.WARNING, text if unread else f"{text}: nothing is in it yet", remedy, subject, figures
    return Result.OK, text, "", subject, figures


def _receiver(config: Config, source: OtlpSource) -> tuple[Result, str, str]:
    if source.token_env is not None and not os.environ.get(source.token_env):
        why = f"the variable {source.token_env}, which token_env names, is not set"
        return Result.FAILED, why, "Put a long random text into it, here and for the daemon."
    is_running, is_served = holder(config.state_dir) is not None, False
    with suppress(OSError), socket.create_connection(host_and_port(source.listen), timeout=_CONNECT_SECONDS):
        is_served = True
    if is_served and not is_running:
        return Result.FAILED, "another program is listening there", "Stop it, or choose another port."
    if is_running and not is_served:
        return Result.FAILED, "the daemon is running, but nothing is listening there", "Look at the daemon's log."
    return Result.OK, "the daemon is listening" if is_served else "the address is free for the daemon", ""


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the file system that a path is on; empty if it is not known."""
    kinds = {}
    with suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            _, mount, kind, *_ = line.split(" ")
            # Of two mounts at one path the later one hides the earlier one.
            kinds[re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount)] = kind
    real = Path(os.path.realpath(path))
    return next((kinds[str(folder)] for folder in (real, *real.parents) if str(folder) in kinds), "")


def is_network(kind: str) -> bool:
    """Whether other machines can write to a file system of this type."""
    return NETWORK.fullmatch(kind) is not None


async def check_recordings(config: Config) -> Finding:
    """What to expect of rollouts with tools, before the first round."""
    if isinstance(config.rollout.agent, AgentProgramSettings):
        return Finding("recordings", Result.SKIPPED, "rollouts run the agent of `rollout.agent` with its own tools")
    try:
        if not found_version(config.state_dir):
            return Finding("recordings", Result.SKIPPED, "there is no state yet")
        return await read_once(config.state_dir, _recordings, config)
    except FlywheelError as error:
        return Finding.from_error("recordings", error)


async def check_forecast(config: Config) -> Finding:
    """Whether rounds could train on the tasks that are there."""
    if not config.has_trainer:
        return Finding(
            "forecast", Result.SKIPPED, "the configuration only judges: it has no setting of what is trained"
        )
    try:
        if not found_version(config.state_dir):
            return Finding("forecast", Result.SKIPPED, "there is no state yet")
        found = await read_once(config.state_dir, forecast, config)
    except FlywheelError as error:
        return Finding.from_error("forecast", error)
    result = Result.WARNING if found.tasks and not found.usable else Result.OK
    return Finding("forecast", result, forecast_text(found), _NOTHING_USABLE, forecast=found)


def check_rounds(config: Config) -> Finding:
    """Where the time of the newest round went."""
    files = list((config.state_dir / "rounds").glob(f"r*/{METRICS_FILE}"))
    newest = max(files, key=lambda path: path.parent.name, default=None)
    times = None if newest is None else times_of(figures_of(read_steps(newest.parent)))
    if newest is None or times is None:
        return Finding("rounds", Result.SKIPPED, "there was no round with rollouts yet")
    shares = ", ".join(f"{times.share(times.parts[part]):.0%} {name}" for part, name in _WAITS.items())
    text = f"{quantity(times.steps, 'step')} of {newest.parent.name} took {duration(times.whole)}: {shares}"
    if times.overlap_saves is not None:
        text += f"; training.overlap would have saved about {duration(times.overlap_saves)}"
    figures = {f"{part}_seconds": round(seconds) for part, seconds in times.parts.items()}
    return Finding("rounds", Result.OK, text, figures=figures)


def _recordings(conn: Connection, config: Config) -> Finding:
    counts = count_with_tools(conn)
    if not counts:
        return Finding("recordings", Result.SKIPPED, "no task was offered tools")
    figures = {f"{why.value}_tasks": number for why, number in counts.items()}
    total = quantity(sum(counts.values()), "task")
    parts = [f"{total} with tools: " + ", ".join(f"{number:,} {_COUNTED[why]}" for why, number in counts.items())]
    if config.rollout.agent == "reply":
        parts.append("rounds leave them out (`rollout.agent: reply`)")
        return Finding("recordings", Result.OK, "; ".join(parts), figures=figures)
    problems = []
    base, arguments = config.model.base, chat_arguments(config.model.base, config.serving)
    template = chat_template(arguments)
    if writes_tools(base, template) is False:
        text = f"{total} with tools, and {template_words(base, template)} writes none"
        return Finding("recordings", Result.FAILED, text, TOOLS_REMEDY, figures=figures)
    if not parses_tools(arguments):
        parts.append(f"no parser is known for the tool calls of {base}: they stay text, when serving and in rounds")
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
    is_counted = sum(expected.best.calls.values()) >= MIN_ROLLOUTS
    if config.rollout.tools.on_miss == "end" and is_known and share < MIN_COMPLETE_SHARE:
        dropped = f"groups in which fewer than {MIN_COMPLETE_SHARE:.0%} have none are dropped"
        if expected.best is expected.repeated:
            parts.append(f"{share:.0%} of rollouts are expected to have no miss, and {dropped}")
            problems.append(_LOW)
        else:
            only = f"{share:.0%} of traces have only such calls"
            parts.append(f"{only}; rollouts with other words in theirs miss, and {dropped}")
            problems.append(_UNSURE)
    elif (rate := expected.best.rate) is not None and rate < MIN_HIT_RATE and is_counted:
        parts.append("recordings will hardly ever answer")
        problems.append(_MISSES if config.rollout.tools.on_miss == "error" else _LOW)
    result = Result.WARNING if problems else Result.OK
    return Finding("recordings", result, "; ".join(parts), " ".join(problems[:1]), figures=figures)


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
    by_tool = ", ".join(f"{name} {best.hits.get(name, 0) / calls:.0%}" for name, calls in _largest(best.calls))
    how = "that other replies to the same question made"
    if best is expected.copied:
        how = "by whether the conversation shows their arguments, as no question was asked twice"
    calls = quantity(sum(best.calls.values()), "call")
    return f"expected hit rate {best.rate:.0%} ({by_tool}), estimated from {calls} {how}"


def _largest(calls: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(calls.items(), key=lambda item: (-item[1], item[0]))[:NAMED]


def _percentages(best: HitRate) -> dict[str, int]:
    shares = {"expected_hits_percent": best.rate, "expected_complete_percent": best.complete_share}
    return {name: round(100 * share) for name, share in shares.items() if share is not None}


def _without_results(sample: list[TraceRecording], config: Config) -> list[str]:
    """Offered tools of which the sample has no result."""
    finish = config.rollout.finish_tools
    offered = {name for recording in sample for name in functions_by_name(recording.tools)} - {
        *FINISH_FUNCTIONS,
        *finish,
    }
    answered = {result.tool.name for recording in sample for result in results_of(recording, finish).results}
    return sorted(offered - answered)
