"""The key of the servers: from the environment variable that the configuration names, and fit for a header."""

from __future__ import annotations

import os

from flywheel.config import ServingSettings
from flywheel.errors import ServeError
from flywheel.serving.condition import Condition


def key_of(serving: ServingSettings, attempted: str) -> str | None:
    """The servers' key, None where they want none. Raises ServeError, without showing it, for one that cannot be."""
    name = serving.api_key_env
    if not name:
        return None
    key = os.environ.get(name)
    if not key:
        raise ServeError(
            attempted, f"serving.api_key_env names {name}, which is not set", f"Set {name} in its environment."
        ).of_condition(Condition.MISCONFIGURED)
    # Found out here and not by the HTTP library, which shows the header that it refuses.
    if key != key.strip() or not (key.isascii() and key.isprintable()):
        raise ServeError(
            attempted,
            f"the key in {name} cannot be sent: it holds a line end, a space at its edge or a character beyond ASCII",
            f"Set {name} to the key alone.",
        ).of_condition(Condition.MISCONFIGURED)
    return key
