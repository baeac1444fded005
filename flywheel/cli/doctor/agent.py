"""Check of `rollout.agent`: the user's workflow or command loads, as it will in a round. It is not run."""

from __future__ import annotations

import asyncio

from flywheel.cli.doctor.finding import Finding, Result
from flywheel.config import Config
from flywheel.errors import ConfigError
from flywheel.training.program.configured_program import program_of
from flywheel.training.program.program_pool import ProgramPool


async def check_agent(config: Config) -> Finding:
    """What the agent of rollouts is, after loading it and its setup in a process of its own."""
    try:
        program = program_of(config)
        if program is None:
            return Finding("agent", Result.SKIPPED, "rollouts run no code of yours: `rollout.agent` names none")
        pool = ProgramPool(program, workers=1)
        try:
            found = await asyncio.to_thread(pool.start)
        finally:
            await asyncio.to_thread(pool.close)
    except ConfigError as error:
        return Finding.of("agent", error)
    return Finding("agent", Result.OK, f"{found}; `flywheel workflow check` runs it once")
