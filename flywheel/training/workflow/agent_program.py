"""What acts in a rollout: the user's program, the models that it reaches, and what one run of it returned.

Plain data, and only the standard library: it is imported by the user's interpreter, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from flywheel.training.workflow import function_name

FailureCause = Literal[
    "timeout", "memory", "raised", "ended", "no_result", "not_a_number", "no_response", "bad_output", "left_processes"
]
"""Why a run gave nothing to learn from.

`timeout`: it ran too long. `memory`: it used too much. `raised`: the function raised, or the command's exit code was
not 0. `ended`: the process of a function ended. `no_result`: it returned nothing, or nothing that is a result.
`not_a_number`: a reward or metric that is not a finite number. `no_response`: no response for the rubric's judge, or
no reward where one is needed. `bad_output`: the output of a command is not one JSON object. `left_processes`:
processes that it started were still running.
"""
FAILURE_CAUSES: Final[tuple[FailureCause, ...]] = get_args(FailureCause)


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """A model of an OpenAI-compatible endpoint."""

    base_url: str
    model: str
    api_key: str = field(default="unused", repr=False)


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
        seconds: Longest run.
        memory_bytes: Of the process and all that it started, resident.
        auxiliary_models: Further models by name, which are not trained.
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
    seconds: float = 600.0
    memory_bytes: int = 4_000_000_000
    auxiliary_models: Mapping[str, ModelEndpoint] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    needs_response: bool = True
    needs_reward: bool = False

    @property
    def name(self) -> str:
        """As users know it."""
        return self.workflow or " ".join(self.command)

    @property
    def files(self) -> list[str]:
        """What its processes read: its working directory, its interpreter, and the files of its functions."""
        functions = map(function_name.parsed, (self.workflow, self.reward_function, self.setup))
        found = (each.where for each in functions if each is not None and each.is_in_file)
        return [*filter(None, (self.folder, self.python)), *found]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run returned, or why it failed.

    Attributes:
        response: The text for the judge; None if it returned none.
        metrics: Finite numbers by name.
        error: For people; empty if it did not fail.
        seconds: Duration.
        peak_bytes: Largest resident memory that was seen.
        shown: The repr of what was returned, shortened.
    """

    reward: float | None = None
    response: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    cause: FailureCause | None = None
    error: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    shown: str = ""
