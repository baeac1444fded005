"""Environment variables by which Flywheel configures what runs inside vLLM's process. Standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

ALIAS_VARIABLE: Final = "FLYWHEEL_ALIAS"
"""The aliases, one a line."""
BASE_VARIABLE: Final = "FLYWHEEL_BASE_MODEL"
FILE_VARIABLE: Final = "FLYWHEEL_ALIAS_FILE"
API_KEY_VARIABLE: Final = "FLYWHEEL_API_KEY"
"""The agents' key. Empty: inference needs none. Not set (vLLM was started by hand): vLLM's own key is used."""
ADMIN_KEY_VARIABLE: Final = "FLYWHEEL_ADMIN_KEY"
ADMIN_KEY_FILE_VARIABLE: Final = "FLYWHEEL_ADMIN_KEY_FILE"
"""A file with the admin key, if the variable above is not set."""
VLLM_KEY_VARIABLE: Final = "VLLM_API_KEY"
"""vLLM's own key, random at each start of `flywheel serve`. The middleware adds it to authenticated requests."""
CPU_LORA_VARIABLE: Final = "FLYWHEEL_CPU_LORA"
"""Of Flywheel's own vLLM processes: on a CPU, its plugin computes the LoRA part of layers."""
SETTINGS_VARIABLE: Final = "FLYWHEEL_SERVER_SETTINGS"
"""`ServerSettings` as JSON. Not set: vLLM was started by hand."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What `flywheel serve` tells its server beside keys and names; the defaults are for a vLLM started by hand."""

    loaded: Sequence[str] = ()
    """The names of the adapters that the server starts with."""
    max_adapters: int | None = None
    """How many can be loaded at the same time; None: any number."""
    base_path: str | None = None
    """The base model, with whose layers adapters are compared."""
    waiting: Mapping[str, str] | None = None
    """The aliases that are refused until their target is set, with the reason."""
    max_body_bytes: int = 32_000_000
    sent_adapters: Mapping[str, Any] | None = None
    """`path`, the folder of adapters that are sent to the server, and `max_bytes` of one. None: none are accepted."""
    call_log: Mapping[str, Any] | None = None
    """`path`, `keep_days` and `max_bytes` of the call log. None: nothing is recorded."""
    not_recorded: Mapping[str, Sequence[str]] | None = None
    """`users` and `conversations` of whom nothing is recorded."""
    allowed_hosts: Sequence[str] | None = None
    """The permitted host names of requests; None: any."""
    open_metrics: bool = False
    expose_versions: bool = False
    address: str | None = None
    """The server's URL, which is printed when it answers."""

    @classmethod
    def of_environment(cls) -> Self:
        return cls(**json.loads(os.environ.get(SETTINGS_VARIABLE) or "{}"))

    def as_json(self) -> str:
        return json.dumps(asdict(self))
