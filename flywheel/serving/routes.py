"""The paths of vLLM's server (0.32) by the key that they need. Paths that are not listed need the admin key; for the
agents' key they do not exist."""

from __future__ import annotations

import re
from typing import Final

HEALTH: Final = "/health"
READY: Final = "/flywheel/ready"
OPEN: Final = frozenset({HEALTH, "/ping", READY})
METRICS: Final = "/metrics"
MODELS: Final = "/v1/models"
MODEL: Final = "/v1/models/"
"""Prefix of single models, which the middleware answers from the list."""
LOAD_ADAPTER: Final = "/v1/load_lora_adapter"
UNLOAD_ADAPTER: Final = "/v1/unload_lora_adapter"
SAGEMAKER_ADAPTERS: Final = "/adapters"
"""vLLM's other endpoint that loads adapters, which is closed: it would pass by the checks of `LOAD_ADAPTER`."""
MANAGEMENT: Final = "/flywheel/"
"""Prefix of the middleware's own endpoints."""
ALIAS: Final = "/flywheel/alias"
ADAPTERS: Final = "/flywheel/adapters/"
"""Prefix of the adapters that are sent to the server, by the hash of their files."""
ALIAS_OWNER: Final = "flywheel"
"""`owned_by` of the aliases in the list of models."""
CALLS: Final = "/flywheel/calls"
ERASE_CALLS: Final = "/flywheel/calls/erase"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
RECORDED: Final = frozenset({"/v1/chat/completions", "/v1/completions", RESPONSES, MESSAGES})
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
        MESSAGES,
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
ADMINS: Final = frozenset(
    {
        LOAD_ADAPTER, "/v1/unload_lora_adapter", "/start_profile", "/stop_profile", "/server_info",
        "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/collective_rpc", "/sleep", "/wake_up",
        "/release_kv_cache_memory", "/is_sleeping", "/load", "/kv_event_sources", "/scale_elastic_ep",
        "/is_scaling_elastic_ep", "/pause", "/resume", "/abort_requests", "/inference/v1/abort_requests",
        "/is_paused", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
        "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version",
        "/weight_info", "/weight_checker", "/get_world_size", "/fault_tolerance/apply", "/fault_tolerance/status",
        "/docs", "/redoc", "/openapi.json",
    }
)  # fmt: skip
"""Paths for which a request with the agents' key is told that the admin key is needed."""
_OF_AGENTS: Final = re.compile(rf"/v1/responses/[^/]+(/cancel)?|{MODEL}.+")


def is_agents(path: str) -> bool:
    """Whether the agents' key permits the path. The server redirects a trailing slash, so it is ignored."""
    path = path.removesuffix("/")
    return path in INFERENCE or path in OTHERS_OF_AGENTS or _OF_AGENTS.fullmatch(path) is not None


def is_admins(path: str) -> bool:
    """Whether the path is known to need the admin key."""
    return path.startswith(MANAGEMENT) or path.removesuffix("/") in ADMINS
