"""The paths of vLLM's server (0.32) by the key that they need. Paths that are not listed need the admin key."""

from __future__ import annotations

import re
from typing import Final

OPEN: Final = frozenset({"/health", "/ping"})
METRICS: Final = "/metrics"
MODELS: Final = "/v1/models"
LOAD_ADAPTER: Final = "/v1/load_lora_adapter"
MANAGEMENT: Final = "/flywheel/"
"""Prefix of the middleware's own endpoints."""
ALIAS: Final = "/flywheel/alias"
CALLS: Final = "/flywheel/calls"
RESPONSES: Final = "/v1/responses"
RECORDED: Final = frozenset({"/v1/chat/completions", "/v1/completions", RESPONSES})
"""Paths of the requests to the alias that the call log holds."""

INFERENCE: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions",
        "/v1/completions/render",
        "/v1/completions/derender",
        RESPONSES,
        "/v1/responses/render",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/embeddings",
        "/v2/embed",
        "/v1/score",
        "/score",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/systemone",
        "/pooling",
        "/classify",
        "/generative_scoring",
        "/tokenize",
        "/detokenize",
        "/inference/v1/generate",
        "/invocations",
        "/cohere/v2/chat",
    }
)
"""Paths of requests whose JSON names a model, which may be an alias."""
OTHERS_OF_AGENTS: Final = frozenset(
    {
        MODELS,
        METRICS,
        "/version",
        "/tokenizer_info",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/realtime",
    }
)
_RESPONSE: Final = re.compile(r"/v1/responses/[^/]+(/cancel)?")


def is_agents(path: str) -> bool:
    """Whether the agents' key permits the path. The server redirects a trailing slash, so it is ignored."""
    path = path.removesuffix("/")
    return path in INFERENCE or path in OTHERS_OF_AGENTS or _RESPONSE.fullmatch(path) is not None
