"""Rollouts of a model at an endpoint: what has come when the time is up counts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from flywheel.training.engine.remote_engine import RemoteApplication, RemoteEngine
from flywheel.training.program.agent_program import ModelEndpoint
from tests.factories.model_endpoint import Endpoint, calls, says
from tests.training.engine.scripted_session import recorded_task, rollout_request
from tests.training.recorded.recordings import ADD, call, steps


async def test_a_rollout_whose_time_is_up_has_the_messages_that_came() -> None:
    loop, go = asyncio.get_running_loop(), threading.Event()

    def an_hour_later() -> None:
        now = loop.time
        loop.time = lambda: now() + 3600  # type: ignore[method-assign]

    def answer(request: dict[str, Any], before: int) -> tuple[int, Any]:
        if before == 0:
            return calls("add", '{"a": 1}')
        loop.call_soon_threadsafe(an_hour_later)
        go.wait()
        return says("late")

    task = recorded_task(steps((call("add", {"a": 1}), "1")), (ADD,))
    asked = rollout_request(task, None, as_served=True, seconds=600)
    with Endpoint(answer) as endpoint:
        application = RemoteApplication(ModelEndpoint(endpoint.base_url, "m"), seconds=60)
        engine = RemoteEngine(application)
        await engine.start()
        try:
            found, none = await engine.generate(asked), await engine.generate(asked)
        finally:
            go.set()
            await engine.stop()
            application._client.close()
    assert (found.truncated, found.error, found.text, len(found.steps)) == (True, "", "", 2)
    assert none.error == "no message within 600 s"
