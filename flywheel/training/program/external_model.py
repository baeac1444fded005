"""What AgentJet's `create_external_llm_fn` returns: a function that asks a model that is not trained.

It runs in the user's interpreter: only the standard library is imported.
"""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint

TRIES: Final = 3
SECONDS: Final = 300.0
"""Longest call."""
PASSING: Final = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses after which another attempt may succeed."""


def external_models(program: AgentProgram) -> Callable[..., Callable[..., dict[str, str]]]:
    """`create_external_llm_fn` for the models that a program may ask."""

    def create_external_llm_fn(
        alien_llm_model: str, alien_llm_response_length: int | None = None
    ) -> Callable[..., dict[str, str]]:
        endpoint = _endpoint(program, alien_llm_model)

        def ask(
            messages: Sequence[Mapping[str, Any]],
            sampling_params_override: Mapping[str, Any] | None = None,
            request_id: str = "",
        ) -> dict[str, str]:
            body: dict[str, Any] = {"model": endpoint.model, "messages": list(messages), "n": 1, "temperature": 0.0}
            if alien_llm_response_length is not None:
                body["max_completion_tokens"] = alien_llm_response_length
            return _answer(endpoint, body | dict(sampling_params_override or {}))

        return ask

    return create_external_llm_fn


def _endpoint(program: AgentProgram, model: str) -> ModelEndpoint:
    """That of the auxiliary model of this name, or else the judge's."""
    if (name := program.auxiliary_name(model)) is not None:
        return program.auxiliary_models[name]
    if program.judge is None:
        raise RuntimeError(f"no endpoint has the model {model}: add it to rollout.auxiliary_models")
    return ModelEndpoint(program.judge.base_url, model, program.judge.api_key)


def _answer(endpoint: ModelEndpoint, body: Mapping[str, Any]) -> dict[str, str]:
    why = ""
    for left in reversed(range(TRIES)):
        # Several keys are written as `k1|k2`.
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {random.choice(endpoint.api_key.split('|')).strip()}",
        }
        url = f"{endpoint.base_url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as reply:
                message = json.load(reply)["choices"][0]["message"]
            return {"role": str(message.get("role") or "assistant"), "content": str(message.get("content") or "")}
        except urllib.error.HTTPError as error:
            why = f"HTTP status {error.code}: {error.read(500).decode(errors='replace')}"
            if error.code not in PASSING:
                break
        except (OSError, ValueError, LookupError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
        if left:
            time.sleep(1.0)
    raise RuntimeError(f"{endpoint.model} at {endpoint.base_url} does not answer: {why}")
