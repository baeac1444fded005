"""Environment variables by which `flywheel serve` configures its middleware inside vLLM's process."""

from __future__ import annotations

from typing import Final

ALIAS_VARIABLE: Final = "FLYWHEEL_ALIAS"
"""The aliases, one a line."""
BASE_VARIABLE: Final = "FLYWHEEL_BASE_MODEL"
FILE_VARIABLE: Final = "FLYWHEEL_ALIAS_FILE"
LOADED_VARIABLE: Final = "FLYWHEEL_LOADED_ADAPTERS"
"""JSON: the names of the adapters that the server starts with."""
API_KEY_VARIABLE: Final = "FLYWHEEL_API_KEY"
"""The agents' key. Empty: inference needs none. Not set (vLLM was started by hand): vLLM's own key is used."""
ADMIN_KEY_VARIABLE: Final = "FLYWHEEL_ADMIN_KEY"
ADMIN_KEY_FILE_VARIABLE: Final = "FLYWHEEL_ADMIN_KEY_FILE"
"""A file with the admin key, if the variable above is not set."""
VLLM_KEY_VARIABLE: Final = "VLLM_API_KEY"
"""vLLM's own key, random at each start of `flywheel serve`. The middleware adds it to authenticated requests."""
OPEN_METRICS_VARIABLE: Final = "FLYWHEEL_OPEN_METRICS"
EXPOSE_VERSIONS_VARIABLE: Final = "FLYWHEEL_EXPOSE_VERSIONS"
HOSTS_VARIABLE: Final = "FLYWHEEL_ALLOWED_HOSTS"
"""JSON: the permitted host names of requests. Not set: any."""
MAX_BODY_VARIABLE: Final = "FLYWHEEL_MAX_BODY_BYTES"
CALL_LOG_VARIABLE: Final = "FLYWHEEL_CALL_LOG"
"""JSON: `path`, `keep_days` and `max_bytes` of the call log. Not set: nothing is recorded."""
ADDRESS_VARIABLE: Final = "FLYWHEEL_ADDRESS"
"""The server's URL, which is printed when it answers."""
