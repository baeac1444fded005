"""A rollout of the user's own agent: its program runs in a child process, and the calls that it makes of the model
are what is trained on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from flywheel.records.program_run import ENGINE_FAULTS, CallFault, RunResult
from flywheel.records.trace import ChatMessage
from flywheel.training.data.loops import cut_loop
from flywheel.training.data.rollout import Completion, LoadedAdapter, RolloutRequest, system_prompts_of, text_of
from flywheel.training.data.samples import CallTokens, Timelines, timelines
from flywheel.training.program.agent_program import ModelEndpoint

API_KEY: Final = "unused"
"""The secret of a rollout is in its URL, but clients refuse to start without a key."""


@dataclass(frozen=True, slots=True)
class ProgramSetup:
    """Which models the program is offered, and its limits.

    Attributes:
        models: The name under which it asks for the model of each target.
        trained: The target that is trained.
        frozen: The adapters of the others by those names; None is the base model.
        max_turns: Calls of the model that is trained.
        needs_reward: Whether a rollout without a reward of the program is worth nothing.
        rewards_loops: Whether a loop that was cut off decides the reward, also where the program failed on it.
    """

    models: Mapping[str, str]
    trained: str
    max_turns: int
    frozen: Mapping[str, LoadedAdapter | None] = field(default_factory=dict)
    needs_reward: bool = False
    rewards_loops: bool = True


class RecordingSession(Protocol):
    """The policy as one rollout reaches it (`Session`)."""

    is_truncated: bool
    is_full: bool

    @property
    def fault(self) -> tuple[CallFault, str] | None: ...

    @property
    def calls(self) -> Sequence[CallTokens]: ...


RunProgram = Callable[[Mapping[str, Any], Mapping[str, ModelEndpoint], str], Awaitable[RunResult]]
"""Runs the program once on a task, with its models by target and the target that is trained (`ProgramPool.run`)."""


async def roll_out(
    request: RolloutRequest, session: RecordingSession, url: str, run_program: RunProgram, setup: ProgramSetup
) -> Completion:
    """The completion of a request whose task is done by the user's agent, which reaches the `session` at `url`.

    A run that lacks an answer of the model, because the engine failed or a call was given up, has no reward whatever
    it returned. A run that fails after the rollout reached a limit is truncated: its last message is the answer,
    unless only the program could say what that is worth. So is one that fails on a message that loops.
    """
    endpoints = {target: ModelEndpoint(url, name, API_KEY) for target, name in setup.models.items()}
    run = await run_program(request.prompt.task.line, endpoints, setup.trained)
    calls = session.calls
    made = timelines(calls)
    loop = await asyncio.to_thread(cut_loop, calls)
    # What a failed run generated is kept for people to read; nothing of it is trained on.
    completion = Completion(
        samples=made.samples,
        texts=made.texts,
        steps=tuple(steps_of(made, "")),
        turns=len(calls),
        forks=made.forks,
        truncated=session.is_truncated,
        run=run,
        system_prompts=_system_prompts(made),
    )
    # How a run failed says more about a call that it gave up.
    if (fault := session.fault) is not None and (run.cause is None or fault[0] in ENGINE_FAULTS):
        why = f"a call of the model has no answer, nor has a retry of it ({fault[0]}): {fault[1]}"
        return replace(completion, cause=fault[0], error=why)
    if run.cause is not None:
        is_decided = bool(loop) and setup.rewards_loops
        completion = replace(completion, truncated=session.is_truncated or session.is_full)
        is_limited = completion.truncated or is_decided
        if fault is not None or not calls or not is_limited or (setup.needs_reward and not is_decided):
            return replace(completion, cause=run.cause, error=f"the agent failed ({run.cause}): {run.error}")
    if not calls:
        why = "the agent made no call of the model: it must ask the one that it is given, at the URL that it is given"
        return replace(completion, cause="no_calls", error=why)
    answer = text_of(calls[-1].answer.get("content")) if run.response is None else run.response
    return replace(completion, text=answer, steps=tuple(steps_of(made, answer)), loop=loop)


def _system_prompts(made: Timelines) -> tuple[str, ...]:
    return tuple(text for calls in made.calls for text in system_prompts_of(calls[0].messages))


def steps_of(made: Timelines, answer: str) -> Iterator[ChatMessage]:
    """The messages between question and answer: what each conversation with the model has beyond its first request,
    one conversation after the other, without a last message that is the answer."""
    steps = list(itertools.chain.from_iterable(map(_added, made.calls)))
    if steps and not steps[-1].get("tool_calls") and steps[-1]["content"].strip() == answer.strip():
        steps.pop()
    return iter(steps)


def _added(calls: Sequence[CallTokens]) -> Iterator[ChatMessage]:
    for message in calls[-1].messages[len(calls[0].messages) :]:
        if isinstance(message, Mapping):
            yield _step(message)
    yield _step(calls[-1].answer)


def _step(message: Mapping[str, Any]) -> ChatMessage:
    """In the form of traced messages: the content is text."""
    step: ChatMessage = {"role": str(message.get("role")), "content": text_of(message.get("content"))}
    for name in ("name", "tool_calls", "tool_call_id"):
        if value := message.get(name):
            step[name] = value
    return step
