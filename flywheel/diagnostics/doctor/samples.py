"""Checks of the ledger: can a round be filled with its samples, and which tasks do rounds leave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from sqlalchemy import Connection

from flywheel.config import Config
from flywheel.daemon.free_samples import OVER, Supplies, Supply
from flywheel.daemon.next_gate_test import next_test
from flywheel.diagnostics.doctor.finding import Finding, Result
from flywheel.errors import FlywheelError
from flywheel.exclusion import WORDS, Exclusion
from flywheel.states import TaskState
from flywheel.store import splits
from flywheel.store.bulk import count_rows
from flywheel.store.database import Store, found_version
from flywheel.store.samples import count_held_out, count_left_out
from flywheel.store.schema import SCHEMA_VERSION, tasks
from flywheel.terminal import quantity

T = TypeVar("T")
_SHARES: Final = (
    "Set `widen: true` for `influence` in {chain}, or larger shares; filters/default.yaml suits few conversations and"
    " users."
)
_HELD: Final = "List them with `flywheel tasks --state held`, then release or reject them."
_SPLIT: Final = "Collect conversations that begin differently; ingest.train_ratio must leave some for both splits."


async def check_left_out(config: Config) -> Finding:
    """Whether rounds leave tasks out, above all because agents are sent a message that their traces do not show."""
    try:
        counts = await _read(config, lambda conn: count_left_out(conn, config.training.takes))
    except FlywheelError as error:
        # Another check reports a state that cannot be read.
        return Finding("prompts", Result.SKIPPED, f"cannot {error.attempted}: {error.why}")
    text = "; ".join(f"{quantity(number, 'task')} left out: {WORDS[each].why}" for each, number in counts.items())
    figures = {f"{each.value}_tasks": number for each, number in counts.items()}
    remedy = next((WORDS[each].remedy for each in (Exclusion.HIDDEN, *counts) if each in counts), "")
    result = Result.WARNING if Exclusion.HIDDEN in counts else Result.OK
    return Finding("prompts", result, text or "no task is left out of rounds", remedy, figures=figures)


async def check_samples(config: Config) -> Finding:
    """Whether a round could be filled now."""
    try:
        if found_version(config.state_dir) != SCHEMA_VERSION:
            return Finding("samples", Result.SKIPPED, "there is no state of this version yet")
        return await _read(config, lambda conn: _samples(conn, config))
    except FlywheelError as error:
        return Finding.of("samples", error)


async def _read(config: Config, question: Callable[[Connection], T]) -> T:
    store = await Store.view(config.state_dir)
    try:
        return await store.read(question)
    finally:
        await store.close()


def _samples(conn: Connection, config: Config) -> Finding:
    supply = Supplies(config).now(conn)
    wanted = config.trigger.min_held_out or config.gate.min_tasks
    held_out = count_held_out(conn, config.training.takes)
    shortfall = next_test(conn, config).shortfall(config.gate)
    text = "; ".join(filter(None, (supply.told, f"{held_out} of {wanted} held-out tasks are judged", shortfall)))
    figures = {
        "usable": supply.usable,
        "needed": supply.needs,
        "over_share": supply.waiting.get(OVER, 0),
        "held_out": held_out,
        "held_out_needed": wanted,
    }
    if obstacles := _obstacles(conn, config, supply):
        why, remedy = obstacles[0]
        return Finding("samples", Result.WARNING, f"no round could be filled: {text}{why}", remedy, figures=figures)
    is_enough = supply.usable >= supply.needs and held_out >= wanted and not shortfall
    text = f"{'a round could be filled' if is_enough else 'not enough for a round yet'}: {text}"
    return Finding("samples", Result.OK, "; ".join(filter(None, (text, supply.notice))), figures=figures)


def _obstacles(conn: Connection, config: Config, supply: Supply) -> list[tuple[str, str]]:
    """What more traces of the same kind would not solve, each with its remedy."""
    found = []
    if supply.usable < supply.needs:
        if supply.waiting.get(OVER, 0) >= supply.needs - supply.usable:
            found.append(("", _SHARES.format(chain=config.filter.chain)))
        if held := count_rows(conn, tasks, tasks.c.state == TaskState.HELD.value):
            found.append((f"; {quantity(held, 'task')} of bursts wait for a person", _HELD))
    if empty := splits.empty_split(conn, config.ingest.train_ratio):
        found.append((f"; {empty}", _SPLIT))
    return found
