"""What can be wrong with a replica: its conditions, and errors with remedies for its refusals."""

from __future__ import annotations

import re
from enum import StrEnum

import httpx2

from flywheel.errors import ServeError
from flywheel.secrets import redact_secrets
from flywheel.serving import routes


class Condition(StrEnum):
    OK = "ok"
    UNREACHABLE = "unreachable"
    """it does not answer in time, or its engine is dead"""
    MISCONFIGURED = "misconfigured"
    """it answers but cannot serve adapters: another key, no middleware, no LoRA, another program"""
    WRONG_ADAPTER = "wrong adapter"
    """it answers with another adapter or with 503, and the deployed one cannot be restored"""
    WRONG_WEIGHTS = "wrong weights"
    """its adapter's log-probabilities differ from those of the round"""
    FAILING = "failing"
    """another error; see the message"""


def load_error(attempted: str, response: httpx2.Response, path: str, *, healthy: bool) -> ServeError:
    """The error for an adapter that was not loaded, by a server whose engine is alive or not."""
    message = message_of(response)
    if response.status_code in (404, 405) and "adapter" not in message:
        return ServeError(
            attempted,
            "it does not load adapters at run time",
            "Start it with `flywheel serve`, or with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.",
        ).of_condition(Condition.MISCONFIGURED)
    if response.status_code == 404:
        return ServeError(
            attempted,
            f"the server finds no adapter in {path}",
            "The directory must exist on the server's own disk, under the same path.",
        ).of_condition(Condition.MISCONFIGURED)
    if response.status_code == 409:
        hint = f"Unload one (POST {routes.UNLOAD_ADAPTER}), or raise serving.max_loras and restart the server."
        return ServeError(attempted, message, hint)
    if response.status_code == 400 and "safetensors" in message:
        hint = "Remove what is not safetensors from it, or train the adapter again."
        return ServeError(attempted, message, hint)
    # vLLM: "LoRA rank 64 is greater than max_lora_rank 16."
    if rank := re.search(r"rank (\d+) is greater than max_lora_rank (\d+)", message):
        wanted, most = rank.groups()
        return ServeError(
            attempted,
            f"rank {wanted} > max_lora_rank {most}",
            f"Restart the server with serving.max_lora_rank {wanted}, or train with a smaller training.lora.r.",
        )
    if "not enabled" in message:
        error = ServeError(attempted, "LoRA is not enabled on it", "Start it with `flywheel serve`.")
        return error.of_condition(Condition.MISCONFIGURED)
    # vLLM also answers 500 for adapters that it can never serve. If the engine is alive, it has examined the adapter.
    if response.status_code == 500 and healthy:
        return ServeError(
            attempted,
            f"the server refuses it: {message}",
            "Look at its log: vLLM serves no DoRA, no modules_to_save, no trained biases and no embeddings.",
        )
    return refused(attempted, response)


def no_middleware(attempted: str, why: str = "it has no alias middleware") -> ServeError:
    return ServeError(
        attempted,
        why,
        "Start it with `flywheel serve`, or with --middleware flywheel.serving.server.middleware.AliasMiddleware and "
        "FLYWHEEL_ALIAS, FLYWHEEL_BASE_MODEL (its served name), FLYWHEEL_ALIAS_FILE and FLYWHEEL_ADMIN_KEY in its "
        "environment.",
    ).of_condition(Condition.MISCONFIGURED)


def refused(attempted: str, response: httpx2.Response) -> ServeError:
    why = f"it answers HTTP {response.status_code}: {message_of(response)}"
    retryable = response.status_code >= 500 or response.status_code in (408, 429)
    error = ServeError(attempted, why, "Look at the server's log.", retryable=retryable)
    # Redirections, and places that are not there: something else answers in the server's place.
    is_elsewhere = response.status_code < 400 or response.status_code in (404, 405, 407)
    return error.of_condition(Condition.MISCONFIGURED) if is_elsewhere else error


def message_of(response: httpx2.Response) -> str:
    """The server's own words, in one line."""
    try:
        error = response.json()["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError, RecursionError):
        text = response.text
    return " ".join(redact_secrets(str(text)).split())[:500] or "no explanation"
