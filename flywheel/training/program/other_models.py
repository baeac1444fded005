"""Requests at the policy's address that name another model: which names are asked for, and who answers them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx2
from starlette.responses import JSONResponse, Response

from flywheel.system.http_client import async_client
from flywheel.system.terminal import quantity
from flywheel.training.program.agent_program import AgentProgram


class OtherModels:
    """Answers in place of the policy, as `AgentProgram.answered_by` says.

    Attributes:
        asked: How often each name was asked for, those that the policy answers included.
    """

    def __init__(self, program: AgentProgram) -> None:
        self.asked: Counter[str] = Counter()
        self._program = program

    def auxiliary_of(self, body: Mapping[str, Any]) -> str | None:
        """The key of the auxiliary model that answers a chat request; None if none does."""
        name = body.get("model")
        if not isinstance(name, str) or self._program.answered_by(name) != "auxiliary":
            return None
        return self._program.auxiliary_name(name)

    async def answer(self, body: Mapping[str, Any], *, is_retry: bool = False) -> Response | None:
        """The response to a chat request; None if it is for the policy. A client's retry is not counted."""
        name = body.get("model")
        if not isinstance(name, str):
            return None
        if not is_retry:
            self.asked[name] += 1
        if self._program.answered_by(name) == "refuse":
            return _error(404, f"the model {name} is refused (rollout.models)", "NotFoundError")
        key = self.auxiliary_of(body)
        return None if key is None else await self._of_auxiliary(key, body)

    async def _of_auxiliary(self, key: str, body: Mapping[str, Any]) -> Response:
        """A stream arrives as a whole."""
        endpoint, seconds = self._program.auxiliary_models[key], self._program.seconds  # no run waits longer
        headers = {"authorization": f"Bearer {endpoint.api_key}"}
        try:
            async with async_client(endpoint.base_url, seconds=seconds, headers=headers, proxies=True) as http:
                found = await http.post("/chat/completions", json={**body, "model": endpoint.model})
        except (httpx2.HTTPError, ValueError) as error:
            why = f"rollout.auxiliary_models.{key} does not answer: {str(error) or type(error).__name__}"
            return _error(502, why, "BadGatewayError")
        return Response(found.content, found.status_code, media_type=found.headers.get("content-type"))


def failure_of(response: Response) -> str:
    """Why an auxiliary model gave no answer, which is no fault of the request; empty otherwise."""
    status = response.status_code
    return f"an auxiliary model failed (HTTP status {status})" if status >= 500 or status == 429 else ""


def listed(asked: Mapping[str, int]) -> str:
    """Names with how often each was asked for: `my-agent 2 times, gpt-4o-mini 1 time`."""
    return ", ".join(f"{name} {quantity(times, 'time')}" for name, times in asked.items())


def undecided(program: AgentProgram, asked: Mapping[str, int]) -> str:
    """A warning about names that the policy answers only because nothing says who does; empty without one."""
    names = {name: times for name, times in asked.items() if program.answered_by(name) is None}
    if not names:
        return ""
    return (
        f"the agent asks for {listed(names)}, which is neither an alias nor the base nor an auxiliary model: the"
        " policy answers, and is trained on it. rollout.models says who answers (policy, auxiliary or refuse)"
    )


def _error(status: int, message: str, kind: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
