"""The `model` argument of a workflow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flywheel.training.workflow.agent_program import ModelEndpoint


@dataclass(frozen=True)
class PlainModel:
    """A model for agents of other frameworks: what an OpenAI client needs."""

    base_url: str
    model: str
    api_key: str = field(repr=False)


def chat_model(endpoint: ModelEndpoint) -> Any:
    """The model of an endpoint for the user's function."""
    return PlainModel(endpoint.base_url, endpoint.model, endpoint.api_key)
