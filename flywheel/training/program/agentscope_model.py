"""The `model` argument of a workflow: a chat model of AgentScope where that is installed.

It runs in the user's interpreter: only the standard library is imported before that.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import dataclass, field
from typing import Any

from flywheel.training.program.agent_program import ModelEndpoint


@dataclass(frozen=True)
class PlainModel:
    """A model for agents of other frameworks: what an OpenAI client needs."""

    base_url: str
    model: str
    api_key: str = field(repr=False)


def chat_model(endpoint: ModelEndpoint) -> Any:
    """The model of an endpoint for the user's function: AgentScope's `OpenAIChatModel`, of 2.x or 1.x, which does not
    stream. Without AgentScope a `PlainModel`."""
    if importlib.util.find_spec("agentscope") is None:
        return PlainModel(endpoint.base_url, endpoint.model, endpoint.api_key)
    chat = importlib.import_module("agentscope.model").OpenAIChatModel
    parameters = inspect.signature(chat).parameters
    if "credential" in parameters:  # 2.x
        credential = importlib.import_module("agentscope.credential").OpenAICredential
        return chat(
            credential=credential(api_key=endpoint.api_key, base_url=endpoint.base_url),
            model=endpoint.model,
            stream=False,
        )
    # 1.x; its name for what the openai client gets has changed.
    client = "client_kwargs" if "client_kwargs" in parameters else "client_args"
    return chat(
        model_name=endpoint.model, api_key=endpoint.api_key, stream=False, **{client: {"base_url": endpoint.base_url}}
    )
