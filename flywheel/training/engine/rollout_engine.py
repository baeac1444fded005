"""What engines of rollouts do alike, whichever model answers: a rollout of messages with recorded tools, and one of
the user's own agent, whose program runs in a child process, and of which the calls that it makes of the model are
what is trained on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from flywheel.config.file import Config
from flywheel.judge.rubric.checks.degenerate import find_loop
from flywheel.records.program_run import ENGINE_FAULTS, RunResult
from flywheel.records.trace import ChatMessage, get_path
from flywheel.training.data.rollout import Completion, LoadedAdapter, RolloutRequest, system_prompts_of, text_of
from flywheel.training.data.samples import CallTokens, Timelines, timelines
from flywheel.training.engine.endpoint import OtherModels, RolloutEndpoint
from flywheel.training.engine.served_application import TIME_UP
from flywheel.training.engine.session import Session
from flywheel.training.program.agent_program import ModelEndpoint
from flywheel.training.program.program_pool import ProgramPool, program_of
from flywheel.training.recorded.recorded_rollout import End, RecordedLoop, RecordedTools, ToolSetup
from flywheel.training.recorded.recordings import trace_results

MAX_CALL_TEXT: Final = 200
"""Characters of a call in an error."""


class RolloutEngine:
    """Base class. One that derives from it sets `_application`, which answers chat requests, before the first
    rollout."""

    session: ClassVar[type[Session]] = Session
    """Of each rollout."""

    def __init__(self) -> None:
        self._application: Any = None
        self._endpoint = RolloutEndpoint()
        self._tools = self._gate_tools = ToolSetup()
        self._pool: ProgramPool | None = None
        self._program = ProgramSetup({}, "", 0)

    def _tokens_of_context(self, request: RolloutRequest) -> int:
        """The context of a rollout, in tokens; 0 where only the model's server knows it."""
        return 0

    def _texts(self, token_ids: Sequence[int]) -> Sequence[str]:
        """The text of each token of a prompt; none where there are no tokens."""
        return ()

    def use_tools(self, training: ToolSetup, gate: ToolSetup) -> None:
        """Set how tools answer in rollouts to learn from, and in those `as_served`."""
        self._tools, self._gate_tools = training, gate

    async def use_program(self, settings: Mapping[str, Any], setup: ProgramSetup) -> str:
        """Start the user's agent of these settings (`Config`) for rollouts of tasks that it does. Returns its
        signature. Raises ConfigError if it does not load."""
        # Checked here, in its process: that makes the names of secrets known, which the agent must not see.
        config = Config.model_validate(settings)
        program = program_of(config)
        if program is None:
            raise ValueError("rollout.agent is no program")
        if config.ray.working_dir is not None:
            # Ray's copy of it is the working directory of its processes.
            program = program.moved(str(config.ray.working_dir), str(Path.cwd()))
        self._program, self._endpoint.others = setup, OtherModels(program)
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)
        self._pool = ProgramPool(
            program, workers=config.rollout.workers, was_called_late=self._endpoint.was_called_late
        )
        return await asyncio.to_thread(self._pool.start)

    def asked_models(self) -> dict[str, int]:
        """How often the user's agent has asked for each model at the policy's address since `use_program`."""
        return dict(self._endpoint.others.asked)

    async def _with_recorded_tools(self, request: RolloutRequest) -> Completion:
        setup = self._gate_tools if request.as_served else self._tools
        tokens = None if request.as_served else request.max_tokens
        session = self._session(request, tokens=tokens, turns=setup.max_turns, seconds=request.seconds)
        try:
            return await _with_recordings(request, session, setup)
        finally:
            session.close()

    async def _with_program(self, request: RolloutRequest) -> Completion:
        if self._pool is None:
            raise RuntimeError("use_program comes first")
        setup = self._program
        session = self._session(
            request,
            tokens=None if request.as_served else request.max_tokens,
            turns=setup.max_turns,
            model=setup.models[setup.trained],
            frozen=setup.frozen,
        )
        pool, url = self._pool, self._endpoint.open(session)

        async def run(*arguments: Any) -> RunResult:
            try:
                return await pool.run(*arguments)
            finally:
                # At once: what threads of the run ask from now on is refused, and noted.
                self._endpoint.close(url)

        return await roll_out(request, session, url, run, setup)

    def open_session(self, request: RolloutRequest, *, turns: int | None = None) -> str:
        """Let an agent be the client of a rollout: the base URL of an OpenAI API for it alone."""
        return self._endpoint.open(self._session(request, tokens=request.max_tokens, turns=turns))

    def close_session(self, url: str) -> tuple[CallTokens, ...]:
        """End such a rollout. Returns its calls."""
        return self._endpoint.close(url).calls

    async def stop(self) -> None:
        """End the endpoint and the user's agent."""
        await self._endpoint.stop()
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)

    def _session(self, request: RolloutRequest, **more: Any) -> Session:
        """A session of this request, with `more` of its arguments."""
        return self.session(
            self._application,
            request.adapter,
            as_served=request.as_served,
            temperature=request.temperature,
            seed=request.seed,
            context=self._tokens_of_context(request),
            texts=self._texts,
            turn_tokens=request.max_turn_tokens,
            **more,
        )


async def _with_recordings(request: RolloutRequest, session: Session, setup: ToolSetup) -> Completion:
    """The completion of a request whose task has recordings, or needs no tools. The session keeps to its limits."""
    task = request.prompt.task
    tools = RecordedTools(
        task.exchange.tools,
        trace_results(task.exchange.tools, task.steps, task.errors, setup.finish_tools),
        shared=setup.shared,
        on_miss=setup.on_miss,
        finish_tools=setup.finish_tools,
    )
    loop = RecordedLoop(task.prompt, tools)
    empty = "its prompt fills the context"
    try:
        error = await _take_turns(loop, request, session)
    except TimeoutError:
        if request.seconds is None:
            raise
        error, empty = "", f"no message within {request.seconds:g} s"
        loop.cut()
    calls = session.calls
    if not calls:
        error = error or empty
    return replace(
        _generated(timelines(calls)),
        text=loop.answer,
        steps=tuple(loop.steps),
        calls=tuple(loop.calls),
        missed=loop.end is End.MISS,
        truncated=not error and loop.end is End.TRUNCATED,
        loop=await _loop_of(calls),
        error=error,
    )


async def _take_turns(loop: RecordedLoop, request: RolloutRequest, session: Session) -> str:
    """Take turns until the loop ends. Returns why the rollout has nothing to grade; empty if it has."""
    task = request.prompt.task
    while True:
        body: dict[str, Any] = {"messages": list(loop.messages)}
        if task.exchange.tools:
            body["tools"] = list(task.exchange.tools)
        answered = len(loop.calls)
        reply = await session.complete(body)
        if reply.is_too_long or reply.is_beyond_limit:
            loop.cut()
            return ""
        if reply.status != 200:
            why = " ".join(reply.error.split())[:300]
            return f"the model's server refused a request: {why} (HTTP status {reply.status})"
        [choice] = reply.body["choices"]
        message = _sent_again(choice["message"], with_reasoning=task.sends_reasoning)
        loop.advance(message, truncated=choice["finish_reason"] in ("length", TIME_UP))
        if loop.end is End.MISS:
            calls = zip(message["tool_calls"], loop.calls[answered:], strict=False)
            return f"no recorded result for {next(_call_text(call) for call, each in calls if each.is_miss)}"
        if loop.end is not None:
            return ""


def _sent_again(message: Mapping[str, Any], *, with_reasoning: bool) -> ChatMessage:
    """A message of the policy in the form in which the agent sends it again."""
    again: ChatMessage = {"role": "assistant", "content": message.get("content")}
    if with_reasoning and (reasoning := message.get("reasoning")):
        again["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        again["tool_calls"] = calls
    return again


def _call_text(call: Mapping[str, Any]) -> str:
    name, arguments = get_path(call, "function", "name"), get_path(call, "function", "arguments")
    return f"{name}({' '.join(str(arguments).split())})"[:MAX_CALL_TEXT]


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

    @classmethod
    def of(
        cls,
        settings: Config,
        trained: str,
        models: Mapping[str, str] | None = None,
        frozen: Mapping[str, LoadedAdapter | None] | None = None,
    ) -> Self:
        """That of these settings, with `models` beside the one that is trained, which is named by their alias."""
        rollout = settings.rollout
        return cls(
            models={trained: settings.model.alias, **(models or {})},
            trained=trained,
            max_turns=rollout.max_turns,
            frozen=frozen or {},
            needs_reward=rollout.weights.workflow > 0,
            rewards_loops=rollout.loop_reward is not None,
        )


async def roll_out(
    request: RolloutRequest,
    session: Session,
    url: str,
    run_program: Callable[..., Awaitable[RunResult]],
    setup: ProgramSetup,
) -> Completion:
    """The completion of a request whose task is done by the user's agent, which reaches the `session` at `url`.

    A run that lacks an answer of the model, because the engine failed or a call was given up, has no reward whatever
    it returned. A run that fails after the rollout reached a limit is truncated: its last message is the answer,
    unless only the program could say what that is worth. So is one that fails on a message that loops. `run_program`
    is as `ProgramPool.run`.
    """
    # The secret of a rollout is in its URL.
    endpoints = {target: ModelEndpoint(url, name) for target, name in setup.models.items()}
    run = await run_program(request.prompt.task.line, endpoints, setup.trained)
    calls = session.calls
    made = timelines(calls)
    loop = await _loop_of(calls)
    # What a failed run generated is kept for people to read; nothing of it is trained on.
    completion = replace(
        _generated(made),
        steps=tuple(steps_of(made, "")),
        truncated=session.is_truncated,
        run=run,
        system_prompts=tuple(text for each in made.calls for text in system_prompts_of(each[0].messages)),
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


def _generated(made: Timelines) -> Completion:
    """What the policy has generated in the calls of a rollout."""
    turns = sum(map(len, made.calls))
    return Completion(samples=made.samples, texts=made.texts, turns=turns, forks=made.forks)


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


async def _loop_of(calls: Iterable[CallTokens]) -> str:
    """What the first message repeats that loops and was cut off at its limit of tokens; empty if none does. Searched
    for in a thread, because a long text takes a while."""
    cut = [call for call in calls if call.finish_reason == "length"]
    return await asyncio.to_thread(_first_loop, cut) if cut else ""


def _first_loop(calls: Iterable[CallTokens]) -> str:
    """Reasoning and the arguments of calls count as well."""
    for call in calls:
        tools = [get_path(each, "function", "arguments") for each in call.answer.get("tool_calls") or ()]
        texts = [call.answer.get(name) for name in ("reasoning", "reasoning_content", "content")] + tools
        if found := next(filter(None, map(find_loop, map(text_of, texts))), ""):
            return found
    return ""
