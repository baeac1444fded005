"""What rounds leave out of the tasks that are there, and what can be done about it."""

from __future__ import annotations

from typing import Final

from flywheel.config import Config
from flywheel.diagnostics.doctor.finding import Finding, Result
from flywheel.errors import FlywheelError
from flywheel.exclusion import WORDS, Exclusion
from flywheel.quantity import quantity
from flywheel.store import samples
from flywheel.store.database import Store

_NAME: Final = "prompts"


async def left_out(config: Config) -> Finding:
    """Whether tasks are left out, most of all for a message that agents are sent and their traces hide."""
    try:
        store = await Store.view(config.state_dir)
        try:
            counts = await store.read(samples.count_left_out, config.training.takes)
        finally:
            await store.close()
    except FlywheelError as error:
        # A state of another version, or none that can be read, is the matter of another check.
        return Finding(_NAME, Result.SKIPPED, f"cannot {error.attempted}: {error.why}")
    told = "; ".join(f"{quantity(number, 'task')} left out: {WORDS[each].why}" for each, number in counts.items())
    figures = {f"{each.value}_tasks": number for each, number in counts.items()}
    to_do = next((WORDS[each].remedy for each in (Exclusion.HIDDEN, *counts) if each in counts), "")
    result = Result.WARNING if Exclusion.HIDDEN in counts else Result.OK
    return Finding(_NAME, result, told or "no task is left out of rounds", to_do, figures=figures)
