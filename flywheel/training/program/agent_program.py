"""What acts in a rollout: the user's program, and the models that it reaches.

Plain data, and only the standard library: it is imported by the user's interpreter, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from flywheel.system.python_files import FunctionName, parsed


def in_copy(path: str, folder: str, copy: str) -> str:
    """A path below `folder` in the `copy` of the folder; others unchanged, and all if `folder` is empty."""
    inside = bool(folder and path) and PurePath(path).is_relative_to(folder)
    return str(PurePath(copy, PurePath(path).relative_to(folder))) if inside else path


@dataclass(frozen=True)
class ModelEndpoint:
    """A model of an OpenAI-compatible endpoint. `base_url` is the API's root. It has no slots: without AgentScope, it
    is what AgentJet's workflows get as their chat model, whose attributes are copied."""

    base_url: str
    model: str
    api_key: str = field(default="unused", repr=False)

    def __str__(self) -> str:
        return f"{self.model} at {self.base_url}"


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """The user's agent and its limits. Either `workflow` or `command` is set.

    Attributes:
        workflow: `FILE.py:function` or `package.module:function`, with `->Class` for AgentJet's classes.
        command: A program and its arguments.
        python: The interpreter of a workflow; empty for this one.
        reward_function: In the same form as `workflow`; its reward replaces the workflow's.
        setup: In the same form; runs once per process.
        folder: The working directory.
        isolation: `process` if a process runs one rollout after the other, `run` if each run has its own.
        seconds: Longest run.
        memory_bytes: Of the process and all that it started, resident.
        auxiliary_models: Further models by name, which are not trained.
        models: Who answers requests for a model of this name at the policy's address: `policy`, `auxiliary` or
            `refuse`.
        config: AgentJet's settings, which its classes get.
        judge: The judge's endpoint, which its classes may ask.
        environment: Variables that it gets although their names are those of secrets.
        needs_response: Whether a run without a response is a failure.
        needs_reward: Whether a run without a reward is a failure.
    """

    workflow: str = ""
    command: tuple[str, ...] = ()
    python: str = ""
    reward_function: str = ""
    setup: str = ""
    folder: str = ""
    isolation: str = "process"
    seconds: float = 600.0
    memory_bytes: int = 4_000_000_000
    auxiliary_models: Mapping[str, ModelEndpoint] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    judge: ModelEndpoint | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    needs_response: bool = True
    needs_reward: bool = False

    @property
    def name(self) -> str:
        """As users know it."""
        return self.workflow or " ".join(self.command)

    def auxiliary_name(self, model: str) -> str | None:
        """The key in `auxiliary_models` of what a client calls `model`: this key, or that of an endpoint's model."""
        others = self.auxiliary_models
        return model if model in others else next((name for name in others if others[name].model == model), None)

    def answered_by(self, model: str) -> str | None:
        """Who answers requests for this model at the policy's address; None for the policy as long as nothing says
        so."""
        return self.models.get(model) or ("auxiliary" if self.auxiliary_name(model) is not None else None)

    @property
    def is_of_agentjet(self) -> bool:
        """Whether one of its functions is a class of AgentJet."""
        return any(each.is_class for each in self._functions)

    @property
    def _functions(self) -> list[FunctionName]:
        return [each for each in map(parsed, (self.workflow, self.reward_function, self.setup)) if each is not None]

    def moved(self, folder: str, copy: str) -> AgentProgram:
        """With its files below `folder` read from the `copy` of the folder."""

        def moved(function: str) -> str:
            found = parsed(function)
            if found is None or not found.is_in_file:
                return function
            return str(found._replace(where=in_copy(found.where, folder, copy)))

        return replace(
            self,
            workflow=moved(self.workflow),
            reward_function=moved(self.reward_function),
            setup=moved(self.setup),
            folder=in_copy(self.folder, folder, copy),
            python=in_copy(self.python, folder, copy),
        )

    @property
    def files(self) -> list[str]:
        """What its processes read: its working directory, its interpreter, and the files of its functions."""
        found = (each.where for each in self._functions if each.is_in_file)
        return [*filter(None, (self.folder, self.python)), *found]
