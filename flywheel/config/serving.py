"""The servers that serve the agent, and the daemon itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flywheel.config.section import Section


class ServingSettings(Section):
    urls: list[str] = ["http://127.0.0.1:8000"]
    """Every vLLM replica that serves the agent (without `/v1`)."""
    api_key_env: str | None = None
    """Name of the environment variable with the server's key, if it wants one."""
    host: str = "127.0.0.1"
    """Where `flywheel serve` listens. Loading adapters is an administrative power: use loopback or a key."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of `flywheel serve`."""
    max_loras: int = Field(default=4, gt=0)
    """Adapters that one batch can mix: the old one, the new one and the one to roll back to."""
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 64
    """Largest rank that the server accepts."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Context length of the server. Default: the model's."""
    cpu_kv_cache_gib: int = Field(default=2, gt=0)
    """Key-value cache without a GPU, GiB."""
    load_timeout_seconds: float = Field(default=120.0, gt=0)
    """Longest wait for an adapter to load."""
    probe_tolerance: float = Field(default=0.1, gt=0)
    """Largest mean difference of log-probabilities between the round's measurement and the server's answer, nats."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long the old adapter stays loaded for requests that were under way."""
    extra_args: list[str] = []
    """More arguments for vLLM's server."""


class DaemonSettings(Section):
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long a stop waits for judge calls in flight."""
    round_attempts: int = Field(default=2, gt=0)
    """How often a round is started before it has failed."""
    failed_round_wait_seconds: float = Field(default=1800.0, ge=0)
    """How long after a failed round the next one may start by itself."""
    round_timeout_seconds: float = Field(default=6 * 3600.0, gt=0)
    """A worker that runs longer is stopped and its round abandoned."""
    reconcile_seconds: float = Field(default=15.0, gt=0)
    """How often the servers are compared with what should be deployed (a restarted server forgets its adapters)."""
