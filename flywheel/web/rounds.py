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
from typing import Any, Final, NamedTuple, Self

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
from flywheel.web import actions, lineage
from flywheel.web.curves import Curves, charts_of, columns, curves_in, figures_by_step, sparkline
from flywheel.web.gate_sentence import later, sentence
from flywheel.web.site import position, site_of, tasks_with

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


async def show_list(request: Request) -> Response:
    """The rounds, the newest first, a page of them."""
    site = site_of(request)
    before, deployed = (position(request.query_params, name) for name in ("before", "deployments"))
    found = await site.read(partial(_page, before, deployed))
    rows = await asyncio.to_thread(lambda: [ListedRound.of(each) for each in found.pop("facts")])
    live = next((row for row in rows if row.is_live), None) if before is None else None
    return site.page("rounds.html", rows=rows, live=live, before=before, sparkline=sparkline, **found)


def _page(before: int | None, deployed: int | None, conn: Connection) -> dict[str, Any]:
    found = round_list.listed(conn, PER_PAGE + 1, before)
    return {
        "facts": found[:PER_PAGE],
        "older": found[PER_PAGE - 1].id if len(found) > PER_PAGE else None,
        "waits": database.noted(conn, database.ROUND_NOTE),
        **lineage.of_aliases(conn, deployed),
    }


@dataclass(frozen=True, slots=True)
class ListedRound:
    """A round as the list shows it. `progress` is None while no worker runs."""

    facts: RoundFacts
    curves: Curves
    progress: RoundProgress | None

    @classmethod
    def of(cls, facts: RoundFacts) -> Self:
        """A round with what its files say."""
        directory = Path(facts.dir)
        return cls(
            facts, curves_in(directory), progress_of(directory) if facts.state == RoundState.TRAINING else None
        )

    @property
    def is_live(self) -> bool:
        return self.facts.state in LIVE_ROUND

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
        first, last = _seconds(self.facts.created_at), _seconds(self.facts.finished_at)
        return duration(last - first) if first is not None and last is not None and last >= first else ""


async def overlay(request: Request) -> Response:
    """From the chosen rounds of the list to the newest of them, with the others drawn over it."""
    site, chosen = site_of(request), request.query_params.getlist("with")
    known = await site.read(round_list.facts, chosen[: MOST_OVERLAID + 1])
    names = sorted(known, key=lambda name: known[name].id, reverse=True)
    if not names:
        return RedirectResponse("/rounds", HTTPStatus.SEE_OTHER)
    address = tasks_with(f"/rounds/{names[0]}", **{"with": names[1:]})
    return RedirectResponse(f"{address}#curves", HTTPStatus.SEE_OTHER)


async def show(request: Request) -> Response:
    """One round."""
    site, name, query = site_of(request), request.path_params["round"], request.query_params
    split = Split.HELD_OUT if query.get("split") == Split.HELD_OUT.value else Split.TRAIN
    others = list(dict.fromkeys(each for each in query.getlist("with") if each != name))[:MOST_OVERLAID]
    after, deployed = position(query, "after") or 0, position(query, "deployments")
    asked = query.get("asked", "")
    found = await site.read(partial(_round, site.config, asked, name, others, split, after, deployed))
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no round {name}.")
    own, *overlaid = await asyncio.to_thread(lambda: [ListedRound.of(each) for each in found.pop("facts")])
    history = found.pop("history")
    end = len(own.curves.steps)
    first = 0 if query.get("steps") == "all" else max(0, end - STEPS_SHOWN)
    return site.page(
        "round.html",
        own=own,
        overlaid=overlaid,
        **await asyncio.to_thread(_left, Path(own.facts.dir)),
        sentence=sentence(own.facts),
        later=later(own.facts),
        charts=charts_of(own.curves),
        drawn={each.facts.name: figures_by_step(each.curves) for each in (own, *overlaid)},
        columns=columns(own.curves),
        places=range(end - 1, first - 1, -1),
        timeline=timeline(history, own.curves),
        times=times_of(own.curves.figures),
        phases=phases(history, own),
        selected=RoundSelection.model_validate(own.facts.selection).sentences if own.facts.selection else (),
        split=split,
        held_out=Split.HELD_OUT,
        after=after,
        address=partial(tasks_with, f"/rounds/{name}", **{"with": others}),
        **found,
    )


def _left(directory: Path) -> dict[str, Any]:
    """What a worker has left in the round's directory, besides figures."""
    log, error = log_end(directory / LOG_FILE), worker_error(directory / ERROR_FILE)
    return {"log": log, "error": error, "is_there": directory.is_dir()}


def _round(
    config: Config,
    asked: str,
    name: str,
    others: list[str],
    split: Split,
    after: int,
    deployed: int | None,
    conn: Connection,
) -> dict[str, Any] | None:
    facts = round_list.facts(conn, [name, *others])
    if name not in facts:
        return None
    own = facts[name]
    rows = round_list.samples(conn, own.id, split, after, SAMPLES_PER_PAGE + 1)
    older, newer = round_list.beside(conn, own.id)
    shares = round_list.shares(conn, own.id)
    # Without samples to train on, the round has only compared another trainer's adapter with its parent.
    trains = not shares or any(each.split == Split.TRAIN for each in shares)
    choices = [each for each in round_list.newest_names(conn, CHOICES + 1) if each != name][:CHOICES]
    return {
        "facts": [facts[each] for each in (name, *others) if each in facts],
        "history": round_list.history(conn, own),
        "shares": shares,
        "trains": trains,
        "samples": rows[:SAMPLES_PER_PAGE],
        "more": rows[SAMPLES_PER_PAGE - 1].id if len(rows) > SAMPLES_PER_PAGE else None,
        "older": older,
        "newer": newer,
        "waiting": told(conn, config, own),
        "asked": actions.asked(conn, asked),
        "choices": [*choices, *(each for each in others if each in facts and each not in choices)],
        **lineage.of_round(conn, own, deployed, trains=trains),
    }


class Moment(NamedTuple):
    """An entry of a round's timeline."""

    at: str
    what: str
    state: str
    detail: str = ""


def timeline(history: Sequence[Row[Any]], found: Curves) -> list[Moment]:
    """What happened to the round, its adapter and its deployments, and the phases of its last worker, in order."""
    kinds = {"rounds": "round", "adapters": "adapter"}
    entries = [Moment(row.at, kinds.get(row.kind, "deployment"), row.new, row.detail) for row in history]
    entries += [Moment(at, "worker", phase) for phase, at in found.phases]
    return sorted(entries, key=lambda entry: _seconds(entry.at) or 0.0)


class PhaseBar(NamedTuple):
    """How long a phase took; `x` and `width` in hundredths of the round's time."""

    name: str
    lasted: str
    x: float
    width: float


def phases(history: Sequence[Row[Any]], own: ListedRound) -> list[PhaseBar]:
    """The phases of the round's last worker, and what followed until the round ended, or its candidate waited."""
    if not own.curves.phases:
        return []
    # The last change to each state. A candidate may wait for days.
    states = {row.new: row.at for row in history if row.kind == "rounds"}
    decided = [("decision and swap", states[RoundState.EVALUATING])] if RoundState.EVALUATING in states else []
    now = own.progress.updated_at if own.progress is not None else ""
    end = states.get(RoundState.PASSED) or own.facts.finished_at or now
    marks = [(name, _seconds(at)) for name, at in (*own.curves.phases, *decided, ("", end))]
    known = [(name, at) for name, at in marks if at is not None]
    begin, part = known[0][1], (known[-1][1] - known[0][1]) / 100
    return [
        PhaseBar(name, duration(last - first), round((first - begin) / part, 2), round((last - first) / part, 2))
        for (name, first), (_, last) in pairwise(known)
        if last >= first and name and part > 0
    ]


def _seconds(at: str | None) -> float | None:
    try:
        return datetime.fromisoformat(at).timestamp() if at else None
    except (ValueError, OverflowError):
        return None


class LogEnd(NamedTuple):
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
    # Of a line that was written again and again, as bars of progress are, the last state.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n")]
    whole = size <= LOG_BYTES and len(lines) <= LOG_LINES
    cut = [f"{line[:LOG_LINE_CHARACTERS]}…" if len(line) > LOG_LINE_CHARACTERS else line for line in lines]
    return LogEnd(cut[int(size > LOG_BYTES) :][-LOG_LINES:] if text else [], whole)


class WorkerError(NamedTuple):
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
