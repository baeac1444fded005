"""The rounds: a list of them, and one round with its curves, its samples and what its worker says."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import orjson
from sqlalchemy import Connection, Row
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from flywheel.config.file import Config
from flywheel.daemon.rounds.waiting import told
from flywheel.records.round import ERROR_FILE, LOG_FILE, RoundSelection
from flywheel.records.states import LIVE_ROUND, RoundState, Split
from flywheel.secrets import redact_secrets
from flywheel.store.kernel import database
from flywheel.store.views import round_list
from flywheel.store.views.round_list import RoundFacts
from flywheel.system.terminal import duration
from flywheel.training.data.round_progress import RoundProgress, progress_of
from flywheel.training.data.step_figures import times_of
from flywheel.web import actions
from flywheel.web.curves import Curves, MetricsTails, charts_of, figures_by_step, sparkline
from flywheel.web.gate_sentence import later, sentence
from flywheel.web.site import site_of

PER_PAGE: Final = 20
SAMPLES_PER_PAGE: Final = 25
STEPS_SHOWN: Final = 50
"""The last steps of the table, unless all are asked for."""
CHOICES: Final = 12
"""The newest rounds, which are offered to be drawn over another one."""
MOST_OVERLAID: Final = 4
LOG_BYTES: Final = 1 << 16
LOG_LINES: Final = 60
LOG_LINE_CHARACTERS: Final = 1_000
ERROR_BYTES: Final = 1 << 16
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")

_tails: Final = MetricsTails()


async def show_list(request: Request) -> Response:
    """The rounds, the newest first, a page of them."""
    site = site_of(request)
    before = _number(request.query_params.get("before", ""))
    found = await site.read(partial(_page, before))
    rows = await asyncio.to_thread(lambda: [_with_files(each) for each in found.pop("facts")])
    live = next((row for row in rows if row.is_live), None) if before is None else None
    return site.page("rounds.html", rows=rows, live=live, before=before, later=later, **found)


def _page(before: int | None, conn: Connection) -> dict[str, Any]:
    found = round_list.listed(conn, PER_PAGE + 1, before)
    return {
        "facts": found[:PER_PAGE],
        "older": found[PER_PAGE - 1].id if len(found) > PER_PAGE else None,
        "waits": database.noted(conn, database.ROUND_NOTE),
    }


@dataclass(frozen=True, slots=True)
class ListedRound:
    """A round as the list shows it. `progress` is None while no worker runs."""

    facts: RoundFacts
    curves: Curves
    progress: RoundProgress | None

    @property
    def is_live(self) -> bool:
        return self.facts.state in LIVE_ROUND

    @property
    def sparkline(self) -> str:
        return sparkline(self.curves)

    @property
    def steps(self) -> int:
        return len(self.curves.steps) or self.facts.result.get("steps", 0)

    @property
    def rewards(self) -> tuple[float | None, float | None]:
        """The mean reward of the first step and of the last one."""
        if self.curves.steps:
            return self.curves.at("reward_mean", 0), self.curves.last("reward_mean")
        return self.facts.result.get("reward_first"), self.facts.result.get("reward_last")

    @property
    def lasted(self) -> str:
        return _lasted(self.facts.created_at, self.facts.finished_at)


def _with_files(facts: RoundFacts) -> ListedRound:
    directory = Path(facts.dir)
    progress = progress_of(directory) if facts.state == RoundState.TRAINING else None
    return ListedRound(facts, _tails.read(directory), progress)


async def overlay(request: Request) -> Response:
    """From the chosen rounds of the list to the newest of them, with the others drawn over it."""
    site, chosen = site_of(request), request.query_params.getlist("with")
    known = await site.read(round_list.facts, chosen[: MOST_OVERLAID + 1])
    names = sorted(known, key=lambda name: known[name].id, reverse=True)
    if not names:
        return RedirectResponse("/rounds", HTTPStatus.SEE_OTHER)
    others = urlencode([("with", name) for name in names[1:]])
    return RedirectResponse(f"/rounds/{names[0]}{'?' + others if others else ''}#curves", HTTPStatus.SEE_OTHER)


async def show(request: Request) -> Response:
    """One round."""
    site, name, query = site_of(request), request.path_params["round"], request.query_params
    split = Split.HELD_OUT if query.get("split") == Split.HELD_OUT.value else Split.TRAIN
    others = list(dict.fromkeys(each for each in query.getlist("with") if each != name))[:MOST_OVERLAID]
    asked, after = query.get("asked", ""), _number(query.get("after", "")) or 0
    found = await site.read(partial(_round, site.config, asked, name, others, split, after))
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no round {name}.")
    files = await asyncio.to_thread(_files, found["facts"])
    own: ListedRound = files["own"]
    history = timeline(found["history"], own.curves, own.facts)
    end = len(own.curves.steps)
    first = 0 if query.get("steps") == "all" else max(0, end - STEPS_SHOWN)
    return site.page(
        "round.html",
        sentence=sentence(own.facts),
        later=later(own.facts),
        charts=charts_of(own.curves),
        columns=columns(own.curves),
        places=range(end - 1, first - 1, -1),
        timeline=history,
        times=times_of(own.curves.figures),
        phases=phases(found["history"], own),
        selected=RoundSelection.model_validate(own.facts.selection).sentences if own.facts.selection else (),
        split=split,
        held_out=Split.HELD_OUT,
        address=partial(_address, name, others),
        **{key: found[key] for key in _SHOWN},
        **files,
    )


_SHOWN: Final = ("older", "newer", "shares", "samples", "more", "choices", "after", "waiting", "asked")


def _round(
    config: Config, asked: str, name: str, others: list[str], split: Split, after: int, conn: Connection
) -> dict[str, Any] | None:
    facts = round_list.facts(conn, [name, *others])
    if name not in facts:
        return None
    own = facts[name]
    rows = round_list.samples(conn, own.id, split, after, SAMPLES_PER_PAGE + 1)
    older, newer = round_list.beside(conn, own.id)
    choices = [each for each in round_list.newest_names(conn, CHOICES + 1) if each != name][:CHOICES]
    return {
        "facts": [facts[each] for each in (name, *others) if each in facts],
        "history": round_list.history(conn, own),
        "shares": round_list.shares(conn, own.id),
        "samples": rows[:SAMPLES_PER_PAGE],
        "more": rows[SAMPLES_PER_PAGE - 1].id if len(rows) > SAMPLES_PER_PAGE else None,
        "after": after,
        "older": older,
        "newer": newer,
        "waiting": told(conn, config, own),
        "asked": actions.asked(conn, asked),
        "choices": [*choices, *(each for each in others if each in facts and each not in choices)],
    }


def _files(facts: Sequence[RoundFacts]) -> dict[str, Any]:
    """What the files of the rounds say; the first is that of the page."""
    shown = [_with_files(each) for each in facts]
    directory = Path(facts[0].dir)
    return {
        "own": shown[0],
        "overlaid": shown[1:],
        "log": log_end(directory / LOG_FILE),
        "error": worker_error(directory / ERROR_FILE),
        "is_there": directory.is_dir(),
    }


async def show_curves(request: Request) -> Response:
    """The figures of a round by step, for the script that draws them: those of `file` from place `begin` on, or all
    if the round has another file by now."""
    site, name = site_of(request), request.path_params["round"]
    found = (await site.read(round_list.facts, [name])).get(name)
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no round {name}.")
    read = await asyncio.to_thread(_tails.read, Path(found.dir))
    begin = _number(request.query_params.get("begin", "")) or 0
    if request.query_params.get("file") != read.file or begin > len(read.steps):
        begin = 0
    return Response(orjson.dumps(figures_by_step(name, read, begin)), media_type="application/json")


def _number(given: str) -> int | None:
    if not given:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"There is no such part of the page: {given[:40]}.")
    return int(given)


def _address(name: str, others: Sequence[str], **changes: object) -> str:
    """The address of the round with the same overlay."""
    query = urlencode([*(("with", each) for each in others), *((key, each) for key, each in changes.items() if each)])
    return f"/rounds/{name}{'?' + query if query else ''}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of steps."""

    title: str
    figure: str
    unit: str = ""


_COLUMNS: Final = (
    Column("Reward", "reward_mean"),
    Column("Deviation", "reward_std"),
    Column("With spread", "spread_share", "share"),
    Column("Loss", "loss"),
    Column("Gradient norm", "grad_norm"),
    Column("Entropy", "entropy", "nats"),
    Column("KL", "kl", "nats"),
    Column("Gap", "logprob_gap", "nats"),
    Column("Length", "completion_tokens_mean", "tokens"),
    Column("Truncated", "truncated_share", "share"),
    Column("Generate", "seconds.generate", "s"),
    Column("Grade", "seconds.grade", "s"),
    Column("Sync", "seconds.sync", "s"),
    Column("Train", "seconds.train", "s"),
    Column("Hits", "tools.hit_rate", "share"),
    Column("Misses", "tools.miss_share", "share"),
    Column("Rollouts", "rollouts"),
    Column("Tokens a second", "tokens_per_second"),
)


def columns(found: Curves) -> list[Column]:
    """The columns for which the round has figures."""
    return [column for column in _COLUMNS if column.figure in found.figures]


@dataclass(frozen=True, slots=True)
class Moment:
    """An entry of a round's timeline."""

    at: str
    what: str
    state: str
    detail: str


def timeline(history: Sequence[Row[Any]], found: Curves, facts: RoundFacts) -> list[Moment]:
    """What happened to the round, its adapter and its deployments, and the phases of its last worker, in order."""
    entries = [
        Moment(row.at, {"rounds": "round", "adapters": "adapter"}.get(row.kind, "deployment"), row.new, row.detail)
        for row in history
    ]
    entries += [Moment(phase.at, "worker", phase.name, "") for phase in found.phases]
    return sorted(entries, key=lambda entry: _seconds(entry.at) or 0.0)


@dataclass(frozen=True, slots=True)
class PhaseBar:
    """How long a phase took; `x` and `width` in hundredths of the round's time."""

    name: str
    seconds: float
    x: float
    width: float
    is_running: bool = False

    @property
    def lasted(self) -> str:
        return duration(self.seconds)


def phases(history: Sequence[Row[Any]], own: ListedRound) -> list[PhaseBar]:
    """The phases of the round's last worker, and what followed until the round ended, or its candidate waited."""
    marks = [(phase.name, _seconds(phase.at)) for phase in own.curves.phases]
    if not marks:
        return []
    ends = [row.at for row in history if row.kind == "rounds" and row.new == RoundState.EVALUATING]
    if ends:
        marks.append(("decision and swap", _seconds(ends[-1])))
    # A candidate may wait for days.
    passed = next((row.at for row in history if row.kind == "rounds" and row.new == RoundState.PASSED), None)
    last = passed or own.facts.finished_at or (own.progress.updated_at if own.progress is not None else "") or ""
    marks.append(("", _seconds(last)))
    known = [(name, at) for name, at in marks if at is not None]
    whole = known[-1][1] - known[0][1]
    if whole <= 0:
        return []
    bars = []
    for (name, begin), (_, end) in pairwise(known):
        if end >= begin and name:
            x = 100 * (begin - known[0][1]) / whole
            bars.append(PhaseBar(name, end - begin, round(x, 2), round(100 * (end - begin) / whole, 2)))
    return bars


def _seconds(at: str | None) -> float | None:
    try:
        return datetime.fromisoformat(at).timestamp() if at else None
    except (ValueError, OverflowError):
        return None


def _lasted(begin: str, end: str | None) -> str:
    first, last = _seconds(begin), _seconds(end)
    return duration(last - first) if first is not None and last is not None and last >= first else ""


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The last lines of a log, without colours and known secrets."""

    lines: list[str]
    is_whole: bool


def log_end(path: Path) -> LogEnd | None:
    """The end of a worker's log; None if there is none, or it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            found = file.read()
    except OSError:
        return None
    # Before lines are cut: part of a key would not be recognised as a secret.
    text = redact_secrets(_COLOURS.sub("", found.decode(errors="replace")))
    lines = [
        line.rpartition("\r")[2] if line.rstrip("\r") == line else line.rstrip("\r") for line in text.split("\n")
    ]
    if lines and not lines[-1]:
        lines.pop()
    if size > LOG_BYTES:
        del lines[:1]
    cut = [line if len(line) <= LOG_LINE_CHARACTERS else f"{line[:LOG_LINE_CHARACTERS]}…" for line in lines]
    return LogEnd(cut[-LOG_LINES:], size <= LOG_BYTES and len(cut) <= LOG_LINES)


@dataclass(frozen=True, slots=True)
class WorkerError:
    """Why a worker ended without a result."""

    error: str
    hint: str
    is_retryable: bool


def worker_error(path: Path) -> WorkerError | None:
    """What the worker said before it ended; None if it did not."""
    try:
        with path.open("rb") as file:
            said = orjson.loads(file.read(ERROR_BYTES))
        return WorkerError(str(said["error"]), str(said.get("hint") or ""), bool(said.get("retryable")))
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
