"""The user's agent as the settings describe it."""

from __future__ import annotations

import os

from flywheel.config import AgentProgramSettings, Config
from flywheel.errors import ConfigError
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint


def program_of(config: Config) -> AgentProgram | None:
    """The program of `rollout.agent`; None if rollouts run none. Raises ConfigError for an auxiliary model whose
    variable has no key, and for a variable of `rollout.agent_environment` that is not set."""
    rollout = config.rollout
    agent = rollout.agent
    if not isinstance(agent, AgentProgramSettings):
        return None
    return AgentProgram(
        workflow=agent.workflow or "",
        command=tuple(agent.command or ()),
        python=str(agent.python or ""),
        reward_function=rollout.reward_function or "",
        setup=rollout.setup or "",
        folder=str(agent.folder),
        seconds=rollout.agent_timeout_seconds,
        memory_bytes=round(rollout.agent_memory_gb * 1e9),
        auxiliary_models={
            name: ModelEndpoint(model.base_url, model.model, **_key(name, model.api_key_env))
            for name, model in rollout.auxiliary_models.items()
        },
        environment={name: _variable(name) for name in rollout.agent_environment},
        needs_response=rollout.reward.rubric > 0,
        needs_reward=rollout.reward.workflow > 0,
    )


def _key(name: str, variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not (key := os.environ.get(variable, "").strip()):
        raise ConfigError(
            f"use rollout.auxiliary_models.{name}",
            f"the environment variable {variable} with its key is not set",
            f"Set it, or name another one in rollout.auxiliary_models.{name}.api_key_env.",
        )
    return {"api_key": key}


def _variable(name: str) -> str:
    if (value := os.environ.get(name)) is None:
        raise ConfigError(
            "run the user's agent",
            f"the environment variable {name} is not set",
            "Set it, or take it out of rollout.agent_environment.",
        )
    return value
