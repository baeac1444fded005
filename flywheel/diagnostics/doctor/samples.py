"""What was judged so far: whether a round could be filled with it, and if not, what keeps it from that."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection

from flywheel.config import Config
from flywheel.daemon.next_test import next_test
from flywheel.daemon.supply import OVER, Supplies, Supply
from flywheel.diagnostics.doctor.finding import Finding, Result
from flywheel.errors import FlywheelError
from flywheel.exclusion import WORDS, Exclusion
from flywheel.states import TaskState
from flywheel.store import claims, samples, splits
from flywheel.store.database import Store, found_version
from flywheel.store.samples import count_held_out
from flywheel.store.schema import SCHEMA_VERSION, tasks
from flywheel.terminal import quantity

_NAME: Final = "samples"
_SHARES: Final = (
    "Set `widen: true` for `influence` in {chain}, or larger shares; filters/default.yaml suits few conversations and"
    " users."
)
_HELD: Final = "Look at them with `flywheel tasks --state held`, and release or reject them."
_SIDE: Final = "Collect conversations that begin otherwise; ingest.train_ratio must leave something for both sides."


async def check_samples(config: Config) -> Finding:
    """Whether a round could be filled from the state as it is."""
    try:
        if found_version(config.state_dir) != SCHEMA_VERSION:
            return Finding(_NAME, Result.SKIPPED, "there is no state of this version yet")
        store = await Store.view(config.state_dir)
        try:
            return await store.read(_samples, config)
        finally:
            await store.close()
    except FlywheelError as error:
        return Finding.of(_NAME, error)


def _samples(conn: Connection, config: Config) -> Finding:
    supply = Supplies(config).now(conn)
    wanted = config.trigger.min_held_out or config.gate.min_tasks
    held_out = count_held_out(conn, config.training.takes)
    shortfall = next_test(conn, config).shortfall(config.gate)
    told = "; ".join(filter(None, (supply.told, f"{held_out} of {wanted} held-out tasks are judged", shortfall)))
    figures = {
        "usable": supply.usable,
        "needed": supply.needs,
        "over_share": supply.waiting.get(OVER, 0),
        "held_out": held_out,
        "held_out_needed": wanted,
    }
    for obstacle, remedy in _obstacles(conn, config, supply):
        return Finding(_NAME, Result.WARNING, f"no round could be filled: {told}{obstacle}", remedy, figures=figures)
    is_enough = supply.usable >= supply.needs and held_out >= wanted and not shortfall
    told = f"{'a round could be filled' if is_enough else 'not enough for a round yet'}: {told}"
    return Finding(_NAME, Result.OK, "; ".join(filter(None, (told, supply.notice))), figures=figures)


def _obstacles(conn: Connection, config: Config, supply: Supply) -> list[tuple[str, str]]:
    """What more of the same traces would not overcome, and what to do about it."""
    found = []
    if supply.usable < supply.needs:
        if supply.waiting.get(OVER, 0) >= supply.needs - supply.usable:
            found.append(("", _SHARES.format(chain=config.filter.chain)))
        if held := claims.count(conn, tasks.c.state == TaskState.HELD.value):
            found.append((f"; {quantity(held, 'task')} of bursts wait for a person", _HELD))
    if empty := splits.empty_side(conn, config.ingest.train_ratio):
        found.append((f"; {empty}", _SIDE))
    return found


_PROMPTS: Final = "prompts"


async def check_left_out(config: Config) -> Finding:
    """Whether tasks are left out, most of all for a message that agents are sent and their traces hide."""
    try:
        store = await Store.view(config.state_dir)
        try:
            counts = await store.read(samples.count_left_out, config.training.takes)
        finally:
            await store.close()
    except FlywheelError as error:
        # A state of another version, or none that can be read, is the matter of another check.
        return Finding(_PROMPTS, Result.SKIPPED, f"cannot {error.attempted}: {error.why}")
    told = "; ".join(f"{quantity(number, 'task')} left out: {WORDS[each].why}" for each, number in counts.items())
    figures = {f"{each.value}_tasks": number for each, number in counts.items()}
    to_do = next((WORDS[each].remedy for each in (Exclusion.HIDDEN, *counts) if each in counts), "")
    result = Result.WARNING if Exclusion.HIDDEN in counts else Result.OK
    return Finding(_PROMPTS, result, told or "no task is left out of rounds", to_do, figures=figures)
