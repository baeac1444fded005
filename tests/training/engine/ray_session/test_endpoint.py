"""The endpoint of a rollout engine: real vLLM in a real Ray actor, and OpenAI's client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import ray

from flywheel.cli.demo.questions import questions
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import LoadedAdapter, RolloutRequest
from flywheel.training.data.samples import CallTokens
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.engine import Engine
from tests.factories.engine import settings, share_of_an_engine
from tests.factories.round import POLICY
from tests.factories.task import round_task
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOKENS = 24


@pytest.fixture(scope="module")
def engine(shared_engine: Any, model: Path) -> Any:
    return shared_engine.of(settings(str(model)))


@pytest.fixture(scope="module")
def prompts(engine: Any) -> list[Prompt]:
    some = [round_task(f"t-{place}", question.text) for place, question in enumerate(questions()[::60])]
    [(made, refused)] = ray_cluster.wait([engine.encode.remote(some)])
    assert refused == {}
    return list(made)


def rollout(prompt: Prompt, adapter: LoadedAdapter | None = None, *, seed: int = 3, **more: Any) -> RolloutRequest:
    return replace(RolloutRequest(prompt, 0, seed, 1.0, TOKENS, adapter), **more)


def opened(engine: Any, request: RolloutRequest) -> str:
    [url] = ray_cluster.wait([engine.open_session.remote(request)])
    return str(url)


def closed(engine: Any, url: str) -> tuple[CallTokens, ...]:
    [calls] = ray_cluster.wait([engine.close_session.remote(url)])
    return tuple(calls)


def client(url: str, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", **settings)


def asked(engine: Any, requests: Sequence[RolloutRequest]) -> list[CallTokens]:
    """The call of each rollout when a client asks the task's prompt."""
    found = []
    for request in requests:
        url = opened(engine, request)
        with client(url) as agent:
            agent.chat.completions.create(model="agent", messages=request.prompt.task.prompt, temperature=0.1, seed=9)
        [call] = closed(engine, url)
        found.append(call)
    return found


def test_the_adapter_of_the_rollout_answers_and_not_another(
    engine: Any, prompts: list[Prompt], adapters: list[LoadedAdapter]
) -> None:
    def gap(call: CallTokens, adapter: LoadedAdapter | None) -> float:
        [scores] = ray_cluster.wait([engine.score.remote(call.prompt_ids, call.token_ids, adapter)])
        return max(abs(told - float(own or 0)) for told, own in zip(scores, call.logprobs, strict=True))

    for own in (None, *adapters):
        [call] = asked(engine, [rollout(prompts[0], own)])
        assert gap(call, own) < 1e-3
        assert min(gap(call, other) for other in (None, *adapters) if other != own) > 0.05


def test_an_adapter_that_was_unloaded_is_refused(
    engine: Any, prompts: list[Prompt], adapters: list[LoadedAdapter]
) -> None:
    """Never the base model in its place."""
    url = opened(engine, rollout(prompts[0], LoadedAdapter("gone", 99)))
    with client(url) as agent, pytest.raises(openai.NotFoundError, match="gone"):
        agent.chat.completions.create(model="agent", messages=prompts[0].task.prompt)
    assert closed(engine, url) == ()


def test_limits_give_the_servers_own_errors(engine: Any, prompts: list[Prompt]) -> None:
    url = opened(engine, rollout(prompts[0], max_tokens=None))
    with client(url) as agent:

        def ask(text: str, **more: Any) -> Any:
            return agent.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], **more)

        # The round's context is 128, that of the engine 2,048.
        for words in (100, 3000):
            with pytest.raises(openai.BadRequestError, match="maximum context length is") as refused:
                ask("plus 4 " * words)
            assert refused.value.param in ("input_tokens", "input_text")
        with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
            ask("?", max_tokens=0)
        with pytest.raises(openai.BadRequestError, match="max_tokens=3000 cannot be greater"):
            ask("?", max_tokens=3000)
        with pytest.raises(openai.BadRequestError, match="message"):
            agent.chat.completions.create(model="m", messages=[])
        # A prompt that nearly fills the context has what is left of it.
        room = ask("plus 4 " * 39, extra_body={"return_token_ids": True})
        with pytest.raises(openai.BadRequestError):
            ask("?", max_tokens=1, tool_choice="required")
    [call] = closed(engine, url)
    assert room.usage.completion_tokens == len(call.token_ids)
    assert len(call.prompt_ids) + len(call.token_ids) <= 128
    assert 100 < len(call.prompt_ids) < 128


def test_the_gates_rollouts_have_the_servers_context(engine: Any, prompts: list[Prompt]) -> None:
    url = opened(engine, rollout(prompts[0], as_served=True, max_tokens=None, temperature=None))
    with client(url) as agent:
        agent.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "plus 4 " * 100}], max_tokens=4
        )
    [call] = closed(engine, url)
    assert len(call.prompt_ids) > 128


def test_a_message_whose_time_is_up_keeps_what_was_generated(engine: Any, prompts: list[Prompt]) -> None:
    """vLLM ends an aborted request with its tokens; some messages end before they are aborted."""

    def abort(actor: Engine) -> bool:
        states = actor._llm.output_processor.request_states.values()
        begun = [each.external_req_id for each in states if each.detokenizer.output_token_ids]
        server = actor._endpoint._server
        if begun and server is not None:
            # In another thread than the engine's loop.
            asyncio.run_coroutine_threadsafe(actor._llm.abort(begun), server._serving.get_loop()).result()
        return bool(begun)

    for seed in range(20):
        going = engine.generate.remote(rollout(prompts[0], seed=seed, temperature=2.0, max_tokens=90))
        while not ray.get(engine.__ray_call__.remote(abort)) and not ray.wait([going], timeout=0)[0]:
            pass
        [cut] = ray_cluster.wait([going])
        if cut.truncated and len(cut.token_ids) < 90:
            break
    assert (cut.truncated, cut.error) == (True, "")
    assert 0 < len(cut.token_ids) == len(cut.logprobs) < 90


@pytest.mark.extended
def test_an_engine_that_is_killed_in_the_middle_fails_its_calls(prompts: list[Prompt]) -> None:
    """vLLM's own process first: its client is told, and so is the round. Then the actor: the connection ends."""
    actor = ray_cluster.start(Engine, settings(str(POLICY)), gpus=share_of_an_engine())
    ray_cluster.wait([actor.start.remote()])
    url = opened(actor, rollout(prompts[0], max_tokens=None, as_served=True))
    port = int(url.split(":")[2].split("/")[0])
    core = wait_for(lambda: core_behind(port), "vLLM's process", seconds=10)
    failures: list[BaseException] = []

    def ask() -> None:
        with client(url, max_retries=0) as agent:
            try:
                agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
            except openai.OpenAIError as error:
                failures.append(error)

    # The first call of all asks vLLM's process what it can do, before anything is in flight there.
    ray.get(actor.generate.remote(rollout(prompts[0])))
    # It generates nothing more: the calls are in flight until the process ends.
    core.suspend()
    asking = threading.Thread(target=ask)
    asking.start()
    direct = actor.generate.remote(rollout(prompts[0]))
    wait_for(lambda: ray.get(actor.__ray_call__.remote(in_flight)) == 2, "both calls to be in flight")
    assert asking.is_alive()
    core.kill()
    asking.join(60)
    [failure] = failures
    assert isinstance(failure, openai.InternalServerError)
    assert "the engine failed" in str(failure)
    with pytest.raises(ray.exceptions.RayTaskError, match="EngineDead"):
        ray.get(direct)
    assert closed(actor, url) == ()
    ray.kill(actor)
    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(60)
    assert isinstance(failures[1], openai.APIConnectionError)


def in_flight(engine: Engine) -> int:
    """Calls that vLLM's engine process has not answered."""
    return int(engine._llm.output_processor.get_num_unfinished_requests())


def core_behind(port: int) -> psutil.Process | None:
    """vLLM's engine process below the actor that listens on this port."""
    for process in psutil.Process().children(recursive=True):
        try:
            if any(each.laddr.port == port and each.status == "LISTEN" for each in process.net_connections("tcp")):
                return max(process.children(recursive=True), key=lambda child: child.memory_info().rss)
        except psutil.Error:
            continue
    return None
