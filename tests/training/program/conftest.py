"""Pools of real child processes, closed after each test."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.program.program_pool import ProgramPool

MODELS = {"policy": ModelEndpoint("http://127.0.0.1:9/r1/v1", "agent", "key-of-the-rollout")}
NewPool = Callable[..., ProgramPool]
WITHOUT_AGENTSCOPE = "\nimport sys; sys.modules['agentscope'] = None\n"
"""Its import takes seconds, and these tests need no model of it."""


@pytest.fixture
def new_pool(tmp_path: Path) -> Iterator[NewPool]:
    """Makes a pool of the function `run` in a file with this text, or of the program of these settings."""
    pools: list[ProgramPool] = []

    def make(text: str | None = None, *, workers: int = 1, **settings: Any) -> ProgramPool:
        if text is not None:
            path = tmp_path / "agent.py"
            path.write_text(textwrap.dedent(text) + WITHOUT_AGENTSCOPE)
            settings.setdefault("workflow", f"{path}:run")
        settings = {"folder": str(tmp_path), "needs_response": False, "seconds": 120.0} | settings
        pools.append(ProgramPool(AgentProgram(**settings), workers=workers))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
